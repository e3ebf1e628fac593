"""One table of passes: what every rank did in every step, from traces, timelines, or both."""
