"""Finished files: whole or not at all, uploaded, announced; and what is derived from a finished trace."""
