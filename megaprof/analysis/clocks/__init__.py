"""Finds out whose clock is off, and which send belongs to which receive."""
