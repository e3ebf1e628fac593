"""What is captured when: the session, roles, annotations, captures on demand."""
