"""Reads what a host framework knows and megaprof cannot see, with one file per host; also has the patches of hosts."""
