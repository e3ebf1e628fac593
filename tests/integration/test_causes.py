"""Faults made on purpose on real megatron-core over gloo: each named, and nothing else, from trace and timeline alike.

Layers wait for a given time in each pass, as a host waits for a GPU. That needs no core, so a busy machine disturbs it
little. All faults of one shape run one after another in the same processes, since starting these takes longest.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.formats.timeline import SUFFIX
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import before_exchange, layers, linger

#: Milliseconds that a layer waits in a forward and in a backward, ...
FORWARD, BACKWARD = 12.0, 24.0
#: ... and what a fault adds to a step, or to an exchange.
LATE, DATA, LINK = 150.0, 120.0, 20.0
PIPELINE = GPTWorkload(pp=3, layers=3, hidden=32, seq_length=16, microbatches=8)
REPLICAS = GPTWorkload(dp=3, layers=1, hidden=32, seq_length=16, microbatches=4)
#: Work of the microbatches of a step, where it is uneven.
VERY_UNEVEN = (0.1, 2.4, 0.2, 2.2, 0.3, 2.0, 0.2, 0.6)
UNEVEN = (0.4, 1.4, 0.7, 1.9, 1.0, 0.5, 1.6, 1.1)
#: What a pipeline without a fault loses at most to one cause, as a part of the step.
THERE = 0.05
#: Steps of a fault: those from the first to the second are captured as one trace, the timeline has the others.
STEPS, CAPTURED = 9, (1, 5)
EXPECTED = {
    "healthy": set(),
    "one hiccup": set(),
    "slow link": {"slow_link:1"},
    "late entry": {"late_entry:1"},
    "one-stage spread": {"uneven_microbatches:1"},
    "uneven microbatches": {"uneven_microbatches:None"},
    "recomputation": {"recomputation:1"},
    "slow forward": {"slow_forward:1"},
    "two slow stages": {"unexplained:1", "embedding_or_loss:2"},  # what the last stage has more may be its loss
    "waiting for data": {"data_wait:0"},
}
FLAGS = ["--profile-target", "train_actor", "--profile-tool", "timeline", "torch", "--profile-select", "per-stage"]
COMES_AND_GOES, PERIOD = 50, 10


def at_stage(fault: str, stage: int) -> tuple[float, float]:
    """Milliseconds that this stage's layer waits in a forward and in a backward."""
    if fault == "recomputation" and stage == 1:
        return FORWARD, BACKWARD + 1.25 * FORWARD  # the work of a forward beside its waiting is repeated as well
    if fault == "slow forward" and stage == 1:
        return 2.5 * FORWARD, BACKWARD
    if fault == "two slow stages" and stage in (1, 2):
        return 2.5 * FORWARD, 2.5 * BACKWARD
    return FORWARD, BACKWARD


def run_faults(directory: str, faults: Sequence[str]) -> None:
    """One rank: every fault in turn, with a directory of its own."""
    import argparse

    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    stage, _ = init_distributed()
    rng = random.Random(stage)
    passes = 0
    fault = "healthy"
    dealt: list[float] = []

    def times(_: float) -> tuple[float, float]:
        nonlocal passes, dealt
        passes += 1
        forward, backward = at_stage(fault, stage)
        first = (passes - 1) % PIPELINE.microbatches == 0
        if fault == "one hiccup" and stage == 1 and gpt.step == CAPTURED[0] + 1 and passes % PIPELINE.microbatches == 5:
            forward *= 7
        if fault == "one-stage spread" and stage == 1:
            # As much in every step: else the stage is slow in some of them.
            dealt = dealt or rng.sample(VERY_UNEVEN, len(VERY_UNEVEN))
            work = dealt.pop()
            forward, backward = forward * work, backward * work
        if fault == "uneven microbatches":  # the same ones on every stage
            work = UNEVEN[(passes - 1) % PIPELINE.microbatches]
            forward, backward = forward * work, backward * work
        return forward + (DATA if fault == "waiting for data" and stage == 0 and first else 0.0), backward

    if stage == 1:
        before_exchange(2, lambda: time.sleep(LINK / 1000 if fault == "slow link" else 0))
    with cpu_megatron():
        gpt = build(PIPELINE)
        linger(layers(gpt.chunks), times)
        forward_backward = get_forward_backward_func()
        gpt.train_step(forward_backward)
        for fault in faults:
            gpt.step = 0
            flags = [*FLAGS, "--profile-merge-steps", "--profile-steps", f"train_actor={CAPTURED[0]}:{CAPTURED[1]}"]
            args = add_profile_args(argparse.ArgumentParser()).parse_args(
                [*flags, "--profile-dir", str(Path(directory, fault))]
            )
            with install_hooks(gpt.chunks, args):
                forward_backward = get_forward_backward_func()
                for _ in range(STEPS):
                    torch.distributed.barrier()
                    if fault == "late entry" and stage == 1:
                        time.sleep(LATE / 1000)
                    gpt.train_step(forward_backward)


def named(directory: Path) -> set[str]:
    """What the report names, but for what is there without a fault: few microbatches, a little loss, short messages."""
    (target,) = analyze(directory).targets
    assert target.diagnosis is not None, target.withheld
    large = [c for c in target.causes if c.price.ms > THERE * target.diagnosis.step_ms and c.kind != "few_microbatches"]
    return {f"{c.kind}:{c.group if c.kind == 'communication' else c.stage}" for c in large}


@pytest.mark.alone
def test_every_fault_is_named_from_trace_and_timeline(tmp_path: Path) -> None:
    # Another process may hold a stage back for most of a capture: what was disturbed is run once more.
    wrong: dict[str, Any] = dict(EXPECTED)
    for attempt in ("first", "second"):
        out = tmp_path / attempt
        run_ranks(run_faults, PIPELINE.world_size, str(out), tuple(wrong), timeout=400)
        found = {fault: (named(out / fault), named(timelines_of(out / fault))) for fault in wrong}
        wrong = {fault: each for fault, each in found.items() if each != (EXPECTED[fault], EXPECTED[fault])}
        if not wrong:
            return
    raise AssertionError(f"from trace and timeline were named {wrong}")


def timelines_of(directory: Path) -> Path:
    """A copy of the timelines alone: beside traces they would not be used for stages."""
    copied = directory.with_name(directory.name + " timelines")
    copied.mkdir()
    for path in directory.rglob("*" + SUFFIX):
        shutil.copy(path, copied)
    return copied


def run_replicas(directory: str) -> None:
    """One rank of three replicas, of which the second is slow now and then."""
    import argparse

    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    rank, _ = init_distributed()

    def times(_: float) -> tuple[float, float]:
        slow = 2.0 if rank == 1 and gpt.step % PERIOD >= PERIOD // 2 else 1.0
        return slow * 2 * FORWARD, slow * 2 * BACKWARD

    args = add_profile_args(argparse.ArgumentParser()).parse_args([*FLAGS[:4], "--profile-dir", directory])
    with cpu_megatron():
        gpt = build(REPLICAS)
        linger(layers(gpt.chunks), times)
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            for _ in range(COMES_AND_GOES):
                gpt.train_step(forward_backward)


@pytest.mark.alone
def test_a_rank_that_is_slow_again_and_again(tmp_path: Path) -> None:
    run_ranks(run_replicas, REPLICAS.world_size, str(tmp_path), timeout=300)
    (target,) = analyze(tmp_path).targets
    slow = target.causes[0]
    assert (slow.kind, slow.ranks, slow.since) == ("slow_rank", (1,), None)
    assert slow.share == pytest.approx(0.5, abs=0.1)
