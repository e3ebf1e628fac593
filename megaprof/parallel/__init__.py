"""Where a rank stands and which ranks are meant; what a model chunk consists of; Megatron's schedules as data."""
