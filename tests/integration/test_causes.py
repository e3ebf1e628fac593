"""Faults made on purpose on real megatron-core over gloo: each named, from trace and timeline alike.

Layers wait for a given time in each pass, as a host waits for a GPU. That needs no core, so a busy machine disturbs it
little; what it adds may have causes of its own, so that only runs with written times show that nothing else is named
(tests/analysis/report/test_truth.py). All faults run one after another in the same processes, since starting these
takes longest.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.formats.timeline import SUFFIX
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import after_exchange, layers, linger

#: Milliseconds that a layer waits in a forward and in a backward, ...
FORWARD, BACKWARD = 30.0, 60.0
#: ... and what a fault adds to a step, or to an exchange.
LATE, DATA, LOADER, LINK = 400.0, 300.0, 50.0, 50.0
PIPELINE = GPTWorkload(pp=3, layers=3, hidden=32, seq_length=16, microbatches=6)
#: Steps of a fault: those from the first to the second are captured as one trace, the timeline has the others.
STEPS, CAPTURED = 9, (1, 5)
EXPECTED = {
    "slow link": {"slow_link:1"},
    "late entry": {"late_entry:1"},
    "recomputation": {"recomputation:1"},
    "slow forward": {"slow_forward:1"},
    "two slow stages": {"unexplained:1", "embedding_or_loss:2"},  # what the last stage has more may be its loss
    "waiting for data": {"data_wait:0"},
    "slow loader": {"data_wait:0"},
}
FLAGS = ["--profile-target", "train_actor", "--profile-tool", "timeline", "torch", "--profile-select", "per-stage"]


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
    fault = "none"

    if stage in (1, 2):
        after_exchange(3 - stage, lambda: time.sleep(LINK / 1000 if fault == "slow link" else 0))
    with cpu_megatron():
        gpt = build(PIPELINE)
        linger(layers(gpt.chunks), lambda _: at_stage(fault, stage))
        batches = gpt.data_iterator

        def late(step: int) -> Any:
            """The first microbatch's data are late, or those of all, in the iterator that the host gives."""
            for number, batch in enumerate(batches(step)):
                if stage == 0 and (fault == "slow loader" or (fault == "waiting for data" and number == 0)):
                    time.sleep((LOADER if fault == "slow loader" else DATA) / 1000)
                yield batch

        gpt.data_iterator = late  # type: ignore[method-assign]
        forward_backward = get_forward_backward_func()
        gpt.train_step(forward_backward)
        for fault in faults:
            gpt.step = 0
            flags = [*FLAGS, "--profile-steps", f"train_actor={CAPTURED[0]}:{CAPTURED[1]}"]
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
    (target,) = analyze(directory).targets
    assert target.diagnosis is not None, target.withheld
    return {f"{cause.kind}:{cause.stage}" for cause in target.causes}


@pytest.mark.slow
def test_every_fault_is_named_from_trace_and_timeline(tmp_path: Path) -> None:
    # Another process may hold a stage back for most of a capture: what was disturbed is run again.
    missing = {(fault, source) for fault in EXPECTED for source in ("trace", "timeline")}
    for attempt in range(3):
        out = tmp_path / str(attempt)
        faults = [fault for fault in EXPECTED if {(fault, "trace"), (fault, "timeline")} & missing]
        run_ranks(run_faults, PIPELINE.world_size, str(out), faults, timeout=400)
        found = {(fault, "trace"): named(out / fault) for fault in faults}
        found |= {(fault, "timeline"): named(timelines_of(out / fault)) for fault in faults}
        missing -= {each for each, names in found.items() if EXPECTED[each[0]] <= names}
        if not missing:
            return
    raise AssertionError(f"not named: {missing}; in the last run: {found}")


def timelines_of(directory: Path) -> Path:
    """A copy of the timelines alone: beside traces they would not be used for stages."""
    copied = directory.with_name(directory.name + " timelines")
    copied.mkdir()
    for path in directory.rglob("*" + SUFFIX):
        shutil.copy(path, copied)
    return copied
