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

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.slow import Straggler
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


def run(directory: Path, fault: str, workload: GPTWorkload = PIPELINE, steps: int = STEPS) -> Fleet:
    run_ranks(train, workload.world_size, str(directory), workload, fault, steps, timeout=280)
    (target,) = analyze(directory).targets
    assert target.fleet is not None
    return target.fleet


def lasting(fleet: Fleet) -> list[Straggler]:
    return [slow for slow in fleet.stragglers if slow.until is None]


def began(step: int) -> bool:
    """Near enough: a step or two may take as long by chance."""
    return abs(step - FROM) <= 3


@pytest.mark.alone
def test_a_slow_rank_is_named_with_its_first_slow_step(tmp_path: Path) -> None:
    fleet = run(tmp_path, "sleep")
    slow = next(each for each in lasting(fleet) if each.what == "compute" and each.ranks == (SLOW_RANK,))
    assert (slow.stage, slow.until) == (1, None)
    assert began(slow.from_step)
    assert slow.own_ms - slow.peers_ms > 2 * SECONDS * 1e3  # of four microbatches, on a machine that may be busy
    assert any(found.startswith(f"Rank {SLOW_RANK} (stage 1, ") for found in findings(fleet))


@pytest.mark.alone
def test_a_slow_tensor_parallel_all_reduce_is_its_groups(tmp_path: Path) -> None:
    fleet = run(tmp_path, "all-reduce", TENSOR)
    slow = next(each for each in lasting(fleet) if each.what == "compute" and SLOW_RANK in each.ranks)
    assert (slow.ranks, slow.capture) == ((2, 3), "2-3")
    assert began(slow.from_step)
    command = f"`megaprof trigger {tmp_path} --target train_actor --steps 2 --select 2-3`"
    assert any(found.startswith("Ranks 2-3 (stage 0, ") and found.endswith(command) for found in findings(fleet))


@pytest.mark.alone
def test_a_slow_gradient_synchronisation_is_its_stages(tmp_path: Path) -> None:
    fleet = run(tmp_path, "gradients")
    shift = next(shift for pp, shift in fleet.synchronisation.stage_synchronisation if pp == 1 and shift.until is None)
    assert began(shift.step)
    assert shift.after_ms > 2 * SECONDS * 1e3
    assert not any(each.ranks == (SLOW_RANK,) for each in lasting(fleet))  # it computes as before
    assert any(
        found.startswith("Gradient synchronisation of stage 1 has taken ") and found.endswith(" --select pp=1`")
        for found in findings(fleet)
    )


@pytest.mark.alone
def test_a_rank_that_comes_late_for_what_no_step_shows(tmp_path: Path) -> None:
    fleet = run(tmp_path, "outside")
    late = next(each for each in lasting(fleet) if each.what == "arrival")
    assert late.ranks == (1, SLOW_RANK)  # its pipeline: the other stage waits for it
    assert began(late.from_step)
    assert late.peers_ms - late.own_ms > 2 * SECONDS * 1e3


@pytest.mark.alone
@pytest.mark.parametrize("workload", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_a_healthy_job_raises_no_alarm(tmp_path: Path, workload: GPTWorkload) -> None:
    # Another process of the machine may really slow a rank for a while, so one quiet run in three is asked for.
    found = []
    for attempt in range(3):
        fleet = run(tmp_path / str(attempt), "none", workload, steps=150)
        shifts = [shift for stage in fleet.stages for shift in stage.shifts]
        waits = fleet.synchronisation
        found.append([fleet.stragglers, shifts, waits.synchronisation_shifts, waits.stage_synchronisation])
        if not any(found[-1]):
            return
    pytest.fail(f"every run raised an alarm: {found}")
