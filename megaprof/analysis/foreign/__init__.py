"""Recordings that megaprof did not make: what is really in them, and nothing that is not."""
