"""The end of a job that was armed: it waits for the files of its workers, or says why no hooks were installed.

The process that started the job or runs it waits: when a driver is done, Ray kills its workers with SIGKILL, although
they may still be writing files.

If no hooks went in, the first armed process logs a line, with the condition that was not met, for all processes that
it started: a launcher never trains itself, and each of its ranks would log the same. If they run on the same machine,
they mark how far they came in a directory that the first process made for them.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaprof.runtime.armed import armed
from megaprof.runtime.isolation import Suppressed, logger

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

_POLL = 0.25
#: How far the clocks of two machines may be apart, in seconds.
_SKEW = 60.0
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


def wait(config: ProfileConfig, since: float) -> None:
    """Waits for the files of a job that began at ``since`` (seconds since the epoch), at most for
    ``--profile-flush-seconds``. Never raises."""
    try:
        from megaprof.artifacts.places import is_remote

        if config.enabled and not is_remote(str(config.dir)):
            wait_for_files(str(config.dir), config.flush_seconds, since)
    except Exception as fault:
        logger.warning("megaprof: files could not be waited for: %r", fault)


def wait_for_files(directory: str, seconds: float, since: float) -> bool:
    """Waits until no process works on a file of this job in ``directory``, at most ``seconds``. Returns False if some
    file is not finished then; a log line names it. Files on a disk that is not seen from here are not waited for.

    ``since``: when the job started, in seconds since the epoch. A file that nobody touched since then belongs to
    another job.
    """
    deadline = time.monotonic() + seconds
    was_finished = False
    while True:
        unfinished = sorted(_unfinished(directory, since - _SKEW))
        if not unfinished and was_finished:
            return True
        if unfinished and time.monotonic() >= deadline:
            logger.error("megaprof: not finished within %.0f s: %s", seconds, ", ".join(unfinished))
            return False
        was_finished = not unfinished  # a second look: the writer may be about to begin with the next file
        time.sleep(_POLL)


def _unfinished(directory: str, since: float) -> Iterator[str]:
    from megaprof.formats.names import is_leftover, is_unfinished  # most processes that are armed never need it

    for folder in (directory, *(str(path) for path in Path(directory).glob("ranks*-*"))):
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if is_unfinished(entry.name) and not is_leftover(entry.name):
                try:
                    if entry.stat(follow_symlinks=False).st_mtime >= since:
                        yield entry.name
                except OSError:
                    continue  # finished meanwhile


def before_ray_ends(worker: ModuleType, finish: Callable[[], object]) -> None:
    """Makes Ray call ``finish`` before ``ray.shutdown`` and before the driver's end, which both kill the job's workers,
    whatever they are doing; a worker does not call it. ``worker`` is Ray's module of that name. The first call
    counts."""
    shutdown = worker.shutdown
    if hasattr(shutdown, "_megaprof"):
        return

    def finish_as_driver() -> None:
        if worker.global_worker.mode != worker.WORKER_MODE:
            finish()

    @functools.wraps(shutdown)
    def finish_and_shut_down(*args: Any, **kwargs: Any) -> Any:
        finish_as_driver()
        return shutdown(*args, **kwargs)

    finish_and_shut_down._megaprof = True  # type: ignore[attr-defined]
    for module in (worker, sys.modules.get("ray")):  # the package has it by name, once it is loaded
        if module is not None and getattr(module, "shutdown", None) is shutdown:
            module.shutdown = finish_and_shut_down  # type: ignore[attr-defined]
    atexit.register(finish_as_driver)  # runs before Ray's own, which was registered when its module was loaded


def between_methods(manager: Any) -> None:
    """Makes Ray say when it runs a method of an actor in this process: between two of them, the actor waits for its
    controller. ``manager`` is Ray's class ``FunctionActorManager`` (2.9 to 2.60)."""
    make = manager._make_actor_method_executor
    if hasattr(make, "_megaprof"):
        return

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        executor = make(*args, **kwargs)
        with Suppressed(Exception):  # another version of Ray's may make another kind of executor
            return _asking(executor)
        return executor

    made._megaprof = True  # type: ignore[attr-defined]
    manager._make_actor_method_executor = made


def _asking(executor: Any) -> Any:
    """Returns an executor of an actor's method that says when it runs. That of a generator only makes one, and stays as
    it is."""
    if inspect.isgeneratorfunction(executor.method) or inspect.isasyncgenfunction(executor.method):
        return executor
    from megaprof.capture.process import process

    @functools.wraps(executor)
    def method(*args: Any, **kwargs: Any) -> Any:
        with process.parts.asked():
            return executor(*args, **kwargs)

    @functools.wraps(executor)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with process.parts.asked():
            return await executor(*args, **kwargs)

    return coroutine if inspect.iscoroutinefunction(executor.method) else method


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
