"""The events of one step as a timeline file has them. The background thread does this for every step of an always-on
run, so it exists twice, as the tape does: in C, and here."""

from __future__ import annotations

from typing import Any

import numpy as np

from megaprof.formats import timeline
from megaprof.formats.steps import codes
from megaprof.recorders import tape

Packed = tuple[bytes, bytes, tuple[int, ...]]
"""The codes of the events as 64-bit integers, in the order of their starts; their times as
`formats.timeline.pack_times` has them; and microseconds by kind of event, in the order of `codes.KINDS`."""


def in_python(events: Any, zero: int) -> Packed:
    """``events``: a buffer of 64-bit integers: code, start and end in turns, in nanoseconds. ``zero``: when the step
    began, likewise. Times are rounded one by one rather than as lengths, so that errors do not add up. Raises
    ValueError for an event that ends before it starts, or starts before the step."""
    noted = np.frombuffer(events, dtype=np.int64).reshape(-1, 3)
    order, times = noted[:, 0], (noted[:, 1:] - (zero - 500)) // 1000
    if (times[1:, 0] < times[:-1, 0]).any():  # exchanges inside a combined pass end before it
        by_start = np.lexsort((-times[:, 1], times[:, 0]))
        order, times = order[by_start], times[by_start]
    lengths, kinds = times[:, 1] - times[:, 0], order & codes.KIND_MASK
    kinds[kinds == codes.WAIT] = codes.P2P  # of an overlapped exchange
    totals = tuple(int(lengths[kinds == kind].sum()) for kind in codes.KINDS)
    (packed,) = timeline.pack_times(times[None])
    return order.tobytes(), packed, totals


#: `in_python`, or the same in C where there is a compiler.
pack: Any = tape.pack_in_c or in_python
