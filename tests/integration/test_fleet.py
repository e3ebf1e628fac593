"""A group of ranks that is slow from some step on, on real megatron-core: found by name in its timelines.

A slow rank and late entry: tests/demo/test_demo.py and test_causes.py; when each began, and that a healthy job
blames nobody: tests/analysis/report/test_causes.py, on written times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.report.report import TargetReport, analyze
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.analysis.telling import findings

pytestmark = pytest.mark.slow

STEPS, SLOW_RANK, FROM = 40, 3, 20
#: What is added to a step: many times what a step takes, also on a machine that is busy.
SECONDS = 0.4
#: What synchronising gradients takes on every rank. A stretch of steps is a level if it lasts some seconds, also before
#: the fault.
ALWAYS = 0.3
PIPELINE = GPTWorkload(pp=2, dp=2, layers=2, hidden=32, seq_length=16, microbatches=2)
TENSOR = GPTWorkload(tp=2, dp=2, layers=1, hidden=32, seq_length=16, microbatches=2)


def train(directory: str, workload: GPTWorkload, fault: str) -> None:
    """One rank of a run in which rank 3 has this fault from step `FROM` on."""
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
            time.sleep(ALWAYS)
            slowed(SECONDS)
            return original(*args, **kwargs)

        return late

    def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        from megatron.core import parallel_state

        tensor_parallel = parallel_state.get_tensor_model_parallel_group()

        def late(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is tensor_parallel:
                slowed(SECONDS / 10)
            return original(*args, **kwargs)

        return late

    with cpu_megatron(), pytest.MonkeyPatch.context() as patches:
        gpt = build(workload)
        if fault == "gradients":
            gpt.config.finalize_model_grads_func = finalize(gpt.config.finalize_model_grads_func)
        else:
            patches.setattr(torch.distributed, "all_reduce", all_reduce(torch.distributed.all_reduce))
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            for step in range(STEPS):  # noqa: B007 (the faults read it)
                gpt.train_step(forward_backward)


def run(directory: Path, fault: str, workload: GPTWorkload) -> TargetReport:
    run_ranks(train, workload.world_size, str(directory), workload, fault, timeout=280)
    (target,) = analyze(directory).targets
    return target


def dearest(target: TargetReport, kind: str) -> Cause:
    return next(cause for cause in target.causes if cause.kind == kind)


def test_a_slow_tensor_parallel_all_reduce_is_its_groups(tmp_path: Path) -> None:
    target = run(tmp_path, "all-reduce", TENSOR)
    assert dearest(target, "slow_rank").ranks == (2, 3)
    command = f"megaprof trigger {tmp_path} --target train_actor --steps 2 --select 2-3"
    assert command in [finding.command for finding in target.findings]


def test_a_slow_gradient_synchronisation_is_its_stages(tmp_path: Path) -> None:
    target = run(tmp_path, "gradients", PIPELINE)
    assert target.fleet is not None
    waits = target.fleet.synchronisation.stage_synchronisation
    shift = next(shift for pp, shift in waits if pp == 1 and shift.until is None)
    assert shift.after_ms - shift.before_ms > 0.5 * SECONDS * 1e3
    assert dearest(target, "communication").while_ms > 0.5 * SECONDS * 1e3
    assert any(
        found.startswith("Gradient synchronisation of stage 1 has taken ") and found.endswith(" --select pp=1`")
        for found in findings(target.fleet)
    )
