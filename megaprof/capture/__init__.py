"""Decides which calls get a window, and opens and closes it."""
