"""Real megatron-core on the CPU, for megaprof's tests and demo, and for tests of your own integration.

Nothing here is a mock: ranks are processes, the model is megatron-core's GPTModel, and its schedules run over gloo.
docs/reference.md has a complete test of an integration.

`run_ranks` raises `RanksFailed` with every rank's traceback, signal or stack, and leaves no process behind.
`cpu_megatron` alone is enough to run a model of your own.
"""

from megaprof.testing.cpu import cpu_megatron, cpu_patches
from megaprof.testing.gpt import BuiltGPT, GPTWorkload, build
from megaprof.testing.launcher import RankReport, RanksFailed, init_distributed, run_ranks

__all__ = [
    "BuiltGPT",
    "GPTWorkload",
    "RankReport",
    "RanksFailed",
    "build",
    "cpu_megatron",
    "cpu_patches",
    "init_distributed",
    "run_ranks",
]
