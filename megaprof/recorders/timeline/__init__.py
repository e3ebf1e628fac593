"""The timeline recorder, which records every step on every rank and is cheap enough to leave on."""
