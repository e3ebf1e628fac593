"""How long each microbatch of a step waited for its data, in a timeline."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megaprof.formats.steps import codes

_MICROBATCH = codes.KIND_BITS + codes.CHUNK_BITS
_CHUNKS, _MICROBATCHES = (1 << codes.CHUNK_BITS) - 1, (1 << codes.MICROBATCH_BITS) - 1


def pack_data(waits: Iterable[tuple[int, int, int]]) -> bytes:
    """Returns two bytes for each microbatch and chunk, up to the last microbatch that waited, behind one byte for the
    unit (2^unit microseconds) and one for the number of chunks. ``waits``: code of `codes`, start and end of each in
    nanoseconds. Those of an unknown microbatch or chunk are left out, because they belong to no pass."""
    waited_ns: dict[tuple[int, int], int] = {}
    for code, start, end in waits:
        place = code >> _MICROBATCH & _MICROBATCHES, code >> codes.KIND_BITS & _CHUNKS  # each plus one
        waited_ns[place] = waited_ns.get(place, 0) + end - start
    waited_us = {place: (ns + 500) // 1000 for place, ns in waited_ns.items() if ns >= 500 and all(place)}
    chunks = max((chunk for _, chunk in waited_us), default=1)
    unit = max(0, max(waited_us.values(), default=0).bit_length() - 16)
    numbers = [0] * (chunks * max((microbatch for microbatch, _ in waited_us), default=0))
    for (microbatch, chunk), us in waited_us.items():
        numbers[(microbatch - 1) * chunks + chunk - 1] = us >> unit
    return struct.pack(f"<BB{len(numbers)}H", unit, chunks, *numbers)


def unpack_data(payload: bytes) -> npt.NDArray[np.int64] | None:
    """Returns [microbatch, chunk]: microseconds that each waited for its data; microbatches behind these did not wait.
    Returns None for damaged bytes."""
    if len(payload) < 2 or payload[0] > 32 or not payload[1] or (len(payload) - 2) % (2 * payload[1]):
        return None
    numbers = np.frombuffer(payload, dtype="<u2", offset=2).astype(np.int64)
    return numbers.reshape(-1, payload[1]) << payload[0]
