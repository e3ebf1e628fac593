"""Times Python's garbage collections. A collection of the oldest objects stops the host for up to a second.

torch 2.13 records collections itself (``record_python_gc_info``), but only with stacks, which cost more than everything
else together.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from typing import Any, NamedTuple

#: The generation whose collections take a long time.
_OLDEST = 2
#: The most collections that are kept. The oldest are dropped.
_MOST = 10_000


class Collection(NamedTuple):
    """A garbage collection that has ended."""

    start: int
    """Nanoseconds since the epoch."""
    end: int
    """Nanoseconds since the epoch."""
    thread: int
    """The system's number of the thread on which Python ran it. All other threads waited."""


class Collections:
    """Keeps the times of collections of the oldest generation, whichever thread Python runs them on."""

    def __init__(self) -> None:
        self.ended: deque[Collection] = deque(maxlen=_MOST)
        self._began = 0

    def start(self) -> None:
        """Forgets earlier collections and begins to record."""
        self.ended.clear()
        if self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Stops recording. Can be run twice."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def until(self, moment: int) -> list[Collection]:
        """Removes and returns the collections that began before ``moment``, in nanoseconds since the epoch."""
        taken = []
        while self.ended and self.ended[0].start < moment:
            taken.append(self.ended.popleft())
        return taken

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Notes a collection. Python calls this before and after every collection, and prints what it raises."""
        if info["generation"] < _OLDEST:
            return
        now = time.time_ns()
        if phase == "start":
            self._began = now
        elif self._began:
            self.ended.append(Collection(self._began, now, threading.get_native_id()))
            self._began = 0
