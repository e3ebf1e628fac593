"""How ranks compare with their peers and steps with those before them, and which ranks the others wait for: what
reports and the live view find alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
#: What is less than this part of something else does not count beside it.
MINOR = 0.25


def of_others(values: Floats, axis: int = 0) -> Floats:
    """Returns, for each value, the lower median of the others along an axis. A rank is no peer of its own: with one
    quick and one slow value, the median of both would lie halfway between them."""
    values = np.moveaxis(values, axis, 0)
    order = np.sort(values, axis=0)
    # The lower median of the others is at (n - 2) // 2 in their own order, and one further in the order of all values
    # if the value itself is below it.
    place = (len(values) - 2) // 2
    return np.moveaxis(np.where(values <= order[place], order[place + 1], order[place]), 0, axis)


def moving_median(values: Floats, width: int) -> Floats:
    """Returns the median of the ``width`` values (an odd number) around each value. Mirrors the series at its ends."""
    padded = np.pad(values, width // 2, mode="reflect")
    medians = np.empty_like(values)
    for begin in range(0, len(values), 1 << 14):
        end = min(begin + (1 << 14), len(values))
        medians[begin:end] = np.median(sliding_window_view(padded[begin : end + width - 1], width), axis=1)
    return medians


def misfits(as_before: Floats | Flags, as_after: Floats | Flags) -> Floats:
    """Returns how badly a change between each two steps fits, [n + 1]: what all steps before it are off from how it was
    before (``as_before`` [n]), and those after it from how it is since (``as_after`` [n])."""
    before, after = (np.concatenate(([0.0], np.cumsum(off))) for off in (as_before, as_after))
    return np.asarray(before + after[-1] - after)


def began(there: Flags) -> int | None:
    """Returns the step since which something is there: 0 if it was from the first step on, None if it comes and goes.

    The step is the one with the fewest exceptions, which are earlier steps with it and later steps without it. It comes
    and goes if there are more exceptions than a quarter of the steps with it, or if only one step is on either side,
    because single steps differ by chance.
    """
    exceptions = misfits(there, ~there)[:-1]
    first = int(np.argmin(exceptions))
    return first if (first == 0 or 1 < first < len(there) - 1) and exceptions[first] <= MINOR * there.sum() else None


class Waits:
    """The graph of who waits for whom, from where the ranks are in the schedule (`control.blame`), or from what they
    have called (`analysis.hang`)."""

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
