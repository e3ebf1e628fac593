"""One step of a timeline as numbers: its events, arrivals at collectives, garbage collections, work, and
waits for data."""
