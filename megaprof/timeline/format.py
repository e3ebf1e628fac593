"""The timeline file: records that follow one another, each with its length and its checksum (docs/timeline.md).

A file is a magic word and records. A *metadata* record is the `megaprof` object of a trace as JSON; a *shape* is the
sequence of events that a step consists of; a *step* refers to one of each by number and holds its times, first the
totals in a fixed layout, then a start and a length for every event of its shape. Steps of one target nearly always
have the same shape, so their events cost four bytes each.

A process that dies leaves a record half-written at the end: reading stops there, and everything before it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.timeline import codes

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
#: No record is longer; what claims to be is damage.
_LONGEST_RECORD = 1 << 26
MOST_NUMBERS = 1 << 16

Microseconds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepRecord:
    """One schedule call on one rank, as it is written. Times in microseconds since its start, ``start_ns`` excepted.

    ``starts`` and ``ends`` have one entry per event of the shape, or are empty with the flag ``INCOMPLETE``.
    """

    metadata: int
    shape: int
    step: int
    index: int
    start_ns: int
    """Wall clock."""
    duration: int
    starts: Sequence[int]
    ends: Sequence[int]
    totals: dict[str, int]
    own: int = 0
    flags: int = 0

    def numbered(self, metadata: int, shape: int) -> StepRecord:
        """The same step with the numbers that its metadata and its shape have in a file."""
        return dataclasses.replace(self, metadata=metadata, shape=shape)


def metadata_record(metadata: dict[str, Any]) -> bytes:
    return _record(METADATA, json.dumps(metadata, separators=(",", ":")).encode())


def shape_record(events: Sequence[int]) -> bytes:
    return _record(SHAPE, encode_numbers(events))


def step_record(step: StepRecord) -> bytes:
    """Raises struct.error for a step number or an index that does not fit."""
    fixed = _FIXED.pack(
        step.metadata,
        step.shape,
        step.index,
        step.flags,
        step.step,
        step.start_ns,
        *(
            min(max(0, number), _LONGEST)
            for number in (step.duration, *(step.totals.get(kind, 0) for kind in codes.KINDS.values()), step.own)
        ),
    )
    gaps_and_lengths: list[int] = []
    last = 0
    for start, end in zip(step.starts, step.ends, strict=True):
        gap = start - last  # an event may lie inside the one that is written after it
        gaps_and_lengths += ((gap << 1) ^ (gap >> 63), max(0, end - start))
        last = end
    return _record(STEP, fixed + encode_numbers(gaps_and_lengths))


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Whole numbers from 0 on as LEB128: seven bits a byte, the lowest first, the top bit set on all but the last."""
    out = bytearray()
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def decode_numbers(data: bytes) -> Microseconds:
    """What `encode_numbers` wrote. Raises ValueError for anything else."""
    stored = np.frombuffer(data, dtype=np.uint8)
    if not stored.size:
        return np.empty(0, dtype=np.int64)
    last = np.flatnonzero(stored < 0x80)
    if not last.size or last[-1] != stored.size - 1:
        raise ValueError("a number has no end")
    first = np.empty_like(last)
    first[0] = 0
    first[1:] = last[:-1] + 1
    lengths = last - first + 1
    if lengths.max() > 9:
        raise ValueError("a number has more than 63 bits")
    places = np.arange(stored.size) - np.repeat(first, lengths)
    return np.add.reduceat((stored & 0x7F).astype(np.int64) << (7 * places), first)


@dataclass(frozen=True)
class Events:
    """The events of one step: ``code[i]`` ran from ``start[i]`` to ``end[i]``, microseconds since the step's start."""

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
        try:
            numbers = decode_numbers(self._tails[position])
        except ValueError:
            return None
        if numbers.size != 2 * code.size:
            return None
        gaps, lengths = numbers[0::2], numbers[1::2]
        start = np.cumsum((gaps >> 1) ^ -(gaps & 1)) + np.cumsum(lengths) - lengths
        return Events(code, start, start + lengths)


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
                shapes.append(decode_numbers(payload))
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
