"""Surveys a whole run on all its ranks, from timelines: how long steps took, what became slow, when, and where.

Times are milliseconds per step. Compute is the forward, backward and combined passes of the timeline. It includes
communication inside a microbatch (tensor-, expert- and context-parallel), which a timeline does not separate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from megaprof.analysis.fleet.events import longest_pass
from megaprof.analysis.fleet.reading import CALLS, FleetReading, Key, RankSeries, Series, bucketed, read_fleet
from megaprof.analysis.fleet.shifts import Buckets, noise_of, relative_shifts
from megaprof.analysis.fleet.standstills import standstills
from megaprof.analysis.fleet.trends import (
    EXCESS,
    Floats,
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
from megaprof.analysis.trace.passes import Pass
from megaprof.analysis.trace.pool import Workers
from megaprof.analysis.trace.reading import find_timelines
from megaprof.formats.job import Standstill
from megaprof.parallel.topology import ParallelSizes

Group = tuple[int, int]  # pp and tp of the ranks that synchronise gradients with each other

#: This fraction of a step is added to synchronisation times before they are compared. So a change counts from 1 % of a
#: step on.
OF_STEP = 0.1
#: A rank's data ends early if it lacks this many steps at the end, and ended this many step times before the others.
LACKS_STEPS = 3
LACKS_TIME = 10


@dataclass(frozen=True)
class StageFleet:
    """One stage on all its ranks."""

    pp: int
    """Pipeline rank."""
    ranks: int
    """Number of its ranks with a timeline."""
    compute: Percentiles | None
    """Percentiles of compute per step over all steps of all ranks, in milliseconds; None without steps."""
    compute_ms: tuple[float | None, ...]
    """Compute per step of the median rank in milliseconds, by bucket."""
    shifts: tuple[Shift, ...]
    """Changes of the level compared with the other stages."""


@dataclass(frozen=True)
class Ended:
    """A rank whose data ends before that of the others."""

    rank: int
    """Global rank."""
    stage: int
    """Pipeline rank."""
    host: str | None
    """Host of the rank."""
    last_step: int
    """Last step with data."""


@dataclass(frozen=True)
class Coverage:
    """The part of a run that the timelines cover."""

    ranks: int
    """Number of ranks with a timeline."""
    missing: tuple[int, ...]
    """Ranks without one."""
    ended: tuple[Ended, ...]
    """Ranks whose data ends early."""
    steps: tuple[int, int]
    """First and last step of any rank."""
    calls: int
    """Number of schedule calls in all steps."""
    left_out: int
    """Largest number of steps on one rank that do not count, because a window was open or they failed."""
    again: int
    """Largest number of steps on one rank that ran twice."""


@dataclass(frozen=True)
class StepTimes:
    """Durations of steps, on the slowest rank."""

    step: Percentiles | None
    """Percentiles over all single steps, in milliseconds."""
    step_ms: tuple[float | None, ...]
    """Milliseconds, by bucket."""
    step_shifts: tuple[Shift, ...]
    """Changes of the level."""
    drift: float | None
    """Fraction by which steps became slower over the run; None if that may be chance."""
    single: SingleSteps
    """Single slow steps."""


@dataclass(frozen=True)
class Synchronisation:
    """Gradient synchronisation without waiting for other ranks."""

    synchronisation_ms: tuple[float | None, ...] = ()
    """Milliseconds per step, by bucket."""
    synchronisation_shifts: tuple[Shift, ...] = ()
    """Changes by which it became slower on all stages."""
    stage_synchronisation: tuple[tuple[int, Shift], ...] = ()
    """Changes by which it became slower on a single stage, each with the pipeline rank of that stage."""

    @property
    def median_ms(self) -> float | None:
        """Milliseconds per step in the median bucket."""
        known_ms = sorted(ms for ms in self.synchronisation_ms if ms is not None)
        return known_ms[len(known_ms) // 2] if known_ms else None


@dataclass(frozen=True)
class Fleet:
    """One target and role on all ranks, over the whole run. A bucket is a stretch of steps; a value by bucket is None
    if the bucket has none."""

    target: str
    """Captured target, such as ``train_actor``."""
    role: str | None
    """``actor``, ``ref``, ...; None without roles."""
    sizes: ParallelSizes
    """Parallel sizes of the job."""
    coverage: Coverage
    """Ranks and steps with data."""
    width: int
    """Steps per bucket."""
    buckets: tuple[int, ...]
    """First step of each bucket."""
    times: StepTimes
    """Durations of steps."""
    stages: tuple[StageFleet, ...]
    """Stages, by pipeline rank."""
    synchronisation: Synchronisation
    """Gradient synchronisation."""
    clock: Literal["host", "device"]
    """Clock of the timelines: ``device`` if the times are the GPU's."""
    standstills: tuple[Standstill, ...] = ()
    """Steps in which the job stood still, or in the middle of which it ended. They do not count in any times."""

    @property
    def key(self) -> Key:
        """Target, role and parallel sizes."""
        return Key(self.target, self.role, self.sizes)

    @property
    def stood_still(self) -> frozenset[int]:
        """The steps of `standstills`."""
        return frozenset(standstill.step for standstill in self.standstills)

    @property
    def shifts(self) -> list[Shift]:
        """All changes of level on stages and in gradient synchronisation."""
        synchronisation = self.synchronisation
        level_shifts = [
            *(shift for stage in self.stages for shift in stage.shifts),
            *synchronisation.synchronisation_shifts,
        ]
        return level_shifts + [shift for _, shift in synchronisation.stage_synchronisation]


def survey(reading: FleetReading) -> list[Fleet]:
    """Returns one `Fleet` for each target, role and set of sizes whose timelines are of the whole run."""
    return [
        _fleet(key, series, reading.width.get(key[:2], 1), partial(longest_pass, reading, key))
        for key, series in reading.series.items()
        if series.ranks and not any(metadata.around_windows for metadata in series.metadata.values())
    ]


def stood_still_in(directory: Path, role: str | None, workers: Workers = 1) -> tuple[Standstill, ...]:
    """Returns the steps in which the newest run in ``directory`` stood still, from its timelines; empty without any.
    ``role``: only steps of this role; None for all."""
    fleets = [f for f in survey(read_fleet(find_timelines(directory), workers)) if role in (None, f.role)]
    several = len({fleet.target for fleet in fleets}) > 1
    return tuple(
        replace(stood, target=fleet.target if several else None) for fleet in fleets for stood in fleet.standstills
    )


def _fleet(key: Key, series: Series, width: int, longest_pass_of: Callable[[int, int], Pass[int] | None]) -> Fleet:
    ranks = sorted(series.ranks, key=lambda rank: rank.coords.rank)
    step_ms, buckets = _buckets(series, ranks, width)
    times = _times(series, step_ms, buckets, width)
    compute = _matrix(ranks, buckets)
    at_stage = {
        pp: [row for row, rank in enumerate(ranks) if rank.coords.pp == pp]
        for pp in sorted({rank.coords.pp for rank in ranks})
    }
    stage_ms = np.array([low_median(compute[rows]) for rows in at_stage.values()])
    shifts_of = dict(zip(at_stage, relative_shifts(stage_ms, buckets), strict=True))
    synchronisation = Synchronisation((None,) * len(step_ms))
    if key.sizes.dp * key.sizes.cp > 1 and series.synchronising:
        groups, rows = _by_group(series.synchronising, buckets)
        floor_ms = OF_STEP * times.step.p50 if times.step else 0.0
        synchronisation = _synchronisation(groups, rows, buckets, floor_ms)
    return Fleet(
        target=key.target,
        role=key.role,
        sizes=key.sizes,
        coverage=_coverage(key, series, ranks, times.step),
        width=width,
        buckets=tuple(buckets.first.tolist()),
        times=times,
        stages=tuple(
            StageFleet(pp, len(at_stage[pp]), _percentiles(series, pp), _plain(compute_ms), shifts_of[pp])
            for pp, compute_ms in zip(at_stage, stage_ms, strict=True)
        ),
        synchronisation=synchronisation,
        clock="device" if any(rank.device_clock for rank in ranks) else "host",
        standstills=standstills(series.stood, max(rank.last_step for rank in ranks), longest_pass_of),
    )


def _matrix(ranks: Sequence[RankSeries], buckets: Buckets) -> Floats:
    """Returns the compute of every rank in milliseconds per step, [rank, bucket]; NaN if it has no steps there."""
    matrix = np.full((len(ranks), len(buckets.first)), np.nan)
    for row, rank in zip(matrix, ranks, strict=True):
        begin = rank.first - buckets.begin
        row[begin : begin + len(rank.counts)] = rank.compute
    return matrix


def _buckets(series: Series, ranks: Sequence[RankSeries], width: int) -> tuple[Floats, Buckets]:
    """Returns the milliseconds of each bucket's median step (a step takes as long as on its slowest rank), and the
    buckets."""
    with_steps = _with_steps(ranks)
    begin = min(rank.first for rank in with_steps)
    count = max(rank.first + len(rank.counts) for rank in with_steps) - begin
    steps = np.zeros(count, dtype=np.int64)
    for rank in with_steps:
        part = steps[rank.first - begin : rank.first - begin + len(rank.counts)]
        np.maximum(part, rank.counts, out=part)
    first, medians, _ = bucketed(series.steps >> CALLS, series.longest, width)
    step_ms = np.full(count, np.nan)
    step_ms[first - begin : first - begin + len(medians)] = medians
    starts = np.arange(begin, begin + count, dtype=np.int64) * width
    return step_ms, Buckets(
        begin=begin,
        first=np.maximum(starts, min(rank.first_step for rank in ranks)),
        last=starts + width - 1,
        steps=steps,
        seconds=step_ms * steps / 1e3,
    )


def _with_steps(ranks: Sequence[RankSeries]) -> Sequence[RankSeries]:
    return [rank for rank in ranks if len(rank.counts)] or ranks


def _times(series: Series, step_ms: Floats, buckets: Buckets, width: int) -> StepTimes:
    stretches = lasting(levels(step_ms, buckets.steps, noise_of(step_ms[None])), buckets.seconds)
    return StepTimes(
        step=Percentiles.of(series.longest) if len(series.longest) else None,
        step_ms=_plain(step_ms),
        step_shifts=tuple(
            _to_the_step(shift, series, width) for shift in shifts(stretches, buckets.first, buckets.last)
        ),
        drift=drift(step_ms),
        single=single_steps(series.steps >> CALLS, series.longest),
    )


def _to_the_step(shift: Shift, series: Series, width: int) -> Shift:
    """Returns the shift with its exact step, within its bucket or the bucket before. Single steps before this step are
    closer to the old level, and steps from it on are closer to the new level."""
    steps = series.steps >> CALLS
    nearby = (steps >= shift.step - width) & (steps < shift.step + width)
    nearby_ms = series.longest[nearby]
    cumulated_ms = np.cumsum(np.abs(nearby_ms - shift.before_ms) - np.abs(nearby_ms - shift.after_ms))
    steps_before = int(np.argmin(np.append(0.0, cumulated_ms[:-1])))
    return replace(shift, step=int(steps[nearby][steps_before]))


def _coverage(key: Key, series: Series, ranks: Sequence[RankSeries], step: Percentiles | None) -> Coverage:
    last_step, end_ns = max(rank.last_step for rank in ranks), max(rank.ended for rank in ranks)
    patience_ns = LACKS_TIME * (step.p50 if step else 0.0) * 1e6
    return Coverage(
        ranks=len(ranks),
        missing=tuple(sorted(set(range(key.sizes.world)) - {rank.coords.rank for rank in ranks})),
        ended=tuple(
            Ended(rank.coords.rank, rank.coords.pp, rank.host, rank.last_step)
            for rank in ranks
            if rank.last_step + LACKS_STEPS <= last_step and end_ns - rank.ended > patience_ns
        ),
        steps=(min(rank.first_step for rank in ranks), last_step),
        calls=len(series.steps),
        left_out=max(rank.left_out for rank in ranks),
        again=max(rank.again for rank in ranks),
    )


def _by_group(times: Mapping[tuple[int, int], tuple[int, Floats]], buckets: Buckets) -> tuple[list[Group], Floats]:
    """Returns every group that synchronises gradients, and the milliseconds that this took its quickest rank,
    [group, bucket]."""
    groups = sorted(times)
    rows = np.full((len(groups), len(buckets.first)), np.nan)
    for row, group in zip(rows, groups, strict=True):
        first, values = times[group]
        row_part = row[first - buckets.begin :]
        values_inside = values[: len(row_part)]
        row_part[: len(values_inside)] = values_inside
    return groups, rows


def _synchronisation(groups: list[Group], rows: Floats, buckets: Buckets, floor_ms: float) -> Synchronisation:
    median_ms = low_median(rows)
    stages = sorted({pp for pp, _ in groups})
    stage_shifts: list[tuple[int, Shift]] = []
    if len(stages) > 1:
        stage_ms = [low_median(rows[[row for row, group in enumerate(groups) if group[0] == pp]]) for pp in stages]
        shifts_by_stage = relative_shifts(np.array(stage_ms), buckets, floor_ms)
        stage_shifts = [
            (pp, shift) for pp, changes in zip(stages, shifts_by_stage, strict=True) for shift in _upwards(changes)
        ]
    return Synchronisation(
        synchronisation_ms=_plain(median_ms),
        synchronisation_shifts=_upwards(relative_shifts(median_ms[None], buckets, floor_ms)[0]),
        stage_synchronisation=tuple(stage_shifts),
    )


def _upwards(changes: Iterable[Shift]) -> tuple[Shift, ...]:
    return tuple(shift for shift in changes if shift.change > EXCESS)


def _percentiles(series: Series, pp: int) -> Percentiles | None:
    histogram = series.histograms[pp]
    if not histogram.counts.any():
        return None
    return Percentiles(*(histogram.percentile_ms(fraction) for fraction in (0.5, 0.95, 0.99, 1.0)))


def _plain(values: Floats) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in np.asarray(values, dtype=np.float64).tolist())
