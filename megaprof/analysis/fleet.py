"""A whole run on all its ranks, from timelines: how long steps took, what became slow, when, and where.

Times are milliseconds per step. Compute is forward, backward and combined passes as the timeline has them, with the
communication inside a microbatch (tensor-, expert- and context-parallel), which a timeline does not tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megaprof.analysis.fleet_reading import (
    INDEX_BITS,
    FleetReading,
    Key,
    RankSeries,
    Series,
    bucketed,
    percentile,
)
from megaprof.analysis.fleet_words import findings_of, notes_of, spans
from megaprof.analysis.stragglers import Buckets, Run, groups_of, layout_of, relative_shifts, slow_rows
from megaprof.analysis.trends import (
    EXCESS,
    Floats,
    Integers,
    Percentiles,
    Shift,
    SingleSteps,
    drift,
    levels,
    low_median,
    others_median,
    shifts,
    single_steps,
)

#: What a gradient synchronisation must have become longer by to be told, as a fraction of the step.
COST = 0.01
#: A rank's data ends early when it lacks this many steps, and the last of them were this many step times ago.
LACKS_STEPS = 3
LACKS_TIME = 10


@dataclass(frozen=True)
class StageFleet:
    """One stage on all its ranks. ``compute_ms`` by bucket: its median rank's, None without steps."""

    pp: int
    ranks: int
    compute: Percentiles
    compute_ms: tuple[float | None, ...]
    shifts: tuple[Shift, ...]


@dataclass(frozen=True)
class Straggler:
    """Ranks that are slower than the others of their stage: ``factor`` is own over peers, from ``from_step`` to
    ``until`` (None: to the end), ``since_start``: from the first step that is known. ``peers``: how many ranks, or
    groups of as many ranks, they were compared with; ``capture``: the selection that would tell which of them it is.

    ``what``: ``compute``, or ``synchronisation`` of gradients among all of ``ranks``.
    """

    what: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    stage: int
    from_step: int
    until: int | None
    since_start: bool
    factor: float
    own_ms: float
    peers_ms: float
    peers: int
    capture: str | None


@dataclass(frozen=True)
class Ended:
    """A rank whose data end before the others' do."""

    rank: int
    stage: int
    host: str | None
    last_step: int


@dataclass(frozen=True)
class Fleet:
    """One target and role. ``buckets``: the first step of each; by bucket ``step_ms``, the longest rank's step time,
    and ``imbalance``, slowest stage over mean stage. ``step``: percentiles over all single steps. ``own_us``,
    ``own_fraction``: what recording cost the training thread per step. ``findings``: sentences, the worst first."""

    key: Key
    ranks: int
    missing: tuple[int, ...]
    ended: tuple[Ended, ...]
    steps: tuple[int, int]
    calls: int
    left_out: int
    width: int
    buckets: tuple[int, ...]
    step: Percentiles | None
    step_ms: tuple[float | None, ...]
    step_shifts: tuple[Shift, ...]
    drift: float | None
    single: SingleSteps
    stages: tuple[StageFleet, ...]
    imbalance: tuple[float | None, ...]
    synchronisation_ms: tuple[float | None, ...]
    synchronisation_shifts: tuple[Shift, ...]
    stage_synchronisation: tuple[tuple[int, Shift], ...]
    stragglers: tuple[Straggler, ...]
    own_us: float
    own_fraction: float
    clock: str
    findings: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``: without what the target's report says already."""
        found = asdict(self)
        del found["key"]
        return found


def survey(reading: FleetReading) -> list[Fleet]:
    """One `Fleet` for every target, role and set of sizes in ``reading``."""
    return [_fleet(key, series, reading.width.get(key, 1)) for key, series in reading.series.items() if series.ranks]


def _fleet(key: Key, series: Series, width: int) -> Fleet:
    ranks = sorted(series.ranks, key=lambda r: r.coords.rank)
    with_steps = [r for r in ranks if len(r.counts)] or ranks
    first = min(r.first for r in with_steps)
    count = max(r.first + len(r.counts) for r in with_steps) - first
    starts = np.arange(first, first + count, dtype=np.int64) * width
    buckets = Buckets(np.maximum(starts, min(r.first_step for r in ranks)), starts + width - 1)
    compute, counted = _matrix(ranks, first, count), _counts(ranks, first, count)
    per_bucket = counted.max(axis=0) if len(counted) else np.zeros(count, dtype=np.int64)
    step_ms = _job(series, first, count, width)
    step = Percentiles.of(series.longest) if len(series.longest) else None
    at_stage = {
        pp: [n for n, r in enumerate(ranks) if r.coords.pp == pp] for pp in sorted({r.coords.pp for r in ranks})
    }
    stage_ms = np.array([low_median(compute[rows]) for rows in at_stage.values()])
    stage_shifts = relative_shifts(stage_ms, per_bucket, buckets)
    least = COST * step.p50 if step else 0.0
    sync_stages, sync_rows = _synchronisation(series, first, count) if key.sizes.dp * key.sizes.cp > 1 else ([], None)
    sync = low_median(sync_rows) if sync_rows is not None else np.full(count, np.nan)
    fleet = Fleet(
        key=key,
        ranks=len(ranks),
        missing=_missing(key, ranks),
        ended=_ended(ranks, step),
        steps=(min(r.first_step for r in ranks), max(r.last_step for r in ranks)),
        calls=len(series.steps),
        left_out=max(r.left_out for r in ranks),
        width=width,
        buckets=tuple(buckets.first.tolist()),
        step=step,
        step_ms=_plain(step_ms),
        step_shifts=shifts(levels(step_ms, per_bucket), buckets.first, buckets.last),
        drift=drift(step_ms),
        single=single_steps(series.steps >> INDEX_BITS, series.longest),
        stages=tuple(
            StageFleet(pp, len(rows), _percentiles(series, pp), _plain(stage_ms[n]), stage_shifts[n])
            for n, (pp, rows) in enumerate(at_stage.items())
        ),
        imbalance=_plain(_imbalance(stage_ms, key)),
        synchronisation_ms=_plain(sync),
        synchronisation_shifts=_upwards(relative_shifts(sync[None], per_bucket, buckets, least)[0]),
        stage_synchronisation=_of_single_stages(sync_stages, sync_rows, per_bucket, buckets, least),
        stragglers=(
            *_stragglers(key, ranks, at_stage, compute, per_bucket, buckets),
            *_slow_groups(ranks, sync_stages, sync_rows, per_bucket, buckets, least),
        ),
        own_us=float(np.median([r.own[0] for r in ranks])),
        own_fraction=float(np.median([r.own[1] for r in ranks])),
        clock="device" if any(r.device_clock for r in ranks) else "host",
        findings=(),
        notes=(),
    )
    return replace(fleet, findings=tuple(findings_of(fleet)), notes=tuple(notes_of(fleet, ranks)))


def _matrix(ranks: Sequence[RankSeries], first: int, count: int) -> Floats:
    """Compute, [rank, bucket], NaN where a rank has no steps."""
    matrix = np.full((len(ranks), count), np.nan)
    for row, rank in enumerate(ranks):
        matrix[row, rank.first - first : rank.first - first + len(rank.counts)] = rank.compute
    return matrix


def _counts(ranks: Sequence[RankSeries], first: int, count: int) -> Integers:
    """The largest number of steps that any rank has, per bucket."""
    most = np.zeros((1, count), dtype=np.int64)
    for rank in ranks:
        if len(rank.counts):
            part = most[0, rank.first - first : rank.first - first + len(rank.counts)]
            np.maximum(part, rank.counts, out=part)
    return most


def _job(series: Series, first: int, count: int, width: int) -> Floats:
    begin, medians, _ = bucketed(series.steps >> INDEX_BITS, series.longest, width)
    out = np.full(count, np.nan)
    out[begin - first : begin - first + len(medians)] = medians
    return out


def _imbalance(stage_ms: Floats, key: Key) -> Floats:
    """Slowest stage over mean stage; unknown without a pipeline, or when a stage is missing."""
    if key.sizes.pp == 1 or len(stage_ms) < key.sizes.pp:
        return np.full(stage_ms.shape[1], np.nan)
    known = np.isfinite(stage_ms).all(axis=0)
    out = np.full(stage_ms.shape[1], np.nan)
    out[known] = stage_ms[:, known].max(axis=0) / np.maximum(stage_ms[:, known].mean(axis=0), 1e-9)
    return out


def _synchronisation(series: Series, first: int, count: int) -> tuple[list[int], Floats | None]:
    """Stage and [row, bucket] of every group of ranks that synchronise gradients with each other."""
    if not series.synchronising:
        return [], None
    groups = sorted(series.synchronising)
    rows = np.full((len(groups), count), np.nan)
    for row, group in enumerate(groups):
        begin, values = series.synchronising[group]
        begin -= first
        fits = values[: max(0, count - begin)]
        rows[row, begin : begin + len(fits)] = fits
    return [pp for pp, _ in groups], rows


def _stragglers(
    key: Key,
    ranks: Sequence[RankSeries],
    at_stage: dict[int, list[int]],
    compute: Floats,
    steps: Integers,
    buckets: Buckets,
) -> list[Straggler]:
    places = {r.coords.rank: r.coords for r in ranks}
    layout = layout_of(places.values(), key.sizes)
    row_of = {r.coords.rank: row for row, r in enumerate(ranks)}
    by_stage: dict[int, list[tuple[int, ...]]] = {pp: [] for pp in at_stage}
    for group in groups_of(places, layout):
        by_stage[places[group[0]].pp].append(group)
    found = []
    for pp, groups in by_stage.items():
        rows = [[row_of[rank] for rank in group] for group in groups]
        typical = np.array([np.nanmedian(compute[own], axis=0) if len(own) > 1 else compute[own[0]] for own in rows])
        for run in slow_rows(typical, steps):
            found.append(_straggler(ranks, groups[run.row], pp, run, buckets, len(groups) - 1))
        # Who waits for nobody inside a microbatch stands out of its group.
        members = [(number, rank) for number, group in enumerate(groups) if len(group) > 1 for rank in group]
        if members:
            own = compute[[row_of[rank] for _, rank in members]]
            against = np.concatenate([others_median(compute[each]) for each in rows if len(each) > 1])
            for run in slow_rows(own, steps, against=against):
                number, rank = members[run.row]
                found.append(_straggler(ranks, (rank,), pp, run, buckets, len(groups[number]) - 1))
    return sorted(found, key=lambda s: (s.until is not None, -s.factor))


def _straggler(
    ranks: Sequence[RankSeries],
    members: Iterable[int],
    pp: int,
    run: Run,
    buckets: Buckets,
    peers: int,
    what: str = "compute",
) -> Straggler:
    members = tuple(members)
    hosts = {r.coords.rank: r.host for r in ranks}
    return Straggler(
        what=what,
        ranks=members,
        hosts=tuple(sorted({host for rank in members if (host := hosts[rank]) is not None})),
        stage=pp,
        from_step=int(buckets.first[run.first]),
        until=None if run.to_end else int(buckets.last[run.last]),
        since_start=run.since_start,
        factor=run.factor,
        own_ms=run.own_ms,
        peers_ms=run.peers_ms,
        peers=peers,
        capture=spans(members) if len(members) > 1 else None,
    )


def _slow_groups(
    ranks: Sequence[RankSeries],
    stages: list[int],
    rows: Floats | None,
    steps: Integers,
    buckets: Buckets,
    least: float,
) -> list[Straggler]:
    """Groups whose gradient synchronisation is slower than that of the others of their stage."""
    found: list[Straggler] = []
    if rows is None:
        return found
    tensor = {pp: sorted({r.coords.tp for r in ranks if r.coords.pp == pp}) for pp in set(stages)}
    for pp in sorted(set(stages)):
        own = rows[[n for n, stage in enumerate(stages) if stage == pp]]
        for run in slow_rows(own, steps, least_ms=least):
            tp = tensor[pp][run.row]
            members = [r.coords.rank for r in ranks if (r.coords.pp, r.coords.tp) == (pp, tp)]
            found.append(_straggler(ranks, members, pp, run, buckets, len(own) - 1, "synchronisation"))
    return found


def _of_single_stages(
    stages: list[int], rows: Floats | None, steps: Integers, buckets: Buckets, least: float
) -> tuple[tuple[int, Shift], ...]:
    """When the gradient synchronisation of one stage became slower, beside that of all."""
    if rows is None or len(set(stages)) < 2:
        return ()
    named = sorted(set(stages))
    per_stage = np.array([low_median(rows[[n for n, stage in enumerate(stages) if stage == pp]]) for pp in named])
    found = relative_shifts(per_stage, steps, buckets, least)
    return tuple((pp, shift) for pp, each in zip(named, found, strict=True) for shift in _upwards(each))


def _upwards(found: Iterable[Shift]) -> tuple[Shift, ...]:
    return tuple(shift for shift in found if shift.change > EXCESS)


def _missing(key: Key, ranks: Sequence[RankSeries]) -> tuple[int, ...]:
    sizes = key.sizes
    world = sizes.tp * sizes.cp * sizes.dp * sizes.pp
    return tuple(sorted(set(range(world)) - {r.coords.rank for r in ranks}))


def _ended(ranks: Sequence[RankSeries], step: Percentiles | None) -> tuple[Ended, ...]:
    last, end = max(r.last_step for r in ranks), max(r.ended for r in ranks)
    patience = LACKS_TIME * (step.p50 if step else 0.0) * 1e6
    return tuple(
        Ended(r.coords.rank, r.coords.pp, r.host, r.last_step)
        for r in ranks
        if r.last_step + LACKS_STEPS <= last and end - r.ended > patience
    )


def _percentiles(series: Series, pp: int) -> Percentiles:
    histogram = series.histograms[pp]
    if not histogram.any():
        return Percentiles(0.0, 0.0, 0.0, 0.0)
    p50, p95, p99 = (min(percentile(histogram, f), series.most[pp]) for f in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, series.most[pp])


def _plain(values: Floats) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in np.asarray(values, dtype=np.float64).tolist())
