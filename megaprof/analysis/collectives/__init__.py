"""Collectives of a whole job, rank by rank, from torch's flight recorder."""
