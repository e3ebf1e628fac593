"""Who comes last inside a group, again and again, and by how much: from when its ranks came to the same collectives.

Ranks of a group leave a collective together: who came to it earlier waited so much longer. Where the device says how
long each rank's part of it ran, the shortest part is that of the rank that came last, which waited for nobody; and no
clocks are compared. Times of hosts are compared on one host alone.
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
    """torch's."""
    ranks: tuple[int, ...]
    """Its members."""


@dataclass(frozen=True)
class OfStep:
    """What one rank came to in one step."""

    rank: int
    """Its number."""
    host: str | None
    """Its machine."""
    start_ns: int
    """When its step began, by the wall clock of its host."""
    groups: Mapping[Group, Arrivals]
    """By group."""

    def ran_ms(self, axis: str) -> float:
        """Returns for how long collectives of an axis ran on this rank's device, waiting included; NaN: that is not
        known."""
        own = [arrivals for group, arrivals in self.groups.items() if group.axis == axis]
        if not own or not all(arrivals.lengths for arrivals in own):
            return float("nan")
        return sum(float(arrivals.values.sum()) * 2.0**arrivals.shift for arrivals in own) / 1e3


def of_steps(timeline: Timeline, rows: Iterable[int], rank: int, host: str | None) -> Iterator[tuple[int, OfStep]]:
    """Returns of some steps of a rank's file, by row, those of which something is known."""
    known: dict[str, Group] = {}
    for payload in timeline.facts(GROUPS).values():
        for name, group in unpack_groups(payload).items():
            axis = axis_of(group.desc)
            if axis in INSIDE:
                known[name] = Group(axis, name, _ranks(group.ranks))
    facts = timeline.facts(COLLECTIVES)
    for row in rows:
        own = {known[each.group]: each for each in unpack_arrivals(facts.get(row, b"")) if each.group in known}
        if own:
            yield row, OfStep(rank, host, int(timeline.steps["start_ns"][row]), own)


def waited_ms(ranks: Sequence[OfStep]) -> dict[int, dict[str, float]]:
    """Returns how many milliseconds of one step each rank waited for its peers, by axis, in all of its collectives
    together; of those that can be compared with another.

    Who came to a collective first waited until the last one came, and that one for nobody. So a rank that waits in one
    group for a slow one, and comes late to another group therefore, has waited all the same.
    """
    by_group: defaultdict[Group, list[tuple[OfStep, Arrivals]]] = defaultdict(list)
    for rank in ranks:
        for group, arrivals in rank.groups.items():
            by_group[group].append((rank, arrivals))
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for group, members in by_group.items():
        if len(members) < len(group.ranks) or len({arrivals.lengths for _, arrivals in members}) > 1:
            continue
        if not members[0][1].lengths and len({rank.host for rank, _ in members}) > 1:
            continue
        for (rank, _), waited in zip(members, _waited(members), strict=True):
            found[rank.rank][group.axis] = found[rank.rank].get(group.axis, 0.0) + waited / 1e3
    return dict(found)


def _waited(members: Sequence[tuple[OfStep, Arrivals]]) -> npt.NDArray[np.float64]:
    """Of each member: how many microseconds it waited in the collectives that all of them kept, and in those that these
    stand for."""
    shift = max(arrivals.shift for _, arrivals in members)
    common = members[0][1].numbers
    for _, arrivals in members:
        common = np.intersect1d(common, arrivals.numbers[kept(arrivals.numbers, shift)], assume_unique=True)
    first = members[0][0].start_ns
    came = np.stack(
        [
            # The shortest part is that of the last to come.
            (-1 if arrivals.lengths else 1) * arrivals.values[np.searchsorted(arrivals.numbers, common)]
            + (0 if arrivals.lengths else (rank.start_ns - first) / 1e3)
            for rank, arrivals in members
        ]
    )
    waited: npt.NDArray[np.float64] = (came.max(axis=0, keepdims=True) - came).sum(axis=1) * 2.0**shift
    return waited


def _ranks(written: str) -> tuple[int, ...]:
    try:
        return tuple(msgspec.json.decode(written, type=list[int]))
    except msgspec.MsgspecError:
        return ()
