"""Trials of a user's own training command, until no other layout is predicted to gain anything."""
