"""Python's garbage collections while a window is open: one of the oldest objects stops the host for up to a second.

torch 2.13 records them itself (``record_python_gc_info``), but only with stacks, which cost more than all else.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

from megaprof.formats.ranges import GARBAGE, operation_range
from megaprof.recorders.emit import LoggedRange

#: The generation whose collections take long.
_OLDEST = 2
#: So many are kept of one window.
_MOST = 10_000


class Collections:
    """Keeps the times of collections of the oldest generation, on whatever thread Python runs them."""

    def __init__(self) -> None:
        self.found: list[LoggedRange] = []
        self._began = 0

    def start(self) -> None:
        """Begin anew."""
        self.found = []
        if self._told not in gc.callbacks:
            gc.callbacks.append(self._told)

    def stop(self) -> None:
        """Keep no more. Can be run twice."""
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def _told(self, phase: str, info: dict[str, Any]) -> None:
        """Python calls it around every collection, and prints what it raises."""
        if info["generation"] < _OLDEST or len(self.found) >= _MOST:
            return
        now = time.time_ns()
        if phase == "start":
            self._began = now
        elif self._began:
            self.found.append(LoggedRange(operation_range(GARBAGE), self._began, now, threading.get_native_id()))
            self._began = 0
