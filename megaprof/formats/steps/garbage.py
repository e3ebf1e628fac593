"""Python's garbage collections in a step and before it, in a timeline."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_ROW = np.dtype([("start", "<i4"), ("length", "<u4")])
_RANGE = np.iinfo(np.int32)


def pack_collections(spans: Iterable[tuple[int, int]], start_ns: int) -> bytes:
    """Returns 8 bytes for each collection. ``spans``: their starts and ends in nanoseconds; ``start_ns``: the step's
    start."""
    times = np.array([*spans], dtype=np.int64).reshape(-1, 2)
    rows = np.empty(len(times), dtype=_ROW)
    rows["start"] = ((times[:, 0] - start_ns) // 1000).clip(_RANGE.min, _RANGE.max)
    rows["length"] = ((times[:, 1] - times[:, 0]) // 1000).clip(0, _RANGE.max)
    return rows.tobytes()


def unpack_collections(payload: bytes) -> npt.NDArray[np.int64]:
    """Returns ``[collection, 2]``: start and end in microseconds since the step's start, in order; none for damaged
    bytes."""
    if len(payload) % _ROW.itemsize:
        return np.empty((0, 2), dtype=np.int64)
    rows = np.frombuffer(payload, dtype=_ROW)
    start = rows["start"].astype(np.int64)
    return np.sort(np.stack((start, start + rows["length"]), axis=-1), axis=0)
