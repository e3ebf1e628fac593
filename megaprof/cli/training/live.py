"""``megaprof demo --live``: a job that runs on, to be watched, asked and interrupted from another shell."""

from __future__ import annotations

import _thread
import argparse
import math
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from megaprof.cli import TERMINATED, CommandError
from megaprof.cli.training import faults
from megaprof.control.job import NoJob, find_job

if TYPE_CHECKING:
    from megaprof.testing import GPTWorkload

#: A job that hangs ends by itself after so many seconds, before the first time-out of Megatron-Core's process groups.
_HANG_SECONDS = 1500.0
#: How long the ranks may take to end a step and to finish their files, in seconds; then they are killed.
_GRACE_SECONDS = 15.0
_NEVER_SECONDS = 1e6
#: How long a job may take to be found by commands, in seconds; then they are printed all the same.
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
    """Train until ``steps``, Ctrl-C, SIGTERM or the time limit in seconds; False where a report is not wanted, because
    SIGTERM came. Raises CommandError when a rank fails, and KeyboardInterrupt or SystemExit where one of these signals
    killed the ranks."""
    from megaprof.testing import RanksFailed, run_ranks

    flags = ["--profile-target", "train_actor", "--profile-dir", str(out)]
    flags += ["--profile-tool", "timeline", "--profile-on-demand"]
    with tempfile.TemporaryDirectory(prefix="megaprof-demo-") as scratch:
        stop = Path(scratch, "stop")
        if time_limit is None and fault == faults.HANG:
            time_limit = _HANG_SECONDS
        with _Ending(stop, time_limit) as ending:

            def heard(rank: int, line: str) -> None:
                if line.strip() == _RUNNING:
                    ending.begun = True
                    _wait_for_answers(out)
                    _introduce(out, fault and faults.told(fault, workload, faults.FIRST_STEP))

            print("  starting the ranks", file=sys.stderr, flush=True)
            try:
                ran, *_ = run_ranks(
                    run_rank,
                    workload.world_size,
                    workload,
                    flags,
                    fault,
                    steps,
                    str(stop),
                    timeout=math.inf,
                    env=env,
                    on_line=heard,
                )
            except RanksFailed as failure:
                print(failure, file=sys.stderr)
                raise CommandError(f"a rank failed (see above); what was recorded is in {out}") from None
            except (KeyboardInterrupt, SystemExit):
                if not ending.late or ending.signal == signal.SIGTERM:
                    _say_how_to_report(out, ending)
                    raise
                print(f"The ranks did not end within {_GRACE_SECONDS:g} s, and were killed.", flush=True)
            else:
                print(f"The demo has ended after {ran} steps.", flush=True)
    if ending.signal == signal.SIGTERM:
        _say_how_to_report(out, ending)
    return ending.signal != signal.SIGTERM


def run_rank(workload: GPTWorkload, flags: list[str], fault: str | None, steps: int | None, stop: str) -> int:
    """One rank: steps until the file ``stop`` appears, the same number on all; returns how many."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks
    from megaprof.testing import build, cpu_megatron, init_distributed

    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    rank, _ = init_distributed(timeout=_NEVER_SECONDS)
    with cpu_megatron():
        gpt = build(workload)
        if fault is not None:
            faults.inject(fault, gpt, faults.FIRST_STEP, Path(stop).exists)
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            go_on = torch.ones(1)
            while go_on.item():
                gpt.train_step(forward_backward)
                if gpt.step == 1 and rank == 0:
                    print(_RUNNING, flush=True)
                go_on[0] = gpt.step != steps and not Path(stop).exists()
                torch.distributed.broadcast(go_on, 0)
    return gpt.step


def _wait_for_answers(directory: Path) -> None:
    """Until commands find the job: what it says of itself is written by a thread of its own, after the first step."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        try:
            find_job(directory)
            return
        except NoJob:
            time.sleep(0.1)


def _introduce(out: Path, fault: str | None) -> None:
    """What a user does now."""
    directory = str(out.absolute())
    print(f"It runs, and writes to {directory}")
    if fault is not None:
        print(f"Fault: {fault}.")
    print("Try in another shell:")
    for about, line in (
        ("the stages, as the job runs", ["watch", directory]),
        ("captures two steps, for a report", ["trigger", directory, "--target", "train_actor"]),
        ("where every rank stands, and whom the others wait for", ["status", directory]),
    ):
        print(f"  {shlex.join([*_program(), *line])}\n      {about}")
    print("Ctrl-C ends it, and prints the report.", flush=True)


def _say_how_to_report(out: Path, ending: _Ending) -> None:
    """Where no report is printed of a job that ran."""
    if ending.begun:
        print(f"What was recorded: {shlex.join([*_program(), 'report', str(out)])}", file=sys.stderr, flush=True)


def _program() -> list[str]:
    """Returns how this command was called, for a shell that stands in another directory."""
    called = Path(sys.argv[0])
    if called.name != "megaprof":
        return [sys.executable, "-m", "megaprof"]
    found = shutil.which(called.name)
    return [called.name] if found and Path(found).samefile(called) else [str(called.absolute())]


class _Ending:
    """Turns Ctrl-C, SIGTERM and the time limit into the end of the job: between two steps, or at once where the job has
    not begun, does not end in time, or the user asks again."""

    def __init__(self, stop: Path, time_limit: float | None) -> None:
        self.begun = False
        self.signal: int | None = None
        self.late = False
        """Whether the ranks did not end in time, and are killed."""
        self._stop = stop
        self._before: dict[signal.Signals, Any] = {}
        self._limit = threading.Timer(min(time_limit, threading.TIMEOUT_MAX), self._ask) if time_limit else None
        self._kill = threading.Timer(_GRACE_SECONDS, self._give_up)
        for timer in (self._limit, self._kill):
            if timer is not None:
                timer.daemon = True

    def __enter__(self) -> _Ending:
        self._before = {number: signal.signal(number, self._asked) for number in _SIGNALS}
        if self._limit is not None:
            self._limit.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for timer in (self._limit, self._kill):
            if timer is not None:
                timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if self.begun and not self._stop.exists():
            self._ask()
            print("Ending after this step; once more ends it at once.", file=sys.stderr, flush=True)
            return
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # nothing interrupts the killing of the ranks
        raise SystemExit(TERMINATED) if self.signal == signal.SIGTERM else KeyboardInterrupt

    def _give_up(self) -> None:
        self.late = True
        _thread.interrupt_main()

    def _ask(self) -> None:
        if not self._stop.exists():
            self._stop.touch()
            self._kill.start()
