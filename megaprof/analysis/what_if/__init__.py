"""Predictions of a changed run: other layouts and their costs, other microbatches, other packings."""
