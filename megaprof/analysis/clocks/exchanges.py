"""Send-receive kernels of the pipeline, split into waiting for the neighbour and transferring.

NCCL's send and receive meet, so that the kernels of both ends contain waiting for the other. Bytes move when both run:
with both ends captured and on one clock, the end that came last is known for every message, and a late neighbour is
not mistaken for a slow network. Which kernel carries which message follows from microbatch and chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaprof.analysis.clocks.clocks import Alignment, Link, align
from megaprof.analysis.trace.attribution import Exchange
from megaprof.analysis.trace.calls import Call, consumer
from megaprof.analysis.trace.intervals import Intervals, intersection, intervals, total, union
from megaprof.formats import ranges

#: A step whose clocks may be off by more than this fraction of it is not laid on one time axis.
MOST_UNCERTAIN = 0.02
#: Kernels without a partner that are still put up with, as a fraction.
_UNMATCHED = 0.05
_OTHER_KIND = {ranges.FORWARD: ranges.BACKWARD, ranges.BACKWARD: ranges.FORWARD}


class _Message(NamedTuple):
    """The input of one phase on the stage that receives it."""

    stage: int
    kind: str
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Meeting:
    """One rank's exchanges: exposed nanoseconds of transfer (a disjoint set) and of waiting for the neighbour."""

    transfer: Intervals
    waiting_ns: int


def offsets(step: Sequence[Call]) -> Alignment | None:
    """The clocks of one step's ranks aligned by its send-receive kernels; None without kernels."""
    if any(call.gpu is None for call in step):
        return None
    hosts = {call.metadata.coords.rank: call.metadata.host for call in step}
    links = []
    for sender, receiver, pairs in _pairs(step):
        sent, received = [(s.start, s.end) for s, _ in pairs], [(r.start, r.end) for _, r in pairs]
        links.append(Link(sender, receiver, sent, received, rendezvous=True))
    return align(hosts, links)


def meetings(step: Sequence[Call], offset: Mapping[int, int]) -> dict[int, Meeting]:
    """By rank, for those whose every exchange has its other end in ``step``; ``offset`` puts ranks on one clock."""
    partners: dict[int, dict[Exchange, int]] = {call.metadata.coords.rank: {} for call in step}
    for sender, receiver, pairs in _pairs(step):
        between = offset.get(receiver, 0) - offset.get(sender, 0)
        for send, receive in pairs:
            mine, theirs = partners[sender], partners[receiver]
            mine[send] = max(mine.get(send, send.start), receive.start + between)
            theirs[receive] = max(theirs.get(receive, receive.start), send.start - between)
    found = {}
    for call in step:
        met = partners[call.metadata.coords.rank]
        if call.gpu is None or not call.gpu.exchanges or len(met) < (1 - _UNMATCHED) * len(call.gpu.exchanges):
            continue
        moving = union(intervals((min(both, each.end), each.end) for each, both in met.items()))
        transfer = intersection(call.gpu.pipeline, moving)
        found[call.metadata.coords.rank] = Meeting(transfer, total(call.gpu.pipeline) - total(transfer))
    return found


def _pairs(step: Sequence[Call]) -> list[tuple[int, int, list[tuple[Exchange, Exchange]]]]:
    """Sender, receiver, and the kernels at both ends of every message between two captured ranks."""
    column = {c.metadata.coords.rank: (c.metadata.coords.tp, c.metadata.coords.cp, c.metadata.coords.dp) for c in step}
    ends = {call.metadata.coords.rank: _ends(call) for call in step}
    at = {(column[call.metadata.coords.rank], call.metadata.coords.pp): call.metadata.coords.rank for call in step}
    found: dict[tuple[int, int], list[tuple[Exchange, Exchange]]] = {}
    for sender, (sends, _) in sorted(ends.items()):
        for message, send in sends.items():
            receiver = at.get((column[sender], message.stage))
            receive = ends[receiver][1].get(message) if receiver is not None else None
            if receiver is not None and receive is not None:
                found.setdefault((sender, receiver), []).append((send, receive))
    return [(sender, receiver, pairs) for (sender, receiver), pairs in found.items()]


def _ends(call: Call) -> tuple[dict[_Message, Exchange], dict[_Message, Exchange]]:
    """The messages that ``call`` sent and received, with the kernels that carried them."""
    exchanges = sorted(call.gpu.exchanges, key=lambda e: e.launched) if call.gpu else []
    sends: dict[_Message, Exchange] = {}
    receives: dict[_Message, Exchange] = {}
    stage = call.metadata.coords.pp
    for kind in (ranges.FORWARD, ranges.BACKWARD):
        phases = [p for p in call.phases if p.kind == kind and p.chunk is not None and p.microbatch is not None]
        leaving = [e for e in exchanges if kind in _sent(e.label)]
        arriving = [e for e in exchanges if kind in _received(e.label)]
        departures, arrivals = [e.launched for e in leaving], [e.launched for e in arriving]
        for number, phase in enumerate(phases):
            chunk, microbatch = phase.chunk or 0, phase.microbatch or 0
            after = phases[number + 1].start if number + 1 < len(phases) else call.end
            place = bisect_left(departures, phase.end)
            to = consumer(call.metadata, kind, chunk)
            if to is not None and place < len(leaving) and departures[place] <= after:
                sends[_Message(to[0], kind, to[1], microbatch)] = leaving[place]
            place = bisect_right(arrivals, phase.start) - 1
            if place >= 0 and consumer(call.metadata, _OTHER_KIND[kind], chunk) is not None:
                receives[_Message(stage, kind, chunk, microbatch)] = arriving[place]
    return sends, receives


def _sent(label: str) -> str:
    return label.partition("recv_")[0]


def _received(label: str) -> str:
    return label.partition("recv_")[2]


def uncertainty(alignment: Alignment) -> int | None:
    """The worst of all ranks' in nanoseconds, None when a clock is only bounded from one side or not at all."""
    if len(alignment.clocks) < len(alignment.hosts):
        return None
    known = [clock.uncertainty_ns for clock in alignment.clocks.values()]
    return max((each for each in known if each is not None), default=0) if None not in known else None


__all__ = ["MOST_UNCERTAIN", "Meeting", "meetings", "offsets", "uncertainty"]
