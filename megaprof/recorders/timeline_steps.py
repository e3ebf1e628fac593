"""The steps of the timeline on their way from the training thread into files, and how long the last ones took. Files
are appended to, rotated and bounded, and always whole up to their last record."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megaprof.formats import timeline as format
from megaprof.formats.job import Recent, limit
from megaprof.formats.names import repeats
from megaprof.formats.timeline import DISTURBED, Memory
from megaprof.parallel.topology import RankCoords
from megaprof.recorders import Window
from megaprof.recorders.loop import Span
from megaprof.recorders.tape import Tape
from megaprof.runtime.isolation import Suppressed, from_host, logger

#: The calls of a target and role that a capture also keeps: up to this many before a window, and this many behind it.
BEFORE, BEHIND = 20, 5
#: The limit in bytes is divided among this many full files. When a new file begins and would exceed the limit, the
#: oldest is removed.
FILES = 4
#: The pause after a failed write (a full disk, a lost file server) before the next try, in seconds.
PAUSE_SECONDS = 60.0
#: The recent times are of this many steps.
RECENT_STEPS = 32

Key = tuple[str, "str | None"]
"""Target and role: what steps are counted by."""
Facts = list[tuple[int, bytes]]
"""The facts written next to a step: which fact of `formats.timeline` it is, and its bytes."""


class PackedStep(NamedTuple):
    """A step as it is written."""

    metadata: dict[str, Any]
    """The ``megaprof`` object (docs/trace-metadata.md), which it shares with other steps."""
    events: bytes
    """The codes of its events as 64-bit integers, in the order of their starts."""
    begun: tuple[int, int, int, int]
    """An argument of `formats.timeline.step_record`, like the next two fields."""
    spent: tuple[int, ...]
    times: bytes
    facts: Facts


@dataclass(slots=True, eq=False)
class TimedCalls:
    """The calls of one target and role so far, and the times of the last ones, which the background thread fills and
    reads."""

    target: str
    role: str | None
    began_ns: int = 0
    """When the last call began, in nanoseconds of the wall clock; 0 before the first one."""
    busy_until_ns: int = 0
    """When the last call that was packed had ended on its own clock, in the same way."""
    count: int = 0
    finished: tuple[int, int] | None = None
    """The step number of the last call that finished, and the number of finished calls."""
    metadata: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    """The metadata so far. The key is made of the facts in which they differ."""
    near: set[int] = field(default_factory=set)
    """The numbers, from 1 on, of the calls in windows and behind them that are still to be written."""
    before: deque[PackedStep] = field(default_factory=lambda: deque(maxlen=BEFORE + 1))
    """The last calls that were packed but not written."""
    packed: int = 0
    """The number of the last call that was packed, from 1 on."""
    times: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Microseconds of each of the last steps: its length, its forwards, backwards, combined passes and all of these,
    its time by other kind of event; then the fraction of its passes that waited for the host; and when it began."""

    def due(self) -> list[PackedStep]:
        """Takes the calls that are to be written by now. A file without an undisturbed call is of no use."""
        if self.packed not in self.near or all(step.begun[1] & DISTURBED for step in self.before):
            return []
        self.near.discard(self.packed)
        steps = [*self.before]
        self.before.clear()
        return steps

    def took(self, microseconds: tuple[int, ...], start_ns: int, host_bound: float = math.nan) -> None:
        """Adds a step to the last ones. `microseconds`: its length, and its time by kind of event, in the order of
        `codes.KINDS`. `start_ns`: when it began, in wall-clock nanoseconds. `host_bound`: the fraction of its passes in
        which the GPU waited for the host; NaN if that is not known."""
        length, *passes = microseconds[:4]
        self.times.append((length, *passes, sum(passes), *microseconds[4:], host_bound, start_ns / 1e3))

    def recent(self) -> Recent:
        """Returns the medians of the last steps, of which there must be some."""
        *columns, host_bound, _ = zip(*_counting([*self.times]), strict=True)
        waiting = [share for share in host_bound if not math.isnan(share)]
        # A long forward and a long backward need not be in the same step, so medians of passes cannot be added.
        medians = (statistics.median(times) / 1e3 for times in columns)
        share = statistics.fmean(waiting) if waiting else None
        return Recent(*(self.target, len(host_bound), *medians, self.role, share))

    def seconds(self) -> float | None:
        """Returns the seconds from one step to the next: the median step plus the median pause behind it, of the same
        steps as `recent`. None before the second step."""
        steps = [*self.times]
        if len(steps) < 2:
            return None
        pauses = (max(0.0, after[-1] - before[-1] - before[0]) for before, after in itertools.pairwise(steps))
        return (statistics.median(step[0] for step in _counting(steps)) + statistics.median(pauses)) / 1e6


def _counting(steps: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Returns the steps that count. A step in which the rank stood still does not."""
    longest = 1e6 * limit(statistics.median(step[0] for step in steps) / 1e6)
    return [step for step in steps if step[0] <= longest]


@dataclass(slots=True, init=False, repr=False, eq=False)
class RecordedStep(Tape):  # type: ignore[misc]  # in C or in Python
    """A tape with the other data of its step. It refers to no model and to no tensor of the schedule, because it may
    wait a while before it is written.

    A mark is a time on the timeline's clock: nanoseconds, or an event on a GPU. Times in nanoseconds are the host's, of
    the wall clock; ``own`` is how long the training thread took to begin and to end the record.
    """

    number: int
    """The number of the step."""
    index: int
    """The number of calls with the same step number before it."""
    count: int
    """Its number among the finished calls of its target and role, from 1 on."""
    calls: TimedCalls
    metadata: dict[str, Any]
    """The description that it shares with other steps."""
    flags: int
    """The step flags, as in `megaprof.formats.timeline`."""
    own: int
    start_ns: int
    end_ns: int
    began: Any
    ended: Any
    between: list[Span] | None
    """The parts of the host's loop since the call before; None if there is none."""
    memory: Memory | None
    """The GPU's memory when the step ended; None without a GPU."""


FileRow = tuple[int, int]
"""The place where a step was written: the number of the file among the files of this rank, from 1 on, and the row."""


class TimelineFiles:
    """Appends the steps of one rank. Only the background thread calls it. Never overwrites an existing file.

    ``limit``: the bytes of all files together, if no single write has more than a file; there may be many small ones. A
    failed write is logged once, and the part that was written is removed. A minute later writing goes on, with the
    steps that come then. A file that never got a step is removed, and no older file is removed for it.
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

    def append(self, steps: Sequence[PackedStep]) -> list[FileRow]:
        """Writes ``steps`` in a single write, into a new file if they do not fit into the open one. Returns their
        places; none if they are lost."""
        if not steps:
            return []
        if time.monotonic() < self._paused_until:
            self.steps_lost += len(steps)
            return []
        try:
            numbers = max(len(self._descriptions), len(self._shapes)) + len(steps)
            # A file that somebody removed keeps nothing that comes now.
            gone = self._file is None or not os.fstat(self._file).st_nlink
            data = b"" if gone or numbers > format.MOST_NUMBERS else self._records(steps)
            if not data or self._size + len(data) > self._largest:
                self._end_file()
                self._begin_file(steps[0].begun[2])
                data = self._records(steps)
            self._write(data)
        except OSError as fault:
            self._pause(fault)
            self.steps_lost += len(steps)
            return []
        self._steps += len(steps)
        return [(self._number, row) for row in range(self._steps - len(steps), self._steps)]

    def add(self, facts: Sequence[tuple[FileRow, int, bytes]]) -> None:
        """Writes facts next to steps that are already written: the step's place, which fact it is, and its bytes.
        Leaves out facts on steps of an earlier file. Writes none if they do not fit into the file."""
        records = [
            format.fact_record(row, what, payload)
            for (file, row), what, payload in facts
            if self._file is not None and file == self._number
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

    def _records(self, steps: Sequence[PackedStep]) -> bytes:
        """Returns the records of ``steps``, which come next in the open file.

        Facts go in front of the steps. Then steps of the same length follow each other, which is quick to read. And a
        file that was cut off lacks steps rather than facts on steps. Some facts hold until the next one of their kind.
        They are left out while they do not change: most jobs write them only once."""
        records: list[bytes] = []
        beside = [] if self._size else [format.MAGIC]
        for row, (metadata, events, begun, spent, times, facts) in enumerate(steps, self._steps):
            description = id(metadata)
            if (number := self._descriptions.get(description)) is None:
                number = self._descriptions[description] = len(self._descriptions)
                records.append(format.metadata_record(metadata))
            if (shape := self._shapes.get(events)) is None:
                shape = self._shapes[events] = len(self._shapes)
                records.append(format.shape_record(events))
            records.append(format.step_record(number, shape, begun, spent, times))
            for what, payload in facts:
                if what in format.HOLDING:
                    if self._holding.get((what, description), b"") == payload:
                        continue
                    self._holding[what, description] = payload
                beside.append(format.fact_record(row, what, payload))
        return b"".join((*beside, *records))

    def _begin_file(self, step: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        first = Window("timeline", self._role, max(step, 0), self._coords).path(self._directory, format.SUFFIX)
        first.parent.mkdir(parents=True, exist_ok=True)
        for path in repeats(first):
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
