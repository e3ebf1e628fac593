"""Logs a line at the end of a run that was armed and got no hooks, with the condition that was not met.

The first armed process logs it for all processes that it started: a launcher never trains itself, and each of its ranks
would log the same. If they run on the same machine, they mark how far they came in a directory that the first process
made for them.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

from megaprof.runtime.armed import armed
from megaprof.runtime.interruption import Suppressed
from megaprof.runtime.logs import logger

#: Names process and directory of the first process. Not one of ``MEGAPROF_*``, because those are options.
_FIRST = "_MEGAPROF_FIRST"
_INSTALLED = "installed"
#: Variables of launchers with a process's rank. Only rank 0 logs the line.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: How far a process may come, in this order.
_REASONS = (
    "neither torch nor megatron.core was imported",
    "torch was imported, but megatron.core was not, and no step of a trainer that megaprof supports without it ran",
    "megatron.core was imported, but not megatron.core.pipeline_parallel.schedules",
    "megatron.core was imported, but no call of its schedules was seen, nor of get_forward_backward_func(), which "
    "returns them",
    "a schedule of megatron.core was asked for or called, but neither had megatron.core.parallel_state been "
    "initialised, nor was the schedule given process groups",
)


def watch() -> None:
    """Has this process log the line at its end, or leave a mark for the process that will."""
    from tempfile import mkdtemp  # not in every process that only waits for megatron-core

    pid, _, directory = os.environ.get(_FIRST, "").partition(":")
    if not directory:
        directory = mkdtemp(prefix="megaprof-")
        os.environ[_FIRST] = f"{os.getpid()}:{directory}"
    armed.marks = Path(directory)
    is_first = pid in ("", str(os.getpid()))  # this process may have run another program before, which set the variable
    atexit.register(_log_reason if is_first else _mark_progress, os.getpid())


def installed() -> None:
    """Leaves a mark that hooks were asked for. What becomes of them is logged elsewhere."""
    _mark(_INSTALLED)


def _progress() -> int:
    """Returns how far this process came, as the index of a reason in `_REASONS`."""
    if "megatron.core.pipeline_parallel.schedules" in sys.modules:
        return 4 if armed.asked_too_early else 3
    if "megatron.core" in sys.modules:
        return 2
    return int("torch" in sys.modules)


def _mark(name: str) -> None:
    if armed.marks is not None:
        with Suppressed(OSError):  # on another machine, or the first process is gone
            (armed.marks / name).touch()


def _mark_progress(pid: int) -> None:
    if pid == os.getpid():  # not in a fork of it
        _mark(str(_progress()))


def _log_reason(pid: int) -> None:
    if pid != os.getpid():
        return
    _mark_progress(pid)
    from shutil import rmtree

    marks = set() if armed.marks is None else {path.name for path in armed.marks.glob("*")}
    if armed.marks is not None:
        rmtree(armed.marks, ignore_errors=True)
    if _INSTALLED in marks or any(os.environ.get(name, "0") != "0" for name in _RANKS):
        return
    furthest = max((int(mark) for mark in marks if mark.isdigit()), default=0)
    processes = "this process" if marks == {str(_progress())} else "this process, or those that it started here"
    reason = _REASONS[min(furthest, len(_REASONS) - 1)]
    logger.warning("megaprof: no hooks were installed in %s; nothing was captured: %s", processes, reason)
