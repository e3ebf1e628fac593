"""Writes a rank's timeline to disk. Files are appended to, rotated and bounded, and always whole up to their last
record."""

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
from megaprof.recorders.timeline_steps import Facts, PackedStep
from megaprof.runtime.isolation import Suppressed, from_host, logger

#: The limit in bytes is divided among this many full files. When a new file begins and would exceed the limit, the
#: oldest is removed.
FILES = 4
#: The pause after a failed write (a full disk, a lost file server) before the next try, in seconds.
PAUSE_SECONDS = 60.0


class Place(NamedTuple):
    """The place where a step was written."""

    file: int
    """The number of the file among the files of this rank, from 1 on."""
    row: int


class TimelineFiles:
    """Appends the steps of one rank. Only the background thread calls it. Never overwrites an existing file.

    ``limit``: the bytes of all files together; there may be many small ones. A failed write is logged once, and the
    part that was written is removed. A minute later writing goes on, with the steps that come then. A file that never
    got a step is removed, and no older file is removed for it.
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
        self._descriptions: dict[int, int] = {}  # by the id of metadata, which live as long as the recorder
        self._shapes: dict[bytes, int] = {}
        self._steps = 0
        self._number = 0
        self._holding: dict[tuple[int, int], bytes] = {}
        self._paused_until = 0.0
        self.steps_lost = 0

    def append(self, steps: Sequence[PackedStep]) -> list[Place]:
        """Writes ``steps``, in a single write unless a new file begins. Returns the places of the written steps, which
        are the first ones of ``steps``."""
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
        """Writes facts next to steps that are already written: the step's place, which fact it is, and its bytes.
        Leaves out facts on steps of an earlier file. Writes none if they do not fit into the file."""
        records = [
            format.fact_record(place.row, what, payload)
            for place, what, payload in facts
            if self._file is not None and place.file == self._number
        ]
        data = b"".join(records)
        if data and self._size + len(data) <= self._largest:
            try:
                self._write(data)
            except OSError as fault:
                self._pause(fault)

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

    def close(self) -> Path | None:
        """Ends the open file. Returns it; None if none is open, or if it has no step."""
        written = self._path if self._file is not None and self._size else None
        self._end_file()
        return written

    def _append(self, steps: Sequence[PackedStep]) -> int:
        """Writes the first of ``steps``, as many as fit into one file. Returns their number."""
        if self._file is None:
            self._begin_file(steps[0].begun[2])
        size, data, count = self._size, list[bytes](), 0
        # Facts go in front of the steps. Then steps of the same length follow each other, which is quick to read. And a
        # file that was cut off lacks steps rather than facts on steps.
        beside: list[bytes] = [] if size else [format.MAGIC]
        for metadata, events, begun, spent, times, facts in steps:
            description = id(metadata)
            number, shape, records = self._descriptions.get(description), self._shapes.get(events), b""
            if number is None or shape is None:
                if size and max(len(self._descriptions), len(self._shapes)) >= format.MOST_NUMBERS:
                    break
                if number is None:
                    number = self._descriptions[description] = len(self._descriptions)
                    records = format.metadata_record(metadata)
                if shape is None:
                    shape = self._shapes[events] = len(self._shapes)
                    records += format.shape_record(events)
            records += format.step_record(number, shape, begun, spent, times)
            fact_records = self._fact_records(description, self._steps + count, facts)
            if size and size + len(records) + len(fact_records) > self._largest:
                break
            data.append(records)
            beside.append(fact_records)
            size += len(records) + len(fact_records)
            count += 1
        if count:
            self._write(b"".join((*beside, *data)))
            self._steps += count
        if count < len(steps):
            self._end_file()
        return count

    def _fact_records(self, description: int, row: int, facts: Facts) -> bytes:
        """Returns the records of the facts on a step. Some facts hold until the next one of their kind. They are left
        out while they do not change: most jobs write them only once."""
        records = []
        for what, payload in facts:
            if what in format.HOLDING:
                if self._holding.get((what, description), b"") == payload:
                    continue
                self._holding[what, description] = payload
            records.append(format.fact_record(row, what, payload))
        return b"".join(records)

    def _begin_file(self, step: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        about = "timeline", self._role, max(step, 0), self._coords, format.SUFFIX
        for repeat in itertools.count(1):
            path = artifact_path(self._directory, *about, repeat=repeat)
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # of an earlier run, or of a step that the host runs again
                self._file = os.open(path, flags, 0o666)
                break
        self._path, self._size = path, 0
        self._number += 1
        self._descriptions, self._shapes, self._holding, self._steps = {}, {}, {}, 0

    def _write(self, data: bytes) -> None:
        """Writes all of ``data``. If it raises OSError, nothing of it stays in the file."""
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
        if not self._size:  # a new file has got its first step
            while sum(size for _, size in self._ended) > self._most:
                path, _ = self._ended.popleft()
                with Suppressed(OSError):
                    path.unlink()
        self._size += len(data)

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
