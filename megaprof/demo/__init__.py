"""``megaprof demo``: a small real pipeline on the CPU, with a fault if asked, and the report on it."""
