"""Surveys a whole run on all its ranks, from timelines: how long steps took, what became slow, when, and where.

Times are milliseconds per step. Compute is the forward, backward and combined passes of the timeline. It includes
communication inside a microbatch (tensor-, expert- and context-parallel), which a timeline does not separate.

A level is a stretch of a series that lasts, and differs from the levels before and after it: the medians are apart by
more than `EXCESS`, and by more than `SIGMAS` standard errors. So a series begins as the shortest stretches that last,
and the two neighbours that differ least become one, until all neighbours differ. All of this works on logarithms,
because disturbances multiply a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from megaprof.analysis.fleet.reading import (
    FleetReading,
    Floats,
    Key,
    Numbers,
    Percentiles,
    Series,
    bucketed,
    low_median,
    read_fleet,
    stacked,
    standstills,
)
from megaprof.analysis.samples import MAD, MEDIAN_ERROR
from megaprof.analysis.trace.reading import Workers, recordings_in
from megaprof.formats.job import Standstill
from megaprof.parallel.peers import misfits, moving_median
from megaprof.parallel.topology import ParallelSizes

#: A level must exceed another level by this fraction.
EXCESS = 0.10
#: A change must be this many standard errors: many series are examined, each at many places.
SIGMAS = 6.0
#: A shorter stretch is a few slow steps, not a level.
LASTING_STEPS = 10
LASTING_BUCKETS = 4
#: A level also lasts this long: another program may take a processor for a while, which can be many short steps.
LASTING_SECONDS = 5.0
#: A single step is slow if it takes this many times the median of the steps around it, and if it also exceeds that
#: median by `SIGMAS` standard deviations.
SINGLE = 1.5
#: Steps on either side that count as around a step.
AROUND = 25
#: This fraction of a step is added to synchronisation times before they are compared. So a change counts from 1 % of a
#: step on.
OF_STEP = 0.1
#: A rank's data ends early if it lacks this many steps at the end, and ended this many step times before the others.
LACKS_STEPS = 3
LACKS_TIME = 10


@dataclass(frozen=True)
class Shift:
    """A change of a time to a new level."""

    step: int
    """First step on the new level."""
    until: int | None
    """Last step on the new level; None if the level stayed."""
    before_ms: float
    """Milliseconds before the change."""
    after_ms: float
    """Milliseconds on the new level."""

    @property
    def change(self) -> float:
        """``after_ms`` over ``before_ms``, minus 1."""
        return self.after_ms / max(self.before_ms, 1e-3) - 1  # a timeline's unit is the microsecond


@dataclass(frozen=True)
class SingleSteps:
    """Steps that took much longer than those around them, as checkpoints and garbage collection do."""

    count: int
    """Number of such steps."""
    worst: tuple[tuple[int, float], ...]
    """Worst of these steps, with their durations as multiples of the median of the steps around them."""
    every: int | None
    """Number of steps between them; None if it varies."""


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
    host: str
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
    buckets = Buckets(np.maximum(starts, first_step), counts, step_ms * counts / 1e3)
    compute_ms, stage_of = stacked(series.compute, begin, len(step_ms)), [rank.coords.pp for rank in series.ranks]
    stages = sorted({*stage_of})
    stage_ms = np.array([low_median(compute_ms[np.equal(stage_of, pp)]) for pp in stages])
    times = _times(series, step_ms, buckets)
    synchronisation = Synchronisation((None,) * len(step_ms))
    if key.sizes.dp * key.sizes.cp > 1 and series.synchronising:
        rows = stacked(series.synchronising.values(), begin, len(step_ms))
        floor_ms = OF_STEP * times.step.p50 if times.step else 0.0
        synchronisation = _synchronisation([pp for pp, _ in series.synchronising], rows, buckets, floor_ms)
    last_step, end_ns = max(rank.last_step for rank in ranks), max(rank.ended for rank in ranks)
    patience_ns = LACKS_TIME * (times.step.p50 if times.step else 0.0) * 1e6
    ended = (
        Ended(rank.coords.rank, rank.coords.pp, rank.host, rank.last_step)
        for rank in ranks
        if rank.last_step + LACKS_STEPS <= last_step and end_ns - rank.ended > patience_ns
    )
    return Fleet(
        target=key.target,
        role=key.role,
        sizes=key.sizes,
        coverage=Coverage(
            ranks=len(ranks),
            missing=tuple(sorted(set(range(key.sizes.world)) - {rank.coords.rank for rank in ranks})),
            ended=tuple(ended),
            steps=(first_step, last_step),
            calls=len(calls.numbers),
            left_out=max(rank.left_out for rank in ranks),
            again=max(rank.again for rank in ranks),
        ),
        width=width,
        buckets=tuple(buckets.first.tolist()),
        times=times,
        stages=tuple(
            StageFleet(pp, stage_of.count(pp), series.percentiles(pp), _plain(ms), changes)
            for pp, ms, changes in zip(stages, stage_ms, relative_shifts(stage_ms, buckets), strict=True)
        ),
        synchronisation=synchronisation,
        clock="device" if any(rank.device_clock for rank in ranks) else "host",
        standstills=standstills(series.stood, last_step, partial(reading.call, key)),
    )


def _times(series: Series, step_ms: Floats, buckets: Buckets) -> StepTimes:
    steps, longest = series.calls.steps, series.calls.longest

    def exact(shift: Shift) -> Shift:
        """Returns the shift with its exact step, within its bucket or the bucket before. Single steps before this step
        are closer to the old level, and steps from it on are closer to the new level."""
        nearby = (steps >= shift.step - series.width) & (steps < shift.step + series.width)
        costs = misfits(*(np.abs(longest[nearby] - ms) for ms in (shift.before_ms, shift.after_ms)))
        return replace(shift, step=int(steps[nearby][np.argmin(costs[:-1])]))

    # Each is one of the times: nothing between two times was measured.
    percentiles = np.percentile(longest, (50, 95, 99, 100), method="inverted_cdf").tolist() if len(longest) else None
    return StepTimes(
        step=Percentiles(*percentiles) if percentiles else None,
        step_ms=_plain(step_ms),
        step_shifts=tuple(map(exact, shifts(step_ms, step_ms, buckets, noise_of(step_ms[None])))),
        single=single_steps(steps, longest),
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


@dataclass(frozen=True)
class Buckets:
    """The buckets of steps, [bucket], of which a series has one value each: their first step, the number of steps, and
    the seconds that these took."""

    first: Numbers
    steps: Numbers
    seconds: Floats


@dataclass(frozen=True)
class Level:
    """A stretch of a series, [begin, end), in which it keeps its level. ``middle`` is the logarithm of its median."""

    begin: int
    end: int
    middle: float
    error: float
    """Standard error of ``middle``."""


def levels(values: Floats, buckets: Buckets, noise: float) -> list[Level]:
    """Splits a series, [bucket], into stretches of one level each. NaN is no value, and belongs to no stretch.

    ``noise`` is the least standard deviation of a value's logarithm (`noise_of`), because the few values of a short
    level may agree by chance.
    """
    places = np.flatnonzero(np.isfinite(values))
    logs = logarithms(values[places])

    def level(begin: int, end: int) -> Level:
        middle = float(np.median(logs[begin:end]))
        spread = max(MAD * float(np.median(np.abs(logs[begin:end] - middle))), noise)
        return Level(begin, end, middle, MEDIAN_ERROR * spread / math.sqrt(end - begin))

    steps, seconds = (np.append(0, np.nancumsum(each[places])) for each in (buckets.steps, buckets.seconds))
    bounds = [0]
    for end in range(LASTING_BUCKETS, len(logs) + 1):
        begin = bounds[-1]
        lasts = steps[end] - steps[begin] >= LASTING_STEPS and seconds[end] - seconds[begin] >= LASTING_SECONDS
        if lasts and end - begin >= LASTING_BUCKETS:
            bounds.append(end)
    bounds[max(len(bounds) - 1, 1) :] = [len(logs)]  # what is too short at the end belongs to the stretch before it
    found = [level(*each) for each in pairwise(bounds) if len(logs)]
    while len(found) > 1:
        # Two levels differ if their gap is more than 1.
        gaps = [
            abs(other.middle - one.middle) / max(math.log1p(EXCESS), SIGMAS * math.hypot(one.error, other.error))
            for one, other in pairwise(found)
        ]
        number = int(np.argmin(gaps))
        if gaps[number] > 1:
            break
        found[number : number + 2] = [level(found[number].begin, found[number + 1].end)]
    for number in range(len(found) - 1):
        before, after = found[number : number + 2]
        # The change is where the values on both sides are closest to the medians.
        off = (np.abs(logs[before.begin : after.end] - each.middle) for each in (before, after))
        inner = misfits(*off)[LASTING_BUCKETS:-LASTING_BUCKETS]
        change = before.begin + LASTING_BUCKETS + int(np.argmin(inner))
        found[number : number + 2] = level(before.begin, change), level(change, after.end)
    return [Level(int(places[x.begin]), int(places[x.end - 1]) + 1, x.middle, x.error) for x in found]


def noise_of(series: Floats) -> float:
    """Returns the standard deviation of the logarithm of one value of ``series``, [row, bucket]. It comes from the
    differences between neighbouring buckets of a row, because a change of level hardly affects these."""
    jumps = np.abs(np.diff(logarithms(series), axis=1))
    return MAD / math.sqrt(2) * float(np.nanmedian(jumps)) if np.isfinite(jumps).any() else 0.0


def shifts(series: Floats, times: Floats, buckets: Buckets, noise: float) -> tuple[Shift, ...]:
    """Returns the changes of level of ``series``, [bucket], with the milliseconds that ``times``, [bucket], has before
    and after them. Changes that these do not have, too, do not count."""
    found = []
    stretches = levels(series, buckets, noise)
    for number, (before, after) in enumerate(pairwise(stretches), 1):
        rises = after.middle > before.middle
        over = (later.begin for later in stretches[number + 1 :] if (later.middle < after.middle) == rises)
        until = next(over, None)
        before_ms, after_ms = (float(np.nanmedian(times[each.begin : each.end])) for each in (before, after))
        if (after_ms > before_ms) == rises:
            last = None if until is None else int(buckets.first[until]) - 1
            found.append(Shift(int(buckets.first[after.begin]), last, before_ms, after_ms))
    return tuple(found)


def relative_shifts(times: Floats, buckets: Buckets, floor_ms: float = 0.0) -> list[tuple[Shift, ...]]:
    """Returns when each row of ``times``, [row, bucket] in milliseconds, changed its level. Changes that all rows share
    do not count, unless there is only one row. ``floor_ms`` is added to all times; it keeps small changes of short
    times from counting."""
    raised = times + floor_ms
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = raised / np.array([[_quickest(row)] for row in raised])
        relative = factors / low_median(factors) if len(times) > 1 else factors
    noise = noise_of(relative)
    return [shifts(series, row, buckets, noise) for series, row in zip(relative, times, strict=True)]


def _quickest(row: Floats) -> float:
    """Returns the level of a row in its quickest stretch of buckets."""
    finite = row[np.isfinite(row)]
    if len(finite) < 2 * LASTING_BUCKETS:
        return float(np.median(finite)) if len(finite) else math.nan
    return float(moving_median(finite, min(LASTING_STEPS, len(finite) // 2) | 1).min())


def logarithms(times: Floats) -> Floats:
    """Returns the natural logarithms of times in milliseconds. Times below a microsecond, the unit of a timeline, count
    as one microsecond."""
    return np.asarray(np.log(np.maximum(times, 1e-3)))


def single_steps(steps: Numbers, times: Floats) -> SingleSteps:
    """Returns the single slow steps in a series of all steps."""
    if len(times) < 3:
        return SingleSteps(0, (), None)
    local_medians = moving_median(times, min(2 * AROUND + 1, len(times) - (len(times) + 1) % 2))
    relative = times / np.maximum(local_medians, 1e-9)
    spread = MAD * float(np.median(np.abs(relative - 1)))
    slow = np.flatnonzero(relative > 1 + max(SINGLE - 1, SIGMAS * spread))
    worst = slow[np.argsort(-relative[slow], kind="stable")][:5]
    gaps = np.diff(steps[slow])
    every = int(gaps[0]) if len(gaps) >= 2 and gaps[0] > 1 and (gaps == gaps[0]).all() else None
    return SingleSteps(len(slow), tuple(zip(steps[worst].tolist(), relative[worst].tolist(), strict=True)), every)


def _plain(values: Floats) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in np.asarray(values, dtype=np.float64).tolist())
