"""Writes range names into torch traces and NVTX, onto the kernels of CUDA graphs, and next to a GPU-only Kineto."""
