"""Finds the job that writes to a save directory, and reads what its ranks wrote."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megaprof.control.directory import (
    COLLECTIVES,
    CONTROL,
    STATUS,
    folder,
    folder_of,
    name_of,
    open_any,
    part,
    parts_with_a_run,
    path_of,
)
from megaprof.formats.faults import Unanswerable
from megaprof.formats.files import Directory, Unsafe
from megaprof.formats.flight import Flight
from megaprof.formats.job import records
from megaprof.formats.job.records import Absent, BadRecord, RunRecord, dead
from megaprof.formats.job.status import LATE_INTERVALS, LATE_SECONDS, InFlight, RankStatus
from megaprof.formats.phrases import ago

#: How often an old status is read again before the job counts as silent: clocks of hosts differ.
_LOOKS = 3
#: Threads that read statuses: a network file system takes milliseconds for each, and serves many at once.
_READERS = 16
#: A record that each rank writes, with its `run` and `rank`.
OfRank = TypeVar("OfRank", RankStatus, InFlight)


class NoJob(Unanswerable):
    """There is no job to look at or to ask. The message says why."""


@dataclass(frozen=True)
class RunningJob:
    """One run in a save directory."""

    directory: Path
    part: str | None
    """The directory of its role inside the control directory; None for a job without roles."""
    run: RunRecord

    def control(self) -> Directory:
        """Opens its control directory. Raises OSError, and Unsafe."""
        return open_any(self.directory, self.part)

    def leader(self) -> RankStatus | None:
        """Returns the status of the lowest rank; None if it cannot be read."""
        return self.statuses([self.run.leader]).get(self.run.leader)

    def statuses(self, ranks: Iterable[int] | None = None) -> dict[int, RankStatus]:
        """Returns the statuses of `ranks`, or of all ranks, by rank: those that exist and belong to this run."""
        try:
            with self.control() as control:
                return read_statuses(control, self.run, range(self.run.world) if ranks is None else ranks)
        except (OSError, Unsafe):
            return {}

    def in_flight(self) -> dict[int, Flight]:
        """Returns what the ranks that stand still have in flight, by rank, as far as they wrote it."""
        try:
            with self.control() as control:
                written = read_of_ranks(control, COLLECTIVES, self.run, range(self.run.world), InFlight)
        except (OSError, Unsafe):
            return {}
        return {rank: Flight(record.version, record.entries, record.pg_config) for rank, record in written.items()}

    def now(self, statuses: dict[int, RankStatus], silence: str | None) -> float:
        """Returns the time in seconds by the clocks of the job's hosts, which may differ from the clock here. While the
        job lives (`silence` is None), some rank wrote its status less than an interval ago."""
        here = time.time()
        if silence is not None or not statuses:
            return here
        latest = max(status.time for status in statuses.values())
        return min(max(here, latest), latest + self.run.interval)

    def silence(self) -> str | None:
        """Returns why the job will not answer any more; None while it lives. May take a few of its intervals."""
        run = self.run
        if run.ended is not None:
            return f"the job has ended, {ago(time.time() - run.ended)} ago"
        if dead(run.host, run.pid):
            return f"the job is gone: process {run.pid} of rank {run.leader} does not exist any more"
        first = self.leader()
        if first is not None and not first.late(time.time()):
            return None
        for _ in range(_LOOKS):
            time.sleep(run.interval)
            last = self.leader()
            if last is not None and (first is None or last.time != first.time):
                return None
        heard = "never" if first is None else f"{ago(time.time() - first.time)} ago"
        name = run.host if first is None else first.name
        return f"the job does not answer: rank {run.leader} ({name}, process {run.pid}) was last heard of {heard}"

    def starting(self, statuses: dict[int, RankStatus]) -> bool:
        """Returns whether ranks without a status may just not have started yet."""
        since = time.time() - self.run.started
        return len(statuses) < self.run.world and since < max(LATE_SECONDS, LATE_INTERVALS * self.run.interval)


def find_job(directory: Path, role: str | None = None) -> RunningJob:
    """Returns the job that writes to `directory`, or a role's part of it. Raises NoJob."""
    if not directory.is_dir():
        raise NoJob(f"{directory} is not a directory")
    try:
        parts = parts_with_a_run(directory)
    except Unsafe as fault:
        raise NoJob(f"no job in {directory}: {fault}") from None
    if not parts:
        raise NoJob(
            f"no job in {directory}: {CONTROL}/run.json does not exist there; a job writes it with its first step, "
            "if it has --profile-on-demand or --profile-tool timeline"
        )
    of_role = part(role)
    chosen = of_role if of_role in parts else None if None in parts else parts[0]
    if chosen not in (of_role, None) and (role is not None or len(parts) > 1):
        roles = ", ".join(str(name).removeprefix("role-") for name in parts)
        raise NoJob(f"the job in {directory} has the roles {roles}: name one with --role")
    try:
        with open_any(directory, chosen) as control:
            return RunningJob(directory, chosen, records.read(control, records.RUN, RunRecord))
    except (Absent, OSError):
        raise NoJob(f"no job in {directory} any more") from None
    except BadRecord as fault:
        raise NoJob(f"{path_of(directory, chosen) / 'run.json'} {fault}") from None
    except Unsafe as fault:
        raise NoJob(f"no job in {directory}: {fault}") from None


def read_statuses(control: Directory, run: RunRecord, ranks: Iterable[int]) -> dict[int, RankStatus]:
    """Returns the statuses of `ranks`, as far as they are written and of `run`, by rank."""
    written = read_of_ranks(control, STATUS, run, ranks, RankStatus)
    sizes = run.sizes
    return {
        rank: status
        for rank, status in written.items()
        if all(place < getattr(sizes, axis) for axis, place in status.coords.items())
    }


def read_of_ranks(
    control: Directory, what: str, run: RunRecord, ranks: Iterable[int], kind: type[OfRank]
) -> dict[int, OfRank]:
    """Returns the records of `ranks` below the directory `what`, as far as they are written and of `run`, by rank."""
    by_folder: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        by_folder.setdefault(folder_of(what, rank, run.world), []).append(rank)
    read: list[tuple[int, OfRank | None]] = []
    for names, members in by_folder.items():
        with suppress(OSError, Unsafe), folder(control, *names) as opened:
            opened.names(1)  # a network file system asks its server again
            read += zip(members, _read_all(opened, members, kind), strict=True)
    return {
        rank: record for rank, record in read if record is not None and (record.run, record.rank) == (run.run, rank)
    }


def _read_all(opened: Directory, ranks: list[int], kind: type[OfRank]) -> list[OfRank | None]:
    if len(ranks) <= _READERS:
        return [_read(opened, rank, kind) for rank in ranks]
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda rank: _read(opened, rank, kind), ranks))


def _read(opened: Directory, rank: int, kind: type[OfRank]) -> OfRank | None:
    try:
        return records.read(opened, name_of(rank), kind)
    except (Absent, BadRecord):
        return None
