"""Whose clock is off; which send belongs to which receive."""
