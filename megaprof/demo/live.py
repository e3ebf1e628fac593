"""``megaprof demo --live``: a job that keeps running, so that it can be watched and captured from another shell."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megaprof.cli import TERMINATED, CommandError
from megaprof.control.directory import NoJob, find_job
from megaprof.demo import faults

if TYPE_CHECKING:
    from megaprof.testing import BuiltGPT, GPTWorkload

#: Seconds after which a hanging job ends by itself, before the first timeout of Megatron-Core's process groups.
_HANG_SECONDS = 1500.0
_NEVER_SECONDS = 1e6
#: The most seconds to wait until commands find the job; after that, the commands are printed anyway.
_ANSWER_SECONDS = 30.0
_RUNNING = "running"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    workload: GPTWorkload,
    out: Path,
    *,
    fault: str | None,
    steps: int | None,
    time_limit: float | None,
    env: Mapping[str, str],
) -> bool:
    """Trains until ``steps``, Ctrl-C, SIGTERM or the time limit (in seconds). Returns False if no report is wanted,
    because SIGTERM arrived. Raises CommandError if a rank fails, and KeyboardInterrupt or SystemExit if one of these
    signals killed the ranks."""
    from megaprof.testing import RanksFailed, run_ranks

    flags = ["--profile-target", "train_actor", "--profile-dir", str(out)]
    flags += ["--profile-tool", "timeline", "--profile-on-demand"]
    if time_limit is None:
        time_limit = _HANG_SECONDS if fault == faults.HANG else math.inf
    with tempfile.TemporaryDirectory(prefix="megaprof-demo-") as scratch, _ending(Path(scratch, "stop")) as ending:

        def on_line(rank: int, line: str) -> None:
            if line.strip() == _RUNNING:
                ending.begun = True
                _wait_for_answers(out)
                _introduce(out, fault and faults.described(fault, workload, faults.FIRST_STEP))
            elif rank == 0:
                print(f"  {line.rstrip()}\n", end="", file=sys.stderr, flush=True)

        print("  starting the ranks", file=sys.stderr, flush=True)
        arguments = workload, flags, fault, steps, time_limit, str(ending.stop)
        try:
            step_count, *_ = run_ranks(
                run_rank, workload.world_size, *arguments, timeout=math.inf, env=env, on_line=on_line
            )
        except RanksFailed as failure:
            print(failure, file=sys.stderr)
            raise CommandError(f"a rank failed (see above); the recorded files are in {out}") from None
        except (KeyboardInterrupt, SystemExit):
            _say_how_to_report(out, ending)
            raise
        print(f"The demo has ended after {step_count} steps.", flush=True)
    if ending.signal == signal.SIGTERM:
        _say_how_to_report(out, ending)
    return ending.signal != signal.SIGTERM


def run_rank(
    workload: GPTWorkload, flags: list[str], fault: str | None, steps: int | None, seconds: float, stop: str
) -> int:
    """Runs one rank until ``steps`` are done, the file ``stop`` appears or the time is up. Returns the number of steps,
    which is the same on all ranks."""
    deadline = time.monotonic() + seconds

    def over() -> bool:
        return Path(stop).exists() or time.monotonic() > deadline

    with hooked_rank(workload, flags, fault, faults.FIRST_STEP, over) as (gpt, forward_backward):
        import torch

        go_on = torch.ones(1)
        while go_on.item():
            gpt.train_step(forward_backward)
            if gpt.step == 1 and torch.distributed.get_rank() == 0:
                print(_RUNNING, flush=True)
            go_on[0] = gpt.step != steps and not over()
            torch.distributed.broadcast(go_on, 0)
    return gpt.step


@contextmanager
def hooked_rank(
    workload: GPTWorkload, flags: list[str], fault: str | None, begin: int = 0, over: Callable[[], bool] = lambda: True
) -> Iterator[tuple[BuiltGPT, Any]]:
    """Yields the model of a rank and its schedule: a small version of a pretrain entrypoint, with the two lines that
    megaprof needs. The fault begins at step ``begin``."""
    print("importing Megatron-Core", flush=True)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks
    from megaprof.testing import build, cpu_megatron, init_distributed

    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    init_distributed(timeout=_NEVER_SECONDS)
    with cpu_megatron():
        print("building the model", flush=True)
        gpt = build(workload)
        if fault is not None:
            faults.inject(fault, gpt, begin, over)
        with install_hooks(gpt.chunks, args):
            yield gpt, get_forward_backward_func()


def _wait_for_answers(directory: Path) -> None:
    """Waits until commands find the job. A separate thread of the job writes its status, after the first step."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        try:
            find_job(directory)
            return
        except NoJob:
            time.sleep(0.1)


def _introduce(out: Path, fault: str | None) -> None:
    """Prints what a user can do now."""
    directory = str(out.absolute())
    print(f"The job is running and writes to {directory}")
    if fault is not None:
        print(f"Fault: {fault}.\n`watch` names it within half a minute.")
    print("Try in another shell:")
    for description, line in (
        ("shows the stages while the job runs", ["watch", directory]),
        ("captures two steps, for a report", ["trigger", directory, "--target", "train_actor"]),
        ("shows where every rank is, and which rank the others wait for", ["status", directory]),
    ):
        print(f"  {shlex.join([*_program(), *line])}\n      {description}")
    print("Ctrl-C ends the job and prints the report.", flush=True)


def _say_how_to_report(out: Path, ending: _Ending) -> None:
    """Prints the command for a report, if the job ran. Called if no report is printed."""
    if ending.begun:
        print(f"To see what was recorded: {shlex.join([*_program(), 'report', str(out)])}", file=sys.stderr, flush=True)


def _program() -> list[str]:
    """Returns the words that call this command from a shell in another directory."""
    called = Path(sys.argv[0])
    if called.name != "megaprof":
        return [sys.executable, "-m", "megaprof"]
    path = shutil.which(called.name)
    return [called.name] if path and Path(path).samefile(called) else [str(called.absolute())]


class _Ending:
    """The end of the job. The job ends between two steps, as soon as the file ``stop`` exists."""

    def __init__(self, stop: Path) -> None:
        self.stop = stop
        self.begun = False
        self.signal: int | None = None


@contextmanager
def _ending(stop: Path) -> Iterator[_Ending]:
    """Makes Ctrl-C and SIGTERM end the job after its step. A signal before the job has begun, or a second one, ends it
    at once."""
    ending = _Ending(stop)

    def on_signal(number: int, frame: FrameType | None) -> None:
        ending.signal = ending.signal or number
        if ending.begun and not stop.exists():
            stop.touch()
            print("Ending after this step; press again to end at once.", file=sys.stderr, flush=True)
            return
        for ending_signal in _SIGNALS:
            signal.signal(ending_signal, signal.SIG_IGN)  # nothing interrupts the killing of the ranks
        raise SystemExit(TERMINATED) if ending.signal == signal.SIGTERM else KeyboardInterrupt

    previous_handlers = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield ending
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
