"""Nothing is offloaded."""

import contextlib


def get_cpu_offload_context(*_, **__):
    return contextlib.nullcontext(), lambda tensor: tensor
