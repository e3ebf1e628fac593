"""Recordings that megaprof did not make: only what they really show."""
