"""Reads what one rank recorded: from a file to events, and from events to calls."""
