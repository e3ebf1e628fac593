"""How long each rank waited for the others of its groups, from when all came to the same collectives.

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

#: Standard error of a median of normal values, by their median absolute deviation and the root of their number.
_OF_MEDIAN = 1.4826 * 1.2533
#: Groups whose ranks wait for each other inside a pass.
_INSIDE = ("tp", "cp", "ep")


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


def waited_ms(ranks: Sequence[OfStep]) -> dict[int, float]:
    """Returns for how many milliseconds of one step each rank waited for others of its groups; of those that can be
    compared with another."""
    by_group: defaultdict[tuple[str, tuple[int, ...]], list[tuple[OfStep, Arrivals]]] = defaultdict(list)
    for rank in ranks:
        for group, arrivals in rank.groups.items():
            by_group[group].append((rank, arrivals))
    found: defaultdict[int, float] = defaultdict(float)
    for members in by_group.values():
        if len(members) < 2 or len({arrivals.lengths for _, arrivals in members}) > 1:
            continue
        if not members[0][1].lengths and len({rank.host for rank, _ in members}) > 1:
            continue
        for (rank, _), waited in zip(members, _waited(members), strict=True):
            found[rank.rank] += waited / 1e3
    return dict(found)


def again_and_again(waited: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns [step, rank]: by how much each came later than its peers again and again, of ``waited`` [step, rank].

    That is the median over steps, less what chance alone would show (James and Stein), in the steps that are nearer to
    it than to nothing: what disturbs a rank in some steps is none of it.
    """
    count, ranks = waited.shape
    if count < 2 or ranks < 2:
        return np.zeros_like(waited)
    others = [np.median(np.delete(waited, rank, axis=1), axis=1) for rank in range(ranks)]
    late = np.stack(others, axis=1) - waited
    usual = np.median(late, axis=0)
    error = _OF_MEDIAN * np.median(np.abs(late - usual), axis=0) / np.sqrt(count - 1)
    usual = np.maximum(usual, 0.0) * np.maximum(1.0 - (error / np.maximum(np.abs(usual), 1e-9)) ** 2, 0.0)
    found: npt.NDArray[np.float64] = np.where(late > usual / 2, usual, 0.0)
    return found


def _waited(members: Sequence[tuple[OfStep, Arrivals]]) -> npt.NDArray[np.float64]:
    """[member]: microseconds, of the collectives that all of them kept, and as many more as they left out."""
    shift = max(arrivals.shift for _, arrivals in members)
    common = members[0][1].numbers
    for _, arrivals in members:
        common = np.intersect1d(common, arrivals.numbers[kept(arrivals.numbers, shift)], assume_unique=True)
    if not len(common):
        return np.zeros(len(members))
    first = members[0][0].start_ns
    values = np.stack(
        [
            arrivals.values[np.searchsorted(arrivals.numbers, common)]
            + (0 if arrivals.lengths else (rank.start_ns - first) / 1e3)
            for rank, arrivals in members
        ]
    )
    # The last to come waits for nobody: it came latest, or its part is the shortest.
    waited = values - values.min(axis=0) if members[0][1].lengths else values.max(axis=0) - values
    found: npt.NDArray[np.float64] = waited.sum(axis=1) * 2.0**shift
    return found


def _ranks(written: str) -> tuple[int, ...]:
    try:
        return tuple(msgspec.json.decode(written, type=list[int]))
    except msgspec.MsgspecError:
        return ()
