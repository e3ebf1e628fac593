"""The work of microbatches in files: the lengths of their sequences, in which attention is quadratic."""

from __future__ import annotations

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


def pack_work(works: Mapping[int, Work]) -> bytes:
    """Returns 16 bytes for each microbatch, after one byte for the least exact source. ``works``: the work of each
    microbatch, by its number. Empty if nothing is known."""
    if not works:
        return b""
    rows = []
    for number in range(max(works) + 1):
        work = works.get(number)
        fields = (0, 0, 0) if work is None else (min(work.tokens, _MOST), min(len(work.lengths), _MOST), work.squares)
        rows.append(_MICROBATCH.pack(*fields))
    source = max(SOURCES.index(work.source) for work in works.values())
    return b"".join((bytes((source + 1,)), *rows))


def unpack_work(payload: bytes) -> tuple[str, npt.NDArray[np.float64]] | None:
    """Returns the source and [microbatch, 3]: tokens, sequences and sum of squares, NaN for an unknown microbatch.
    Returns None if all are unknown, or if the bytes are impossible."""
    if not payload or not 1 <= payload[0] <= len(SOURCES) or (len(payload) - 1) % _ROW.itemsize:
        return None
    rows = np.frombuffer(payload, dtype=_ROW, offset=1)
    amounts = np.stack([rows[name].astype(float) for name in ("tokens", "sequences", "squares")], axis=-1)
    amounts[rows["tokens"] == 0] = np.nan
    return SOURCES[payload[0] - 1], amounts
