"""Layouts, cost model, candidates, what causes cost."""
