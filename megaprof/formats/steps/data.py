"""How long each microbatch of a step waited for its data, in a timeline."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaprof.formats.steps import codes

Int64s = npt.NDArray[np.int64]
_BYTES = 2


def pack_data(waits: Int64s) -> bytes:
    """Returns two bytes for each microbatch and chunk, up to the last microbatch that waited, behind one byte for the
    unit (2^unit microseconds) and one for the number of chunks. ``waits``: [wait, 3], code of `codes`, start and end in
    nanoseconds. Those of an unknown microbatch or chunk are left out, because they belong to no pass."""
    chunks = (waits[:, 0] >> codes.KIND_BITS & (1 << codes.CHUNK_BITS) - 1) - 1
    microbatches = (waits[:, 0] >> codes.KIND_BITS + codes.CHUNK_BITS & (1 << codes.MICROBATCH_BITS) - 1) - 1
    known = (chunks >= 0) & (microbatches >= 0)
    chunks, microbatches, ns = chunks[known], microbatches[known], (waits[:, 2] - waits[:, 1])[known]
    waited_ns = np.zeros((microbatches.max(initial=-1) + 1, chunks.max(initial=0) + 1), dtype=np.int64)
    np.add.at(waited_ns, (microbatches, chunks), np.maximum(ns, 0))
    waited_us = (waited_ns + 500) // 1000
    waited_us = waited_us[: np.flatnonzero(waited_us.any(axis=1)).max(initial=-1) + 1]
    unit = max(0, int(waited_us.max(initial=0)).bit_length() - 8 * _BYTES)
    return bytes((unit, waited_us.shape[1])) + (waited_us >> unit).astype("<u2").tobytes()


def unpack_data(payload: bytes) -> Int64s | None:
    """Returns [microbatch, chunk]: microseconds that each waited for its data; microbatches behind these did not wait.
    Returns None for damaged bytes."""
    if len(payload) < 2 or payload[0] > 32 or not payload[1] or (len(payload) - 2) % (_BYTES * payload[1]):
        return None
    numbers = np.frombuffer(payload, dtype="<u2", offset=2).astype(np.int64)
    return numbers.reshape(-1, payload[1]) << payload[0]
