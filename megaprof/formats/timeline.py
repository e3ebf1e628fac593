"""The timeline file: records that follow one another, each with its length and its checksum (docs/timeline.md).

A file is a magic word and records. A *metadata* record is the `megaprof` object of a trace as JSON. A *shape* is the
sequence of events in a step. A *step* refers to one of each by number and holds its times: first totals in a fixed
layout, then a start and a length for every event of its shape. Steps of one target nearly always have the same shape,
so each event costs four bytes.

A process that dies may leave half a record at the end: reading stops there, and everything before it is whole.
"""

from __future__ import annotations

import json
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from megaprof.formats import codes
from megaprof.formats.inputs import read_input
from megaprof.formats.metadata import MOST_STEPS, Metadata, read_metadata

SUFFIX = ".timeline.bin"
MAGIC = b"MEGATL01"
METADATA, SHAPE, STEP, FACT = 1, 2, 3, 4
#: Kinds of facts about a step.
WORK, COLLECTIONS, COLLECTIVES, GROUPS, MEMORY, WAITED, HOST_BOUND, DATA, BETWEEN, MODULES = range(1, 11)
#: Kinds of facts that also hold for the following steps with the same metadata, until the next fact of that kind.
HOLDING = WORK, MEMORY

#: Step flags.
DEVICE_CLOCK = 1  # its times are the GPU's, by CUDA events
FAILED = 2  # the host raised an exception in it
DISTURBED = 4  # the profiler was prepared, opened or closed in it or right before it, so it took longer than usual
INCOMPLETE = 8  # it has no times per event: they were not ready in time, or too many

#: The CRC of a record together with its own CRC: the same for every whole record.
_WHOLE = 0x2144DF1C
_CUT = "its last record is not complete"
_HEAD = struct.Struct("<BI")
_CHECK = struct.Struct("<I")
_FIXED = struct.Struct("<HHHBqqIIIIIII")
_STEP = struct.Struct(_HEAD.format + _FIXED.format[1:])
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
_LONGEST_STEP = 1 << 48  # microseconds: nine years
_LATEST = 1 << 62  # nanoseconds since the epoch: with a step's length behind it, still 64 bits
#: Events of a step; the recorder keeps far fewer.
_MOST_EVENTS = 1 << 18
_MOST_BYTES = 1 << 62
MOST_NUMBERS = 1 << 16
_FACT = struct.Struct("<IB")
_MEMORY = struct.Struct("<QQQ")
_WAITED = struct.Struct("<iII")

Microseconds = npt.NDArray[np.int64]


class Memory(NamedTuple):
    """The memory of a rank's device in a step, in bytes: what is allocated when it ends, the most so far, or since the
    host last reset torch's counter, and what the device has, 0 if that is not known."""

    allocated: int
    peak: int
    capacity: int

    def pack(self) -> bytes:
        """Returns its bytes for a file."""
        return _MEMORY.pack(*self)

    @classmethod
    def unpack(cls, payload: bytes) -> Memory | None:
        """Reads bytes of a file; None if they are empty or impossible."""
        memory = cls(*_MEMORY.unpack(payload)) if len(payload) == _MEMORY.size else None
        return (
            memory if memory is not None and memory.allocated <= memory.peak < _MOST_BYTES > memory.capacity else None
        )


class Waited(NamedTuple):
    """The training thread's wait for a processor core within a span of time, in microseconds."""

    start: int
    """Start of the span, relative to the step's start."""
    length: int
    waited: int
    """The time that the thread waited in the span."""

    def pack(self) -> bytes | None:
        """Returns its bytes for a file; None for a span of more than half an hour, for which a file has no room."""
        fits = -(1 << 31) <= self.start < 1 << 31 and 0 <= self.waited <= self.length <= _LONGEST
        return _WAITED.pack(*self) if fits else None

    @classmethod
    def unpack(cls, payload: bytes) -> Waited | None:
        """Reads bytes of a file; None if they are empty or impossible."""
        waited = cls(*_WAITED.unpack(payload)) if len(payload) == _WAITED.size else None
        return waited if waited is not None and waited.waited <= waited.length else None


def metadata_record(metadata: dict[str, Any]) -> bytes:
    return _record(METADATA, json.dumps(metadata, separators=(",", ":")).encode())


def shape_record(events: Sequence[int] | bytes) -> bytes:
    """Returns the record of a shape. ``events``: codes of `megaprof.formats.codes` in the order of their starts,
    or their bytes as 64-bit integers."""
    return _record(SHAPE, events if isinstance(events, bytes) else np.asarray(events, dtype="<i8").tobytes())


def step_record(
    metadata: int, shape: int, begun: tuple[int, int, int, int], spent: tuple[int, ...], times: bytes
) -> bytes:
    """Returns the record of one schedule call on one rank. Raises struct.error for what does not fit.

    ``metadata``, ``shape``: the numbers of these records in the file, from 0. ``begun``: the call's number within its
    step, from 0; the sum of its flags; the step, in the host's numbering if it has one; and the wall-clock time of its
    start, in nanoseconds. ``spent``: microseconds of the call, of each kind of event (`codes.KINDS`), and of recording
    it. ``times``: the times of its events, from `pack_times`.
    """
    if max(spent) > _LONGEST or min(spent) < 0:
        spent = tuple(min(max(0, number), _LONGEST) for number in spent)
    head = _STEP.pack(STEP, _FIXED.size + len(times), metadata, shape, *begun, *spent)
    return head + times + _CHECK.pack(zlib.crc32(times, zlib.crc32(head)))


def fact_record(row: int, kind: int, payload: bytes) -> bytes:
    """Returns the record of a fact about step number ``row`` of the file, from 0. ``kind``, such as ``WORK``,
    decides what the bytes of ``payload`` mean."""
    return _record(FACT, _FACT.pack(row, kind) + payload)


def pack_times(times: Microseconds) -> list[bytes]:
    """Returns the packed times of steps that have equally many events, from ``[step, event, 2]`` with start and end:
    for every event, how long after the one before it began, and how long it took, in 16 bits each. Raises ValueError
    for events that are not in the order of their starts.

    The unit is the smallest power of two of microseconds in which all times of a step fit: if the longest phase takes a
    second, it is 16 us. Differences are of rounded times, so errors do not add up.
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
        step_differences = _differences(times[step : step + 1] >> unit) if unit else differences[step]
        packed.append(bytes((unit,)) + step_differences.astype("<u2").tobytes())
    return packed


def _differences(times: Microseconds) -> Microseconds:
    differences = times.copy()
    differences[:, 1:, 0] -= times[:, :-1, 0]
    differences[:, :, 1] -= times[:, :, 0]
    return differences


@dataclass(frozen=True)
class Timeline:
    """A file that was read; every record in it is checked."""

    path: Path
    metadata: tuple[Metadata, ...]
    """The metadata of its steps, by the numbers that these refer to."""
    shapes: tuple[npt.NDArray[np.int64], ...]
    """The codes of the events of a step, by number of the shape."""
    steps: npt.NDArray[Any]
    """Its steps in the order of writing, with the fields of ``STEP_TYPE``."""
    damage: str | None
    """Why reading stopped before the end of the file; None if it did not."""
    _data: bytes
    """The file; empty if times of events were not asked for."""
    _runs: tuple[range, ...]
    """Where in ``_data`` the times of each step are, for each run of consecutive records of one length."""
    _ends: tuple[int, ...]
    """The number of steps up to the end of each run."""
    _facts: Mapping[int, Mapping[int, bytes]]
    """Facts by their kind and by the step's position; empty if they were not asked for."""

    @property
    def is_cut(self) -> bool:
        """True if it ends inside a record, because the process was killed or still writes."""
        return self.damage == _CUT

    def by_metadata(self) -> Iterator[tuple[Metadata, npt.NDArray[Any]]]:
        """Yields the steps of each target and role in it, with their metadata, where there are any."""
        for number, metadata in enumerate(self.metadata):
            steps = self.steps if len(self.metadata) == 1 else self.steps[self.steps["metadata"] == number]
            if len(steps):
                yield metadata, steps

    def facts(self, kind: int) -> Mapping[int, bytes]:
        """Returns the facts of a kind such as ``WORK``, by the positions of their steps in ``steps``."""
        return self._facts.get(kind, {})

    def host_bound_passes(self, position: int) -> float | None:
        """Returns in which part of the passes of step ``steps[position]`` the GPU waited for its host, None if that is
        not known."""
        bits, passes = (
            self.facts(HOST_BOUND).get(position),
            codes.are_passes(self.shapes[self.steps["shape"][position]]),
        )
        return min(1.0, int.from_bytes(bits, "little").bit_count() / max(int(passes.sum()), 1)) if bits else None

    def holding(self, kind: int) -> list[bytes]:
        """Returns, for a kind in ``HOLDING``, the fact that holds for every step: the last fact before or at that step,
        among steps with the same metadata."""
        facts, latest_by_metadata = self.facts(kind), dict[int, bytes]()
        if not facts:
            return [b""] * len(self.steps)
        held_facts = []
        for row, number in enumerate(self.steps["metadata"].tolist()):
            latest_by_metadata[number] = facts.get(row, latest_by_metadata.get(number, b""))
            held_facts.append(latest_by_metadata[number])
        return held_facts

    def times(self, positions: Sequence[int]) -> tuple[npt.NDArray[np.intp], Microseconds]:
        """Returns the times of events of steps of one shape: which of ``positions`` have events, and their starts and
        ends, ``[step, event, 2]``, in microseconds since the step's start. Events may be damaged or missing."""
        count = self.shapes[self.steps["shape"][positions[0]]].size
        size = 1 + 4 * count if count else 0
        tails = []
        for position in positions:
            tail, number = b"", bisect_right(self._ends, position)
            if number < len(self._ends):
                run = self._runs[number]
                begin = run[position - self._ends[number]]
                tail = self._data[begin : begin + run.step - _STEP.size - _CHECK.size]
            tails.append(tail)
        is_complete = self.steps["flags"][positions] & INCOMPLETE == 0
        present_positions = np.flatnonzero(is_complete & [len(tail) == size for tail in tails])
        packed = np.frombuffer(
            b"".join([tails[index] for index in present_positions.tolist()]), dtype=np.uint8
        ).reshape(len(present_positions), size)
        times = packed[:, 1:].copy().view("<u2").astype(np.int64).reshape(len(present_positions), count, 2)
        np.cumsum(times[..., 0], axis=1, out=times[..., 0])
        times[..., 1] += times[..., 0]
        if not count:
            return present_positions, times
        unit = packed[:, 0].astype(np.int64)
        is_possible = (unit < _LONGEST_STEP.bit_length()) & (times[..., 1].max(axis=1) <= _LONGEST_STEP >> unit)
        return present_positions[is_possible], times[is_possible] << unit[is_possible, None, None]


class UnreadableTimeline(Exception):
    """A file is no timeline, or cannot be read; the message completes "<path>: ..."."""


def read_timeline(path: Path, *, events: bool = True) -> Timeline:
    """Reads a file up to its end or to the first damage. Without ``events``, it leaves out the times of single events
    and facts about steps, for readers of thousands of files. Raises UnreadableTimeline, and nothing else whatever the
    file holds."""
    try:
        data = read_input(path)
    except OSError as fault:
        raise UnreadableTimeline(f"it cannot be read: {fault.strerror or fault}") from None
    if data[: len(MAGIC)] != MAGIC[: len(data)] or (data and len(data) < len(MAGIC)):
        raise UnreadableTimeline("it is no timeline of megaprof's")
    metadata: list[Metadata] = []
    shapes: list[npt.NDArray[np.int64]] = []
    blocks: list[npt.NDArray[Any]] = []
    runs: list[range] = []
    facts: dict[int, dict[int, bytes]] = {}
    damage = None
    position = len(MAGIC)
    try:
        while position < len(data):
            kind, end = _checked(data, position)
            if kind == STEP:
                stride = end - position
                if stride < _STEP.size + _CHECK.size:
                    raise ValueError("a step is too short")
                end = _end_of_run(data, position, stride)
                rows = np.frombuffer(data, dtype=np.uint8, offset=position, count=end - position).reshape(-1, stride)
                block = np.ascontiguousarray(rows[:, _HEAD.size : _STEP.size]).view(STEP_TYPE)[:, 0]
                refers = (block["metadata"] < len(metadata)) & (block["shape"] < len(shapes))
                known = len(block) if refers.all() else int(refers.argmin())
                blocks.append(block[:known])
                runs.append(range(position + _STEP.size, end, stride)[:known])
                if known < len(block):
                    raise ValueError("a step refers to what is not there")
            elif kind == SHAPE and len(shapes) < MOST_NUMBERS:
                payload = data[position + _HEAD.size : end - _CHECK.size]
                if len(payload) % 8 or len(payload) > 8 * _MOST_EVENTS:
                    raise ValueError("a shape is damaged")
                shapes.append(np.frombuffer(payload, dtype="<i8"))
            elif kind == METADATA and len(metadata) < MOST_NUMBERS:
                try:
                    metadata.append(read_metadata(data[position + _HEAD.size : end - _CHECK.size]))
                except ValueError as fault:
                    raise ValueError(f"its metadata is damaged: {fault}") from None
            elif kind == FACT and events and end - position >= _HEAD.size + _FACT.size + _CHECK.size:
                row, fact_kind = _FACT.unpack_from(data, position + _HEAD.size)
                facts.setdefault(fact_kind, {})[row] = data[position + _HEAD.size + _FACT.size : end - _CHECK.size]
            # A record of a kind that a later version added is skipped.
            position = end
    except ValueError as fault:
        damage = str(fault)
    except MemoryError:
        raise UnreadableTimeline("it does not fit into memory") from None
    steps = blocks[0] if len(blocks) == 1 else np.concatenate([np.empty(0, dtype=STEP_TYPE), *blocks])
    is_impossible = (steps["step"] < 0) | (steps["step"] >= MOST_STEPS)
    is_impossible |= (steps["start_ns"] < 0) | (steps["start_ns"] > _LATEST)
    if is_impossible.any():
        steps, damage = steps[: int(is_impossible.argmax())], "a step has an impossible number or time"
    times = (data, tuple(runs), tuple(accumulate(map(len, runs)))) if events else (b"", (), ())
    return Timeline(path, tuple(metadata), tuple(shapes), steps, damage, *times, facts)


def _end_of_run(data: bytes, position: int, stride: int) -> int:
    """Returns the end of the run of consecutive whole records with the same head as the record at ``position``."""
    head, view, crc32 = data[position : position + _HEAD.size], memoryview(data), isal_zlib.crc32
    count = (len(data) - position) // stride
    run = view[position : position + count * stride]
    heads = np.frombuffer(run, dtype=np.uint8).reshape(count, stride)[:, : _HEAD.size]
    if crc32(run) == _run_of(count, stride) and (heads == heads[0]).all():
        return position + count * stride
    for following in range(position + stride, len(data) - stride + 1, stride):
        if not data.startswith(head, following) or crc32(view[following : following + stride]) != _WHOLE:
            return following
    return position + count * stride


@lru_cache(maxsize=64)
def _run_of(count: int, stride: int) -> int:
    """Returns the CRC of ``count`` whole records of ``stride`` bytes each. It does not depend on their content: after
    each whole record the CRC is the same."""
    record = bytes(stride - _CHECK.size)
    return isal_zlib.crc32((record + _CHECK.pack(zlib.crc32(record))) * count)


def _record(kind: int, payload: bytes) -> bytes:
    head = _HEAD.pack(kind, len(payload))
    return b"".join((head, payload, _CHECK.pack(zlib.crc32(payload, zlib.crc32(head)))))


def _checked(data: bytes, position: int) -> tuple[int, int]:
    """Returns the kind of a record and where it ends. Raises ValueError if it is not whole."""
    if position + _HEAD.size > len(data):
        raise ValueError(_CUT)
    kind, length = _HEAD.unpack_from(data, position)
    end = position + _HEAD.size + length
    if end + _CHECK.size > len(data):
        raise ValueError(_CUT)
    if isal_zlib.crc32(memoryview(data)[position : end + _CHECK.size]) != _WHOLE:
        raise ValueError("a record is damaged")
    return kind, end + _CHECK.size
