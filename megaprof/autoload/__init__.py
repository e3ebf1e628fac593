"""Hooks without an edit of the host: everything that calls ``install_hooks`` for the user."""
