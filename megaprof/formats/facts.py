"""Facts about a step as bytes in a timeline: the work of its microbatches, Python's garbage collections, waits for
data, arrivals at collectives, and what its rank did before it.

Each is a plain value in MessagePack, which `unpack` reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, msgpack

from megaprof.formats import codes
from megaprof.formats.flight import GroupConfig
from megaprof.formats.ranges import GARBAGE, WAITING

_T = TypeVar("_T")
#: What is counted or lasts, and times relative to the step's start.
Amount = Annotated[int, Meta(ge=0, le=1 << 53)]
Moment = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
Share = Annotated[float, Meta(ge=0, le=1)]


def unpack(payload: bytes, kind: type[_T]) -> _T | None:
    """Reads a fact that is a plain value; None if it is missing or damaged."""
    try:
        return msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


#: Sources of the lengths, the most exact first.
SOURCES = PACKED, MASK, POSITIONS, SHAPES = "packed_seq_params", "attention_mask", "position_ids", "shapes"
_OfMicrobatch = tuple[Amount | None, Amount | None, Amount | None]


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
    """Returns the least exact source, and tokens, sequences and squares of each microbatch up to the last one whose
    work is known. Returns nothing if the work of none is known."""
    if not works:
        return b""
    of_each = {number: (work.tokens, len(work.lengths), work.squares) for number, work in works.items()}
    rows = [of_each.get(number, (None, None, None)) for number in range(max(works) + 1)]
    return msgpack.encode((max((work.source for work in works.values()), key=SOURCES.index), rows))


def unpack_work(payload: bytes) -> tuple[str, npt.NDArray[np.float64]] | None:
    """Returns the source and [microbatch, 3]: tokens, sequences and sum of squares, NaN for an unknown microbatch.
    Returns None if all are unknown, or if the bytes are impossible."""
    found = unpack(payload, tuple[str, list[_OfMicrobatch]])
    if found is None or found[0] not in SOURCES:
        return None
    return found[0], np.array(found[1], dtype=np.float64).reshape(-1, 3)


Collected = list[tuple[Moment, Moment]]
"""When each of Python's garbage collections in a step and before it began and ended, in microseconds since the step's
start."""
DataWaits = list[list[Amount]]
"""How many microseconds microbatches waited for their data, by chunk and microbatch, up to the last one that waited."""


def pack_data(waits: Iterable[tuple[int, int, int]]) -> bytes:
    """Returns the `DataWaits` of a step. ``waits``: code of `codes`, start and end of each in nanoseconds. Those of an
    unknown microbatch or chunk are left out, because they belong to no pass."""
    waited_ns = defaultdict[int, Counter[int]](Counter)
    for code, start, end in waits:
        microbatch, chunk = codes.place(code)
        if microbatch is not None and chunk is not None and end - start >= 500:
            waited_ns[chunk][microbatch] += end - start
    of_chunks = [waited_ns[chunk] for chunk in range(max(waited_ns, default=-1) + 1)]
    return msgpack.encode([[(ns[mb] + 500) // 1000 for mb in range(max(ns, default=-1) + 1)] for ns in of_chunks])


#: Bytes of one step at most, of a collective, and of a group besides its name and its collectives.
MOST_ARRIVAL_BYTES, _ARRIVAL_BYTES, _GROUP_BYTES = 1024, 4, 20
_Shift = Annotated[int, Meta(ge=0, le=40)]
_Arrivals = list[tuple[str, bool, _Shift, _Shift, Amount, bytes]]
"""Of each group its name, whether its values are lengths, ``shift`` (one of 2^shift collectives is kept), the unit of
the values (2^unit microseconds), the number of the first collective, and two ``u16`` for each collective."""
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
    header_bytes = sum(_GROUP_BYTES + len(arrivals.group.encode()) for arrivals in groups)
    most_collectives = (MOST_ARRIVAL_BYTES - header_bytes) // _ARRIVAL_BYTES
    shift = 0
    while sum(int(kept(arrivals.numbers, shift).sum()) for arrivals in groups) > max(most_collectives, 0):
        shift += 1
    packed = []
    for arrivals in groups:
        is_kept = kept(arrivals.numbers, shift)
        numbers, values = arrivals.numbers[is_kept], arrivals.values[is_kept]
        first_number = int(numbers[0]) if len(numbers) else 0
        fits = numbers - first_number < 1 << 16
        numbers, values = numbers[fits] - first_number, np.maximum(values[fits], 0)
        unit = max(0, int(values.max(initial=0)).bit_length() - 16)
        rows = np.stack([numbers, values >> unit], axis=-1).astype("<u2").tobytes()
        packed.append((arrivals.group, arrivals.lengths, shift, unit, first_number, rows))
    return msgpack.encode(packed)


def unpack_arrivals(payload: bytes) -> tuple[Arrivals, ...]:
    """Reads what `pack_arrivals` wrote; returns none if the bytes are impossible."""
    groups = []
    for name, lengths, shift, unit, first_number, packed in unpack(payload, _Arrivals) or ():
        whole = packed[: len(packed) // _ARRIVAL_BYTES * _ARRIVAL_BYTES]
        numbers, values = np.frombuffer(whole, dtype="<u2").reshape(-1, 2).astype(np.int64).T
        groups.append(Arrivals(name, lengths, shift, numbers + first_number, values << unit))
    return tuple(groups)


Groups = dict[str, GroupConfig]
"""The groups of a file, by torch's names."""
Module = tuple[str, int | None, int | None, str]
"""A kind of pass through a module: its label (`ranges.MODULES`), its layer, the layer's MTP layer, and ``forward`` or
``backward``."""
Modules = list[tuple[Module, int]]
"""How many nanoseconds passes through modules take."""


_TARGETS = "train_actor", "train_log_probs", "evaluate", "train_overall", "annotated"
#: The parts, by their number in a file, from 1 on.
PARTS = (
    *("optimizer", "evaluation", "saving", "logging", "data", GARBAGE),
    *_TARGETS,
    *("reference", "rollout", "rewards", "weight_sync", "offload", WAITING),
)
#: Those that are other calls of the schedule.
CALLS = frozenset([*_TARGETS, "reference"])
Between = list[Amount]
"""What a rank did from the end of a call until the next one, in order, without a gap: in turn, the number of a part, 0
for time of which nothing is known, and its microseconds."""


def part_of_call(target: str, role: str | None) -> str:
    """Returns the part that a call of the schedule is."""
    return "reference" if (target, role) == ("train_log_probs", "ref") else target


def pack_between(spans: Iterable[tuple[str, int]]) -> bytes:
    """Returns `Between` for some parts, in order, and their nanoseconds. A name that is no part stands for time of
    which nothing is known."""
    numbers = ((PARTS.index(part) + 1 if part in PARTS else 0, ns) for part, ns in spans if ns)
    took = [(number, sum(ns for _, ns in same) // 1000) for number, same in groupby(numbers, itemgetter(0))]
    return msgpack.encode([amount for number, us in took if us for amount in (number, us)])
