"""Real jobs for the tests of control: a small pipeline that trains until it is told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import before_forward
from tests.built import digests

SMALL = GPTWorkload(pp=2, hidden=64, seq_length=32, layers=4, microbatches=4)
#: Between two steps of a job that is asked, so that it need not be repeated with thousands of them.
PAUSE = 0.1


@dataclass(frozen=True)
class Slow:
    """From call ``step`` on, ``rank`` sleeps in the forward pass of ``microbatch`` until the job is told to stop."""

    rank: int
    step: int
    microbatch: int


def train(
    workload: GPTWorkload,
    flags: list[str],
    stop: str,
    least: int,
    slow: Slow | None = None,
    quick: bool = False,
) -> Any:
    """Steps until the file ``stop`` appears, at least ``least``, the same number on all ranks; returns what they
    computed. Without ``flags`` megaprof is not there, and it is ``least`` steps. ``quick``: every rank looks, and looks
    at the others, ten times as often."""
    import argparse

    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    if quick:
        _look_often()
    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    rank, _ = init_distributed(timeout=180)
    with cpu_megatron():
        gpt = build(workload)
        losses: list[Any] = []
        if slow is not None and slow.rank == rank:
            _sleep_in_forward(gpt, slow, workload.microbatches, losses, stop)
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            go_on = torch.ones(1)
            while go_on.item():
                losses.append(gpt.train_step(forward_backward))
                time.sleep(PAUSE if flags else 0)
                go_on[0] = len(losses) < least or (bool(flags) and not Path(stop).exists())
                torch.distributed.broadcast(go_on, 0)
    return losses, *digests(gpt)


def _look_often() -> None:
    from megaprof.control import listener
    from megaprof.metrics import sinks

    listener.interval = lambda world: 0.1  # type: ignore[assignment]
    sinks.LEAST_SECONDS = 0.3  # type: ignore[misc]


def _sleep_in_forward(gpt: Any, slow: Slow, microbatches: int, losses: list[Any], stop: str) -> None:
    forwards = 0

    def sleep() -> None:
        nonlocal forwards
        microbatch, forwards = forwards % microbatches, forwards + 1
        if microbatch != slow.microbatch or len(losses) < slow.step:
            return
        while not Path(stop).exists():
            time.sleep(0.1)

    before_forward(gpt.chunks[0], sleep)


@dataclass
class Running:
    """A job in the background of a test. ``results``: what every rank returned, after ``end``."""

    stop: Path
    directory: Path
    thread: threading.Thread | None = None
    results: list[Any] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)

    def end(self) -> list[Any]:
        self.stop.touch()
        if self.thread is not None:
            self.thread.join()
        if self.faults:
            raise self.faults[0]
        return self.results


@contextmanager
def running(
    directory: Path,
    flags: list[str],
    *,
    workload: GPTWorkload = SMALL,
    slow: Slow | None = None,
    quick: bool = False,
) -> Iterator[Running]:
    """A job without any window, which runs inside."""
    directory.mkdir(exist_ok=True)
    job = Running(directory.parent / f"{directory.name}.stop", directory)
    flags = ["--profile-target", "train_actor", "--profile-dir", str(directory), *flags]

    def launch() -> None:
        try:
            job.results += run_ranks(
                train, workload.world_size, workload, flags, str(job.stop), 3, slow, quick, timeout=300
            )
        except BaseException as fault:
            job.faults.append(fault)

    job.thread = threading.Thread(target=launch)
    job.thread.start()
    try:
        deadline = time.monotonic() + 120
        while not (directory / "control" / "run.json").exists() and job.thread.is_alive():
            if time.monotonic() > deadline:
                raise TimeoutError("the job did not come up")
            time.sleep(0.1)
        yield job
    finally:
        job.end()
