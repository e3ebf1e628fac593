"""Host memory guard: while a window is open, a thread watches how much memory is left.

A profiler keeps everything it records in host memory until the window closes, and closing takes several times as much
again. Where that would not fit, a window must end before the kernel's out-of-memory killer ends the training. The
watcher only sets an attribute; the training thread looks at it before each microbatch and closes the window itself.

Two bounds, of which ``--profile-max-host-memory`` sets one:

* a size (``64GiB``): this process's resident memory;
* a share (``80%``): memory in use, of the tightest control group above this process (v1 and v2) and of the machine.
  Page cache counts as free: the kernel gives it back. 95 % unless it is the share that was set.

Either bound already counts what closing the window is going to take.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("megaprof")

DEFAULT_SHARE = 0.95
#: Stopping and exporting a Kineto trace took 6 times what recording it had taken (torch 2.13, CPU: 89 MB, then 525).
CLOSING_FACTOR = 6
#: A look costs ~0.1 ms of the interpreter lock.
INTERVAL_SECONDS = 0.1

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_VALID = "valid: a size such as 64GiB or 500MB (of this process), or a share such as 80% (of the container's memory)"


@dataclass(frozen=True)
class MemoryLimit:
    """``size`` bounds this process in bytes (None: no bound); ``share`` bounds container and machine, 0 to 1."""

    size: int | None
    share: float


def parse_limit(option: str, text: str) -> MemoryLimit:
    """Read ``64GiB`` (or ``64g``), ``64GB`` (decimal), ``1000000`` (bytes) or ``80%``.

    Raises ValueError that names ``option``, the value and what would be valid.
    """
    if match := _SHARE.fullmatch(text.strip()):
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise ValueError(f"{option}: {text!r} is not a share between 0% and 100%; {_VALID}")
        return MemoryLimit(None, share)
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{option}: {text!r} is neither a size nor a share; {_VALID}")
    decimal = match[2] and not match[3] and text.strip().lower().endswith("b")
    size = int(float(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].lower()])
    if size < 1:
        raise ValueError(f"{option}: {text!r} is no memory at all; {_VALID}")
    return MemoryLimit(size, DEFAULT_SHARE)


@dataclass(frozen=True)
class Bound:
    """Something whose memory can run out: what it is called, and ``read() -> (bytes in use, bytes there are)``."""

    name: str
    read: Callable[[], tuple[int, int]]


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def find_bounds(proc: Path = Path("/proc")) -> tuple[Bound, ...]:
    """The machine, and every control group above this process that limits memory."""
    return (Bound("the machine", lambda: _machine(proc)), *_cgroups(proc))


def _machine(proc: Path) -> tuple[int, int]:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kilobytes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    total = kilobytes["MemTotal:"]
    return (total - kilobytes["MemAvailable:"]) * 1024, total * 1024


def _cgroups(proc: Path) -> list[Bound]:
    """Own group first, then its parents up to the root of the mount: any of them may hold the limit.

    ``/proc/self/cgroup`` gives the group's path in its hierarchy, ``mountinfo`` which part of the hierarchy is mounted
    where. In a container without a cgroup namespace the path is the host's and the mount's root a prefix of it.
    """
    total = _machine(proc)[1]
    mounts = _cgroup_mounts(proc)
    bounds = []
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else None
        if version not in mounts or version is None:
            continue
        root, mount = mounts[version]
        inside = os.path.relpath(path, root) if root == "/" or path == root or path.startswith(root + "/") else "."
        group = mount if inside.startswith("..") else (mount / inside)
        for level in (group, *group.parents):
            if (bound := _cgroup(level, version, total)) is not None:
                bounds.append(bound)
            if level == mount:
                break
    return bounds


def _cgroup_mounts(proc: Path) -> dict[int, tuple[str, Path]]:
    """Version -> (root within the hierarchy, mount point) of the hierarchy that controls memory."""
    mounts = {}
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        if kind[0] == "cgroup" and "memory" not in kind[-1].split(","):
            continue
        mounts[2 if kind[0] == "cgroup2" else 1] = (fields[3], Path(fields[4]))
    return mounts


def _cgroup(group: Path, version: int, machine: int) -> Bound | None:
    """The limit of one group; None where it has none, or none below the machine's memory."""
    if version == 2:
        usage, limit, cached = "memory.current", "memory.max", ("inactive_file", "active_file")
    else:
        usage, limit = "memory.usage_in_bytes", "memory.limit_in_bytes"
        cached = ("total_inactive_file", "total_active_file")

    def read() -> tuple[int, int]:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / usage).read_text()) - sum(int(stat.get(name, 0)) for name in cached)
        return used, int((group / limit).read_text())

    try:
        return Bound(f"the container ({group})", read) if read()[1] < machine else None
    except (OSError, ValueError):  # no such controller here, or "max"
        return None


class HostMemoryGuard:
    """Watches between ``start()`` and ``stop()``; calls ``on_limit(reason)`` in its own thread, once, when it is time.

    The thread lives while a window is open and no longer. What cannot be read is not watched.
    """

    def __init__(
        self,
        limit: MemoryLimit,
        on_limit: Callable[[str], None],
        *,
        resident: Callable[[], int] = resident_bytes,
        bounds: Callable[[], tuple[Bound, ...]] = find_bounds,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._limit = limit
        self._on_limit = on_limit
        self._resident = resident
        self._find_bounds = bounds
        self._interval = interval
        self._done: threading.Event | None = None

    def start(self) -> None:
        """Begin to watch. Costs the caller the start of a thread."""
        self.stop()
        self._done = done = threading.Event()
        threading.Thread(target=self._watch, args=(done,), name="megaprof-host-memory", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; a no-op when nothing is watched. Does not wait for the thread, which ends by itself."""
        if self._done is not None:
            self._done.set()
            self._done = None

    def _watch(self, done: threading.Event) -> None:
        try:
            bounds, before = self._find_bounds(), self._resident()
            while True:
                reason = self._over(bounds, before)
                if done.is_set():
                    return
                if reason is not None:
                    self._on_limit(reason)
                    return
                if done.wait(self._interval):
                    return
        except Exception:  # a file of the kernel's that is not as we know it must not reach anybody
            logger.warning("megaprof: host memory cannot be watched on this machine", exc_info=True)

    def _over(self, bounds: tuple[Bound, ...], before: int) -> str | None:
        """Why the window must close now, or None."""
        resident = self._resident()
        closing = CLOSING_FACTOR * max(0, resident - before)
        size = self._limit.size
        if size is not None and resident + closing > size:
            return _reason("this process", resident, closing, size, size)
        for bound in bounds:
            used, there_is = bound.read()
            allowed = int(there_is * self._limit.share)
            if used + closing > allowed:
                return _reason(bound.name, used, closing, allowed, there_is)
        return None


def _reason(name: str, used: int, closing: int, allowed: int, there_is: int) -> str:
    gib = 1 << 30
    total = "" if there_is == allowed else f" (of {there_is / gib:.2f})"
    return (
        f"host memory: {name} uses {used / gib:.2f} GiB, closing the window may take {closing / gib:.2f} GiB more, and "
        f"--profile-max-host-memory allows {allowed / gib:.2f} GiB{total}"
    )
