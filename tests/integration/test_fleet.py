"""A rank slowed on purpose, on real megatron-core: found by name, with when it began; nobody in a healthy job.

What is added to a step is large against what the machine, which may be busy, makes of it. Others may really be slower
for a while there, so that only what lasts to the end is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.report.report import analyze
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import before_forward
from tests.analysis.telling import findings

STEPS, SLOW_RANK, FROM = 60, 3, 20
SECONDS = 0.1  # per microbatch, of which a step has four
PIPELINE = GPTWorkload(pp=2, dp=2, layers=4, hidden=64, seq_length=32, microbatches=4)
TENSOR = GPTWorkload(tp=2, dp=2, layers=2, hidden=64, seq_length=32, microbatches=4)


def train(directory: str, workload: GPTWorkload, fault: str, steps: int) -> None:
    """One rank of a run in which rank 3 has this fault from step 15 on."""
    import argparse

    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    flags = ["--profile-target", "train_actor", "--profile-tool", "timeline", "--profile-dir", directory]
    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    rank, _ = init_distributed()
    step = 0

    def slowed(seconds: float) -> None:
        if rank == SLOW_RANK and step >= FROM:
            time.sleep(seconds)

    def finalize(original: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **kwargs: Any) -> Any:
            slowed(4 * SECONDS)
            return original(*args, **kwargs)

        return late

    def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        from megatron.core import parallel_state

        tensor_parallel = parallel_state.get_tensor_model_parallel_group()

        def late(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is tensor_parallel:
                slowed(SECONDS / 4)
            return original(*args, **kwargs)

        return late

    with cpu_megatron(), pytest.MonkeyPatch.context() as patches:
        gpt = build(workload)
        if fault == "sleep":
            before_forward(gpt.chunks[0], lambda: slowed(SECONDS))
        elif fault == "gradients":
            gpt.config.finalize_model_grads_func = finalize(gpt.config.finalize_model_grads_func)
        elif fault == "all-reduce":
            patches.setattr(torch.distributed, "all_reduce", all_reduce(torch.distributed.all_reduce))
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            for step in range(steps):  # noqa: B007 (the faults read it)
                if fault == "outside":
                    slowed(4 * SECONDS)
                gpt.train_step(forward_backward)


def run(directory: Path, fault: str, workload: GPTWorkload = PIPELINE, steps: int = STEPS) -> TargetReport:
    run_ranks(train, workload.world_size, str(directory), workload, fault, steps, timeout=280)
    (target,) = analyze(directory).targets
    return target


def dearest(target: TargetReport, kind: str) -> Cause:
    return next(cause for cause in target.causes if cause.kind == kind)


def began(step: int | None) -> bool:
    """Near enough: a step or two may take as long by chance, and not every one is looked at."""
    return step is not None and abs(step - FROM) <= 4


@pytest.mark.alone
def test_a_slow_rank_is_named_with_its_first_slow_step(tmp_path: Path) -> None:
    slow = dearest(run(tmp_path, "sleep"), "slow_rank")
    assert (slow.ranks, slow.stage) == ((SLOW_RANK,), 1)
    assert began(slow.since)
    assert slow.while_ms > 2 * SECONDS * 1e3  # of four microbatches, on a machine that may be busy


@pytest.mark.alone
def test_a_slow_tensor_parallel_all_reduce_is_its_groups(tmp_path: Path) -> None:
    target = run(tmp_path, "all-reduce", TENSOR)
    slow = dearest(target, "slow_rank")
    assert slow.ranks == (2, 3)
    assert began(slow.since)
    command = f"megaprof trigger {tmp_path} --target train_actor --steps 2 --select 2-3"
    assert command in [finding.command for finding in target.findings]


@pytest.mark.alone
def test_a_slow_gradient_synchronisation_is_its_stages(tmp_path: Path) -> None:
    target = run(tmp_path, "gradients")
    assert target.fleet is not None
    waits = target.fleet.synchronisation.stage_synchronisation
    shift = next(shift for pp, shift in waits if pp == 1 and shift.until is None)
    assert began(shift.step)
    assert shift.after_ms > 2 * SECONDS * 1e3
    assert "slow_rank" not in {cause.kind for cause in target.causes}  # it computes as before
    assert began(dearest(target, "communication").since)
    assert any(
        found.startswith("Gradient synchronisation of stage 1 has taken ") and found.endswith(" --select pp=1`")
        for found in findings(target.fleet)
    )


@pytest.mark.alone
def test_a_rank_that_enters_late(tmp_path: Path) -> None:
    late = dearest(run(tmp_path, "outside"), "late_entry")
    assert late.ranks == (SLOW_RANK,)
    assert began(late.since)
    assert late.while_ms > 2 * SECONDS * 1e3


@pytest.mark.alone
@pytest.mark.parametrize("workload", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_a_healthy_job_blames_no_rank(tmp_path: Path, workload: GPTWorkload) -> None:
    # Another process of the machine may really slow a rank for a while, so one quiet run in three is asked for.
    found = []
    for attempt in range(3):
        target = run(tmp_path / str(attempt), "none", workload, steps=150)
        assert target.fleet is not None
        shifts = [shift for stage in target.fleet.stages for shift in stage.shifts]
        found.append([[cause for cause in target.causes if cause.ranks], shifts])
        if not any(found[-1]):
            return
    pytest.fail(f"every run raised an alarm: {found}")
