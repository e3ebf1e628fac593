"""Adapters: what a host framework knows and megaprof cannot see. Each as thin as it can be."""
