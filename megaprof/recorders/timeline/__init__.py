"""The timeline recorder: every step on every rank, cheap enough to leave on."""
