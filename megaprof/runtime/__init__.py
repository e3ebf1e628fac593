"""What keeps the host safe: fault isolation, the background thread, the end of a process."""
