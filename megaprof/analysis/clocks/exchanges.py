"""Splits the pipeline's send-receive kernels into waiting for the neighbour and transfer.

NCCL's send and receive meet, so the kernel at each end includes waiting for the other. Bytes only move while both run.
If both ends were captured and are on one clock, the later end of each message is known, and a late neighbour is not
mistaken for a slow network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaprof.analysis.clocks.matching import Interval, links_of
from megaprof.analysis.trace.calls import Call
from megaprof.analysis.trace.intervals import Intervals, intersection, intervals, total, union

#: Fraction of kernels that may lack their partner.
_UNMATCHED = 0.05


@dataclass(frozen=True)
class Meeting:
    """One rank's exchanges while nothing computed."""

    transfer: Intervals
    """When bytes moved, in nanoseconds on the rank's clock; disjoint."""
    waiting_ns: int
    """Nanoseconds that the rank waited for its neighbours."""


def meetings(step: Sequence[Call], offset: Mapping[int, int]) -> dict[int, Meeting]:
    """Returns the exchanges by rank, for ranks whose exchanges all have their other end in ``step``. ``offset``:
    nanoseconds to add to the times of each rank."""
    by_kernels = [call for call in step if call.gpu is not None and call.gpu.exchanges]
    # The time at which the later end arrived, by rank and kernel, on the rank's own clock.
    both: dict[int, dict[Interval, int]] = {call.rank: {} for call in by_kernels}
    for link in links_of(by_kernels):
        if not link.rendezvous:
            continue
        mine, theirs = both[link.sender], both[link.receiver]
        between = offset.get(link.receiver, 0) - offset.get(link.sender, 0)
        for send, receive in zip(link.sends, link.receives, strict=True):
            mine[send] = max(mine.get(send, send[0]), receive[0] + between)
            theirs[receive] = max(theirs.get(receive, receive[0]), send[0] - between)
    found = {}
    for call in by_kernels:
        met = both[call.rank]
        if call.gpu is None or len(met) < (1 - _UNMATCHED) * len(call.gpu.exchanges):
            continue
        moving = union(intervals((min(came, end), end) for (_, end), came in met.items()))
        transfer = intersection(call.gpu.pipeline, moving)
        found[call.rank] = Meeting(transfer, total(call.gpu.pipeline) - total(transfer))
    return found
