"""Facts about a parallel job: its ranks and their machine, what model chunks hold, schedules, who waits for whom."""
