"""Fault isolation, in one place: a fault of megaprof never reaches the training that hosts it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType

from megaprof.runtime.logs import logger


class Contained:
    """``with Contained("closing a window", on_fault): ...``: an Exception inside ends here, as one log line.

    ``on_fault`` is called once for it and is itself contained. KeyboardInterrupt and SystemExit belong to the host
    and pass through.
    """

    __slots__ = ("_doing", "_on_fault")

    def __init__(self, doing: str, on_fault: Callable[[], None]) -> None:
        self._doing = doing
        self._on_fault = on_fault

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> bool:
        if not isinstance(fault, Exception):
            return False
        contain(self._doing, self._on_fault, fault)
        return True


def contain(doing: str, on_fault: Callable[[], None], fault: Exception) -> None:
    """The same for an ``except Exception as fault:``, which costs nothing where nothing fails."""
    tb = fault.__traceback__
    where = traceback.extract_tb(tb)[-1] if tb is not None else None
    place = f"{where.filename}:{where.lineno}" if where is not None else "unknown place"
    logger.error(
        "megaprof: %s failed, profiling is off for the rest of this run and training goes on: %s: %s (%s)",
        doing,
        type(fault).__name__,
        fault,
        place,
    )
    try:
        on_fault()
    except Exception:  # the cleanup of a fault must not become the next one
        logger.debug("megaprof: cleaning up after the fault failed too", exc_info=True)
