"""A rank slowed on purpose, on real megatron-core: found by name, with when it began."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megaprof.analysis.report import analyze
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

STEPS, SLOW_RANK, FROM = 40, 3, 15
WORKLOAD = GPTWorkload(pp=2, dp=2, layers=4, hidden=64, seq_length=32, microbatches=4)


def train(directory: str) -> int:
    """One rank of a run in which every forward of rank 3 sleeps from step 15 on."""
    import argparse

    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    flags = ["--profile-target", "train_actor", "--profile-tool", "timeline", "--profile-dir", directory]
    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    rank, _ = init_distributed()
    step = 0

    def sleep(*_: Any) -> None:
        if rank == SLOW_RANK and step >= FROM:
            time.sleep(0.05)

    with cpu_megatron():
        gpt = build(WORKLOAD)
        gpt.chunks[0].register_forward_pre_hook(sleep)
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            for step in range(STEPS):  # noqa: B007 (the hook reads it)
                gpt.train_step(forward_backward)
    return int(ps.get_pipeline_model_parallel_rank())


def test_a_slow_rank_is_named_with_its_first_slow_step(tmp_path: Path) -> None:
    stages = run_ranks(train, WORKLOAD.world_size, str(tmp_path), timeout=240)
    (target,) = analyze(tmp_path).targets
    assert target.fleet is not None
    slow = target.fleet.stragglers[0]  # on a busy machine, others may really be slower for a while
    assert (slow.ranks, slow.stage, slow.until) == ((SLOW_RANK,), stages[SLOW_RANK], None)
    assert abs(slow.from_step - FROM) <= 2
    assert slow.own_ms - slow.peers_ms > 100  # four microbatches of 50 ms, on a machine that may be busy
    assert target.fleet.findings[0].startswith(f"rank {SLOW_RANK} (stage {stages[SLOW_RANK]}, ")
    assert target.measured.step_time_ms is not None
    assert [stage.pp for stage in target.measured.stages] == [0, 1]
