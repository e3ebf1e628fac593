"""The whole run on all ranks, from timelines."""
