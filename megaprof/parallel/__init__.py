"""Facts about a parallel job: coordinates, selected ranks, the contents of model chunks, and the schedules as data."""
