"""Finds which rank of a group comes last again and again, and by how much, from when the ranks come to a collective.

The ranks of a group leave a collective together, so a rank that comes earlier waits longer. If the device times how
long each rank's part ran, no clocks need to be compared: the shortest part belongs to the rank that came last, which
waited for no one. Host times are compared only if all ranks are on one host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.groups import INSIDE, axis_of
from megaprof.formats.steps.arrivals import Arrivals, kept, unpack_arrivals, unpack_groups
from megaprof.formats.timeline import COLLECTIVES, GROUPS, Timeline


class Group(NamedTuple):
    """A group whose ranks wait for each other inside a pass."""

    axis: str
    """``tp``, ``cp`` or ``ep``."""
    name: str
    """Name in torch."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""


@dataclass(frozen=True)
class OfStep:
    """The collectives that one rank came to in one step."""

    rank: int
    """Global rank."""
    host: str | None
    """Host of the rank; None if it is not known."""
    start_ns: int
    """Start of the step, in nanoseconds on the wall clock of the host."""
    groups: Mapping[Group, Arrivals]
    """When the rank came to the collectives of each group."""

    def ran_ms(self, axis: str) -> float:
        """Returns how many milliseconds the collectives of an axis ran on this rank's device, including waiting; NaN
        if that is not known."""
        axis_arrivals = [arrivals for group, arrivals in self.groups.items() if group.axis == axis]
        if not axis_arrivals or not all(arrivals.lengths for arrivals in axis_arrivals):
            return float("nan")
        return sum(float(arrivals.values.sum()) * 2.0**arrivals.shift for arrivals in axis_arrivals) / 1e3


def of_steps(timeline: Timeline, rows: Iterable[int], rank: int, host: str | None) -> Iterator[tuple[int, OfStep]]:
    """Yields what a rank came to in its steps at ``rows``, with the row. Skips steps without known collectives."""
    groups: dict[str, Group] = {}
    for payload in timeline.facts(GROUPS).values():
        for name, group in unpack_groups(payload).items():
            axis = axis_of(group.desc)
            if axis in INSIDE:
                groups[name] = Group(axis, name, _ranks(group.ranks))
    facts = timeline.facts(COLLECTIVES)
    for row in rows:
        arrivals_by_group = {
            groups[arrivals.group]: arrivals
            for arrivals in unpack_arrivals(facts.get(row, b""))
            if arrivals.group in groups
        }
        if arrivals_by_group:
            yield row, OfStep(rank, host, int(timeline.steps["start_ns"][row]), arrivals_by_group)


def waited_ms(ranks: Sequence[OfStep]) -> dict[int, dict[str, float]]:
    """Returns how many milliseconds of one step each rank waited for its peers, by rank and axis.

    This is the sum over all collectives of the groups whose ranks can be compared with each other. A rank that comes
    to a collective early waits until the last one comes; the last one waits for no one. A rank that waits for a slow
    rank in one group, and therefore comes late to another group, still counts as one that waited.
    """
    by_group: defaultdict[Group, list[tuple[OfStep, Arrivals]]] = defaultdict(list)
    for rank_step in ranks:
        for group, arrivals in rank_step.groups.items():
            by_group[group].append((rank_step, arrivals))
    waits_ms: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for group, members in by_group.items():
        if len(members) < len(group.ranks) or len({arrivals.lengths for _, arrivals in members}) > 1:
            continue
        if not members[0][1].lengths and len({rank_step.host for rank_step, _ in members}) > 1:
            continue
        for (rank_step, _), waited_us in zip(members, _waited(members), strict=True):
            waits_ms[rank_step.rank][group.axis] = waits_ms[rank_step.rank].get(group.axis, 0.0) + waited_us / 1e3
    return dict(waits_ms)


def _waited(members: Sequence[tuple[OfStep, Arrivals]]) -> npt.NDArray[np.float64]:
    """Returns how many microseconds each member waited: in the collectives that all members kept, scaled up to those
    that were not kept."""
    shift = max(arrivals.shift for _, arrivals in members)
    common = members[0][1].numbers
    for _, arrivals in members:
        common = np.intersect1d(common, arrivals.numbers[kept(arrivals.numbers, shift)], assume_unique=True)
    first_start_ns = members[0][0].start_ns
    came_us = np.stack(
        [
            # The rank that came last has the shortest part.
            (-1 if arrivals.lengths else 1) * arrivals.values[np.searchsorted(arrivals.numbers, common)]
            + (0 if arrivals.lengths else (rank_step.start_ns - first_start_ns) / 1e3)
            for rank_step, arrivals in members
        ]
    )
    waited_us: npt.NDArray[np.float64] = (came_us.max(axis=0, keepdims=True) - came_us).sum(axis=1) * 2.0**shift
    return waited_us


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(msgspec.json.decode(text, type=list[int]))
    except msgspec.MsgspecError:
        return ()
