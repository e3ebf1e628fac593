"""Python's garbage collections: one of the oldest objects stops the host for up to a second.

torch 2.13 records them itself (``record_python_gc_info``), but only with stacks, which cost more than all else.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from typing import Any, NamedTuple

#: The generation whose collections take long.
_OLDEST = 2
#: So many are kept; the oldest go.
_MOST = 10_000


class Collection(NamedTuple):
    """One that has ended."""

    start: int
    """Nanoseconds since the epoch."""
    end: int
    """Nanoseconds since the epoch."""
    thread: int
    """The system's number of the thread on which Python ran it; all others waited."""


class Collections:
    """Keeps the times of collections of the oldest generation, on whatever thread Python runs them."""

    def __init__(self) -> None:
        self.found: deque[Collection] = deque(maxlen=_MOST)
        self._began = 0

    def start(self) -> None:
        """Begin anew."""
        self.found.clear()
        if self._told not in gc.callbacks:
            gc.callbacks.append(self._told)

    def stop(self) -> None:
        """Keep no more. Can be run twice."""
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def until(self, moment: int) -> list[Collection]:
        """Takes out those that began before ``moment``, in nanoseconds since the epoch."""
        taken = []
        while self.found and self.found[0].start < moment:
            taken.append(self.found.popleft())
        return taken

    def _told(self, phase: str, info: dict[str, Any]) -> None:
        """Python calls it around every collection, and prints what it raises."""
        if info["generation"] < _OLDEST:
            return
        now = time.time_ns()
        if phase == "start":
            self._began = now
        elif self._began:
            self.found.append(Collection(self._began, now, threading.get_native_id()))
            self._began = 0
