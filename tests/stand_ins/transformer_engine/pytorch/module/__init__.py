"""Linear layers and norms."""

from .base import TransformerEngineBaseModule
from .linear import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from .norms import LayerNorm, RMSNorm

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
]
