"""Measures how long the training thread waits for a processor core, because others run on the cores that it may use."""

from __future__ import annotations

import os
import threading
import time

from megaprof.formats.timeline import Waited
from megaprof.runtime.interruption import Suppressed

#: Bytes that the system's answer has at most: three numbers of 64 bits.
_LONGEST = 64


def waited_ns(thread: int) -> int | None:
    """Returns for how many nanoseconds, since it began, a thread of this process was ready to run but had no core.
    ``thread``: the system's number of the thread. None if the system does not count it: only Linux does, if it was
    built to (``run_delay`` in Documentation/scheduler/sched-stats.rst)."""
    with Suppressed(OSError):
        file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            ran, waited, _ = os.read(file, _LONGEST).split()
        finally:
            os.close(file)
        return int(waited) if int(ran) else None
    return None


class Waits:
    """Measures how long one thread waits for a core between two readings."""

    def __init__(self) -> None:
        """For the calling thread. Reads nothing yet."""
        self._thread = threading.get_native_id()
        self._last: tuple[int, int] | None = None

    @property
    def began(self) -> bool:
        """True if the last reading gave a number."""
        return self._last is not None

    def read(self, since_ns: int) -> Waited | None:
        """Returns how long the thread waited since the last reading. ``since_ns``: the wall-clock time, in nanoseconds,
        that the start of this interval is counted from. None if that is unknown, as at the first reading."""
        waited, now = waited_ns(self._thread), time.time_ns()
        last, self._last = self._last, None if waited is None else (now, waited)
        if waited is None or last is None:
            return None
        # The system counts a wait when it is over, even if it began before the last reading.
        length = now - last[0]
        return Waited((last[0] - since_ns) // 1000, length // 1000, min(waited - last[1], length) // 1000)
