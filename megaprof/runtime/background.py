"""The background thread: everything that an armed process does beside its training, on one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from megaprof.runtime.isolation import logger

#: Long enough for the training thread to wake up and take the interpreter.
_PAUSE_SECONDS = 0.001


class Background:
    """Runs tasks on one daemon thread, which starts with the first of them and ends with the last.

    A task that raises is dropped with one log line; the others, and training, go on. A child of ``os.fork`` has no
    such thread, and needs a `Background` of its own: the thread, its tasks and the holder of the lock stayed in the
    parent. Methods may be called from any thread; ``wake`` takes less than a microsecond.
    """

    def __init__(self) -> None:
        #: How many seconds lie between two runs of each task, and whether each ``wake()`` runs it, too.
        self._tasks: dict[Callable[[], None], tuple[float, bool]] = {}
        self._lock = threading.Lock()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, task: Callable[[], None], every: float, *, woken: bool = False) -> None:
        """Runs ``task`` every ``every`` seconds (for the first time sooner), and with ``woken`` also after each
        ``wake()``."""
        with self._lock:
            self._tasks[task] = every, woken
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="megaprof-background", daemon=True)
                self._thread.start()
        self._wakes.put(False)

    def remove(self, task: Callable[[], None]) -> None:
        """Stops running ``task``, although it may be running now. Does nothing if it was never added."""
        with self._lock:
            self._tasks.pop(task, None)
        self._wakes.put(False)

    def pause(self) -> None:
        """Lets other threads have the interpreter, in the middle of a long task on this thread. Otherwise Python takes
        it away only after 5 ms, each time, and the training thread waits meanwhile."""
        time.sleep(_PAUSE_SECONDS)

    def wake(self) -> None:
        """Runs the tasks that were added with ``woken`` now."""
        self._wakes.put(True)

    def _run(self) -> None:
        """Runs tasks at multiples of their period on the monotonic clock, so tasks of one period share a wake-up, and
        so do the ranks of a host: one pause of all ranks together holds a pipeline up less than a pause of each in
        turn."""
        wakes, last = self._wakes, time.monotonic()
        while True:
            now = time.monotonic()
            with self._lock:
                if not self._tasks:
                    self._thread = None
                    return
                wait = min(every - now % every if every else 0.0 for every, _ in self._tasks.values())
            woken = _drain(wakes, wait)
            before, last = last, time.monotonic()
            with self._lock:
                due = [
                    task
                    for task, (every, by_wake) in self._tasks.items()
                    if (woken and by_wake) or not every or last // every > before // every
                ]
            for task in due:
                try:
                    task()
                except Exception as fault:
                    self.remove(task)
                    line = "megaprof: a background task failed and is off; training goes on: %r"
                    logger.error(line, fault, exc_info=True)


def _drain(wakes: queue.SimpleQueue[bool], wait: float) -> bool:
    """Waits for a wake-up, at most ``wait`` seconds, and takes all that are in the queue. Returns whether one of them
    came from ``wake``."""
    woken = False
    try:
        woken = wakes.get(timeout=wait)
        while True:
            woken = wakes.get_nowait() or woken
    except queue.Empty:
        return woken
