"""A stand-in for Transformer Engine on a CPU, in plain torch: what Megatron-Core's own wrappers need, and no more.

Put the directory above on the path, and ``megatron.core.extensions.transformer_engine`` runs unmodified, over real
schedules, without tensor parallelism, in float32 and bf16. What it does not have (FP8, fused optimizers, kernels for
experts' permutation) is an ImportError, as with a release that lacks it. Nothing in here is Transformer Engine's code.
"""

from . import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
