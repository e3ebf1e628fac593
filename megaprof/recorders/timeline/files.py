"""A rank's timeline on disk: appended to, rotated, bounded, and whole up to its last record whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from megaprof.formats import timeline as format
from megaprof.formats.names import artifact_path
from megaprof.parallel.topology import RankCoords
from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

#: The limit of bytes is for this many full files; the oldest goes when another one begins that would exceed it.
FILES = 4
#: After a write that failed (a full disk, a file server that is gone), how long not to try again, in seconds.
PAUSE_SECONDS = 60.0


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
        self._metadata: dict[Any, int] = {}
        self._shapes: dict[bytes, int] = {}
        self._paused_until = 0.0
        self.bytes_written = 0
        self.steps_lost = 0

    def append(self, key: Any, metadata: dict[str, Any], events: bytes, step: format.StepRecord) -> None:
        """Write ``step``; the numbers of its metadata, for which ``key`` stands, and of its shape are filled in.
        ``events``: its codes as 64-bit integers, in the order of their starts."""
        if time.monotonic() < self._paused_until:
            self.steps_lost += 1
            return
        try:
            self._append(key, metadata, events, step)
        except OSError as fault:
            if from_host(fault):  # the last steps are written by the host's own thread
                raise
            self.steps_lost += 1
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._end_file()
            logger.error(
                "megaprof: the timeline cannot be written to %s: %s; trying again in %.0f s",
                self._directory,
                fault.strerror or fault,
                PAUSE_SECONDS,
            )

    def note(self, cost: format.Cost) -> None:
        """Write what recording costs, as it is known now, to the open file."""
        if self._file is not None and time.monotonic() >= self._paused_until:
            with contextlib.suppress(OSError):  # the next step says so
                self._write(format.cost_record(cost))

    def close(self) -> None:
        self._end_file()

    def _append(self, key: Any, metadata: dict[str, Any], events: bytes, step: format.StepRecord) -> None:
        data = self._records(key, metadata, events, step)
        most = max(len(self._metadata), len(self._shapes))
        if self._file is not None and (self._size + len(data) > self._largest or most >= format.MOST_NUMBERS):
            self._end_file()
        if self._file is None:
            self._begin_file(step.step)
            data = format.MAGIC + self._records(key, metadata, events, step)
        self._write(data)
        self._metadata.setdefault(key, len(self._metadata))
        self._shapes.setdefault(events, len(self._shapes))

    def _records(self, key: Any, metadata: dict[str, Any], events: bytes, step: format.StepRecord) -> bytes:
        """What ``step`` adds to the open file."""
        records = []
        if (number := self._metadata.get(key)) is None:
            number = len(self._metadata)
            records.append(format.metadata_record(metadata))
        if (shape := self._shapes.get(events)) is None:
            shape = len(self._shapes)
            records.append(format.shape_record(events))
        records.append(format.step_record(step, number, shape))
        return b"".join(records)

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
        self._metadata, self._shapes = {}, {}

    def _write(self, data: bytes) -> None:
        """All of ``data`` or, after an OSError, nothing of it."""
        if self._file is None:
            raise OSError("no file is open")
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
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
            with contextlib.suppress(OSError):
                path.unlink()

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(OSError):
            os.close(file)
        if self._size:
            self._ended.append((self._path, self._size))
        else:
            with contextlib.suppress(OSError):
                self._path.unlink()
