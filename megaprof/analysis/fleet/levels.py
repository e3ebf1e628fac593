"""Finds levels, changes and outliers in series of times. It uses medians, which a few slow steps do not move.

A level is a stretch of a series that lasts, and differs from the levels before and after it: the medians are apart by
more than `EXCESS`, and by more than `SIGMAS` standard errors. So a series begins as the shortest stretches that last,
and the two neighbours that differ least become one, until all neighbours differ. All of this works on logarithms,
because disturbances multiply a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megaprof.analysis.samples import MAD, MEDIAN_ERROR
from megaprof.parallel.peers import misfits, moving_median

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

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of many times, in milliseconds."""

    p50: float
    """Median."""
    p95: float
    """95 % of the times are below."""
    p99: float
    """99 % of the times are below."""
    max: float
    """Longest time."""

    @classmethod
    def of(cls, values: Floats) -> Percentiles:
        # Each is one of the times: nothing between two times was measured.
        return cls(*np.percentile(values, (50, 95, 99, 100), method="inverted_cdf").tolist())


@dataclass(frozen=True)
class Buckets:
    """The buckets of steps, [bucket], of which a series has one value each: their first and last step, the number of
    steps, and the seconds that these took."""

    first: Integers
    last: Integers
    steps: Integers
    seconds: Floats


@dataclass(frozen=True)
class Level:
    """A stretch of a series, [begin, end), in which it keeps its level. ``middle`` is the logarithm of its median."""

    begin: int
    end: int
    middle: float
    error: float
    """Standard error of ``middle``."""

    def apart(self, other: Level) -> float:
        """Returns how far two levels are apart; they differ if it is more than 1."""
        error = math.hypot(self.error, other.error)
        return abs(other.middle - self.middle) / max(math.log1p(EXCESS), SIGMAS * error)


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
        gaps = [one.apart(other) for one, other in pairwise(found)]
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
            last = None if until is None else int(buckets.last[until - 1])
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


def low_median(values: Floats) -> Floats:
    """Returns the median along the first axis, ignoring NaN; NaN if there is no value. Of two middle values it returns
    the lower one, so that one slow value of two does not move it."""
    ordered = np.sort(values, axis=0)
    counts = np.isfinite(values).sum(axis=0)
    medians: Floats = np.take_along_axis(ordered, np.maximum((counts - 1) // 2, 0)[None], axis=0)[0]
    return np.where(counts > 0, medians, np.nan)


def single_steps(steps: Integers, times: Floats) -> SingleSteps:
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
