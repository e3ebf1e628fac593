"""Facts about a parallel job: its ranks and their machine, the contents of model chunks, schedules as data, and how
ranks compare with each other and wait for each other."""
