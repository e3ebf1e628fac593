"""What keeps the host safe: fault isolation, the background thread, the host memory guard, the end of a process."""
