"""Commands that start a training, or prepare one."""
