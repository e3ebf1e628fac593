"""Range names where they are recorded: in torch traces and NVTX, on the kernels of CUDA graphs, beside Kineto."""
