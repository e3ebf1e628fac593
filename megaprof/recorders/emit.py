"""Opens and closes ranges: the same name in the torch trace and in NVTX (domain ``megaprof``)."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

from megaprof.formats.ranges import DOMAIN

try:
    import nvtx
except ModuleNotFoundError:  # there is none for macOS, and no tool there that would show it
    nvtx = None


class LoggedRange(NamedTuple):
    """A range that has ended, for a recorder that does not see user annotations."""

    name: str
    """The range's name."""
    start: int
    """Nanoseconds since the epoch, as Kineto counts."""
    end: int
    """Nanoseconds since the epoch."""
    thread: int
    """The system's thread number."""


#: Where ended ranges go while a recorder wants them; None otherwise.
log: list[LoggedRange] | None = None


_OURS: dict[str, Any] = {"domain": DOMAIN}


class Range:
    """``with Range("megaprof/forward mb=3 chunk=0"): ...``. Created only while a window is open.

    ``look``: the domain, color and category that NVTX gives it. ``overlapping``: it need not end before what began
    after it, as a coroutine's; NVTX keeps such ranges beside the threads' stacks of ranges.
    """

    __slots__ = ("_began", "_handle", "_look", "_name", "_open", "_overlapping", "_recorded")

    def __init__(self, name: str, look: dict[str, Any] = _OURS, *, overlapping: bool = False) -> None:
        self._name = name
        self._look = look
        self._overlapping = overlapping
        self._handle: Any = None
        self._began = 0
        self._open = False
        from torch.profiler import record_function  # here, because reading traces needs no torch

        # A user annotation rather than the cheaper fast record: Kineto mirrors it on the GPU's timeline.
        self._recorded = record_function(name)

    def __enter__(self) -> None:
        self._open = True
        try:
            if log is not None:
                self._began = time.time_ns()
            if nvtx is None:
                pass
            elif self._overlapping:
                self._handle = nvtx.start_range(self._name, **self._look)
            else:
                nvtx.push_range(self._name, **self._look)
            self._recorded.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the range; a no-op when it is not open."""
        if not self._open:
            return
        self._open = False
        try:
            if self._recorded.record is not None:
                self._recorded.__exit__(None, None, None)
        finally:
            if nvtx is None:
                pass
            elif not self._overlapping:
                nvtx.pop_range(domain=self._look["domain"])
            elif self._handle is not None:
                nvtx.end_range(self._handle)
        if log is not None and self._began:
            log.append(LoggedRange(self._name, self._began, time.time_ns(), threading.get_native_id()))
