"""The timeline file: records that follow one another, each with its length and its checksum (docs/timeline.md).

A file is a magic word and records. A *metadata* record is the `megaprof` object of a trace as JSON; a *shape* is the
sequence of events that a step consists of; a *step* refers to one of each by number and holds its times, first the
totals in a fixed layout, then a start and a length for every event of its shape. Steps of one target nearly always
have the same shape, so their events cost four bytes each.

A process that dies leaves a record half-written at the end: reading stops there, and everything before it is whole.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.formats import codes

SUFFIX = ".timeline.bin"
MAGIC = b"MEGATL01"
METADATA, SHAPE, STEP = 1, 2, 3

#: Step flags.
DEVICE_CLOCK = 1  # its times are the GPU's, by CUDA events
FAILED = 2  # the host raised an exception in it
CAPTURED = 4  # a window was open, so it took longer than usual
INCOMPLETE = 8  # it has no times per event: they were not ready in time, or too many

_HEAD = struct.Struct("<BI")
_CHECK = struct.Struct("<I")
_FIXED = struct.Struct("<HHHBqqIIIIIII")
#: The fixed part of every step: totals per kind of event in microseconds, saturating; ``own`` is what the timeline
#: itself cost the training thread.
STEP_TYPE = np.dtype(
    [
        ("metadata", "<u2"),
        ("shape", "<u2"),
        ("index", "<u2"),
        ("flags", "u1"),
        ("step", "<i8"),
        ("start_ns", "<i8"),
        ("duration", "<u4"),
        ("forward", "<u4"),
        ("backward", "<u4"),
        ("combined", "<u4"),
        ("finalize", "<u4"),
        ("p2p", "<u4"),
        ("own", "<u4"),
    ]
)
_LONGEST = (1 << 32) - 1
_LARGEST = (1 << 16) - 1
_LARGEST_UNIT = 40  # microseconds to the power of two: no step takes longer than years
#: No record is longer; what claims to be is damage.
_LONGEST_RECORD = 1 << 26
MOST_NUMBERS = 1 << 16

Microseconds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepRecord:
    """One schedule call on one rank, as it is written. Times in microseconds since its start, ``start_ns`` excepted.

    ``starts`` and ``ends`` have one entry per event of the shape, in the order of the starts, or are empty with
    the flag ``INCOMPLETE``.
    """

    metadata: int
    shape: int
    step: int
    index: int
    start_ns: int
    """Wall clock."""
    duration: int
    starts: Sequence[int] | Microseconds
    ends: Sequence[int] | Microseconds
    totals: dict[str, int]
    own: int = 0
    flags: int = 0
    packed: bytes | None = None
    """``starts`` and ``ends`` as `pack_times` has them, in their place."""


def metadata_record(metadata: dict[str, Any]) -> bytes:
    return _record(METADATA, json.dumps(metadata, separators=(",", ":")).encode())


def shape_record(events: Sequence[int] | bytes) -> bytes:
    """``events``: codes of `megaprof.formats.codes`, in the order of their starts; or the same as 64-bit integers."""
    return _record(SHAPE, events if isinstance(events, bytes) else np.asarray(events, dtype="<i8").tobytes())


def step_record(step: StepRecord, metadata: int | None = None, shape: int | None = None) -> bytes:
    """``metadata`` and ``shape``: their numbers in this file, where they are not the step's own. Raises ValueError or
    struct.error for what does not fit."""
    fixed = _FIXED.pack(
        step.metadata if metadata is None else metadata,
        step.shape if shape is None else shape,
        step.index,
        step.flags,
        step.step,
        step.start_ns,
        *(
            min(max(0, number), _LONGEST)
            for number in (step.duration, *(step.totals.get(kind, 0) for kind in codes.KINDS.values()), step.own)
        ),
    )
    packed = step.packed
    if packed is None:
        times = np.stack([np.asarray(step.starts, dtype=np.int64), np.asarray(step.ends, dtype=np.int64)], axis=-1)
        (packed,) = pack_times(times[None])
    return _record(STEP, fixed + packed)


def pack_times(times: Microseconds) -> list[bytes]:
    """The times of steps with as many events each, ``[step, event, 2]`` with start and end: for every event how long
    after the one before it began, and how long it took, in 16 bits each. Raises ValueError for events that are not in
    the order of their starts.

    The unit is the first power of two of microseconds in which all times of a step fit: a step whose longest phase
    takes a second is kept to 16 us. Differences are of rounded times, so errors do not add up.
    """
    if not times.size:
        return [b""] * len(times)
    differences = _differences(times)
    if int(differences.min()) < 0:
        raise ValueError("events are not in the order of their starts, or end before they start")
    packed = []
    for step, longest in enumerate(differences.max(axis=(1, 2)).tolist()):
        unit = max(0, longest.bit_length() - 16)
        if unit and longest >> unit == _LARGEST:  # rounding may add one
            unit += 1
        of_step = _differences(times[step : step + 1] >> unit) if unit else differences[step]
        packed.append(bytes((unit,)) + of_step.astype("<u2").tobytes())
    return packed


def _differences(times: Microseconds) -> Microseconds:
    differences = times.copy()
    differences[:, 1:, 0] -= times[:, :-1, 0]
    differences[:, :, 1] -= times[:, :, 0]
    return differences


@dataclass(frozen=True)
class Events:
    """The events of one step: ``code[i]`` ran from ``start[i]`` to ``end[i]``, microseconds since the step's start, in
    the order of the starts; an enclosing one comes before what it encloses."""

    code: npt.NDArray[np.int64]
    start: Microseconds
    end: Microseconds


@dataclass(frozen=True)
class Timeline:
    """One file that was read: ``steps`` has the fields of ``STEP_TYPE``, in the order of writing.

    ``damage``: why reading stopped before the end of the file, None when it did not.
    """

    path: Path
    metadata: tuple[dict[str, Any], ...]
    shapes: tuple[npt.NDArray[np.int64], ...]
    steps: npt.NDArray[Any]
    damage: str | None
    _tails: tuple[bytes, ...]

    def events(self, position: int) -> Events | None:
        """The events of step ``steps[position]``; None where it has none, or where they are damaged."""
        fixed = self.steps[position]
        if fixed["flags"] & INCOMPLETE:
            return None
        code = self.shapes[fixed["shape"]]
        tail = self._tails[position]
        if len(tail) != (1 + 4 * code.size if code.size else 0) or (tail and tail[0] > _LARGEST_UNIT):
            return None
        times = np.frombuffer(tail, dtype="<u2", offset=min(1, len(tail))).astype(np.int64)
        unit = tail[0] if tail else 0
        start = np.cumsum(times[0::2])
        return Events(code, start << unit, (start + times[1::2]) << unit)


class UnreadableTimeline(Exception):
    """A file that is no timeline, or cannot be read; ``reason`` completes "<path>: ..."."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def read_timeline(path: Path, *, events: bool = True) -> Timeline:
    """Read a file up to its end or to the first damage. ``events``: False leaves the times of single events out, for
    readers that go through thousands of files. Raises UnreadableTimeline, whatever the file holds."""
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise UnreadableTimeline(path, f"it cannot be read: {fault.strerror or fault}") from None
    if data[: len(MAGIC)] != MAGIC[: len(data)] or (data and len(data) < len(MAGIC)):
        raise UnreadableTimeline(path, "it is no timeline of megaprof's")
    metadata: list[dict[str, Any]] = []
    shapes: list[npt.NDArray[np.int64]] = []
    fixed: list[bytes] = []
    tails: list[bytes] = []
    damage = None
    try:
        for kind, payload in _records(data):
            if kind == STEP:
                if len(payload) < _FIXED.size:
                    raise ValueError("a step is too short")
                which, shape = payload[0] | payload[1] << 8, payload[2] | payload[3] << 8
                if which >= len(metadata) or shape >= len(shapes):
                    raise ValueError("a step refers to what is not there")
                fixed.append(payload[: _FIXED.size])
                if events:
                    tails.append(payload[_FIXED.size :])
            elif kind == SHAPE:
                if len(payload) % 8:
                    raise ValueError("a shape is damaged")
                shapes.append(np.frombuffer(payload, dtype="<i8"))
            elif kind == METADATA:
                metadata.append(_object(payload))
            # A record of a kind that a later version added is skipped.
    except ValueError as fault:
        damage = str(fault)
    return Timeline(
        path, tuple(metadata), tuple(shapes), np.frombuffer(b"".join(fixed), dtype=STEP_TYPE), damage, tuple(tails)
    )


def _record(kind: int, payload: bytes) -> bytes:
    head = _HEAD.pack(kind, len(payload))
    return b"".join((head, payload, _CHECK.pack(zlib.crc32(payload, zlib.crc32(head)))))


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Raises ValueError at the first one that is not whole."""
    position, size = len(MAGIC), len(data)
    view = memoryview(data)
    while position < size:
        if position + _HEAD.size > size:
            raise ValueError("its last record is not complete")
        kind, length = _HEAD.unpack_from(data, position)
        end = position + _HEAD.size + length
        if length > _LONGEST_RECORD or end + _CHECK.size > size:
            raise ValueError("its last record is not complete")
        if zlib.crc32(view[position:end]) != _CHECK.unpack_from(data, end)[0]:
            raise ValueError(f"the record at byte {position} is damaged")
        yield kind, data[position + _HEAD.size : end]
        position = end + _CHECK.size


def _object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except RecursionError:
        raise ValueError("its metadata is damaged") from None
    if not isinstance(found, dict):
        raise ValueError("its metadata is no object")
    return found
