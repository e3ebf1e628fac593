"""Codes of a timeline's events: whole numbers, so that naming an event on the training path takes a few shifts.

A code packs what a range name says elsewhere (`ranges`): kind, model chunk and microbatch, and for a combined pass also
those of its backward. In a field, 0 means that the number is not known, and ``n + 1`` means number ``n``.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from megaprof.formats import ranges
from megaprof.formats.ranges import RangeName

#: ``DATA``, waiting for data, is no event of a step: a tape keeps it by itself, on the host's clock (`recorders.tape`).
FORWARD, BACKWARD, COMBINED, FINALIZE, P2P, WAIT, DATA = range(1, 8)
#: The call of a model inside a forward: only the hook uses it, no event has it.
MODEL = 15
#: The kinds that a step has totals of, in this order.
KINDS = {FORWARD: "forward", BACKWARD: "backward", COMBINED: "combined", FINALIZE: "finalize", P2P: "p2p"}
#: Handles of overlapped exchanges, as Megatron's schedules name them (0.12 to 0.19).
WAITS = ("recv_prev", "recv_next", "send_next", "send_prev")

KIND_BITS, CHUNK_BITS, MICROBATCH_BITS = 4, 8, 20
_CHUNK = KIND_BITS
_MICROBATCH = _CHUNK + CHUNK_BITS
_SECOND = CHUNK_BITS + MICROBATCH_BITS
KIND_MASK = (1 << KIND_BITS) - 1
_CHUNK_MASK = (1 << CHUNK_BITS) - 1
_MICROBATCH_MASK = (1 << MICROBATCH_BITS) - 1
_LABELS = {
    FORWARD: ranges.FORWARD,
    BACKWARD: ranges.BACKWARD,
    COMBINED: ranges.COMBINED,
    DATA: ranges.DATA_WAIT,
}


def are_passes(events: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns which of some codes are passes of a microbatch."""
    kinds = events & KIND_MASK
    return (kinds >= FORWARD) & (kinds <= COMBINED)


def phase(kind: int, microbatch: int | None, chunk: int | None) -> int:
    """Returns the code of one microbatch's forward or backward."""
    return kind | of_chunk(chunk) | of_microbatch(microbatch)


def of_chunk(number: int | None) -> int:
    """Returns the part of a code for a model chunk. A number too large for its field counts as not known."""
    return 0 if number is None or number >= _CHUNK_MASK else (number + 1) << _CHUNK


def of_microbatch(number: int | None) -> int:
    """Returns the part of a code for a microbatch."""
    return 0 if number is None or number >= _MICROBATCH_MASK else (int(number) + 1) << _MICROBATCH


def combined(forward: int, backward: int) -> int:
    """Returns the code of a combined-1F1B pass, from the parts for the microbatch and the chunk of its two halves."""
    return COMBINED | forward | backward << _SECOND


def exchange(operation: str) -> int:
    """Returns the code of a pipeline exchange, one of `ranges.P2P_OPERATIONS`."""
    return P2P | (ranges.P2P_OPERATIONS.index(operation) + 1) << _CHUNK


def wait(handle: str) -> int:
    """Returns the code of the wait for an overlapped exchange, by the name of its handle."""
    return WAIT | ((WAITS.index(handle) + 1) << _CHUNK if handle in WAITS else 0)


@functools.lru_cache(maxsize=1 << 16)
def name(code: int) -> RangeName | None:
    """Returns the range name for ``code``; None for a number that is no code (a newer format, a damaged file)."""
    kind, index = code & KIND_MASK, (code >> _CHUNK) & _CHUNK_MASK
    if kind in _LABELS:
        microbatch, chunk = microbatch_and_chunk(code)
        fields = {"mb": microbatch, "chunk": chunk}
        if kind == COMBINED:
            fields["bmb"], fields["bchunk"] = microbatch_and_chunk(code >> _SECOND)
        return RangeName(_LABELS[kind], fields)
    if kind == FINALIZE:
        return RangeName(ranges.FINALIZE_GRADS, {})
    if kind == P2P and 1 <= index <= len(ranges.P2P_OPERATIONS):
        return RangeName(ranges.P2P_OPERATIONS[index - 1], {})
    if kind == WAIT and index <= len(WAITS):
        return RangeName(ranges.WAIT + WAITS[index - 1] if index else ranges.WAIT_ANY, {})
    return None


def microbatch_and_chunk(code: int) -> tuple[int | None, int | None]:
    """Returns the microbatch and the model chunk of a pass, None for each that is not known."""
    chunk, microbatch = (code >> _CHUNK) & _CHUNK_MASK, (code >> _MICROBATCH) & _MICROBATCH_MASK
    return (microbatch - 1 if microbatch else None), (chunk - 1 if chunk else None)
