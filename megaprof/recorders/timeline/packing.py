"""Packs the events of one step as they are in a timeline file. The background thread does this for every step of an
always-on run. So the code exists twice, like the tape: in C and here."""

from __future__ import annotations

from typing import Any

import numpy as np

from megaprof.formats import timeline
from megaprof.formats.steps import codes
from megaprof.recorders import tape

Packed = tuple[bytes, bytes, tuple[int, ...]]
"""The packed events of a step: their codes as 64-bit integers, in the order of their starts; their times, packed by
`formats.timeline.pack_times`; and their microseconds by kind of event, in the order of `codes.KINDS`."""


def in_python(events: Any, zero: int) -> Packed:
    """Packs ``events``, a buffer of 64-bit integers: code, start and end of each event in turn, times in nanoseconds.
    ``zero``: when the step began, in nanoseconds of the same clock. Rounds every time rather than every length, so that
    errors do not add up. Raises ValueError if an event ends before it starts, or starts before the step."""
    noted = np.frombuffer(events, dtype=np.int64).reshape(-1, 3)
    order, times = noted[:, 0], (noted[:, 1:] - (zero - 500)) // 1000
    if (times[1:, 0] < times[:-1, 0]).any():  # an exchange inside a combined pass ends, and is noted, before the pass
        by_start = np.lexsort((-times[:, 1], times[:, 0]))
        order, times = order[by_start], times[by_start]
    lengths, kinds = times[:, 1] - times[:, 0], order & codes.KIND_MASK
    kinds[kinds == codes.WAIT] = codes.P2P  # the wait for an overlapped exchange
    totals = tuple(int(lengths[kinds == kind].sum()) for kind in codes.KINDS)
    (packed,) = timeline.pack_times(times[None])
    return order.tobytes(), packed, totals


#: `in_python`, or the same function in C if it was built.
pack: Any = tape.pack_in_c or in_python
