"""Real megatron-core on the CPU: for megaprof's tests and demo, and for testing your own integration with it.

Nothing here is a mock: the ranks are processes, the model is megatron-core's GPTModel, its schedules run over gloo.
docs/testing.md has a whole test of an integration.

`run_ranks` raises `RanksFailed` with every rank's traceback, signal or stack, and leaves no process behind.
`cpu_megatron` alone is enough where a model of your own is to run.
"""

from megaprof.testing.cpu import Patch, cpu_megatron, cpu_patches
from megaprof.testing.gpt import BuiltGPT, build
from megaprof.testing.launcher import RankReport, RanksFailed, init_distributed, run_ranks
from megaprof.testing.workload import GPTWorkload

__all__ = [
    "BuiltGPT",
    "GPTWorkload",
    "Patch",
    "RankReport",
    "RanksFailed",
    "build",
    "cpu_megatron",
    "cpu_patches",
    "init_distributed",
    "run_ranks",
]
