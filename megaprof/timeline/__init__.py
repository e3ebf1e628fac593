"""The timeline: start and end of every phase of every step, on every rank, cheap enough to leave on."""
