"""The exception that every reader raises for its user."""


class Unanswerable(Exception):
    """The input cannot answer what was asked; the message says why, on one line."""
