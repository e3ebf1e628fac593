"""What a host framework knows and megaprof cannot see, one file per host; and the patches of hosts."""
