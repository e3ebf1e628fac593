"""Host memory guard: while a window is open, a thread watches how much memory is left.

A profiler keeps everything it records in host memory until the window closes, and closing takes several times as much
again. Where that would not fit, a window must end before the kernel's out-of-memory killer ends the training. The
watcher only sets an attribute; the training thread looks at it before each microbatch and closes the window itself.

Two bounds, of which ``--profile-max-host-memory`` sets one:

* a size (``64GiB``): this process's resident memory;
* a share (``80%``): memory in use, of the tightest control group above this process (v1 and v2) and of the machine.
  Page cache counts as free: the kernel gives it back. 95 % unless it is the share that was set.

Either bound already counts what closing the window is going to take, and a share also what the other processes of this
host need to close theirs: ranks capture the same step, so they close together.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megaprof.parallel.machine import Bound, find_bounds, resident_bytes
from megaprof.runtime.logs import logger

DEFAULT_SHARE = 0.95
#: Stopping and exporting a Kineto trace took so many times what recording it had taken, at most: 3.6 to 6.7 by options,
#: torch 2.13, CPU activity (``python -m tests.benchmarks.closing``; docs/architecture.md has the figures).
CLOSING_FACTOR = 7
#: A look costs ~0.1 ms of the interpreter lock.
INTERVAL_SECONDS = 0.1

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_VALID = "valid: a size such as 64GiB or 500MB (of this process), or a share such as 80% (of the container's memory)"


@dataclass(frozen=True)
class MemoryLimit:
    """How much memory may be in use, closing the window included."""

    size: int | None
    """Bound of this process's resident memory, in bytes; None: no bound."""
    share: float
    """Bound of the memory of the container and of the machine, as a fraction of it, 0 to 1."""


def parse_limit(option: str, text: str) -> MemoryLimit:
    """Read ``64GiB`` (or ``64g``), ``64GB`` (decimal), ``1000000B`` or ``80%``. A number alone is refused:
    whoever writes 12 means no bytes.

    Raises ValueError that names ``option``, the value and what would be valid.
    """
    if match := _SHARE.fullmatch(text.strip()):
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise ValueError(f"{option}: {text!r} is not a share between 0% and 100%; {_VALID}")
        return MemoryLimit(None, share)
    match = _SIZE.fullmatch(text.strip())
    if match is not None and text.strip()[-1] in "0123456789":
        raise ValueError(f"{option}: {text!r} has no unit; {_VALID}")
    if match is None:
        raise ValueError(f"{option}: {text!r} is neither a size nor a share; {_VALID}")
    decimal = match[2] and not match[3] and text.strip().lower().endswith("b")
    size = int(float(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].lower()])
    if size < 1:
        raise ValueError(f"{option}: {text!r} is less than one byte; {_VALID}")
    return MemoryLimit(size, DEFAULT_SHARE)


class Neighbours(Protocol):
    """The processes of this host whose windows are open; this one is among them."""

    def say(self, needed: int) -> None:
        """This process needs so many bytes more than it has, to close its window."""

    def others(self) -> int:
        """The bytes that the others need together."""


class HostMemoryGuard:
    """Watches between ``start()`` and ``stop()``; calls ``on_limit(reason)`` in its own thread, once, when it is time.

    The thread lives while a window is open and no longer. What cannot be read is not watched.
    """

    def __init__(
        self,
        limit: MemoryLimit,
        on_limit: Callable[[str], None],
        neighbours: Callable[[], AbstractContextManager[Neighbours]],
        *,
        resident: Callable[[], int] = resident_bytes,
        bounds: Callable[[], tuple[Bound, ...]] = find_bounds,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._limit = limit
        self._on_limit = on_limit
        self._resident = resident
        self._find_bounds = bounds
        self._neighbours = neighbours
        self._interval = interval
        self._closing = False
        self._done: threading.Event | None = None

    def start(self) -> None:
        """Begin to watch. Costs the caller the start of a thread."""
        self.stop()
        self._closing = False
        self._done = done = threading.Event()
        threading.Thread(target=self._watch, args=(done,), name="megaprof-host-memory", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; a no-op when nothing is watched. Does not wait for the thread, which ends by itself."""
        if self._done is not None:
            self._done.set()
            self._done = None

    def closes(self) -> None:
        """The window is being closed: there is nothing to watch any more, but others are told what that still takes."""
        self._closing = True

    def _watch(self, done: threading.Event) -> None:
        try:
            bounds, before, recorded, said = self._find_bounds(), self._resident(), 0, False
            with self._neighbours() as neighbours:
                while not done.is_set():
                    resident = self._resident()
                    closing, taken = self._closing, max(0, resident - before)
                    recorded = recorded if closing else taken
                    needed = max(0, recorded + CLOSING_FACTOR * recorded - taken)
                    neighbours.say(needed)
                    if not closing and not said:
                        reason = self._over(bounds, resident, needed, neighbours.others())
                        if reason is not None and not done.is_set():
                            said = True
                            self._on_limit(reason)
                    done.wait(self._interval)
        except Exception:  # a file of the kernel's that is not as we know it must not reach anybody
            logger.warning("megaprof: host memory cannot be watched on this machine", exc_info=True)

    def _over(self, bounds: tuple[Bound, ...], resident: int, needed: int, others: int) -> str | None:
        """Returns why the window must close now, or None. ``needed``: what closing it takes, ``others``: the same of
        theirs."""
        size = self._limit.size
        if size is not None and resident + needed > size:
            return _reason("this process", resident, needed, 0, size, size)
        for bound in bounds:
            used, there_is = bound.read()
            allowed = int(there_is * self._limit.share)
            if used + needed + others > allowed:
                return _reason(bound.name, used, needed, others, allowed, there_is)
        return None


def _reason(name: str, used: int, needed: int, others: int, allowed: int, there_is: int) -> str:
    gib = 1 << 30
    total = "" if there_is == allowed else f" (of {there_is / gib:.2f})"
    theirs = f", those of other processes here {others / gib:.2f} GiB" if others else ""
    return (
        f"host memory: {name} uses {used / gib:.2f} GiB, closing the window may take {needed / gib:.2f} GiB more"
        f"{theirs}, and --profile-max-host-memory allows {allowed / gib:.2f} GiB{total}"
    )
