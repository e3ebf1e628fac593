"""Random states by name, and recomputation with them."""

import torch
from torch.utils.checkpoint import checkpoint as recomputed


class CudaRNGStatesTracker:
    """Megatron-Core derives its own tracker from this one, and uses that only where it is asked to."""


def checkpoint(
    function, *args, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None, **kwargs
):
    return recomputed(function, *args, use_reentrant=False, **kwargs)


def activation_recompute_forward(*_, **__):
    return torch.enable_grad()


def is_fp8_activation_recompute_enabled():
    return False


def in_fp8_activation_recompute_phase():
    return False
