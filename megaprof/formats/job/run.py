"""`run.json`: what commands and ranks have to know about the running job. Its lowest rank writes it."""

from __future__ import annotations

import os
import secrets
import time
from typing import Annotated

from msgspec import Meta

from megaprof.formats.job.records import Count, Name, Record, Time
from megaprof.formats.names import host, is_gone
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout

NAME = "run.json"
#: Status files that the whole job writes each second, at most.
STATUS_RATE = 1000
#: No job has more ranks, and nobody reads more status files.
MOST_RANKS = 1 << 18
LARGEST_PID = 1 << 31


def interval(world: int) -> float:
    """Returns the seconds between two looks of a rank, so that the whole job looks at most `STATUS_RATE` times a
    second."""
    return max(1.0, world / STATUS_RATE)


#: The interval in the largest job.
LONGEST_INTERVAL = interval(MOST_RANKS)


class RunRecord(Record, frozen=True):
    """A running job, or one role's part of it, as its lowest rank describes it."""

    run: Name
    """A random name of this run: another run in the same directory has another name."""
    host: Name
    """The host of the lowest rank, as `formats.names.host` names it."""
    pid: Annotated[int, Meta(ge=0, le=LARGEST_PID)]
    """The lowest rank's process id there."""
    started: Time
    """When it started, in wall-clock seconds."""
    sizes: ParallelSizes
    """Its parallel sizes."""
    order: Name | None
    """Megatron's rank order, such as ``tp-cp-ep-dp-pp``; None if no order explains the ranks."""
    targets: Annotated[tuple[Name, ...], Meta(max_length=8)]
    """The targets that it captures by itself."""
    role: str | None
    """The role of the model; None without roles."""
    interval: Annotated[float, Meta(ge=0.01, le=LONGEST_INTERVAL)]
    """Seconds between two looks of a rank, and between two of its status records."""
    leader: Count = 0
    """Its lowest rank, which removes old requests."""
    ended: Time | None = None
    """When it ended, in wall-clock seconds; None while it runs."""

    def __post_init__(self) -> None:
        """Raises ValueError if the sizes make more ranks than any job has."""
        largest = max(self.world, self.sizes.vpp, self.sizes.ep, self.sizes.etp)
        if largest > MOST_RANKS:
            raise ValueError(f"its sizes make {largest} ranks, more than {MOST_RANKS}")

    @classmethod
    def new(
        cls, coords: RankCoords, layout: WorldLayout | None, targets: tuple[str, ...], role: str | None, seconds: float
    ) -> RunRecord:
        """Returns the record of the job of the rank at `coords`. It begins now, and a rank looks every `seconds`."""
        return cls(
            run=secrets.token_hex(8),
            host=host(),
            pid=os.getpid(),
            started=time.time(),
            sizes=coords.sizes,
            order=None if layout is None else layout.order,
            targets=targets,
            role=role,
            interval=seconds,
            leader=coords.rank,
        )

    @property
    def world(self) -> int:
        """The number of its ranks."""
        return self.sizes.world

    @property
    def layout(self) -> WorldLayout | None:
        """Every rank's coordinates; None if no rank order explains them."""
        if self.order is None:
            return None
        try:
            return WorldLayout(self.sizes, self.order)
        except ValueError:
            return None


def dead(host_of: str, pid: int) -> bool:
    """Returns whether a process is known to be gone. False for a process of another host, about which nothing is
    known."""
    if host_of != host():
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # Z: it has ended, but its parent has not noticed
            return file.read().rpartition(b")")[2].split()[0] == b"Z" or is_gone(pid)
    except (OSError, IndexError):  # without /proc
        return is_gone(pid)
