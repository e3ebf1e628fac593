"""The records of a running job: the run itself, the status of each rank, and the request to capture."""
