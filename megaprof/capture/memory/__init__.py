"""Host memory while a window is open: what this process, and the others of its host, still need to close theirs."""
