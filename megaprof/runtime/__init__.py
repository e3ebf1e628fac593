"""What keeps the host safe: fault isolation and the log, replaced attributes, the background thread, the end of a
process. Also a process that still waits for megatron-core."""
