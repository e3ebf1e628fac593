"""Opens and closes ranges, under the same name in the torch trace and in NVTX (domain ``megaprof``)."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

from megaprof.formats.ranges import DOMAIN

try:
    import nvtx
except ModuleNotFoundError:  # there is no nvtx for macOS, and no tool there that would show ranges
    nvtx = None


class LoggedRange(NamedTuple):
    """A range that has ended. It is kept for a recorder that does not see user annotations."""

    name: str
    """The range's name."""
    start: int
    """Its beginning, in nanoseconds since the epoch, as Kineto counts."""
    end: int
    """Its end, in nanoseconds since the epoch."""
    thread: int
    """The system's number of its thread."""


#: Takes ended ranges while a recorder wants them; None otherwise.
log: list[LoggedRange] | None = None
#: Names the nodes that are captured in its block. None unless a CUDA graph is captured whose kernels get our names.
mark: Callable[[str], AbstractContextManager[object]] | None = None


_OURS: dict[str, Any] = {"domain": DOMAIN}


def push(name: str) -> None:
    """Opens a range in NVTX only, in the domain ``megaprof``. `pop` closes it."""
    if nvtx is not None:
        nvtx.push_range(name, **_OURS)


def pop() -> None:
    """Closes the range that `push` opened."""
    if nvtx is not None:
        nvtx.pop_range(domain=DOMAIN)


def reaches_nobody() -> bool:
    """Returns whether the nvtx package sees no tool attached to NVTX. nvtx 0.2.12 and later do not see an older Nsight
    Systems, and drop every range."""
    return nvtx is None or type(nvtx.get_domain(DOMAIN)).__name__ == "DummyDomain"


def nvtx_version() -> str:
    """Returns the version of the nvtx package."""
    try:
        return importlib.metadata.version("nvtx")
    except importlib.metadata.PackageNotFoundError:
        return "(none installed)"


class Range:
    """A range around a block, made only while a window is open: ``with Range("megaprof/forward mb=3 chunk=0"): ...``.

    ``look``: the domain, color and category of the range in NVTX. ``overlapping``: the range may end before one that
    began after it, like a coroutine's. NVTX keeps such ranges apart from the threads' stacks of ranges.
    """

    __slots__ = ("_began", "_handle", "_look", "_marked", "_name", "_open", "_overlapping", "_recorded")

    def __init__(self, name: str, look: dict[str, Any] | None = None, *, overlapping: bool = False) -> None:
        self._name = name
        self._look = look or _OURS
        self._overlapping = overlapping
        self._handle: Any = None
        self._began = 0
        self._open = False
        self._marked: AbstractContextManager[object] | None = None
        # If torch has not been imported, Kineto cannot be recording. A fast record would be cheaper than this user
        # annotation, but Kineto mirrors only the annotation on the GPU's timeline.
        profiler = sys.modules.get("torch.profiler")
        self._recorded: Any = None if profiler is None else profiler.record_function(name)

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
            if self._recorded is not None:
                self._recorded.__enter__()
            if mark is not None:
                self._marked = mark(self._name)
                self._marked.__enter__()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the range. A no-op if it is not open."""
        if not self._open:
            return
        self._open = False
        marked, self._marked = self._marked, None
        if marked is not None and mark is not None:  # otherwise the capture in which it began is over
            marked.__exit__(None, None, None)
        try:
            if self._recorded is not None and self._recorded.record is not None:
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
