"""Commands that start a training run, or prepare one."""
