"""Finds which rank of a group comes last again and again, and by how much, from when the ranks come to a collective.

The ranks of a group leave a collective together, so a rank that comes earlier waits longer. If the device times how
long each rank's part ran, no clocks need to be compared: the shortest part belongs to the rank that came last, which
waited for no one. Host times are compared only if all ranks are on one host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.groups import INSIDE, axis_of, ranks_of
from megaprof.formats.facts import Arrivals, Groups, kept, unpack_arrivals, unpack_json
from megaprof.formats.timeline import COLLECTIVES, GROUPS, Timeline

Floats = npt.NDArray[np.float64]


class Group(NamedTuple):
    """A group whose ranks wait for each other inside a pass."""

    axis: str
    """``tp``, ``cp`` or ``ep``."""
    name: str
    """In torch."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StepArrivals:
    """When one rank came to the collectives of each group in one step."""

    rank: int
    host: str | None
    start_ns: int
    """Start of the step, in nanoseconds on the wall clock of the host."""
    groups: Mapping[Group, Arrivals]

    def ran_ms(self, axis: str, pass_ms: float = math.inf) -> float:
        """Returns how many milliseconds the collectives of an axis ran on this rank's device, including waiting; NaN
        if that is not known. ``pass_ms``: what a usual pass takes."""
        axis_arrivals = [arrivals for group, arrivals in self.groups.items() if group.axis == axis]
        if not axis_arrivals or not all(arrivals.lengths for arrivals in axis_arrivals):
            return float("nan")
        return sum(float(_sum_ms(arrivals.values, arrivals.shift, pass_ms)[0]) for arrivals in axis_arrivals)


def step_arrivals(timeline: Timeline, row: int, rank: int, host: str | None) -> StepArrivals | None:
    """Returns what a rank came to in its step at ``row``; None if that is not known."""
    groups: dict[str, Group] = {}
    for payload in timeline.facts(GROUPS).values():
        for name, group in unpack_json(payload, Groups).items():
            axis = axis_of(group.desc)
            if axis in INSIDE:
                groups[name] = Group(axis, name, ranks_of(group.ranks) or ())
    all_arrivals = unpack_arrivals(timeline.facts(COLLECTIVES).get(row, b""))
    by_group = {groups[arrivals.group]: arrivals for arrivals in all_arrivals if arrivals.group in groups}
    return StepArrivals(rank, host, int(timeline.steps["start_ns"][row]), by_group) if by_group else None


def waited_ms(ranks: Sequence[StepArrivals], pass_ms: float = math.inf) -> dict[int, dict[str, Floats]]:
    """Returns how many milliseconds of one step each rank waited for its peers, by rank and axis: all of it, and the
    part in single waits that are longer than a usual pass takes (``pass_ms``).

    This is the sum over all collectives of the groups whose ranks can be compared with each other. A rank that comes
    to a collective early waits until the last one comes; the last one waits for no one. A rank that waits for a slow
    rank in one group, and therefore comes late to another group, still counts as one that waited.
    """
    by_group: defaultdict[Group, list[tuple[StepArrivals, Arrivals]]] = defaultdict(list)
    for rank_step in ranks:
        for group, arrivals in rank_step.groups.items():
            by_group[group].append((rank_step, arrivals))
    waits_ms: defaultdict[int, dict[str, Floats]] = defaultdict(dict)
    for group, members in by_group.items():
        if len(members) < len(group.ranks) or len({arrivals.lengths for _, arrivals in members}) > 1:
            continue
        if not members[0][1].lengths and len({rank_step.host for rank_step, _ in members}) > 1:
            continue
        shift = max(arrivals.shift for _, arrivals in members)
        numbers = [arrivals.numbers[kept(arrivals.numbers, shift)] for _, arrivals in members]
        common = reduce(partial(np.intersect1d, assume_unique=True), numbers)  # the collectives that all members kept
        came_us = []
        for rank_step, arrivals in members:
            values_us = arrivals.values[np.searchsorted(arrivals.numbers, common)]
            host_us = (rank_step.start_ns - members[0][0].start_ns) / 1e3 + values_us
            came_us.append(-values_us if arrivals.lengths else host_us)  # who comes last has the shortest part
        for (rank_step, _), since_us in zip(members, came_us, strict=True):
            waited = _sum_ms(np.max(came_us, axis=0) - since_us, shift, pass_ms)
            waits_ms[rank_step.rank][group.axis] = waits_ms[rank_step.rank].get(group.axis, 0.0) + waited
    return dict(waits_ms)


def _sum_ms(values_us: npt.NDArray[Any], shift: int, pass_ms: float) -> Floats:
    """Returns the sum of values of which one in 2^``shift`` was kept, and the part longer than a pass. Such a value
    counts once: had there been more of them, there would be as many longer passes."""
    longer = values_us > 1e3 * pass_ms
    longer_us = values_us[longer].sum()
    return np.array((values_us[~longer].sum() * 2.0**shift + longer_us, longer_us)) / 1e3
