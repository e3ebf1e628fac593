"""Which rank a job waits for, derived from where every rank stands.

A rank in an exchange waits for the neighbouring stage that it exchanges with. A rank in the gradient reduction waits
for the replicas of its stage that have not reached it yet. A rank that others wait for, and that waits for no one, is
the culprit. Inside a microbatch, waiting for a tensor-, context- or expert-parallel peer looks like computing; so a
rank there is taken to wait for those peers that have stood somewhere else for longer, and for those that flight
recorders show it to wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megaprof.formats import ranges
from megaprof.formats.job import FIRST_STEP_SECONDS, STUCK_SECONDS, Position, RankStatus, RunRecord, limit
from megaprof.formats.names import dead
from megaprof.parallel.peers import Waits
from megaprof.parallel.schedules import RECEIVES, SENDS, Placement
from megaprof.parallel.topology import WorldLayout

#: A rank that stands still has also not moved for this many of its own looks.
STUCK_INTERVALS = 3
_COMPUTING = frozenset(ranges.PASSES)
#: Exchanges with the stage before, and with the stage behind.
_WITH_PREVIOUS = frozenset((RECEIVES[ranges.FORWARD], SENDS[ranges.BACKWARD]))
_WITH_NEXT = frozenset((RECEIVES[ranges.BACKWARD], SENDS[ranges.FORWARD]))


@dataclass(frozen=True)
class WaitedFor:
    """A rank that the others wait for, or that has gone silent."""

    rank: int
    """Global rank."""
    silent: bool
    """True if the rank gives no sign of life."""
    gone: bool
    """True if its process no longer exists."""
    waiting: int
    """Number of ranks that wait for it, directly or through other ranks."""
    for_s: float
    """Seconds since it last moved or, if it is silent, since its last sign of life; 0 without any."""


@dataclass(frozen=True)
class Blame:
    """The ranks that keep a job waiting, if there are any."""

    stuck: tuple[int, ...]
    """The ranks that have not moved for a long time; empty when nothing hangs."""
    culprits: tuple[WaitedFor, ...]
    """The silent ranks first, then those that most others wait for."""
    still: float
    """Seconds since any rank moved; 0 if some rank still moves."""
    waits_for: Mapping[int, int]
    """The first culprit that a rank waits for, directly or through other ranks, by the rank that waits."""


def find_culprits(
    run: RunRecord,
    statuses: Mapping[int, RankStatus],
    now: float,
    stuck_after: float = STUCK_SECONDS,
    *,
    afterwards: bool = False,
    called: Mapping[int, Collection[int]] | None = None,
) -> Blame:
    """Returns the ranks of `run` that the others wait for.

    `statuses` holds those that could be read, by rank. `now` is in wall-clock seconds. A rank hangs when it has not
    moved for `stuck_after` seconds or longer (`is_stuck`). `afterwards`: the job is gone, and `now` is its last moment,
    when every rank with a status was still alive. `called`: the ranks that a rank waits for in collectives.

    Example: on four stages, rank 0 stands in ``send_forward_recv_backward``, rank 1 in ``backward``, rank 2 in
    ``send_backward_recv_forward``, rank 3 in ``recv_forward``, all for a minute. The culprit is rank 1, and 3 ranks
    wait for it.
    """
    silent = set(range(run.world)) - set(statuses)
    silent |= {rank for rank, status in statuses.items() if not afterwards and status.late(now)}
    alive = {rank: status for rank, status in statuses.items() if rank not in silent and not status.ended}
    stuck = {rank for rank, status in alive.items() if is_stuck(status, now, stuck_after)}
    edges: dict[int, set[int]] = {}
    fresh = set(stuck)
    while fresh:
        rank = fresh.pop()
        edges[rank] = {*_waits_for(run, statuses, rank), *(called or {}).get(rank, ())} if rank in alive else set()
        fresh |= edges[rank] - edges.keys()
    waits = Waits(edges)
    idle = waits.sinks - silent
    if stuck and not idle and not silent:
        # No rank is waited for, or all wait in a circle: only the rank that stands still longest can be named.
        placed = [rank for rank in stuck if not statuses[rank].whereabouts_unknown]
        idle = {max(placed, key=lambda rank: statuses[rank].stuck(now))} if placed else set()
    culprits = []
    for rank in silent | idle:
        status, seconds = statuses.get(rank), 0.0
        if status is not None:
            seconds = now - status.time if rank in silent else status.stuck(now)
        gone = status is not None and dead(status.host, status.pid)
        culprits.append(WaitedFor(rank, rank in silent, gone, len(waits.waiting(rank)), round(seconds, 3)))
    culprits.sort(key=lambda culprit: (not culprit.silent, -culprit.waiting, -culprit.for_s, culprit.rank))
    still = min((statuses[rank].stuck(now) for rank in alive), default=0.0) if len(stuck) == len(alive) else 0.0
    first = {waiter: culprit.rank for culprit in reversed(culprits) for waiter in waits.waiting(culprit.rank)}
    return Blame(tuple(sorted(stuck)), tuple(culprits), still, first)


def is_stuck(status: RankStatus, now: float, seconds: float = STUCK_SECONDS) -> bool:
    """Returns whether a rank has not moved for `seconds`, and for longer than its steps take."""
    first = 0.0 if status.past_first_step else FIRST_STEP_SECONDS
    usual = (status.step_ms or 0.0) / 1e3
    return status.stuck(now) > max(limit(usual, seconds), STUCK_INTERVALS * status.interval, first)


def _waits_for(run: RunRecord, statuses: Mapping[int, RankStatus], rank: int) -> Iterator[int]:
    status, layout = statuses[rank], run.layout
    if status.place is None or layout is None:
        return
    if status.place.phase in _COMPUTING:
        yield from _coupled(layout, statuses, status)
    elif status.place.phase == ranges.FINALIZE_GRADS:
        yield from _replicas(layout, statuses, status, status.place)
    else:
        beside = Placement(run.sizes.pp, run.sizes.vpp).beside(status.coords["pp"])
        exchanged = ranges.transfers(status.place.phase)
        for transfers, other in zip((_WITH_PREVIOUS, _WITH_NEXT), beside, strict=True):
            if other is not None and not transfers.isdisjoint(exchanged):
                yield layout.rank_of(**{axis: status.coords[axis] for axis in ("tp", "cp", "dp")}, pp=other)


def _replicas(
    layout: WorldLayout, statuses: Mapping[int, RankStatus], status: RankStatus, place: Position
) -> Iterator[int]:
    """Yields the ranks that have not reached the gradient reduction of this step: replicas of its stage, and the other
    end of its pipeline, which may share the embedding."""
    sizes, tp, pp = layout.sizes, status.coords["tp"], status.coords["pp"]
    ranks = [layout.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) for dp in range(sizes.dp) for cp in range(sizes.cp)]
    if pp in (0, sizes.pp - 1):
        ranks.append(layout.rank_of(tp=tp, cp=status.coords["cp"], dp=status.coords["dp"], pp=sizes.pp - 1 - pp))
    for rank in ranks:
        other = statuses.get(rank)
        if rank != status.rank and (other is None or not _reduces(other, place)):
            yield rank


def _reduces(status: RankStatus, reduction: Position) -> bool:
    """Returns whether a rank has reached the same reduction, that is, of the same step, target and role."""
    place = status.place
    if place is not None and (place.target, place.role) == (reduction.target, reduction.role):
        return place.step > reduction.step or (place.step == reduction.step and place.phase == ranges.FINALIZE_GRADS)
    last = status.finished(reduction.target, reduction.role)
    return last is not None and last >= reduction.step


def _coupled(layout: WorldLayout, statuses: Mapping[int, RankStatus], status: RankStatus) -> Iterator[int]:
    """Yields the ranks that it communicates with inside a microbatch and that have stood elsewhere for longer."""
    sizes, coords = layout.sizes, status.coords
    if sizes.tp * sizes.cp * sizes.ep == 1:
        return
    # An expert group reaches over replicas; which ones is a matter of the rank order.
    replicas: Iterable[int] = range(sizes.dp) if sizes.ep > 1 else (coords["dp"],)
    for dp, cp, tp in itertools.product(replicas, range(sizes.cp), range(sizes.tp)):
        other = statuses.get(layout.rank_of(tp=tp, cp=cp, dp=dp, pp=coords["pp"]))
        if other is None or other.rank == status.rank or (dp != coords["dp"] and tp != coords["tp"]):
            continue
        if _position(other) != _position(status) and other.moved < status.moved:
            yield other.rank


def _position(status: RankStatus) -> tuple[object, ...]:
    place = status.place
    return () if place is None else (place.target, place.role, place.step, place.phase, place.microbatch, place.chunk)
