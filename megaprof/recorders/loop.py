"""What the host does beside its passes: in which part of its loop it is, how long Python collects garbage, and how long
the training thread waits for a processor core because others run on the cores that it may use.

A collection of the oldest objects stops the host for up to a second. torch 2.13 records collections itself
(``record_python_gc_info``), but only with stacks, which cost more than everything else together.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaprof.formats.ranges import GARBAGE, WAITING
from megaprof.runtime.isolation import Suppressed, in_full

if TYPE_CHECKING:
    from megaprof.formats.timeline import Waited

#: So many parts, and collections, are kept until somebody takes them. The oldest are dropped.
_MOST = 1024

Span = tuple[str, int, int]
"""A part, and when it began and ended, in nanoseconds of the wall clock."""


class Parts:
    """The parts of a process's loop, as they end. Only the outermost one counts: what saves a checkpoint may
    evaluate."""

    def __init__(self) -> None:
        self.now: tuple[str, int] | None = None
        """The part that runs, and since when. None between parts. Any thread may read it."""
        self.spans: deque[Span] = deque(maxlen=_MOST)
        self._thread: int | None = None
        self._asked: set[object] = set()
        self._optimizes: list[int] = []  # since when, once for all who watch

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Makes the code inside work that another process asked for, on any thread. Behind it, this process waits until
        it is asked again, or until it does something by itself."""
        work = object()
        self._asked.add(work)
        self._stop_waiting()
        try:
            yield
        finally:
            self._asked.discard(work)
            if not self._asked and self.now is None:
                self.now = WAITING, time.time_ns()

    @contextmanager
    def inside(self, part: str | None) -> Iterator[None]:
        """Makes the code inside one part; None: it is none. Another thread than the schedule's is no part of its
        loop."""
        entered = part is not None and threading.get_ident() == self._thread and self.enter(part)
        try:
            yield
        finally:
            if entered:
                self.leave()

    def enter(self, part: str, *, schedule: bool = False) -> bool:
        """Begins a part, and returns whether it is the outermost one; then `leave` must follow. ``schedule``: it is a
        call of the schedule."""
        if schedule:
            self._thread = threading.get_ident()
        self._stop_waiting()
        if self.now is not None:
            return False
        self.now = part, time.time_ns()
        return True

    def watch_optimizers(self) -> Callable[[], None]:
        """Makes every step of an optimizer of torch's a part, if it is in no other one. Returns what ends that."""
        from torch.compiler import is_compiling
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def before(*_: Any) -> None:
            if not is_compiling():  # the graph of a step that is compiled has no hooks
                alone = self.now is None and threading.get_ident() == self._thread
                self._optimizes = [time.time_ns()] if alone else []

        def after(*_: Any) -> None:  # not if the step fails
            while not is_compiling() and self._optimizes:
                self.spans.append(("optimizer", self._optimizes.pop(), time.time_ns()))

        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        return partial(in_full, *(hook.remove for hook in hooks))

    def leave(self) -> None:
        """Ends the part that runs."""
        if self.now is not None:
            self.spans.append((*self.now, time.time_ns()))
            self.now = None

    def _stop_waiting(self) -> None:
        if self.now is not None and self.now[0] == WAITING:
            self.leave()

    def since(self, ns: int) -> list[Span]:
        """Returns the parts that began after this time."""
        # A copy: other threads, on which methods of an actor end, add to it meanwhile.
        return [*takewhile(lambda span: span[1] >= ns, reversed(list(self.spans)))]


#: The generation whose collections take a long time.
_OLDEST = 2


Collection = tuple[int, int, int]
"""A garbage collection: when it began and ended, in nanoseconds since the epoch, and the system's number of the thread
on which Python ran it. All other threads waited."""


class Collections:
    """Keeps the times of collections of the oldest generation, whichever thread Python runs them on."""

    def __init__(self, parts: Parts | None = None) -> None:
        self.ended: deque[Collection] = deque(maxlen=_MOST)
        self._parts = parts or Parts()
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
        while self.ended and self.ended[0][0] < moment:
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
            self.ended.append((self._began, now, threading.get_native_id()))
            if self._parts.now is None:  # else it is in another part
                spans = self._parts.spans
                # What it finalises may wait, and then the host goes on with other parts if it is on another thread.
                spans.append((GARBAGE, max(self._began, spans[-1][2] if spans else 0), now))
            self._began = 0


def waited_ns(thread: int) -> int | None:
    """Returns for how many nanoseconds, since it began, a thread of this process was ready to run but had no core.
    ``thread``: the system's number of the thread. None if the system does not count it: only Linux does, if it was
    built to (``run_delay`` in Documentation/scheduler/sched-stats.rst)."""
    with Suppressed(OSError):
        ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()
        return int(waited) if int(ran) else None
    return None


def measure_waits() -> Callable[[int], Waited | None] | None:
    """Begins to measure how long the calling thread waits for a core; None if the system does not count it. Returns a
    function that returns how long it was since the last call of that function, or since now; None if that is unknown.
    The function gets the wall-clock time, in nanoseconds, that the start of this interval is counted from."""
    from megaprof.formats.timeline import Waited  # brings numpy, which a process without hooks does not load

    thread = threading.get_native_id()
    last = time.time_ns(), time.monotonic_ns(), waited_ns(thread)
    if last[2] is None:
        return None

    def read(since_ns: int) -> Waited | None:
        nonlocal last
        (before_ns, began, before), last = last, (time.time_ns(), time.monotonic_ns(), waited_ns(thread))
        if last[2] is None or before is None:
            return None
        # The system counts a wait when it is over, even if it began before the last reading.
        length = last[1] - began  # also where somebody sets the clock
        return Waited((before_ns - since_ns) // 1000, length // 1000, min(last[2] - before, length) // 1000)

    return read
