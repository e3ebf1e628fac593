"""Reads files of Nsight Systems."""
