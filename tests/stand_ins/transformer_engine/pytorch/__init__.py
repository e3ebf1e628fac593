"""The modules that Megatron-Core derives from, and what it looks at beside them."""

from . import attention, cpu_offload, distributed, fp8, module, ops, utils
from .attention import DotProductAttention
from .cpu_offload import get_cpu_offload_context
from .fp8 import fp8_autocast, fp8_model_init
from .module import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "attention",
    "cpu_offload",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "module",
    "ops",
    "utils",
]
