"""A whole run on all its ranks, from timelines: how long steps took, what became slow, when, and where.

Times are milliseconds per step. Compute is forward, backward and combined passes as the timeline has them, with the
communication inside a microbatch (tensor-, expert- and context-parallel), which a timeline does not tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaprof.analysis.fleet.reading import (
    INDEX_BITS,
    FleetReading,
    Key,
    RankSeries,
    Series,
    bucketed,
    percentile,
)
from megaprof.analysis.fleet.slow import Group, Straggler, late_ranks, matrix_of, slow_groups, slow_ranks
from megaprof.analysis.fleet.stragglers import Buckets, noise_of, relative_shifts
from megaprof.analysis.fleet.trends import (
    Floats,
    Integers,
    Percentiles,
    Shift,
    SingleSteps,
    drift,
    lasting,
    levels,
    low_median,
    shifts,
    single_steps,
)
from megaprof.analysis.stages.slow import EXCESS

#: A gradient synchronisation is compared with this part of the step added, so that what is told takes 1 % of it.
OF_STEP = 0.1
#: A rank's data ends early when it lacks this many steps, and the last of them were this many step times ago.
LACKS_STEPS = 3
LACKS_TIME = 10


@dataclass(frozen=True)
class StageFleet:
    """One stage on all its ranks."""

    pp: int
    """Its pipeline rank."""
    ranks: int
    """How many of its ranks have a timeline."""
    compute: Percentiles | None
    """Milliseconds per step, over all steps of all ranks; None without steps."""
    compute_ms: tuple[float | None, ...]
    """Milliseconds per step of its median rank, by bucket."""
    shifts: tuple[Shift, ...]
    """When that changed compared with the other stages."""


@dataclass(frozen=True)
class Ended:
    """A rank whose data end before the others' do."""

    rank: int
    """Its global number."""
    stage: int
    """Its pipeline rank."""
    host: str | None
    """The machine that it ran on."""
    last_step: int
    """Its last step."""


@dataclass(frozen=True)
class Fleet:
    """One target and role on all its ranks, over the whole run. By bucket: one value for every stretch of steps, None
    where there is none."""

    key: Key
    """Target, role and parallel sizes."""
    ranks: int
    """How many ranks have a timeline."""
    missing: tuple[int, ...]
    """The other ranks of the world, by number."""
    ended: tuple[Ended, ...]
    """Ranks whose data end early."""
    steps: tuple[int, int]
    """The first and the last step of any rank."""
    calls: int
    """Schedule calls of all steps."""
    left_out: int
    """Steps of a rank, at most, that do not count: a window was open in them, or they failed."""
    again: int
    """Steps of a rank, at most, that ran twice."""
    width: int
    """Steps per bucket."""
    buckets: tuple[int, ...]
    """The first step of each bucket."""
    step: Percentiles | None
    """Milliseconds of a step on its longest rank, over all single steps."""
    step_ms: tuple[float | None, ...]
    """The same, by bucket."""
    step_shifts: tuple[Shift, ...]
    """When that changed its level."""
    drift: float | None
    """By which fraction steps grow over the run; None where that may be chance."""
    single: SingleSteps
    """Single slow steps."""
    stages: tuple[StageFleet, ...]
    """By pipeline rank."""
    imbalance: tuple[float | None, ...]
    """Compute of the slowest stage over the average over stages, by bucket."""
    synchronisation_ms: tuple[float | None, ...]
    """Milliseconds of gradient synchronisation per step without waiting for other ranks, by bucket."""
    synchronisation_shifts: tuple[Shift, ...]
    """When that became slower on all stages."""
    stage_synchronisation: tuple[tuple[int, Shift], ...]
    """When that became slower on a single stage, with its pipeline rank."""
    stragglers: tuple[Straggler, ...]
    """Ranks that hold the others up, those first that compute longer until the end."""
    own_us: float
    """Microseconds per step that recording cost the training thread, the median rank's."""
    own_fraction: float
    """The same as a fraction of the step."""
    clock: str
    """``host``, or ``device`` where the times are the GPU's."""
    directory: Path
    """Where the job writes, so that a capture can be asked for."""

    @property
    def median_synchronisation_ms(self) -> float | None:
        """Milliseconds of gradient synchronisation in the median bucket."""
        known = sorted(ms for ms in self.synchronisation_ms if ms is not None)
        return known[len(known) // 2] if known else None


def survey(reading: FleetReading, directory: Path) -> list[Fleet]:
    """One `Fleet` for every target, role and set of sizes in ``reading``, of the job that writes to ``directory``."""
    return [
        _fleet(key, series, reading.width.get(key, 1), directory)
        for key, series in reading.series.items()
        if series.ranks
    ]


def _fleet(key: Key, series: Series, width: int, directory: Path) -> Fleet:
    ranks = sorted(series.ranks, key=lambda r: r.coords.rank)
    with_steps = [r for r in ranks if len(r.counts)] or ranks
    first = min(r.first for r in with_steps)
    count = max(r.first + len(r.counts) for r in with_steps) - first
    starts = np.arange(first, first + count, dtype=np.int64) * width
    step_ms, per_bucket = _job(series, first, count, width), _counts(ranks, first, count)
    buckets = Buckets(
        first=np.maximum(starts, min(r.first_step for r in ranks)),
        last=starts + width - 1,
        steps=per_bucket,
        seconds=step_ms * per_bucket / 1e3,
    )
    compute = matrix_of(ranks, "compute", first, count)
    step = Percentiles.of(series.longest) if len(series.longest) else None
    at_stage = {
        pp: [n for n, r in enumerate(ranks) if r.coords.pp == pp] for pp in sorted({r.coords.pp for r in ranks})
    }
    stage_ms = np.array([low_median(compute[rows]) for rows in at_stage.values()])
    stage_shifts = relative_shifts(stage_ms, buckets)
    floor = OF_STEP * step.p50 if step else 0.0
    groups, sync_rows = _synchronisation(series, first, count) if key.sizes.dp * key.sizes.cp > 1 else ([], None)
    stragglers = slow_ranks(key, ranks, at_stage, compute, buckets)
    sync = low_median(sync_rows) if sync_rows is not None else np.full(count, np.nan)
    return Fleet(
        key=key,
        ranks=len(ranks),
        missing=_missing(key, ranks),
        ended=_ended(ranks, step),
        steps=(min(r.first_step for r in ranks), max(r.last_step for r in ranks)),
        calls=len(series.steps),
        left_out=max(r.left_out for r in ranks),
        again=max(r.again for r in ranks),
        width=width,
        buckets=tuple(buckets.first.tolist()),
        step=step,
        step_ms=_plain(step_ms),
        step_shifts=_of_steps(step_ms, buckets),
        drift=drift(step_ms),
        single=single_steps(series.steps >> INDEX_BITS, series.longest),
        stages=tuple(
            StageFleet(pp, len(rows), _percentiles(series, pp), _plain(stage_ms[n]), stage_shifts[n])
            for n, (pp, rows) in enumerate(at_stage.items())
        ),
        imbalance=_plain(_imbalance(stage_ms, key)),
        synchronisation_ms=_plain(sync),
        synchronisation_shifts=_upwards(relative_shifts(sync[None], buckets, floor)[0]),
        stage_synchronisation=_of_single_stages(groups, sync_rows, buckets, floor),
        stragglers=(
            *stragglers,
            *slow_groups(ranks, groups, sync_rows, buckets, floor),
            *(late_ranks(ranks, first, count, step_ms, buckets, stragglers) if groups else ()),
        ),
        own_us=float(np.median([r.own[0] for r in with_steps])),
        own_fraction=float(np.median([r.own[1] for r in with_steps])),
        clock="device" if any(r.device_clock for r in ranks) else "host",
        directory=directory,
    )


def _counts(ranks: Sequence[RankSeries], first: int, count: int) -> Integers:
    """The largest number of steps that any rank has, per bucket."""
    most = np.zeros(count, dtype=np.int64)
    for rank in ranks:
        if len(rank.counts):
            part = most[rank.first - first : rank.first - first + len(rank.counts)]
            np.maximum(part, rank.counts, out=part)
    return most


def _of_steps(step_ms: Floats, buckets: Buckets) -> tuple[Shift, ...]:
    found = levels(step_ms, buckets.steps, noise_of(step_ms[None]))
    return shifts(lasting(found, buckets.seconds), buckets.first, buckets.last)


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


def _synchronisation(series: Series, first: int, count: int) -> tuple[list[Group], Floats | None]:
    """Every group of ranks that synchronise gradients with each other, and [row, bucket] of what it took."""
    if not series.synchronising:
        return [], None
    groups = sorted(series.synchronising)
    rows = np.full((len(groups), count), np.nan)
    for row, group in enumerate(groups):
        begin, values = series.synchronising[group]
        begin -= first
        fits = values[: max(0, count - begin)]
        rows[row, begin : begin + len(fits)] = fits
    return groups, rows


def _of_single_stages(
    groups: list[Group], rows: Floats | None, buckets: Buckets, floor: float
) -> tuple[tuple[int, Shift], ...]:
    """When the gradient synchronisation of one stage became slower, beside that of all."""
    named = sorted({pp for pp, _ in groups})
    if rows is None or len(named) < 2:
        return ()
    per_stage = np.array([low_median(rows[[n for n, group in enumerate(groups) if group[0] == pp]]) for pp in named])
    found = relative_shifts(per_stage, buckets, floor)
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


def _percentiles(series: Series, pp: int) -> Percentiles | None:
    histogram = series.histograms[pp]
    if not histogram.any():
        return None
    p50, p95, p99 = (min(percentile(histogram, f), series.most[pp]) for f in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, series.most[pp])


def _plain(values: Floats) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in np.asarray(values, dtype=np.float64).tolist())
