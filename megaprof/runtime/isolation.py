"""Fault isolation, in one place: a fault of megaprof never reaches the training that hosts it, and what the host raises
while our code runs always does (`interruption`)."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

#: How often `in_full` runs a step that the host interrupts.
_ATTEMPTS = 3


class Contained:
    """``with Contained("closing a window", on_fault): ...``: a fault of ours ends here, as one log line.

    ``on_fault`` is called for every exception, before anything else; it cleans up and can be called twice. What the
    host raised passes through unchanged, once that is done.
    """

    __slots__ = ("_doing", "_on_fault")

    def __init__(self, doing: str, on_fault: Callable[[], None]) -> None:
        self._doing = doing
        self._on_fault = on_fault

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> bool:
        return fault is not None and contained(self._doing, self._on_fault, fault)


def contained(doing: str, on_fault: Callable[[], None], fault: BaseException) -> bool:
    """Does what `Contained` does, inside ``except BaseException as fault:``, which costs nothing as long as nothing
    fails. Returns False if ``fault`` is the host's, and the caller must raise it again."""
    in_full(on_fault)
    if from_host(fault):
        logger.warning(
            "megaprof: the host raised %s while megaprof was %s; profiling is off for the rest of this run",
            type(fault).__name__,
            doing,
        )
        return False
    tb = fault.__traceback__
    frame = traceback.extract_tb(tb)[-1] if tb is not None else None
    location = f"{frame.filename}:{frame.lineno}" if frame is not None else "unknown place"
    logger.error(
        "megaprof: %s failed, profiling is off for the rest of this run and training goes on: %s: %s (%s)",
        doing,
        type(fault).__name__,
        fault,
        location,
    )
    return True


def fault_now() -> str:
    """Describes the exception that is being handled, or cleaned up after, in a few words."""
    fault = sys.exc_info()[1]
    return "a fault" if fault is None else f"{type(fault).__name__}: {fault}"


def in_full(*steps: Callable[[], object] | None) -> None:
    """Runs every step of a clean-up, even if one of them raises. None is no step. It must be safe to run a step twice.

    If the host raises an exception in the middle of a step, the step runs again, and the exception reaches the caller
    when all steps are done. A fault of ours ends its step with a log line: cleaning up after a fault must not cause the
    next one.
    """
    host_fault: BaseException | None = None
    for step in filter(None, steps):
        for _ in range(_ATTEMPTS):
            try:
                step()
                break
            except BaseException as fault:
                if not from_host(fault):
                    logger.warning("megaprof: cleaning up failed: %r", fault)
                    break
                host_fault = fault
    if host_fault is not None:
        raise host_fault
