"""The end of a job in the process that started it or runs it: the files of its workers are finished first."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig


def wait(config: ProfileConfig | None, since: float) -> None:
    """Wait for files of a job that began at ``since`` (seconds since the epoch), for ``--profile-flush-seconds`` at
    most. Without ``config`` the ``MEGAPROF_*`` environment says where they are. Never raises."""
    try:
        from megaprof.artifacts.remote import is_remote
        from megaprof.config.options import ProfileConfig
        from megaprof.integrations.ray_workers import wait_for_files

        config = config or ProfileConfig.from_env()
        if config.enabled and not is_remote(str(config.dir)):
            wait_for_files(str(config.dir), config.flush_seconds, since)
    except Exception as fault:
        logger.warning("megaprof: files could not be waited for: %r", fault)


def before_ray_ends(worker: ModuleType, finish: Callable[[], object]) -> None:
    """Call ``finish`` before ``ray.shutdown`` and before the driver's end: both kill the workers of the job, whatever
    they are doing. ``worker`` is Ray's module of that name. A worker's own end is nothing to wait for others. The first
    call counts."""
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
