"""Ray: hooks in every worker process, by Ray's own ``worker_process_setup_hook`` and the ``MEGAPROF_*`` environment;
and the end of a job, which waits for the files of its workers: when a driver is done, Ray kills them with SIGKILL.

    ray.init(runtime_env=megaprof.autoload.ray.runtime_env(config))
    ray job submit --runtime-env-json "$(megaprof run --profile-... --ray-runtime-env)" -- python train.py ...

A cluster that the training starts by itself (``ray.init()`` without an address) needs neither: its workers inherit the
environment of ``megaprof run -- python train.py ...``.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaprof.runtime.isolation import Suppressed, logger

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

HOOK = "worker_process_setup_hook"
#: Arms a worker process: Ray calls it before the first task or actor there.
ARM = "megaprof.autoload.arming.arm"
_POLL = 0.25
#: How far the clocks of two machines may be apart, in seconds.
_SKEW = 60.0


def runtime_env(config: ProfileConfig, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the runtime environment ``base``, with what makes every worker profile itself as ``config`` says.

    It also makes this process, the driver, wait for the workers' files before Ray ends them. Megaprof must be installed
    where the workers run. A relative directory is made absolute, because workers have another working directory. A
    configuration without a target adds nothing. Raises ValueError for a ``base`` that has a set-up hook already: call
    ``megaprof.autoload.arming.arm()`` in that one, and pass ``config.to_env()`` on.
    """
    merged = dict(base or {})
    if not config.enabled:
        return merged
    if HOOK in merged:
        raise ValueError(
            f"runtime_env: {HOOK} is {merged[HOOK]!r} already; call {ARM}() in it instead, and "
            "put the MEGAPROF_ variables of ProfileConfig.to_env() into env_vars"
        )
    merged[HOOK] = ARM
    merged["env_vars"] = {**merged.get("env_vars", {}), **config.to_env()}
    worker = sys.modules.get("ray._private.worker")
    if worker is not None:
        before_ray_ends(worker, partial(wait, config, time.time()))
    return merged


def wait(config: ProfileConfig, since: float) -> bool:
    """Waits until no process works on a file of this job in the save path, at most for ``--profile-flush-seconds``.
    Returns False if some file is not finished then; a log line names it. Files on a disk that is not seen from here are
    not waited for. Never raises.

    ``since``: when the job started, in seconds since the epoch. A file that nobody touched since then belongs to
    another job.
    """
    from megaprof.artifacts.places import is_remote

    directory = str(config.dir)
    if not config.enabled or is_remote(directory):
        return True
    deadline = time.monotonic() + config.flush_seconds
    was_finished = False
    try:
        while True:
            unfinished = sorted(_unfinished(directory, since - _SKEW))
            if not unfinished and was_finished:
                return True
            if unfinished and time.monotonic() >= deadline:
                names = ", ".join(unfinished)
                logger.error("megaprof: not finished within %.0f s: %s", config.flush_seconds, names)
                return False
            was_finished = not unfinished  # a second look: the writer may be about to begin with the next file
            time.sleep(_POLL)
    except Exception as fault:
        logger.warning("megaprof: files could not be waited for: %r", fault)
        return False


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
