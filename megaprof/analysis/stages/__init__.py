"""Metrics of every stage, the verdict and its causes."""
