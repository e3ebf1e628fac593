"""The work of microbatches in files: the lengths of their sequences, in which attention is quadratic."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Sources of the lengths, the most exact first. A timeline stores the index in this list plus one.
SOURCES = PACKED, MASK, POSITIONS, SHAPES = "packed_seq_params", "attention_mask", "position_ids", "shapes"

_MICROBATCH = struct.Struct("<IIQ")
_ROW = np.dtype([("tokens", "<u4"), ("sequences", "<u4"), ("squares", "<u8")])
_MOST = (1 << 32) - 1


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

    @functools.cached_property
    def packed(self) -> bytes:
        """The microbatch as it is in a file. Microbatches that share this object are packed only once."""
        return _MICROBATCH.pack(min(self.tokens, _MOST), min(len(self.lengths), _MOST), self.squares)


def pack_work(works: Mapping[int, Work]) -> bytes:
    """Returns one byte for the least exact source, and 16 for each microbatch up to the last one whose work is known.
    Returns nothing if the work of none is known."""
    if not works:
        return b""
    rows = [bytes(_MICROBATCH.size)] * (max(works) + 1)
    for microbatch, work in works.items():
        rows[microbatch] = work.packed
    least_exact = max(map(SOURCES.index, {work.source for work in works.values()}))
    return b"".join((bytes((least_exact + 1,)), *rows))


def unpack_work(payload: bytes) -> tuple[str, npt.NDArray[np.float64]] | None:
    """Returns the source and [microbatch, 3]: tokens, sequences and sum of squares, NaN for an unknown microbatch.
    Returns None if all are unknown, or if the bytes are impossible."""
    if not payload or not 1 <= payload[0] <= len(SOURCES) or (len(payload) - 1) % _ROW.itemsize:
        return None
    rows = np.frombuffer(payload, dtype=_ROW, offset=1)
    amounts = np.stack([rows[name].astype(float) for name in ("tokens", "sequences", "squares")], axis=-1)
    amounts[rows["tokens"] == 0] = np.nan
    return SOURCES[payload[0] - 1], amounts
