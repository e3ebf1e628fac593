"""What the training thread does between the calls of the schedule: in which part of its loop the host is."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from megaprof.formats.ranges import WAITING

#: So many parts are kept until the next call begins.
_MOST = 1024

Span = tuple[str, int, int]
"""A part, and when it began and ended, in nanoseconds of the wall clock."""


class Parts:
    """The parts of a process's loop, as they end. Only the outermost one counts: what saves a checkpoint may
    evaluate."""

    def __init__(self) -> None:
        self.now: tuple[str, int] | None = None
        """The part that runs, and since when. None between parts. Any thread may read it."""
        self._spans: deque[Span] = deque(maxlen=_MOST)
        self._thread: int | None = None
        self._asked: set[object] = set()

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

    def leave(self) -> None:
        """Ends the part that runs."""
        if self.now is not None:
            self._spans.append((*self.now, time.time_ns()))
            self.now = None

    def _stop_waiting(self) -> None:
        if self.now is not None and self.now[0] == WAITING:
            self.leave()

    def since(self, ns: int) -> list[Span]:
        """Returns the parts that began after this time."""
        spans = []
        for span in reversed(self._spans):
            if span[1] < ns:
                break
            spans.append(span)
        return spans
