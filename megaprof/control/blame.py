"""Whom a job waits for: from where every rank stands, who waits for whom, and who keeps all of them waiting.

A rank in an exchange waits for the neighbouring stage that it exchanges with, a rank in the gradient reduction for the
replicas of its stage that have not come that far. Whoever is waited for and does not wait himself is to blame.
Inside a microbatch, what waits for a tensor-, context- or expert-parallel peer cannot be told from what computes, so
peers that stand elsewhere for longer are taken to be waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megaprof.formats import ranges
from megaprof.formats.job.run import RunRecord
from megaprof.formats.job.standstill import STUCK_SECONDS, stands_still
from megaprof.formats.job.status import Position, RankStatus
from megaprof.parallel.schedules import RECEIVES, SENDS, Placement

#: A rank that stands still has also not moved for this many of its own looks.
STUCK_INTERVALS = 3
_COMPUTING = frozenset(ranges.PASSES)
#: What is exchanged with the stage before, and with the one behind.
_WITH_PREVIOUS = frozenset((RECEIVES[ranges.FORWARD], SENDS[ranges.BACKWARD]))
_WITH_NEXT = frozenset((RECEIVES[ranges.BACKWARD], SENDS[ranges.FORWARD]))


@dataclass(frozen=True)
class Culprit:
    """A rank that others wait for, or of which nothing is heard."""

    rank: int
    """Its global rank."""
    status: RankStatus | None
    """What it last said; None for one that has written nothing."""
    silent: bool
    """It gives no sign of life."""
    waiting: int
    """How many ranks wait for it, over others too."""
    seconds: float
    """For how long it has not moved, or not been heard of."""


@dataclass(frozen=True)
class Blame:
    """Who keeps a job waiting, if anybody does."""

    stuck: tuple[int, ...]
    """Ranks that have not moved for long; empty when nothing hangs."""
    culprits: tuple[Culprit, ...]
    """The most guilty first."""
    still: float
    """Seconds for which nothing at all has moved; 0 when something does."""


def find_culprits(
    run: RunRecord,
    statuses: Mapping[int, RankStatus],
    now: float,
    stuck_after: float = STUCK_SECONDS,
    *,
    afterwards: bool = False,
) -> Blame:
    """Of the ranks of `run`: `statuses` by rank, as far as they could be read; `now` in wall-clock seconds.

    `stuck_after`: seconds without a move after which a rank hangs, at least. `afterwards`: the job is gone, and `now`
    is its last moment, in which every rank with a status was alive.
    """
    silent = set(range(run.world)) - set(statuses)
    silent |= {rank for rank, status in statuses.items() if not afterwards and status.late(now)}
    alive = {rank: status for rank, status in statuses.items() if rank not in silent and not status.ended}
    stuck = {rank for rank, status in alive.items() if is_stuck(status, now, stuck_after)}
    edges: dict[int, set[int]] = {}
    fresh = set(stuck)
    while fresh:
        rank = fresh.pop()
        edges[rank] = set(_waits_for(run, statuses, rank)) if rank in alive else set()
        fresh |= edges[rank] - edges.keys()
    waiters: dict[int, set[int]] = defaultdict(set)
    for rank, others in edges.items():
        for other in others:
            waiters[other].add(rank)
    idle = {rank for rank in waiters if not edges[rank] and rank not in silent}
    if stuck and not idle and not silent:
        # Nobody is waited for, or all wait in a circle: those that stand still longest are all that can be named.
        idle = {max(stuck, key=lambda rank: statuses[rank].stuck(now))}
    culprits = [
        Culprit(
            rank,
            statuses.get(rank),
            rank in silent,
            len(_all_waiting(rank, waiters)),
            _seconds(statuses.get(rank), rank in silent, now),
        )
        for rank in silent | idle
    ]
    culprits.sort(key=lambda culprit: (not culprit.silent, -culprit.waiting, -culprit.seconds, culprit.rank))
    still = min((statuses[rank].stuck(now) for rank in alive), default=0.0) if len(stuck) == len(alive) else 0.0
    return Blame(tuple(sorted(stuck)), tuple(culprits), still)


def is_stuck(status: RankStatus, now: float, seconds: float = STUCK_SECONDS) -> bool:
    """Whether it has not moved for `seconds`, and for longer than its steps explain."""
    least = max(seconds, STUCK_INTERVALS * status.interval)
    return stands_still(status.stuck(now), status.step_ms, first=not status.settled, least=least)


def _waits_for(run: RunRecord, statuses: Mapping[int, RankStatus], rank: int) -> Iterator[int]:
    status = statuses[rank]
    if status.place is None:
        return
    if status.place.phase in _COMPUTING:
        yield from _coupled(run, statuses, status)
    elif status.place.phase == ranges.FINALIZE_GRADS:
        yield from _replicas(run, statuses, status)
    else:
        placement, stage = Placement(run.sizes.pp, run.sizes.vpp), status.coords["pp"]
        exchanged = ranges.transfers(status.place.phase)
        for transfers, other in ((_WITH_PREVIOUS, placement.previous(stage)), (_WITH_NEXT, placement.following(stage))):
            if other is not None and not transfers.isdisjoint(exchanged):
                yield from _named(run, status, pp=other)


def _named(run: RunRecord, status: RankStatus, **elsewhere: int) -> Iterator[int]:
    """The rank at other coordinates, as Megatron's rank order has it."""
    layout = run.layout
    if layout is not None:
        yield layout.rank_of(**{axis: {**status.coords, **elsewhere}[axis] for axis in ("tp", "cp", "dp", "pp")})


def _replicas(run: RunRecord, statuses: Mapping[int, RankStatus], status: RankStatus) -> Iterator[int]:
    """Replicas of its stage, and the other end of its pipeline, which may share the embedding: those that have not
    come to the reduction of this step."""
    layout, own = run.layout, status.coords
    if layout is None or status.place is None:
        return
    ends = {0, run.sizes.pp - 1}
    stages = ends if own["pp"] in ends else {own["pp"]}
    for pp in stages:
        for dp in range(run.sizes.dp) if pp == own["pp"] else (own["dp"],):
            for cp in range(run.sizes.cp) if pp == own["pp"] else (own["cp"],):
                rank = layout.rank_of(tp=own["tp"], cp=cp, dp=dp, pp=pp)
                other = statuses.get(rank)
                if rank != status.rank and (other is None or not _reduces(other, status.place)):
                    yield rank


def _reduces(status: RankStatus, reduction: Position) -> bool:
    """Whether it has come to the same reduction: that of the same step of the same target and role."""
    place = status.place
    if place is not None and (place.target, place.role) == (reduction.target, reduction.role):
        return place.step > reduction.step or (place.step == reduction.step and place.phase == ranges.FINALIZE_GRADS)
    last = status.finished(reduction.target, reduction.role)
    return last is not None and last >= reduction.step


def _coupled(run: RunRecord, statuses: Mapping[int, RankStatus], status: RankStatus) -> Iterator[int]:
    """Ranks with which it communicates inside a microbatch and that have stood elsewhere for longer."""
    sizes, layout, own, place = run.sizes, run.layout, status.coords, status.place
    if layout is None or place is None or sizes.tp * sizes.cp * sizes.ep == 1:
        return
    # An expert group reaches over replicas; which ones is a matter of the rank order.
    replicas: Iterable[int] = range(sizes.dp) if sizes.ep > 1 else (own["dp"],)
    for dp in replicas:
        for cp in range(sizes.cp):
            for tp in range(sizes.tp):
                other = statuses.get(layout.rank_of(tp=tp, cp=cp, dp=dp, pp=own["pp"]))
                if other is None or other.rank == status.rank or (dp != own["dp"] and tp != own["tp"]):
                    continue
                if _position(other) != _position(status) and other.moved < status.moved:
                    yield other.rank


def _position(status: RankStatus) -> tuple[object, ...]:
    place = status.place
    return () if place is None else (place.target, place.role, place.step, place.phase, place.microbatch, place.chunk)


def _all_waiting(rank: int, waiters: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    fresh = {rank}
    while fresh:
        fresh = set().union(*(waiters.get(each, set()) for each in fresh)) - found
        found |= fresh
    return found - {rank}


def _seconds(status: RankStatus | None, silent: bool, now: float) -> float:
    if status is None:
        return 0.0
    return now - status.time if silent else status.stuck(now)
