"""The records of a running job: what it is, where it stands, and what is asked of it."""
