"""Surveys a whole run on all its ranks, from timelines: how long steps took, what became slow, when, and where.

Times are milliseconds per step. Compute is the forward, backward and combined passes of the timeline. It includes
communication inside a microbatch (tensor-, expert- and context-parallel), which a timeline does not separate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from megaprof.analysis.fleet.levels import (
    EXCESS,
    Buckets,
    Floats,
    Percentiles,
    Shift,
    SingleSteps,
    low_median,
    noise_of,
    relative_shifts,
    shifts,
    single_steps,
)
from megaprof.analysis.fleet.reading import (
    FleetReading,
    Key,
    RankRow,
    Series,
    bucketed,
    read_fleet,
    stacked,
    standstills,
)
from megaprof.analysis.trace.reading import Workers, recordings_in
from megaprof.formats.job import Standstill
from megaprof.parallel.peers import misfits
from megaprof.parallel.topology import ParallelSizes

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
    def shifts(self) -> list[Shift]:
        """All changes of level on stages and in gradient synchronisation."""
        of_stages = [shift for stage in self.stages for shift in stage.shifts]
        whole, single = self.synchronisation.synchronisation_shifts, self.synchronisation.stage_synchronisation
        return [*of_stages, *whole, *(shift for _, shift in single)]


def survey(reading: FleetReading) -> list[Fleet]:
    """Returns one `Fleet` for each target, role and set of sizes whose timelines are of the whole run."""
    return [
        _fleet(key, series, reading)
        for key, series in reading.series.items()
        if series.ranks and not any(metadata.around_windows for metadata in series.metadata.values())
    ]


def stood_still_in(directory: Path, role: str | None, workers: Workers = 1) -> tuple[Standstill, ...]:
    """Returns the steps in which the newest run in ``directory`` stood still, from its timelines; empty without any.
    ``role``: only steps of this role; None for all."""
    fleets = [f for f in survey(read_fleet(recordings_in(directory)[1], workers)) if role in (None, f.role)]
    several = len({fleet.target for fleet in fleets}) > 1
    return tuple(
        replace(stood, target=fleet.target if several else None) for fleet in fleets for stood in fleet.standstills
    )


def _fleet(key: Key, series: Series, reading: FleetReading) -> Fleet:
    calls, width, ranks = series.calls, series.width, sorted(series.ranks, key=lambda row: row.coords.rank)
    begin, medians = bucketed(calls.steps, calls.longest[None], width)
    (step_ms,) = medians
    starts = np.arange(begin, begin + len(step_ms)) * width
    counts = np.bincount(np.minimum(calls.steps // width - begin, len(step_ms) - 1), minlength=len(step_ms))
    first_step = min(rank.first_step for rank in ranks)
    buckets = Buckets(np.maximum(starts, first_step), starts + width - 1, counts, step_ms * counts / 1e3)
    compute_ms, stage_of = stacked(series.compute, begin, len(step_ms)), [rank.coords.pp for rank in series.ranks]
    stages = sorted({*stage_of})
    stage_ms = np.array([low_median(compute_ms[np.equal(stage_of, pp)]) for pp in stages])
    times = _times(series, step_ms, buckets)
    synchronisation = Synchronisation((None,) * len(step_ms))
    if key.sizes.dp * key.sizes.cp > 1 and series.synchronising:
        rows = stacked(series.synchronising.values(), begin, len(step_ms))
        floor_ms = OF_STEP * times.step.p50 if times.step else 0.0
        synchronisation = _synchronisation([pp for pp, _ in series.synchronising], rows, buckets, floor_ms)
    call_of = reading.calls_of(key, {each.coords.rank for each in series.stood})
    return Fleet(
        target=key.target,
        role=key.role,
        sizes=key.sizes,
        coverage=_coverage(key, series, ranks, times.step),
        width=width,
        buckets=tuple(buckets.first.tolist()),
        times=times,
        stages=tuple(
            StageFleet(pp, stage_of.count(pp), series.percentiles(pp), _plain(ms), changes)
            for pp, ms, changes in zip(stages, stage_ms, relative_shifts(stage_ms, buckets), strict=True)
        ),
        synchronisation=synchronisation,
        clock="device" if any(rank.device_clock for rank in ranks) else "host",
        standstills=standstills(series.stood, max(rank.last_step for rank in ranks), call_of),
    )


def _times(series: Series, step_ms: Floats, buckets: Buckets) -> StepTimes:
    steps, longest = series.calls.steps, series.calls.longest

    def exact(shift: Shift) -> Shift:
        """Returns the shift with its exact step, within its bucket or the bucket before. Single steps before this step
        are closer to the old level, and steps from it on are closer to the new level."""
        nearby = (steps >= shift.step - series.width) & (steps < shift.step + series.width)
        costs = misfits(*(np.abs(longest[nearby] - ms) for ms in (shift.before_ms, shift.after_ms)))
        return replace(shift, step=int(steps[nearby][np.argmin(costs[:-1])]))

    return StepTimes(
        step=Percentiles.of(longest) if len(longest) else None,
        step_ms=_plain(step_ms),
        step_shifts=tuple(map(exact, shifts(step_ms, step_ms, buckets, noise_of(step_ms[None])))),
        single=single_steps(steps, longest),
    )


def _coverage(key: Key, series: Series, ranks: Sequence[RankRow], step: Percentiles | None) -> Coverage:
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
        calls=len(series.calls.numbers),
        left_out=max(rank.left_out for rank in ranks),
        again=max(rank.again for rank in ranks),
    )


def _synchronisation(stage_of: Sequence[int], rows: Floats, buckets: Buckets, floor_ms: float) -> Synchronisation:
    """Returns what ``rows``, [group, bucket], show: the milliseconds that synchronising gradients took the quickest
    rank of each group. ``stage_of``: the stage of each."""
    median_ms, stages = low_median(rows), sorted({*stage_of})
    stage_ms = np.array([low_median(rows[np.equal(stage_of, pp)]) for pp in stages])
    of_stages = relative_shifts(stage_ms, buckets, floor_ms) if len(stages) > 1 else []
    return Synchronisation(
        synchronisation_ms=_plain(median_ms),
        synchronisation_shifts=tuple(
            shift for shift in relative_shifts(median_ms[None], buckets, floor_ms)[0] if shift.change > EXCESS
        ),
        stage_synchronisation=tuple(
            (pp, shift)
            for pp, changes in zip(stages, of_stages, strict=False)
            for shift in changes
            if shift.change > EXCESS
        ),
    )


def _plain(values: Floats) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in np.asarray(values, dtype=np.float64).tolist())
