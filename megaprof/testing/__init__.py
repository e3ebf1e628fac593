"""Real megatron-core on the CPU: for megaprof's tests and demo, and for testing your own integration with it.

Nothing here is a mock: the ranks are processes, the model is megatron-core's GPTModel, its schedules run over gloo.
A test of a hook on Megatron's schedules needs no GPU, and no more than this::

    from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

    WORKLOAD = GPTWorkload(pp=2, layers=4, layout=(3, 1), hidden=64, seq_length=32)

    def one_rank():  # importable, and its result can be pickled
        init_distributed()
        with cpu_megatron():
            gpt = build(WORKLOAD)
            calls = my_integration.install(gpt.chunks)
            losses = [gpt.train_step() for _ in range(3)]
            gpt.log_probs_pass()
            gpt.evaluate()
        return gpt.layers_per_chunk, losses, len(calls)

    def test_my_integration():
        for layers, losses, calls in run_ranks(one_rank, WORKLOAD.world_size, timeout=120):
            assert calls == 5

`run_ranks` raises `RanksFailed` with every rank's traceback, signal or stack, and leaves no process
behind. `cpu_megatron` alone is enough where a model of your own is to run, and `cpu_process` puts the whole process of
a trainer on the CPU that is not yours to change.
"""

from megaprof.testing.cpu import Patch, cpu_megatron, cpu_patches
from megaprof.testing.gpt import BuiltGPT, build
from megaprof.testing.launcher import RankReport, RanksFailed, init_distributed, run_ranks
from megaprof.testing.process import cpu_process
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
    "cpu_process",
    "init_distributed",
    "run_ranks",
]
