"""Runs one trial: the user's command, with a timeline of every rank, until it has made enough steps.

Once every rank has made its steps, the command gets SIGTERM, which torchrun passes on to the ranks. Processes that
still run after a while get SIGKILL. Apart from the command's own process group, only processes that have the trial's
directory in their environment are killed; no other processes have it there.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from megaprof.autoload.arming import environment
from megaprof.config.options import ProfileConfig, variable
from megaprof.control.directory import find_job
from megaprof.formats.job import CONTROL, STATUS, RankStatus
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.machine import processes_with

#: The captured target. Timelines need no profiler, so recording them does not change what is measured.
TARGET = "train_actor"
LOG = "output.log"
#: Steps before the measured ones, which make room for the warm-up that the analysis leaves out.
WARM_UP = 3
#: Seconds that a command has to end after SIGTERM; megaprof writes its files for up to 20 of them.
_GRACE = 40.0
_LOOK = 0.5
#: The number of bytes at the end of a log that are searched for an error.
_READ = 1 << 18
#: The prefix that torch and launchers put in front of a rank's line.
_LABEL = r"(\[rank\d+\]:)?\s*([\w.-]+: )?"
#: A line that begins with the name of an error: the end of a traceback, argparse's ``program: error: ``, or a script's
#: own ``error: ``. The first one is the cause: other ranks and the launcher report only later that a rank has ended.
_RAISED = re.compile(rf"^{_LABEL}[\w.-]*([Ee]rror|Exception)(: |$)")
#: A traceback that begins in the middle of a line, down to its error. A program that prints words before a traceback
#: has caught the error; Megatron-Bridge does so for everything that it cannot import.
_CAUGHT = re.compile(rf"^(?!{_LABEL}Traceback \().*Traceback \(most recent call last\):\n([ \t].*\n)*.*$", re.MULTILINE)
#: What is in megaprof's own messages. A command never fails because of them.
_OURS = re.compile(r"megaprof( ends)?: |megaprof .*writes to ")
#: How torch and the kernel say that memory ran out.
_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "oom-kill", "Cannot allocate memory")


@dataclass(frozen=True)
class Ended:
    outcome: Literal["enough", "exited", "out_of_memory", "time_limit"]
    """``enough``: all ranks made their steps; ``exited``: it ended before that; ``out_of_memory``; ``time_limit``."""
    code: int | None = None
    """The command's exit code, if it ended by itself."""
    last_line: str | None = None
    """The error that a failed command printed; its last line if it ended by itself and printed no error."""


def config_of(directory: Path) -> ProfileConfig:
    """Returns the configuration of a trial. Raises ValueError."""
    return ProfileConfig(target=(TARGET,), tool=("timeline",), dir=str(directory))


def apart(directory: Path) -> dict[str, str]:
    """Returns the environment that keeps a trial in ``directory`` out of the user's runs in W&B, and in the TensorBoard
    of verl and SkyRL."""
    return {"WANDB_MODE": "disabled", "TENSORBOARD_DIR": str(directory / "tensorboard")}


def run(
    command: Sequence[str],
    directory: Path,
    steps: int,
    time_limit: float,
    advance: Callable[[int], None] = lambda _: None,
    config: ProfileConfig | None = None,
    alone: Mapping[str, str] | None = None,
) -> Ended:
    """Runs ``command`` until every rank has made ``steps`` steps after `WARM_UP`. Its timelines and output go to
    ``directory``, which is new. ``advance(steps)`` is called as steps are made. ``config``: another one than that of a
    trial. ``alone``: further environment of one rank without its others, with the ``PYTHONPATH`` that comes first.

    However this function ends, or is killed, the command ends, too. Raises OSError if it cannot be started.
    """
    env = environment(config or config_of(directory), os.environ) | apart(directory)
    if alone is not None:
        env |= {**alone, "PYTHONPATH": os.pathsep.join((alone["PYTHONPATH"], env["PYTHONPATH"]))}
    with (directory / LOG).open("wb") as log:
        # A process that was killed ends nothing; Linux does so for it: PR_SET_PDEATHSIG, see prctl(2).
        end = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=end
        )
        try:
            made = partial(_steps if alone is None else _steps_alone, directory)
            ended = _watched(process, made, steps + WARM_UP, time.monotonic() + time_limit, advance)
            return _explained(ended, directory / LOG)  # before `_end`, which may make the command print more
        finally:
            _end(process, directory)


def _watched(
    process: subprocess.Popen[bytes], made: Callable[[], int], steps: int, until: float, advance: Callable[[int], None]
) -> Ended:
    while process.poll() is None:
        steps_made = made()
        advance(steps_made)
        if steps_made >= steps:
            return Ended("enough")
        if time.monotonic() > until:
            return Ended("time_limit")
        time.sleep(_LOOK)
    return Ended("exited", process.returncode)


def _steps(directory: Path) -> int:
    try:
        job = find_job(directory)
    except Unanswerable:
        return 0
    statuses = job.statuses()
    return min(map(_steps_of, statuses.values())) if len(statuses) == job.run.world else 0


def _steps_alone(directory: Path) -> int:
    """Returns how many steps the only rank has made. It has no record of its job if it is not the first rank."""
    made = 0
    for file in directory.glob(f"{CONTROL}/{STATUS}/**/*.json"):
        with suppress(OSError, msgspec.MsgspecError):
            made = max(made, _steps_of(msgspec.json.decode(file.read_bytes(), type=RankStatus)))
    return made


def _steps_of(status: RankStatus) -> int:
    return max((calls.count or 0 for calls in status.calls if calls.target == TARGET), default=0)


def _end(process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + _GRACE
    try:
        _signal_group(process, signal.SIGTERM)
        while (process.poll() is None or running(directory)) and time.monotonic() < deadline:
            time.sleep(_LOOK / 2)
    finally:  # at once, if the user interrupts this, too
        _signal_group(process, signal.SIGKILL)
        for pid in running(directory):  # processes with their own session, such as torchrun's ranks
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def running(directory: Path) -> list[int]:
    """Returns the ids of the processes of trials in ``directory`` or below it."""
    mark = f"{variable('dir')}={directory.absolute()}"
    return processes_with(f"{mark}\0", f"{mark}/")


def _explained(ended: Ended, log: Path) -> Ended:
    if ended.outcome == "enough":
        return ended
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _READ))
        printed = _CAUGHT.sub("", file.read().decode("utf-8", "replace"))
    lines = [line.strip() for line in printed.splitlines() if line.strip() and not _OURS.search(line)]
    if line := next((line for line in lines if any(phrase in line for phrase in _OUT_OF_MEMORY)), None):
        return Ended("out_of_memory", ended.code, line)
    last_line = lines[-1] if lines and ended.outcome == "exited" else None
    return Ended(ended.outcome, ended.code, next(filter(_RAISED.search, lines), last_line))
