"""A rank's arrivals at the collectives of one step, in a timeline: a sample of them if they are many.

All ranks of a group sample the same collectives: whether one is kept depends on its number alone. A rank that keeps
fewer than others keeps a part of those.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.formats.flight import GroupConfig

Int64s = npt.NDArray[np.int64]

#: Bytes of one step at most, and bytes of a collective.
MOST_BYTES, _EACH = 1024, 4
#: The length of the group's name, whether its values are lengths, ``shift`` (one of 2^shift collectives is kept), the
#: unit of the values (2^unit microseconds), how many collectives follow, and the number of the first one.
_GROUP = struct.Struct("<BBBBHQ")
_LARGEST = (1 << 16) - 1
_MIXED = 0x9E3779B97F4A7C15  # Knuth's multiplicative hashing (1998, section 6.4), in 64 bits


@dataclass(frozen=True)
class Arrivals:
    """One group's collectives in one step of one rank."""

    group: str
    """torch's name of the group."""
    lengths: bool
    """True if ``values`` are how long they ran on the device, including waits; False if they are when the host reached
    them."""
    shift: int
    """One of 2^``shift`` collectives is kept."""
    numbers: Int64s
    """The numbers of the collectives in the group, ascending."""
    values: Int64s
    """For each, the microseconds that it ran, or from the step's start until the rank reached it."""


def kept(numbers: Int64s, shift: int) -> npt.NDArray[np.bool_]:
    """Returns which collectives are kept if one of 2^``shift`` is."""
    if shift == 0:
        return np.ones(len(numbers), dtype=np.bool_)
    hashes = numbers.astype(np.uint64) * np.uint64(_MIXED)
    is_kept: npt.NDArray[np.bool_] = hashes >> np.uint64(64 - shift) == 0
    return is_kept


def pack_arrivals(groups: Sequence[Arrivals]) -> bytes:
    """Returns at most `MOST_BYTES` for groups with all collectives of a step. Keeps as many as there is room for."""
    header_bytes = sum(_GROUP.size + len(arrivals.group.encode()) for arrivals in groups)
    most_collectives = (MOST_BYTES - header_bytes) // _EACH
    shift = 0
    while sum(int(kept(arrivals.numbers, shift).sum()) for arrivals in groups) > max(most_collectives, 0):
        shift += 1
    packed = []
    for arrivals in groups:
        is_kept = kept(arrivals.numbers, shift)
        numbers, values = arrivals.numbers[is_kept], arrivals.values[is_kept]
        first_number = int(numbers[0]) if len(numbers) else 0
        fits = numbers - first_number <= _LARGEST
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
        position = begin + count * _EACH
        if position > len(payload) or shift > 32 or unit > 40 or first_number >= 1 << 62:
            return ()
        rows = np.frombuffer(payload, dtype="<u2", offset=begin, count=2 * count).reshape(-1, 2).astype(np.int64)
        name = payload[begin - length : begin].decode(errors="replace")
        groups.append(Arrivals(name, bool(lengths), shift, rows[:, 0] + first_number, rows[:, 1] << unit))
    return tuple(groups)


def pack_groups(groups: Mapping[str, GroupConfig]) -> bytes:
    """Returns the bytes for the groups of a file, by torch's names."""
    return msgspec.json.encode(groups)


def unpack_groups(payload: bytes) -> dict[str, GroupConfig]:
    """Reads what `pack_groups` wrote; returns none if the bytes are damaged."""
    try:
        return msgspec.json.decode(payload, type=dict[str, GroupConfig])
    except msgspec.MsgspecError:
        return {}
