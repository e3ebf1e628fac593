"""Splits the pipeline's send-receive kernels into waiting for the neighbour and transfer.

NCCL's send and receive meet, so the kernel at each end includes waiting for the other. Bytes only move while both run.
If both ends were captured and are on one clock, the later end of each message is known, and a late neighbour is not
mistaken for a slow network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaprof.analysis.clocks.matching import Interval, links_of
from megaprof.analysis.trace.intervals import intersection, intervals, total, union
from megaprof.analysis.trace.steps import TracedStep

#: Fraction of kernels that may lack their partner.
_UNMATCHED = 0.05


def meetings(steps: Sequence[TracedStep], offset: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Returns for how many nanoseconds bytes moved while nothing computed, and for how many each rank waited for its
    neighbours, by rank: for those whose exchanges all have their other end in ``steps``, one of each rank. ``offset``:
    nanoseconds to add to the times of each rank."""
    by_kernels = [step for step in steps if step.kernels.labels]
    # The time at which the later end arrived, by rank and kernel, on the rank's own clock.
    later_end_ns: dict[int, dict[Interval, int]] = {step.rank: {} for step in by_kernels}
    for link in links_of(by_kernels):
        if not link.rendezvous:
            continue
        by_send, by_receive = later_end_ns[link.sender], later_end_ns[link.receiver]
        clock_difference_ns = offset[link.receiver] - offset[link.sender]
        for send, receive in zip(link.sends, link.receives, strict=True):
            by_send[send] = max(by_send.get(send, send[0]), receive[0] + clock_difference_ns)
            by_receive[receive] = max(by_receive.get(receive, receive[0]), send[0] - clock_difference_ns)
    meetings_by_rank = {}
    for step in by_kernels:
        arrived_ns = later_end_ns[step.rank]
        if len(arrived_ns) < (1 - _UNMATCHED) * len(step.kernels.labels):
            continue
        moving = union(intervals((min(arrival_ns, end), end) for (_, end), arrival_ns in arrived_ns.items()))
        transfer_ns = total(intersection(step.pipeline, moving))
        meetings_by_rank[step.rank] = transfer_ns, total(step.pipeline) - transfer_ns
    return meetings_by_rank
