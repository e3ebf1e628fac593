"""`run.json`: what a command, and every rank, has to know about the running job. Its lowest rank writes it."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from megaprof.formats.checks import Record, listing, number, optional, sentence, text, whole
from megaprof.formats.files import Directory, Owner
from megaprof.formats.job import records
from megaprof.formats.job.records import BadRecord
from megaprof.formats.names import host, is_gone
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout

NAME = "run.json"
#: Status files that the whole job writes each second, at most.
STATUS_RATE = 1000
#: No job has more ranks: a record that says so is somebody's joke, and nobody reads that many files for it.
MOST_RANKS = 1 << 18
LARGEST_PID = 1 << 31
LATEST = float(1 << 33)
"""Wall-clock seconds that no clock shows before the year 2242; as nanoseconds they fit into 63 bits."""


def interval(world: int) -> float:
    """Seconds between two looks of a rank: at most `STATUS_RATE` of them a second in the whole job."""
    return max(1.0, world / STATUS_RATE)


def _sizes(value: object) -> ParallelSizes:
    if not isinstance(value, dict):
        raise ValueError("are not an object")
    check = whole(1, MOST_RANKS)
    return ParallelSizes(**{axis: check(value[axis]) for axis in ParallelSizes.__dataclass_fields__ if axis in value})


@dataclass(frozen=True)
class RunRecord(Record):
    """A running job, or one role's part of it, as its lowest rank describes it."""

    run: Annotated[str, text(64)]
    """A random name for this run: what is of another one in the same directory has another name."""
    host: Annotated[str, text()]
    """Where the lowest rank runs, as `formats.names.host` says it."""
    pid: Annotated[int, whole(0, LARGEST_PID)]
    """The lowest rank's process id there."""
    started: Annotated[float, number(0, LATEST)]
    """Wall-clock seconds."""
    sizes: Annotated[ParallelSizes, _sizes]
    """How many ways it is parallel along each axis."""
    order: Annotated[str | None, optional(text())]
    """Megatron's rank order, such as ``tp-cp-ep-dp-pp``; None where no order explains the ranks."""
    targets: Annotated[tuple[str, ...], listing(text(), 8)]
    """What it captures by itself."""
    role: Annotated[str | None, optional(sentence(200))]
    """Whose model it is; None without roles."""
    interval: Annotated[float, number(0.01, interval(MOST_RANKS))]
    """Seconds between two looks of a rank, and between two of its status records."""
    leader: Annotated[int, whole(0, MOST_RANKS)] = 0
    """The rank that reads requests."""
    ended: Annotated[float | None, optional(number(0, LATEST))] = None
    """Wall-clock seconds when it ended; None while it runs."""

    @classmethod
    def new(
        cls, coords: RankCoords, layout: WorldLayout | None, targets: tuple[str, ...], role: str | None, every: float
    ) -> RunRecord:
        """The job of the rank at `coords`, which begins now and looks every `every` seconds."""
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
        """How many ranks it has."""
        return self.sizes.world

    @property
    def layout(self) -> WorldLayout | None:
        """Every rank's coordinates, None where no rank order explains them."""
        return None if self.order is None else WorldLayout(self.sizes, self.order)

    def as_record(self) -> dict[str, Any]:
        return {**super().as_record(), "world": self.world, "targets": list(self.targets)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> RunRecord:
        run = super().from_record(record)
        if run.world > MOST_RANKS:
            raise ValueError(f"its sizes make {run.world} ranks, more than {MOST_RANKS}")
        if run.leader >= run.world:
            raise ValueError(f"leader {run.leader} is outside the world of {run.world} ranks")
        if run.interval > interval(run.world):
            raise ValueError(f"interval {run.interval:g} s is longer than a job of {run.world} ranks takes")
        if run.order is not None:
            WorldLayout(run.sizes, run.order)
        return run


def read_run(directory: Directory, owner: Owner | None = None) -> RunRecord:
    """The run of a control directory; with `owner`, only what nobody else can have written.

    Raises Absent, BadRecord.
    """
    return records.decoded(directory, NAME, owner, _run)


@lru_cache(maxsize=4)
def _run(content: bytes) -> RunRecord:
    """Every rank reads the same one again and again."""
    record = records.decode(content)
    try:
        return RunRecord.from_record(record)
    except ValueError as fault:
        raise BadRecord(f"describes no job: {fault}") from None


def dead(host_of: str, pid: int) -> bool:
    """True when a process of this host is known to be gone; False also for what cannot be known from here."""
    return host_of == host() and (is_gone(pid) or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    """Linux; elsewhere a process that nobody has waited for counts as alive."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False
