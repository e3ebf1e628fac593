"""What a run would take otherwise: layouts and what they cost, other microbatches, other packings."""
