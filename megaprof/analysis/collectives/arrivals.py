"""Who comes last inside a group, again and again, and by how much: from when its ranks came to the same collectives.

Ranks of a group leave a collective together: who came to it earlier waited so much longer. Where the device says how
long each rank's part of it ran, the shortest part is that of the rank that came last, which waited for nobody; and no
clocks are compared. Times of hosts are compared on one host alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.groups import axis_of
from megaprof.formats.arrivals import Arrivals, kept, unpack_arrivals, unpack_groups
from megaprof.formats.timeline import COLLECTIVES, GROUPS, Timeline

#: By the median absolute deviation of normal values: their standard deviation, and, with the root of their number, the
#: standard error of their median.
_MAD = 1.4826
_OF_MEDIAN = 1.2533 * _MAD
#: Groups whose ranks wait for each other inside a pass and have the same work there. Experts get as many tokens as the
#: router sends them: of 5 healthy jobs with EP 2 a rank was named in 3, up to 5 % of the step.
_INSIDE = ("tp", "cp")


@dataclass(frozen=True)
class OfStep:
    """What one rank came to in one step."""

    rank: int
    """Its number."""
    host: str | None
    """Its machine."""
    start_ns: int
    """When its step began, by the wall clock of its host."""
    groups: Mapping[tuple[str, tuple[int, ...]], Arrivals]
    """By name and ranks of the group: those whose ranks wait for each other inside a pass."""


def of_steps(timeline: Timeline, rows: Iterable[int], rank: int, host: str | None) -> Iterator[tuple[int, OfStep]]:
    """Returns of some steps of a rank's file, by row, those of which something is known."""
    known: dict[str, tuple[int, ...]] = {}
    for payload in timeline.facts(GROUPS).values():
        for name, group in unpack_groups(payload).items():
            if axis_of(group.desc) in _INSIDE:
                known[name] = _ranks(group.ranks)
    facts = timeline.facts(COLLECTIVES)
    for row in rows:
        own = {
            (each.group, known[each.group]): each
            for each in unpack_arrivals(facts.get(row, b""))
            if each.group in known
        }
        if own:
            yield row, OfStep(rank, host, int(timeline.steps["start_ns"][row]), own)


def late_ms(ranks: Sequence[OfStep]) -> dict[int, float]:
    """Returns by how many milliseconds each rank came later to the collectives of one step than its peers, all of them
    added up, negative where it came earlier; of those that can be compared with another.

    Of each collective only what is more than the scatter of all would show counts (soft thresholds, Donoho and
    Johnstone 1994): where a backend lets ranks go one by one, every collective has a little of it.
    """
    by_group: defaultdict[tuple[str, tuple[int, ...]], list[tuple[OfStep, Arrivals]]] = defaultdict(list)
    for rank in ranks:
        for group, arrivals in rank.groups.items():
            by_group[group].append((rank, arrivals))
    found: defaultdict[int, list[npt.NDArray[np.float64]]] = defaultdict(list)
    for members in by_group.values():
        if len(members) < 2 or len({arrivals.lengths for _, arrivals in members}) > 1:
            continue
        if not members[0][1].lengths and len({rank.host for rank, _ in members}) > 1:
            continue
        for (rank, _), late in zip(members, _late(members), strict=True):
            found[rank.rank].append(late)
    return {rank: _beyond_scatter(np.concatenate(each, axis=1)) / 1e3 for rank, each in found.items()}


def _beyond_scatter(late: npt.NDArray[np.float64]) -> float:
    """The sum of what is late beyond the scatter, of [lateness or how many collectives it stands for, collective]."""
    each, count = late
    if not len(each):
        return 0.0
    scatter = _MAD * float(np.median(np.abs(each - np.median(each))))
    more = np.maximum(np.abs(each) - scatter * np.sqrt(2.0 * np.log(len(each))), 0.0)
    return float((np.sign(each) * more * count).sum())


def again_and_again(late: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns [step, rank]: by how much each came later than its peers again and again, of ``late`` [step, rank].

    That is the median over steps, less what chance alone would show (James and Stein), in the steps that are nearer to
    it than to nothing: what disturbs a rank in some steps is none of it.
    """
    if len(late) < 2:
        return np.zeros_like(late)
    usual = np.median(late, axis=0)
    error = _OF_MEDIAN * np.median(np.abs(late - usual), axis=0) / np.sqrt(len(late) - 1)
    usual = np.maximum(usual, 0.0) * np.maximum(1.0 - (error / np.maximum(np.abs(usual), 1e-9)) ** 2, 0.0)
    found: npt.NDArray[np.float64] = np.where(late > usual / 2, usual, 0.0)
    return found


def _late(members: Sequence[tuple[OfStep, Arrivals]]) -> list[npt.NDArray[np.float64]]:
    """Of each member [2, collective]: by how many microseconds it came later than the others to each that all of them
    kept, and how many that one stands for."""
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
    late = (came[n] - np.median(np.delete(came, n, axis=0), axis=0) for n in range(len(members)))
    return [np.stack((each, np.full(len(common), 2.0**shift))) for each in late]


def _ranks(written: str) -> tuple[int, ...]:
    try:
        return tuple(msgspec.json.decode(written, type=list[int]))
    except msgspec.MsgspecError:
        return ()
