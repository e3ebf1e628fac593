"""A rank's timeline on disk: appended to, rotated, bounded, and whole up to its last record whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megaprof.formats import timeline as format
from megaprof.formats.names import artifact_path
from megaprof.parallel.topology import RankCoords
from megaprof.recorders.timeline.step import Description
from megaprof.runtime.interruption import Suppressed, from_host
from megaprof.runtime.logs import logger

#: The limit of bytes is for this many full files; the oldest goes when another one begins that would exceed it.
FILES = 4
#: After a write that failed (a full disk, a file server that is gone), how long not to try again, in seconds.
PAUSE_SECONDS = 60.0

Facts = tuple[tuple[int, bytes], ...]
"""What stands beside a step: which fact of `formats.timeline`, and its bytes."""


class PackedStep(NamedTuple):
    """A step as it is written."""

    description: Description
    """What it shares with other steps: its metadata."""
    events: bytes
    """The codes of its events as 64-bit integers, in the order of their starts."""
    begun: tuple[int, int, int, int]
    """As `formats.timeline.step_record` takes it, like the next two."""
    spent: tuple[int, ...]
    times: bytes
    facts: Facts
    """What stands beside it."""


class Place(NamedTuple):
    """Where a step was written."""

    file: int
    """The rank's how manieth file."""
    row: int
    """The step's position in it."""


class TimelineFiles:
    """Appends steps for one rank. Only the background thread calls it. Never overwrites a file that exists.

    ``limit``: bytes of all files together; there may be many small ones. A write that fails is logged once, taken back
    as far as it got, and tried again a minute later with the steps that come then. A file that never got a step is
    removed, and removes no other.
    """

    def __init__(self, directory: Path, role: str | None, coords: RankCoords, limit: int) -> None:
        self._directory = directory
        self._role = role
        self._coords = coords
        self._largest = max(limit // FILES, 1 << 16)
        self._most = (FILES - 1) * self._largest
        self._ended: deque[tuple[Path, int]] = deque()
        self._path = directory
        self._file: int | None = None
        self._size = 0
        self._descriptions: dict[Description, int] = {}
        self._shapes: dict[bytes, int] = {}
        self._steps = 0
        self._number = 0
        self._holding: dict[tuple[int, Description], bytes] = {}
        self._paused_until = 0.0
        self.bytes_written = 0
        self.steps_lost = 0

    def append(self, steps: Sequence[PackedStep]) -> list[Place]:
        """Write ``steps``, with one write as long as no other file begins; answers where those are that were written,
        the first ones."""
        places: list[Place] = []
        try:
            while len(places) < len(steps) and time.monotonic() >= self._paused_until:
                count = self._append(steps[len(places) :])
                places += (Place(self._number, row) for row in range(self._steps - count, self._steps))
        except OSError as fault:
            self._pause(fault)
        self.steps_lost += len(steps) - len(places)
        return places

    def add(self, facts: Sequence[tuple[Place, int, bytes]]) -> None:
        """Write what stands beside steps that were written before: place, which fact, and its bytes. What is beside
        steps of an earlier file, or has no room, is left out."""
        said = [format.fact_record(place.row, what, payload) for place, what, payload in facts if self._is_open(place)]
        data = b"".join(said)
        if data and self._size + len(data) <= self._largest:
            try:
                self._write(data)
            except OSError as fault:
                self._pause(fault)

    def _is_open(self, place: Place) -> bool:
        return self._file is not None and place.file == self._number

    def _pause(self, fault: OSError) -> None:
        if from_host(fault):  # the last steps are written by the host's own thread
            raise fault
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        self._end_file()
        logger.error(
            "megaprof: the timeline cannot be written to %s: %s; trying again in %.0f s",
            self._directory,
            fault.strerror or fault,
            PAUSE_SECONDS,
        )

    def close(self) -> None:
        self._end_file()

    def _append(self, steps: Sequence[PackedStep]) -> int:
        """Write the first of ``steps``, as many as have room in one file; answers how many."""
        if self._file is None:
            self._begin_file(steps[0].begun[2])
        size, data, count = self._size, list[bytes](), 0
        # In front of the steps: those of one length then follow each other, which is quick to read, and a file that is
        # cut lacks steps rather than what stands beside them.
        beside: list[bytes] = [] if size else [format.MAGIC]
        for description, events, begun, spent, times, facts in steps:
            number, shape, records = self._descriptions.get(description), self._shapes.get(events), b""
            if number is None or shape is None:
                if size and max(len(self._descriptions), len(self._shapes)) >= format.MOST_NUMBERS:
                    break
                if number is None:
                    number = self._descriptions[description] = len(self._descriptions)
                    records = format.metadata_record(description.metadata)
                if shape is None:
                    shape = self._shapes[events] = len(self._shapes)
                    records += format.shape_record(events)
            records += format.step_record(number, shape, begun, spent, times)
            said = self._said(description, self._steps + count, facts)
            if size and size + len(records) + len(said) > self._largest:
                break
            data.append(records)
            beside.append(said)
            size += len(records) + len(said)
            count += 1
        if count:
            self._write(b"".join((*beside, *data)))
            self._steps += count
        if count < len(steps):
            self._end_file()
        return count

    def _said(self, description: Description, row: int, facts: Facts) -> bytes:
        """The records of what stands beside a step. What holds until another one is told most jobs say once."""
        said = []
        for what, payload in facts:
            if what in format.HOLDING:
                if self._holding.get((what, description), b"") == payload:
                    continue
                self._holding[what, description] = payload
            said.append(format.fact_record(row, what, payload))
        return b"".join(said)

    def _begin_file(self, step: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        about = "timeline", self._role, max(step, 0), self._coords, format.SUFFIX
        for repeat in itertools.count(1):
            path = artifact_path(self._directory, *about, repeat=repeat)
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # an earlier run's, or a step that the host runs again
                self._file = os.open(path, flags, 0o666)
                break
        self._path, self._size = path, 0
        self._number += 1
        self._descriptions, self._shapes, self._holding, self._steps = {}, {}, {}, 0

    def _write(self, data: bytes) -> None:
        """All of ``data`` or, after an OSError, nothing of it."""
        if self._file is None:
            raise OSError("no file is open")
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            with Suppressed(OSError):
                os.ftruncate(self._file, self._size)
            raise
        if not self._size:
            self._make_room()
        self._size += len(data)
        self.bytes_written += len(data)

    def _make_room(self) -> None:
        """The file that begins has its first step: older ones go, as far as there would be too many bytes."""
        while sum(size for _, size in self._ended) > self._most:
            path, _ = self._ended.popleft()
            with Suppressed(OSError):
                path.unlink()

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with Suppressed(OSError):
            os.close(file)
        if self._size:
            self._ended.append((self._path, self._size))
        else:
            with Suppressed(OSError):
                self._path.unlink()
