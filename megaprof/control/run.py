"""``run.json``: what a command has to know about the job before it can ask it anything."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaprof.config.windows import TARGETS
from megaprof.control import records
from megaprof.control.paths import Paths
from megaprof.formats.names import host
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout

#: Status files that the whole job writes each second, at most.
STATUS_RATE = 1000


def interval(world: int) -> float:
    """Seconds between two looks of a rank: at most ``STATUS_RATE`` of them a second in the whole job."""
    return max(1.0, world / STATUS_RATE)


@dataclass(frozen=True)
class Run:
    """A job as its lowest rank described it. ``order``: Megatron's rank order, None where no order explains it."""

    run: str
    host: str
    pid: int
    started: float
    sizes: ParallelSizes
    order: str | None
    targets: tuple[str, ...]
    role: str | None
    interval: float
    leader: int = 0
    """The rank that reads requests."""
    ended: float | None = None

    @classmethod
    def new(
        cls, coords: RankCoords, layout: WorldLayout | None, targets: tuple[str, ...], role: str | None, every: float
    ) -> Run:
        return cls(
            run=secrets.token_hex(8),
            host=host(),
            pid=os.getpid(),
            started=time.time(),
            sizes=coords.sizes,
            order=None if layout is None else layout.order,
            targets=targets,
            role=role,
            interval=every,
            leader=coords.rank,
        )

    @property
    def world(self) -> int:
        return self.sizes.world

    @property
    def layout(self) -> WorldLayout | None:
        return None if self.order is None else WorldLayout(self.sizes, self.order)

    def as_record(self) -> dict[str, Any]:
        return {"version": 1, **asdict(self), "world": self.world, "targets": list(self.targets)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Run:
        """Raises ValueError."""
        sizes, targets, order = record.get("sizes"), record.get("targets"), record.get("order")
        if not isinstance(sizes, dict) or not isinstance(targets, list) or not set(targets) <= set(TARGETS):
            raise ValueError("it does not describe a job")
        if order is not None and not isinstance(order, str):
            raise ValueError("it does not describe a job")
        known = ParallelSizes.__dataclass_fields__
        run = cls(
            run=records.text(record, "run"),
            host=records.text(record, "host"),
            pid=records.whole(record, "pid", 0, 1 << 32),
            started=records.number(record, "started", 0, 1e12),
            sizes=ParallelSizes(**{name: size for name, size in sizes.items() if name in known}),
            order=order,
            targets=tuple(targets),
            role=None if record.get("role") is None else records.text(record, "role"),
            interval=records.number(record, "interval", 0.01, 1e4),
            leader=records.whole(record, "leader", 0, 1 << 32),
            ended=None if record.get("ended") is None else records.number(record, "ended", 0, 1e12),
        )
        if run.order is not None:
            WorldLayout(run.sizes, run.order)
        return run


def read_run(root: Path, owner: records.Owner | None = None) -> Run:
    """Raises Absent, BadRecord."""
    record = records.read(Paths(root).run, owner)
    try:
        return Run.from_record(record)
    except ValueError as fault:
        raise records.BadRecord(f"describes no job: {fault}") from None


def dead(host_of: str, pid: int) -> bool:
    """True when a process of this host is known to be gone; False also for what cannot be known from here."""
    if host_of != host():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Linux; elsewhere a process that nobody has waited for counts as alive."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False
