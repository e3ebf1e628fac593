"""Decides what is captured and when: the session, roles, annotations, captures on demand."""
