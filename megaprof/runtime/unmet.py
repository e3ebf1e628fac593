"""A run that was armed and got no hooks says so at its end, in one line, with the condition that was not met.

The first armed process speaks for all that it started: a launcher never trains itself, and its ranks would each say the
same. They leave a mark of how far they came in a directory that it made for them, if they run on its machine.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

from megaprof.runtime.armed import armed
from megaprof.runtime.interruption import Suppressed
from megaprof.runtime.logs import logger

#: Process and directory of the first one. Not among the ``MEGAPROF_*``: those are options.
_FIRST = "_MEGAPROF_FIRST"
_INSTALLED = "installed"
#: Of a launcher's processes, one speaks.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: How far a process may come, in this order.
_CAME = (
    "neither torch nor megatron.core was imported",
    "torch was imported, but megatron.core was not, nor did a step of a trainer without it run that megaprof knows",
    "megatron.core was imported, but not megatron.core.pipeline_parallel.schedules",
    "megatron.core was imported, but get_forward_backward_func(), with which it gives its schedules, was never called",
    "get_forward_backward_func() was called, but neither had megatron.core.parallel_state been initialised, nor was "
    "the schedule given process groups",
)


def watch() -> None:
    """Have this process log the line at its end, or leave a mark for the process that will."""
    from tempfile import mkdtemp  # not in every process that only waits for megatron-core

    pid, _, directory = os.environ.get(_FIRST, "").partition(":")
    if not directory:
        directory = mkdtemp(prefix="megaprof-")
        os.environ[_FIRST] = f"{os.getpid()}:{directory}"
    armed.marks = Path(directory)
    first = pid in ("", str(os.getpid()))  # of an earlier program, in whose place this one runs
    atexit.register(_speak if first else _leave, os.getpid())


def installed() -> None:
    """Leave a mark that hooks were asked for: what becomes of them is logged elsewhere."""
    _mark(_INSTALLED)


def _came() -> int:
    """The index into `_CAME`."""
    if "megatron.core.pipeline_parallel.schedules" in sys.modules:
        return 4 if armed.asked_too_early else 3
    if "megatron.core" in sys.modules:
        return 2
    return int("torch" in sys.modules)


def _mark(name: str) -> None:
    if armed.marks is not None:
        with Suppressed(OSError):  # on another machine, or the first process is gone
            (armed.marks / name).touch()


def _leave(pid: int) -> None:
    if pid == os.getpid():  # else a fork of it
        _mark(str(_came()))


def _speak(pid: int) -> None:
    if pid != os.getpid():
        return
    _leave(pid)
    from shutil import rmtree

    marks = set() if armed.marks is None else {path.name for path in armed.marks.glob("*")}
    if armed.marks is not None:
        rmtree(armed.marks, ignore_errors=True)
    if _INSTALLED in marks or any(os.environ.get(name, "0") != "0" for name in _RANKS):
        return
    came = max((int(each) for each in marks if each.isdigit()), default=0)
    where = "this process" if marks == {str(_came())} else "this process, or those that it started here"
    reached = _CAME[min(came, len(_CAME) - 1)]
    logger.warning("megaprof: no Megatron schedule ran in %s; nothing was captured: %s", where, reached)
