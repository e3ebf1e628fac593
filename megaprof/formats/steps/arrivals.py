"""A rank's arrivals at the collectives of one step, in a timeline: a sample of them if they are many.

All ranks of a group sample the same collectives: whether one is kept depends on its number alone, and a rank that keeps
fewer keeps some of those that the others keep.
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
#: Length of the group's name, whether its values are lengths, the power of two of which one is kept, the power of two
#: of microseconds that values are in, how many follow, and the number of the first.
_GROUP = struct.Struct("<BBBBHQ")
_LARGEST = (1 << 16) - 1
_MIXED = 0x9E3779B97F4A7C15  # Knuth's multiplicative hashing (1998, section 6.4), in 64 bits


@dataclass(frozen=True)
class Arrivals:
    """One group's collectives in one step of one rank."""

    group: str
    """torch's name of the group."""
    lengths: bool
    """True if ``values`` are how long they ran on the device, including waits; else they are when the host came to
    them."""
    shift: int
    """One of 2^``shift`` collectives is kept."""
    numbers: Int64s
    """The numbers of the collectives in the group, ascending."""
    values: Int64s
    """For each, microseconds that it ran, or from the step's start until the rank came to it."""


def kept(numbers: Int64s, shift: int) -> npt.NDArray[np.bool_]:
    """Returns which collectives are kept if one of 2^``shift`` is."""
    if shift == 0:
        return np.ones(len(numbers), dtype=np.bool_)
    mixed = numbers.astype(np.uint64) * np.uint64(_MIXED)
    found: npt.NDArray[np.bool_] = mixed >> np.uint64(64 - shift) == 0
    return found


def pack_arrivals(groups: Sequence[Arrivals]) -> bytes:
    """Returns at most `MOST_BYTES` for groups that hold all collectives of a step: as many as there is room for."""
    heads = sum(_GROUP.size + len(each.group.encode()) for each in groups)
    room = (MOST_BYTES - heads) // _EACH
    shift = 0
    while sum(int(kept(each.numbers, shift).sum()) for each in groups) > max(room, 0):
        shift += 1
    packed = []
    for each in groups:
        some = kept(each.numbers, shift)
        numbers, values = each.numbers[some], each.values[some]
        first = int(numbers[0]) if len(numbers) else 0
        near = numbers - first <= _LARGEST
        numbers, values = numbers[near] - first, np.maximum(values[near], 0)
        unit = max(0, int(values.max(initial=0)).bit_length() - 16)
        name = each.group.encode()
        packed.append(_GROUP.pack(len(name), each.lengths, shift, unit, len(numbers), first) + name)
        packed.append(np.stack([numbers, values >> unit], axis=-1).astype("<u2").tobytes())
    return b"".join(packed)


def unpack_arrivals(payload: bytes) -> tuple[Arrivals, ...]:
    """Reads what `pack_arrivals` wrote; returns none if the bytes are impossible."""
    found, position = [], 0
    while position + _GROUP.size <= len(payload):
        length, lengths, shift, unit, count, first = _GROUP.unpack_from(payload, position)
        begin = position + _GROUP.size + length
        position = begin + count * _EACH
        if position > len(payload) or shift > 32 or unit > 40 or first >= 1 << 62:
            return ()
        rows = np.frombuffer(payload, dtype="<u2", offset=begin, count=2 * count).reshape(-1, 2).astype(np.int64)
        name = payload[begin - length : begin].decode(errors="replace")
        found.append(Arrivals(name, bool(lengths), shift, rows[:, 0] + first, rows[:, 1] << unit))
    return tuple(found)


def pack_groups(groups: Mapping[str, GroupConfig]) -> bytes:
    """Returns the bytes for the groups of a file, by torch's names."""
    return msgspec.json.encode(groups)


def unpack_groups(payload: bytes) -> dict[str, GroupConfig]:
    """Reads what `pack_groups` wrote; returns none if the bytes are damaged."""
    try:
        return msgspec.json.decode(payload, type=dict[str, GroupConfig])
    except msgspec.MsgspecError:
        return {}
