"""Converts captures for other tools: to one merged Perfetto trace."""
