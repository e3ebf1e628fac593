"""Puts the clocks of several hosts on one time axis, from the messages between ranks.

A receive cannot end before its send began. With ``offset`` as the time to add to a rank's times, each message
from rank s to rank r gives ``offset[r] - offset[s] >= send.start - receive.end``, and the quickest message of many
gives a tight bound. Messages the other way bound the same difference from above, as in NTP (RFC 5905, section 8,
without its assumption about single packets): in a pipeline, activations go one way and their gradients the other.
If a send ends only after its receive was posted, as NCCL's does unless the message fits into its buffers, one direction
is enough. Messages show which it was: where a bound from the end of a send contradicts the others, sends were buffered.

Ranks of one host share a clock. That is verified, because containers on different machines may have the same name.
Times are integers in nanoseconds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megaprof.analysis.clocks.matching import Link
from megaprof.analysis.notes import Note

#: Without a note, timestamps of one clock may contradict each other by this much, and clocks may drift apart by this
#: much within a step (at 50 ppm, a lot for a machine in service, 2 s make 0.1 ms).
TOLERANCE_NS = 100_000

#: As a bound, this means that there is none. As an uncertainty, it exceeds any known one, but can still be added up.
_FAR = 1 << 62
_Clock = tuple[str, int]  # host, and the rank if the host's name stands for more than one clock (else -1)


@dataclass(frozen=True)
class Clock:
    """The correction that puts a rank's times on the common clock."""

    offset_ns: int
    """Nanoseconds to add."""
    uncertainty_ns: int | None
    """Uncertainty in nanoseconds, plus or minus. None if all messages go in one direction: the offset is then bounded
    from one side only, and assumes that the quickest message took no time."""
    messages: int
    """Number of messages it is based on."""


@dataclass(frozen=True)
class Alignment:
    """The clocks of all ranks that messages connect."""

    reference: int | None
    """The rank whose clock is the common one; None without ranks."""
    clocks: dict[int, Clock]
    """Clocks by rank, for ranks that messages connect with ``reference``."""
    hosts: dict[int, str | None]
    """Each rank's host; None if unknown."""
    warnings: tuple[Note, ...]
    """Contradictions between messages, and ranks that are not connected."""

    def offset(self, rank: int) -> int:
        """Returns the nanoseconds to add to the times of ``rank``; 0 if nothing is known."""
        clock = self.clocks.get(rank)
        return clock.offset_ns if clock else 0


@dataclass
class _Bounds:
    """Bounds of ``offset[b] - offset[a]`` for a pair of clocks (a, b)."""

    arrived_low: int = -_FAR
    arrived_high: int = _FAR
    """From messages that cannot arrive before they were sent."""
    met_low: int = -_FAR
    met_high: int = _FAR
    """From sends that end only after their receive was posted, unless they are buffered."""
    messages: int = 0

    @property
    def _buffered(self) -> bool:
        """True if the messages contradict each other only if sends wait for their receivers."""
        met = max(self.arrived_low, self.met_low) - min(self.arrived_high, self.met_high)
        return met > TOLERANCE_NS >= self.arrived_low - self.arrived_high

    @property
    def low(self) -> int:
        """The least difference."""
        return self.arrived_low if self._buffered else max(self.arrived_low, self.met_low)

    @property
    def high(self) -> int:
        """The greatest difference."""
        return self.arrived_high if self._buffered else min(self.arrived_high, self.met_high)

    @property
    def contradiction(self) -> int:
        """Nanoseconds by which the bounds exclude each other."""
        return max(0, self.low - self.high)

    @property
    def contradiction_of_zero(self) -> int:
        """Nanoseconds by which messages arrived before they were sent if both are the same clock. A send that ends
        before its receive is posted shows nothing: it may be buffered."""
        return max(0, self.arrived_low, -self.arrived_high)

    @property
    def estimate(self) -> tuple[int, int]:
        """The difference and its uncertainty."""
        if self.low > -_FAR and self.high < _FAR:
            return (self.low + self.high) // 2, (abs(self.high - self.low) + 1) // 2
        return (self.low if self.low > -_FAR else self.high), _FAR


_Graph = dict[tuple[_Clock, _Clock], _Bounds]


def align(hosts: Mapping[int, str | None], links: Iterable[Link]) -> Alignment:
    """Returns offsets that put all ranks on the clock of the lowest one. ``hosts``: each rank's host, None if unknown.

    Clocks that are only connected through others are reached on the path with the least uncertainty, which adds up
    along a path. ``warnings`` of the result name contradictions, and ranks that are not connected with the lowest.
    """
    links = [link for link in links if link.sends and link.receives]
    warnings: list[Note] = []
    for link in links:
        if len(link.sends) != len(link.receives):
            ranks = link.sender, link.receiver
            warnings.append(Note("messages_unmatched", ranks=ranks, count=len(link.sends), of=len(link.receives)))
    clock_of = _clocks(hosts, links, warnings)
    if not clock_of:
        return Alignment(None, {}, {}, tuple(warnings))
    graph: _Graph = {}
    for link in links:
        _add(graph, clock_of[link.sender], clock_of[link.receiver], link)
    warnings += _contradictions(graph)
    reference = min(hosts)
    corrections = _shortest(graph, clock_of[reference])
    warnings += _disagreements(graph, corrections)
    unconnected = sorted({_clock_name(clock) for clock in clock_of.values() if clock not in corrections})
    if unconnected:
        warnings.append(Note("clocks_unconnected", ranks=(reference,), names=tuple(unconnected)))
    clocks = {rank: corrections[clock] for rank, clock in sorted(clock_of.items()) if clock in corrections}
    return Alignment(reference, clocks, dict(hosts), tuple(dict.fromkeys(warnings)))


def _clocks(hosts: Mapping[int, str | None], links: list[Link], warnings: list[Note]) -> dict[int, _Clock]:
    """Returns the clock of each rank: its host's, or its own if the host is unknown or several machines share its name.

    Machines share a name if messages contradict a single clock, and a clock for each rank resolves the contradiction.
    """
    graphs: dict[str, _Graph] = {}
    for link in links:
        host = hosts[link.sender]
        if host is not None and host == hosts[link.receiver]:
            _add(graphs.setdefault(host, {}), (host, link.sender), (host, link.receiver), link)
    shared_names = set()
    for host, graph in graphs.items():
        contradiction_ns = max(bounds.contradiction_of_zero for bounds in graph.values())
        if contradiction_ns <= TOLERANCE_NS:
            continue
        said = "the traces are of different runs"
        if not any(bounds.contradiction > TOLERANCE_NS for bounds in graph.values()):
            shared_names.add(host)
            said = "several machines have this name, so every rank gets a clock of its own"
        warnings.append(Note("clocks_contradicted", names=(f"host {host}",), ms=(contradiction_ns / 1e6,), said=said))
    return {
        rank: ("", rank) if host is None else (host, rank if host in shared_names else -1)
        for rank, host in hosts.items()
    }


def _add(graph: _Graph, sender: _Clock, receiver: _Clock, link: Link) -> None:
    if sender == receiver:
        return
    both = list(zip(link.sends, link.receives, strict=False))
    arrived_low = max(send[0] - receive[1] for send, receive in both)
    met_high = min(send[1] - receive[0] for send, receive in both) if link.rendezvous else _FAR
    if (receiver, sender) in graph:
        bounds = graph[receiver, sender]
        bounds.arrived_high = min(bounds.arrived_high, -arrived_low)
        bounds.met_low = max(bounds.met_low, -met_high)
    else:
        bounds = graph.setdefault((sender, receiver), _Bounds())
        bounds.arrived_low = max(bounds.arrived_low, arrived_low)
        bounds.met_high = min(bounds.met_high, met_high)
    bounds.messages += len(both)


def _shortest(graph: _Graph, reference: _Clock) -> dict[_Clock, Clock]:
    """Returns every clock connected with ``reference``, on the path of the least uncertainty (Dijkstra)."""
    neighbours: defaultdict[_Clock, list[tuple[_Clock, int, int, int]]] = defaultdict(list)
    for (a, b), bounds in graph.items():
        difference, edge_uncertainty = bounds.estimate
        neighbours[a].append((b, difference, edge_uncertainty, bounds.messages))
        neighbours[b].append((a, -difference, edge_uncertainty, bounds.messages))
    corrections: dict[_Clock, Clock] = {}
    queue = [(0, 0, reference, 0)]
    while queue:
        uncertainty, offset, clock, messages = heapq.heappop(queue)
        if clock in corrections:
            continue
        corrections[clock] = Clock(offset, uncertainty if uncertainty < _FAR else None, messages)
        for neighbour, difference, edge_uncertainty, count in neighbours[clock]:
            if neighbour not in corrections:
                heapq.heappush(queue, (uncertainty + edge_uncertainty, offset + difference, neighbour, count))
    return corrections


def _contradictions(graph: _Graph) -> Iterator[Note]:
    """Yields one note about all pairs of clocks whose messages exclude each other, with the worst of them."""
    pairs = [(bounds.contradiction, pair) for pair, bounds in graph.items() if bounds.contradiction > TOLERANCE_NS]
    if pairs:
        worst_ns, (a, b) = max(pairs)
        names = _clock_name(a), _clock_name(b)
        said = "a clock was adjusted meanwhile, or the traces are of different runs"
        yield Note("clocks_contradicted", names=names, count=len(pairs), ms=(worst_ns / 1e6,), said=said)


def _disagreements(graph: _Graph, corrections: dict[_Clock, Clock]) -> Iterator[Note]:
    """Yields a note for each pair whose messages exclude the offsets found on a path through other hosts."""
    for (a, b), bounds in graph.items():
        if a not in corrections or bounds.contradiction > TOLERANCE_NS:
            continue
        uncertainties_ns = [corrections[clock].uncertainty_ns for clock in (a, b)]
        slack = TOLERANCE_NS + bounds.contradiction + sum(ns for ns in uncertainties_ns if ns is not None)
        difference = corrections[b].offset_ns - corrections[a].offset_ns
        if None not in uncertainties_ns and not bounds.low - slack <= difference <= bounds.high + slack:
            names, said = (_clock_name(a), _clock_name(b)), "messages by way of other hosts give another offset"
            yield Note("clocks_contradicted", names=names, said=said)


def _clock_name(clock: _Clock) -> str:
    host, rank = clock
    return f"rank {rank}" + (f" (host {host})" if host else "") if rank >= 0 else f"host {host}"
