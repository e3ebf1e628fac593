"""``status/rank00000.json``: where one rank stands, written by itself every few seconds."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megaprof.control import records
from megaprof.control.paths import Paths, refresh
from megaprof.control.request import Answer
from megaprof.control.run import Run, dead
from megaprof.formats.names import host
from megaprof.recorders.timeline.progress import BETWEEN, Watch

if TYPE_CHECKING:
    from megaprof.capture.session import Session
    from megaprof.control.capture import Key

#: Bytes of a status file, always.
SIZE = 2048
_LONGEST_REASON = 300
#: Readers at a time: a network file system answers each within milliseconds, and all of them at once.
_READERS = 16
#: A status is late when it is older than this many intervals, and than this many seconds.
LATE_INTERVALS, LATE_SECONDS = 5, 15.0

COORDS = ("pp", "tp", "cp", "ep", "dp")


def of_rank(
    session: Session,
    *,
    run: str | None,
    every: float,
    seconds: Callable[[Key], float | None],
    watches: tuple[Watch, Watch],
    capture: tuple[str, Answer] | None,
    ended: bool = False,
) -> dict[str, Any]:
    """The record of this rank now.

    ``seconds``: between two calls of a target and role lately; ``watches``: of where the training thread and the GPU
    are.
    """
    coords, timeline = session.coords, session.timeline
    position = recent = cost = device = None
    if timeline is not None:
        position, recent, cost = timeline.position(), timeline.recent(), timeline.cost()
        if (device := timeline.device_position()) is not None:
            where = (device.step, device.phase, device.microbatch, device.chunk)
            device = replace(device, since=watches[1].since(where))
    calls: dict[str, dict[str, Any]] = {}
    for (target, role), begun in list(session.calls.items()):
        between = seconds((target, role))
        calls.setdefault(target if role is None else f"{target}.{role}"[:60], {}).update(
            begun=begun, seconds=None if between is None else round(between, 6)
        )
    for target, (step, count) in {} if timeline is None else timeline.calls().items():
        calls.setdefault(target, {}).update(step=step, count=count)
    return {
        "version": 1,
        "run": run,
        "rank": coords.rank,
        "coords": {axis: getattr(coords, axis) for axis in COORDS},
        "host": host(),
        "name": socket.gethostname()[:64],
        "pid": os.getpid(),
        "time": time.time(),
        "interval": every,
        "ended": ended,
        "off": session.disabled,
        "since": watches[0].since((position, sum(session.calls.values()))),
        "calls": dict(list(calls.items())[:8]),
        "position": None if position is None else position.as_dict(),
        "device_position": None if device is None else device.as_dict(),
        "recent": None if recent is None else _rounded(recent.as_dict()),
        "cost": None if cost is None else _rounded(cost.as_dict()),
        "capture": None
        if capture is None
        else {
            "request": capture[0],
            "state": capture[1].state,
            "reason": capture[1].reason and capture[1].reason[:_LONGEST_REASON],
        },
    }


def fitted(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` within `SIZE`: names of roles and reasons may be long, and JSON makes six bytes of many a letter."""
    capture, calls = record["capture"], list(record["calls"].items())
    reason = (capture or {}).get("reason") or ""
    while len(records.encode(record)) > SIZE and (calls or reason):
        if reason:
            reason = reason[: len(reason) // 2]
            record = {**record, "capture": {**capture, "reason": reason}}
        else:
            calls = calls[: len(calls) // 2]
            record = {**record, "calls": dict(calls)}
    return record


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in figures.items()}


@dataclass(frozen=True)
class Place:
    """Where a rank is inside a schedule call, as `megaprof.recorders.timeline.progress.Position` has it."""

    target: str
    step: int
    phase: str
    microbatch: int | None
    chunk: int | None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        chunk = f" (chunk {self.chunk})" if self.chunk else ""
        return f"{self.phase}{microbatch}{chunk}"


@dataclass(frozen=True)
class RankStatus:
    """One rank's status as it was read. Times in wall-clock seconds of its host, figures as in the file."""

    rank: int
    coords: dict[str, int]
    host: str
    name: str
    pid: int
    time: float
    interval: float
    ended: bool
    off: bool
    since: float
    """When it was first seen where it is."""
    calls: dict[str, dict[str, Any]]
    place: Place | None
    recent: dict[str, Any] | None
    cost: dict[str, Any] | None
    capture: dict[str, Any] | None

    @property
    def compute_ms(self) -> float | None:
        """Forward, backward and combined passes of a step together."""
        if self.recent is None:
            return None
        parts = [self.recent.get(f"{kind}_ms") for kind in ("forward", "backward", "combined")]
        return sum(part for part in parts if isinstance(part, int | float))

    @property
    def step_ms(self) -> float | None:
        """How long a step takes; without a timeline, the time from one to the next."""
        if self.recent is not None and isinstance(self.recent.get("step_ms"), int | float):
            return float(self.recent["step_ms"])
        between = (self.seconds_between(target) for target in self.calls)
        return next((1e3 * seconds for seconds in between if seconds is not None), None)

    def seconds_between(self, target: str) -> float | None:
        """From the beginning of one step of ``target`` to that of the next."""
        seconds = self.calls.get(target, {}).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    def step(self, target: str | None = None) -> int | None:
        """The step it is in, or else the last one that it finished, of ``target`` or of whatever there is."""
        if self.place is not None and target in (None, self.place.target):
            return self.place.step
        for name, call in self.calls.items():
            if target in (None, name):
                last = call.get("step", call["begun"] - 1 if isinstance(call.get("begun"), int) else None)
                return last if isinstance(last, int) else None
        return None

    def stuck(self, now: float) -> float:
        """Seconds for which it has not moved, by its own host's clock as far as that was written down."""
        return max(0.0, max(now, self.time) - self.since)

    def late(self, now: float) -> bool:
        """No sign of life for too long, or a process of this host that is gone."""
        return not self.ended and (
            now - self.time > max(LATE_SECONDS, LATE_INTERVALS * self.interval) or dead(self.host, self.pid)
        )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> RankStatus:
        """Raises ValueError."""
        coords, calls = record.get("coords"), record.get("calls")
        if not isinstance(coords, dict) or not all(type(coords.get(axis)) is int for axis in COORDS):
            raise ValueError("no coordinates")
        if not isinstance(calls, dict) or not all(isinstance(call, dict) for call in calls.values()):
            raise ValueError("no calls")

        def part(key: str) -> dict[str, Any] | None:
            value = record.get(key)
            return value if isinstance(value, dict) else None

        position, device, recent = part("position"), part("device_position"), part("recent")
        # The GPU runs behind its host; but what it waits for between two phases, only the host knows.
        if device is not None and (device.get("phase") != BETWEEN or position is None):
            position = device
        return cls(
            rank=records.whole(record, "rank", 0, 1 << 32),
            coords={axis: coords[axis] for axis in COORDS},
            host=records.text(record, "host"),
            name=records.text(record, "name"),
            pid=records.whole(record, "pid", 0, 1 << 32),
            time=records.number(record, "time", 0, 1e12),
            interval=records.number(record, "interval", 0, 1e6),
            ended=record.get("ended") is True,
            off=record.get("off") is True,
            since=records.number(record if position is None else position, "since", 0, 1e12),
            calls=calls,
            place=None if position is None else _place(position),
            recent=recent if recent is not None and isinstance(recent.get("target"), str) else None,
            cost=part("cost"),
            capture=part("capture"),
        )


def _place(position: dict[str, Any]) -> Place:
    return Place(
        target=records.text(position, "target"),
        step=records.whole(position, "step", 0, 1 << 62),
        phase=records.text(position, "phase"),
        microbatch=None if position.get("microbatch") is None else records.whole(position, "microbatch", 0, 1 << 32),
        chunk=None if position.get("chunk") is None else records.whole(position, "chunk", 0, 1 << 32),
    )


def read_status(paths: Paths, run: Run, rank: int) -> RankStatus | None:
    """None: not written, not whole, or of another run."""
    try:
        record = records.read(paths.status(rank))
        if record.get("run") != run.run:
            return None
        status = RankStatus.from_record(record)
    except (records.Absent, records.BadRecord, ValueError):
        return None
    inside = all(0 <= place < getattr(run.sizes, axis) for axis, place in status.coords.items())
    return status if status.rank == rank and inside else None


def read_statuses(paths: Paths, run: Run, ranks: Iterable[int]) -> dict[int, RankStatus]:
    """Those of ``ranks`` that can be read, by rank."""
    wanted = list(ranks)
    for directory in {paths.status(rank).parent for rank in wanted}:
        refresh(directory)
    if len(wanted) <= _READERS:
        found = [read_status(paths, run, rank) for rank in wanted]
    else:
        with ThreadPoolExecutor(_READERS) as readers:
            found = list(readers.map(lambda rank: read_status(paths, run, rank), wanted, chunksize=256))
    return {status.rank: status for status in found if status is not None}
