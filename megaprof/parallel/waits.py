"""Who waits for whom, and the ranks that a job which stands still waits for in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping


class Waits:
    """The graph of who waits for whom, from where the ranks are in the schedule (`control.blame`), or from what they
    have called (`analysis.collectives.hang`)."""

    def __init__(self, waits_for: Mapping[int, Collection[int]]) -> None:
        """`waits_for`: the ranks that a rank waits for directly, by rank."""
        waiters: defaultdict[int, set[int]] = defaultdict(set)
        for waiter, others in waits_for.items():
            for other in others:
                waiters[other].add(waiter)
        self._waiters = waiters
        #: The ranks that others wait for and that wait for no one.
        self.sinks = {rank for rank in waiters if not waits_for.get(rank)}
        #: The ranks that wait for each other in a circle, if none of the sinks keeps them waiting.
        self.circle = {rank for rank, others in waits_for.items() if others} - self.waiting(*self.sinks)
        while outside := {rank for rank in self.circle if not waiters[rank] & self.circle}:
            self.circle -= outside

    def waiting(self, *ranks: int) -> set[int]:
        """Returns the ranks that wait for one of `ranks`, directly or through others."""
        found: set[int] = set()
        fresh = set(ranks)
        while fresh:
            fresh = set().union(*(self._waiters.get(rank, set()) for rank in fresh)) - found
            found |= fresh
        return found - set(ranks)
