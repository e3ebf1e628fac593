"""How long the training thread waits for a processor core, because others run on those that it may use."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from megaprof.formats.timeline import Waited
from megaprof.runtime.interruption import Suppressed


def waited_ns(thread: int) -> int | None:
    """Returns for how many nanoseconds since it began a thread of this process, by the system's number, could have run
    and had no core. None where the system does not say: only Linux does, if it was built to (``run_delay`` in
    Documentation/scheduler/sched-stats.rst)."""
    with Suppressed(OSError):
        ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return int(waited) if int(ran) else None
    return None


class Waits:
    """What one thread waits, from one reading to the next."""

    def __init__(self) -> None:
        """Of the thread that calls. Nothing is read."""
        self._thread = threading.get_native_id()
        self._last: tuple[int, int] | None = None

    @property
    def began(self) -> bool:
        """Whether there was a reading."""
        return self._last is not None

    def read(self, since_ns: int) -> Waited | None:
        """Returns what it waited since the last reading, from ``since_ns`` on, in nanoseconds of the wall clock; None
        where nobody knows, as at the first one."""
        waited, now = waited_ns(self._thread), time.time_ns()
        last, self._last = self._last, None if waited is None else (now, waited)
        if waited is None or last is None:
            return None
        # A wait counts when it is over, even one that began before the last reading.
        length = now - last[0]
        return Waited((last[0] - since_ns) // 1000, length // 1000, min(waited - last[1], length) // 1000)
