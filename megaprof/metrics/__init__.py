"""The figures of a running job, computed from its status files (docs/on-demand.md lists every figure).

Each rank's figures are medians over its last steps. compute = forward + backward + combined passes of a step, with
whatever is communicated inside a microbatch; its median is not the sum of the medians of these passes. A slow rank is
named by itself: compute and gradients of its stage are the medians of the others, which together with the bubble make a
step. What is slow is so even if all waits for a processor core were part of it. Of ranks that communicate with each
other inside a microbatch, one makes all slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megaprof.formats.job import RankStatus, RunRecord
from megaprof.parallel.peers import of_others

#: A rank is slow from this factor over its peers on, and a stage from this one over the average stage.
SLOW = 1.1
#: A rank waits for a processor core from this part of the time on.
WAITS = SLOW - 1


@dataclass(frozen=True)
class SlowRanks:
    """Ranks of one stage that are slower than its other ranks."""

    ranks: tuple[int, ...]
    """Slow ranks, the slowest first."""
    stage: int
    """Stage of these ranks."""
    ratio: float
    """Compute of the slowest one / that of its peers."""
    compute_ms: float
    """Compute of the slowest one per step, in milliseconds."""
    peer: int
    """A typical other rank of the stage."""
    since: int | None = None
    """First step from which on the slowest one was almost always slow; None if unknown, or if it is the first."""


@dataclass(frozen=True)
class HostBound:
    """Stages whose GPUs wait for their host in most passes: they have nothing else to do at both ends of these."""

    stages: tuple[int, ...]
    """Pipeline ranks, the one that waits most first."""
    passes: float
    """Fraction of the passes in which the one that waits least does so."""
    rank: int
    """Rank of the first stage that waits most."""
    since: int | None = None
    """First step from which on that rank almost always waited; None if unknown, or if it is the first of all."""


@dataclass(frozen=True)
class StageFigures:
    """One pipeline stage now. A field is None if it is not known."""

    pp: int
    """Pipeline rank."""
    ranks: int
    """Number of its ranks that answered."""
    step: int | None
    """Last step of any of them."""
    step_ms: float | None
    """Duration of a step in milliseconds (see `Summary`): median of its ranks."""
    compute_ms: float | None
    """Compute per step in milliseconds: median of its ranks, without slow ones."""
    gradients_ms: float | None
    """Time per step to finalise gradients, with waiting for other ranks, in milliseconds: median without slow ranks."""
    imbalance: float | None
    """Compute of this stage / mean of all stages."""
    slowest_rank: int | None
    """Rank that computes longest."""
    slowest_ms: float | None
    """Compute of that rank in milliseconds."""
    host_bound_passes: float | None
    """Fraction of the passes in which its GPUs waited for their host: mean of its ranks; None on a CPU."""


@dataclass(frozen=True)
class Summary:
    """The whole job now. A field is None if it is not known: there is no timeline, or no step has finished."""

    target: str | None
    """Target of the steps."""
    step: int | None
    """Last step of any rank."""
    stages: tuple[StageFigures, ...]
    """Stages with at least one known rank, in order."""
    step_ms: float | None
    """Duration of a step in milliseconds: that of the stage that takes longest. Without any timeline, the time from one
    step to the next."""
    imbalance: float | None
    """Compute of the slowest stage / mean of all stages."""
    slowest_stage: int | None
    """Pipeline rank of that stage."""
    bubble_fraction: float | None
    """Fraction of a step for which a stage waits for others, averaged over the stages."""
    straggler: int | None
    """Rank that computes longest compared with its peers, the other ranks of its stage."""
    straggler_ratio: float | None
    """Compute of that rank / median of its peers."""
    slow_stage: int | None
    """The slowest stage if it computes more than 1.1 times as long as the average one; otherwise None."""
    recent: int | None
    """Number of steps behind these medians, the last ones of every rank."""


def _compared(
    statuses: Iterable[RankStatus],
) -> tuple[dict[int, list[RankStatus]], dict[int, float], dict[int, float]]:
    """Returns the ranks of each stage; compute of each rank over that of the others of its stage (`peers.of_others`),
    as in the report, where there are others; and the same of the slow ranks alone."""
    by_stage: dict[int, list[RankStatus]] = {}
    for status in sorted(statuses, key=lambda status: status.coords["pp"]):
        by_stage.setdefault(status.coords["pp"], []).append(status)
    above, slow = dict[int, float](), dict[int, float]()
    for members in by_stage.values():
        timed = [status for status in members if status.compute_ms]
        times = np.array([status.compute_ms for status in timed])
        factors = (times / of_others(times)).tolist() if len(timed) > 1 else []
        above |= {status.rank: factor for status, factor in zip(timed, factors, strict=False)}
        left = {status.rank: (_undisturbed_ms(status) or 0.0) / (status.compute_ms or 1.0) for status in timed}
        slow |= {rank: above[rank] for rank in left if above.get(rank, 0.0) * left[rank] > SLOW}
    return by_stage, above, slow


def summarise(run: RunRecord, statuses: Iterable[RankStatus]) -> Summary:
    """Returns the figures of the ranks in `statuses`. There is a straggler only if a stage has several of these."""
    by_stage, above, slow = _compared(statuses)
    # They show how long the stage computes, as in the report.
    usual = {pp: [status for status in members if status.rank not in slow] for pp, members in by_stage.items()}
    compute = {pp: _median(status.compute_ms for status in members) for pp, members in usual.items()}
    known_ms = {pp: value for pp, value in compute.items() if value is not None}
    # A mean over some stages is not the mean of all.
    mean = statistics.fmean(known_ms.values()) if len(known_ms) == run.sizes.pp and any(known_ms.values()) else None
    everyone = [status for members in by_stage.values() for status in members]
    # Where some ranks keep a timeline, the others know only the time from one step to the next, which is longer.
    clocks = [status for status in everyone if status.recent is not None] or everyone
    steps_ms = {pp: _median(status.step_ms for status in clocks if status.coords["pp"] == pp) for pp in by_stage}

    def figures(pp: int) -> StageFigures:
        members, compute_ms, waiting = by_stage[pp], compute[pp], _host_bound(by_stage[pp])
        timed = [(status.compute_ms, -status.rank) for status in members if status.compute_ms is not None]
        slowest_ms, slowest = max(timed, default=(None, None))
        return StageFigures(
            pp=pp,
            ranks=len(members),
            step=max((step for status in members if (step := status.last_step) is not None), default=None),
            step_ms=steps_ms[pp],
            compute_ms=compute_ms,
            gradients_ms=_median(status.recent.finalize_ms for status in usual[pp] if status.recent is not None),
            imbalance=None if compute_ms is None or mean is None else compute_ms / mean,
            slowest_rank=None if slowest is None else -slowest,
            slowest_ms=slowest_ms,
            host_bound_passes=statistics.fmean(waiting.values()) if waiting else None,
        )

    stages = tuple(map(figures, by_stage))
    slowest = max(known_ms, key=lambda pp: known_ms[pp]) if mean is not None else None
    undisturbed = None if slowest is None else _median(map(_undisturbed_ms, usual[slowest]))
    step_ms = max(filter(None, steps_ms.values()), default=None)
    busy = [s.compute_ms + s.gradients_ms for s in stages if s.compute_ms is not None and s.gradients_ms is not None]
    # Medians of the parts of steps may come to more than the median of the steps.
    idle = [max(0.0, 1 - busy_ms / step_ms) for busy_ms in busy] if step_ms else []
    ratio, straggler = max(((factor, rank) for rank, factor in above.items()), default=(None, None))
    return Summary(
        target=next((status.recent.target for status in everyone if status.recent is not None), None),
        step=max((stage.step for stage in stages if stage.step is not None), default=None),
        stages=stages,
        step_ms=step_ms,
        imbalance=None if mean is None or slowest is None else known_ms[slowest] / mean,
        slowest_stage=slowest,
        bubble_fraction=statistics.fmean(idle) if mean is not None and idle else None,
        straggler=straggler,
        straggler_ratio=ratio,
        slow_stage=slowest if mean and undisturbed is not None and undisturbed / mean > SLOW else None,
        recent=max((status.recent.steps for status in everyone if status.recent is not None), default=None),
    )


def longest_stage(times: Iterable[tuple[int, float | None]]) -> float | None:
    """Returns the time of the stage that takes longest, each stage being the median of its ranks; None if no time is
    known. ``times``: the stage of each rank, and its time."""
    by_stage: dict[int, list[float | None]] = {}
    for stage, time in times:
        by_stage.setdefault(stage, []).append(time)
    return max((ms for members in by_stage.values() if (ms := _median(members)) is not None), default=None)


def slow_ranks(statuses: Iterable[RankStatus]) -> list[SlowRanks]:
    """Returns the slow ranks of each stage that has some, starting with the stage whose slowest rank is furthest above
    its peers."""
    found = []
    by_stage, _, slow_of_all = _compared(statuses)
    for pp, members in by_stage.items():
        compute_ms = {status.rank: status.compute_ms for status in members if status.compute_ms}
        peers = {rank: ms for rank, ms in compute_ms.items() if rank not in slow_of_all}
        slow = {rank: slow_of_all[rank] for rank in compute_ms if rank in slow_of_all}
        if slow and peers:
            usual = statistics.median_low(peers.values())
            peer = min(rank for rank, ms in peers.items() if ms == usual)
            # A rank that is above its peers by far less than the slowest rank may be so by chance.
            most = max(slow.values())
            named = [rank for rank, factor in slow.items() if factor - 1 > (most - 1) / 2]
            first, *others = sorted(named, key=lambda rank: (-slow[rank], rank))
            found.append(SlowRanks((first, *others), pp, most, compute_ms[first], peer))
    return sorted(found, key=lambda slow: -slow.ratio)


def host_bound(statuses: Iterable[RankStatus]) -> HostBound | None:
    """Returns the stages whose GPUs wait for their host in more than half of the passes; None if there are none."""
    by_stage = {pp: parts for pp, members in _compared(statuses)[0].items() if (parts := _host_bound(members))}
    means = {pp: statistics.fmean(parts.values()) for pp, parts in by_stage.items()}
    stages = sorted((pp for pp, mean in means.items() if mean > 0.5), key=lambda pp: (-means[pp], pp))
    if not stages:
        return None
    first = by_stage[stages[0]]
    return HostBound((*stages,), means[stages[-1]], max(first, key=lambda rank: (first[rank], -rank)))


def _host_bound(members: Iterable[RankStatus]) -> dict[int, float]:
    """Returns the fraction of its passes in which each rank's GPU waited for its host, as far as it is known."""
    recents = {status.rank: status.recent for status in members if status.recent is not None}
    return {rank: part for rank, recent in recents.items() if (part := recent.host_bound_passes) is not None}


def _undisturbed_ms(status: RankStatus) -> float | None:
    """Returns the least compute of a rank without its waits for a processor core. Its status does not say how much of
    these fell into its passes, so all of them may have."""
    compute_ms, step_ms = status.compute_ms, status.step_ms
    return None if compute_ms is None or step_ms is None else max(0.0, compute_ms - (status.waits or 0.0) * step_ms)


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None
