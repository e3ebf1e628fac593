"""Facts about a step as bytes in a timeline: the work of its microbatches, Python's garbage collections, waits for
data, arrivals at collectives, and what its rank did before it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.formats import codes
from megaprof.formats.flight import GroupConfig
from megaprof.formats.ranges import GARBAGE, WAITING

_MOST_16, _MOST_32 = (1 << 16) - 1, (1 << 32) - 1

#: Sources of the lengths, the most exact first. A timeline stores the index in this list plus one.
SOURCES = PACKED, MASK, POSITIONS, SHAPES = "packed_seq_params", "attention_mask", "position_ids", "shapes"

_WORK_ROW = np.dtype([("tokens", "<u4"), ("sequences", "<u4"), ("squares", "<u8")])


@dataclass(frozen=True)
class Work:
    """The work of one microbatch."""

    tokens: int
    """Tokens that were computed, including padding."""
    lengths: tuple[int, ...]
    """The lengths of the sequences, each of which attends to itself only."""
    source: str
    """One of `SOURCES`."""

    @property
    def squares(self) -> int:
        """The sum of the squares of the lengths, to which the cost of attention is proportional."""
        return sum(length * length for length in self.lengths)


def pack_work(works: Mapping[int, Work]) -> bytes:
    """Returns one byte for the least exact source, and 16 for each microbatch up to the last one whose work is known.
    Returns nothing if the work of none is known."""
    if not works:
        return b""
    rows = np.zeros(max(works) + 1, dtype=_WORK_ROW)
    for microbatch, work in works.items():
        rows[microbatch] = min(work.tokens, _MOST_32), min(len(work.lengths), _MOST_32), work.squares
    least_exact = max(map(SOURCES.index, {work.source for work in works.values()}))
    return bytes((least_exact + 1,)) + rows.tobytes()


def unpack_work(payload: bytes) -> tuple[str, npt.NDArray[np.float64]] | None:
    """Returns the source and [microbatch, 3]: tokens, sequences and sum of squares, NaN for an unknown microbatch.
    Returns None if all are unknown, or if the bytes are impossible."""
    if not payload or not 1 <= payload[0] <= len(SOURCES) or (len(payload) - 1) % _WORK_ROW.itemsize:
        return None
    rows = np.frombuffer(payload, dtype=_WORK_ROW, offset=1)
    amounts = np.stack([rows[name].astype(float) for name in ("tokens", "sequences", "squares")], axis=-1)
    amounts[rows["tokens"] == 0] = np.nan
    return SOURCES[payload[0] - 1], amounts


_COLLECTION_ROW = np.dtype([("start", "<i4"), ("length", "<u4")])
_INT32 = np.iinfo(np.int32)


def pack_collections(spans: Iterable[tuple[int, int]], start_ns: int) -> bytes:
    """Returns 8 bytes for each of Python's garbage collections in a step and before it. ``spans``: their starts and
    ends in nanoseconds; ``start_ns``: the step's start."""
    times = np.array([*spans], dtype=np.int64).reshape(-1, 2)
    rows = np.empty(len(times), dtype=_COLLECTION_ROW)
    rows["start"] = ((times[:, 0] - start_ns) // 1000).clip(_INT32.min, _INT32.max)
    rows["length"] = ((times[:, 1] - times[:, 0]) // 1000).clip(0, _INT32.max)
    return rows.tobytes()


def unpack_collections(payload: bytes) -> npt.NDArray[np.int64]:
    """Returns ``[collection, 2]``: start and end in microseconds since the step's start, in order; none for damaged
    bytes."""
    if len(payload) % _COLLECTION_ROW.itemsize:
        return np.empty((0, 2), dtype=np.int64)
    rows = np.frombuffer(payload, dtype=_COLLECTION_ROW)
    start = rows["start"].astype(np.int64)
    return np.sort(np.stack((start, start + rows["length"]), axis=-1), axis=0)


def pack_data(waits: Iterable[tuple[int, int, int]]) -> bytes:
    """Returns how long each microbatch of a step waited for its data: two bytes for each microbatch and chunk, up to
    the last microbatch that waited, behind one byte for the unit (2^unit microseconds) and one for the number of
    chunks. ``waits``: code of `codes`, start and end of each in nanoseconds. Those of an unknown microbatch or chunk
    are left out, because they belong to no pass."""
    waited_ns: dict[tuple[int, int], int] = {}
    for code, start, end in waits:
        microbatch, chunk = codes.microbatch_and_chunk(code)
        if microbatch is not None and chunk is not None:
            waited_ns[microbatch, chunk] = waited_ns.get((microbatch, chunk), 0) + end - start
    waited_us = {place: (ns + 500) // 1000 for place, ns in waited_ns.items() if ns >= 500}
    chunks = 1 + max((chunk for _, chunk in waited_us), default=0)
    unit = max(0, max(waited_us.values(), default=0).bit_length() - 16)
    numbers = [0] * (chunks * max((microbatch + 1 for microbatch, _ in waited_us), default=0))
    for (microbatch, chunk), us in waited_us.items():
        numbers[microbatch * chunks + chunk] = us >> unit
    return struct.pack(f"<BB{len(numbers)}H", unit, chunks, *numbers)


def unpack_data(payload: bytes) -> npt.NDArray[np.int64] | None:
    """Returns [microbatch, chunk]: microseconds that each waited for its data; microbatches behind these did not wait.
    Returns None for damaged bytes."""
    if len(payload) < 2 or payload[0] > 32 or not payload[1] or (len(payload) - 2) % (2 * payload[1]):
        return None
    numbers = np.frombuffer(payload, dtype="<u2", offset=2).astype(np.int64)
    return numbers.reshape(-1, payload[1]) << payload[0]


#: Bytes of one step at most, and bytes of a collective.
MOST_ARRIVAL_BYTES, _ARRIVAL_BYTES = 1024, 4
#: The length of the group's name, whether its values are lengths, ``shift`` (one of 2^shift collectives is kept), the
#: unit of the values (2^unit microseconds), how many collectives follow, and the number of the first one.
_GROUP = struct.Struct("<BBBBHQ")
_MIXED = 0x9E3779B97F4A7C15  # Knuth's multiplicative hashing (1998, section 6.4), in 64 bits


@dataclass(frozen=True)
class Arrivals:
    """One group's collectives in one step of one rank: a sample of them if they are many.

    All ranks of a group sample the same collectives: whether one is kept depends on its number alone. A rank that keeps
    fewer than others keeps a part of those.
    """

    group: str
    """torch's name of the group."""
    lengths: bool
    """True if ``values`` are how long they ran on the device, including waits; False if they are when the host reached
    them."""
    shift: int
    """One of 2^``shift`` collectives is kept."""
    numbers: npt.NDArray[np.int64]
    """The numbers of the collectives in the group, ascending."""
    values: npt.NDArray[np.int64]
    """For each, the microseconds that it ran, or from the step's start until the rank reached it."""


def kept(numbers: npt.NDArray[np.int64], shift: int) -> npt.NDArray[np.bool_]:
    """Returns which collectives are kept if one of 2^``shift`` is."""
    if shift == 0:
        return np.ones(len(numbers), dtype=np.bool_)
    hashes = numbers.astype(np.uint64) * np.uint64(_MIXED)
    is_kept: npt.NDArray[np.bool_] = hashes >> np.uint64(64 - shift) == 0
    return is_kept


def pack_arrivals(groups: Sequence[Arrivals]) -> bytes:
    """Returns at most `MOST_ARRIVAL_BYTES` for groups with all collectives of a step. Keeps as many as there is room
    for."""
    header_bytes = sum(_GROUP.size + len(arrivals.group.encode()) for arrivals in groups)
    most_collectives = (MOST_ARRIVAL_BYTES - header_bytes) // _ARRIVAL_BYTES
    shift = 0
    while sum(int(kept(arrivals.numbers, shift).sum()) for arrivals in groups) > max(most_collectives, 0):
        shift += 1
    packed = []
    for arrivals in groups:
        is_kept = kept(arrivals.numbers, shift)
        numbers, values = arrivals.numbers[is_kept], arrivals.values[is_kept]
        first_number = int(numbers[0]) if len(numbers) else 0
        fits = numbers - first_number <= _MOST_16
        numbers, values = numbers[fits] - first_number, np.maximum(values[fits], 0)
        unit = max(0, int(values.max(initial=0)).bit_length() - 16)
        name = arrivals.group.encode()
        packed.append(_GROUP.pack(len(name), arrivals.lengths, shift, unit, len(numbers), first_number) + name)
        packed.append(np.stack([numbers, values >> unit], axis=-1).astype("<u2").tobytes())
    return b"".join(packed)


def unpack_arrivals(payload: bytes) -> tuple[Arrivals, ...]:
    """Reads what `pack_arrivals` wrote; returns none if the bytes are impossible."""
    groups, position = [], 0
    while position + _GROUP.size <= len(payload):
        length, lengths, shift, unit, count, first_number = _GROUP.unpack_from(payload, position)
        begin = position + _GROUP.size + length
        position = begin + count * _ARRIVAL_BYTES
        if position > len(payload) or shift > 32 or unit > 40 or first_number >= 1 << 62:
            return ()
        rows = np.frombuffer(payload, dtype="<u2", offset=begin, count=2 * count).reshape(-1, 2).astype(np.int64)
        name = payload[begin - length : begin].decode(errors="replace")
        groups.append(Arrivals(name, bool(lengths), shift, rows[:, 0] + first_number, rows[:, 1] << unit))
    return tuple(groups)


Groups = dict[str, GroupConfig]
"""The groups of a file, by torch's names."""
Module = tuple[str, int | None, int | None, str]
"""A kind of pass through a module: its label (`ranges.MODULES`), its layer, the layer's MTP layer, and ``forward`` or
``backward``."""
Modules = list[tuple[Module, int]]
"""How many nanoseconds passes through modules take."""


J = TypeVar("J", Groups, Modules)


def unpack_json(payload: bytes, kind: type[J]) -> J:
    """Reads a fact that is JSON, because it is neither large nor frequent; returns an empty one if it is damaged."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.MsgspecError:
        return kind()


_TARGETS = "train_actor", "train_log_probs", "evaluate", "train_overall", "annotated"
#: The parts, by their number in a file, from 1 on.
PARTS = (
    *("optimizer", "evaluation", "saving", "logging", "data", GARBAGE),
    *_TARGETS,
    *("reference", "rollout", "rewards", "weight_sync", "offload", WAITING),
)
#: Those that are other calls of the schedule.
CALLS = frozenset([*_TARGETS, "reference"])
_PART_ROW = np.dtype([("part", "u1"), ("us", "<u4")])


def part_of_call(target: str, role: str | None) -> str:
    """Returns the part that a call of the schedule is."""
    return "reference" if (target, role) == ("train_log_probs", "ref") else target


def pack_between(spans: Iterable[tuple[str, int]]) -> bytes:
    """Returns what a rank did from the end of a call until the next one, in order, without a gap: five bytes for each
    part and its nanoseconds. A name that is no part stands for time of which nothing is known."""
    numbers = ((PARTS.index(part) + 1 if part in PARTS else 0, ns) for part, ns in spans if ns)
    rows = []
    for number, same in groupby(numbers, itemgetter(0)):
        us = sum(ns for _, ns in same) // 1000
        rows += [(number, _MOST_32)] * (us // _MOST_32) + [(number, us % _MOST_32)] * (us > 0)
    return np.array(rows, dtype=_PART_ROW).tobytes()


def unpack_between(payloads: Sequence[bytes]) -> npt.NDArray[np.float64]:
    """Returns [call, part]: the milliseconds before each of many calls that have each of `PARTS`. A damaged payload has
    none."""
    whole = [payload if len(payload) % _PART_ROW.itemsize == 0 else b"" for payload in payloads]
    rows = np.frombuffer(b"".join(whole), dtype=_PART_ROW)
    call = np.repeat(np.arange(len(whole)), [len(payload) // _PART_ROW.itemsize for payload in whole])
    known = (rows["part"] > 0) & (rows["part"] <= len(PARTS))
    took_ms = np.zeros((len(whole), len(PARTS)))
    np.add.at(took_ms, (call[known], rows["part"][known] - 1), rows["us"][known] / 1e3)
    return took_ms


def unpack_spans(payload: bytes, start_ns: int) -> list[tuple[str, int, int]]:
    """Returns the parts before a call that began at ``start_ns``, the last one first, each with its begin and end on
    the same clock. None of damaged bytes."""
    rows = np.frombuffer(payload, dtype=_PART_ROW).tolist() if len(payload) % _PART_ROW.itemsize == 0 else []
    spans, end = [], start_ns
    for number, us in reversed(rows):
        begin = end - 1000 * us
        if 0 < number <= len(PARTS):
            spans.append((PARTS[number - 1], begin, end))
        end = begin
    return spans
