"""Finds levels, changes and outliers in a series of times. It uses medians, which a few slow steps do not move.

A series is split at the stretch that stands out most, and then its parts are split in the same way. A split counts if
the medians of both sides differ by more than `EXCESS` and by more than `SIGMAS` standard errors, and if each side lasts
for `LASTING_STEPS` steps. All of this works on logarithms, because disturbances multiply a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megaprof.analysis.samples import MAD, MEDIAN_ERROR
from megaprof.parallel.comparing import misfits, moving_median

#: A level must exceed another level by this fraction.
EXCESS = 0.10
#: A change must be this many standard errors: many series are examined, each at many places.
SIGMAS = 6.0
#: A shorter stretch is a few slow steps, not a level.
LASTING_STEPS = 10
LASTING_BUCKETS = 3
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
        # Each is one of the times, as in `reading.Histogram`: nothing between two times was measured.
        p50, p95, p99, largest = np.percentile(values, (50, 95, 99, 100), method="inverted_cdf").tolist()
        return cls(p50, p95, p99, largest)


@dataclass(frozen=True)
class Level:
    """A stretch of a series in which it keeps its level."""

    first: int
    """Position of its first bucket in the series."""
    last: int
    """Position of its last bucket."""
    value: float
    """Median, in the unit of the series."""
    error: float
    """Standard error of ``value``, as a fraction of it."""
    steps: int
    """Number of steps in its buckets."""


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


def levels(values: Floats, steps: Integers, noise: float = 0.0) -> list[Level]:
    """Splits a series into stretches of one level each. NaN is no value, and belongs to no stretch.

    ``steps`` has the number of steps whose median a value is. ``noise`` is the least standard deviation of a value's
    logarithm, if it is known from more than the scatter within a level.
    """
    positions = np.flatnonzero(np.isfinite(values))
    if not positions.size:
        return []
    logs, known_steps = logarithms(values[positions]), steps[positions]
    cumulated = np.concatenate(([0], np.cumsum(known_steps)))
    bounds = _merged(logs, cumulated, _split(logs, cumulated, 0, len(logs), noise), noise)
    return [
        Level(
            int(positions[begin]),
            int(positions[end - 1]),
            *_level(logs, begin, end, noise),
            int(cumulated[end] - cumulated[begin]),
        )
        for begin, end in bounds
    ]


def lasting(stretches: Sequence[Level], seconds: Floats) -> list[Level]:
    """Returns the levels without those that the series leaves again within `LASTING_SECONDS`. ``seconds`` has the time
    that every bucket took."""
    kept = list(stretches[:1])
    for level in stretches[1:]:
        if np.nansum(seconds[level.first : level.last + 1]) >= LASTING_SECONDS and differ(kept[-1], level):
            kept.append(level)
    return kept


def shifts(stretches: Sequence[Level], first_steps: Integers, last_steps: Integers) -> tuple[Shift, ...]:
    """Returns the changes between levels. ``first_steps`` and ``last_steps`` have the first and last step of every
    bucket."""
    changes = []
    for number in range(1, len(stretches)):
        before, after = stretches[number - 1], stretches[number]
        later_level = next(
            (level for level in stretches[number + 1 :] if (level.value < after.value) == (after.value > before.value)),
            None,
        )
        until = int(last_steps[later_level.first - 1]) if later_level else None
        changes.append(Shift(int(first_steps[after.first]), until, before.value, after.value))
    return tuple(changes)


def differ(before: Level, after: Level) -> bool:
    """Returns whether two levels differ by more than the thresholds of this module."""
    low, high = sorted((before.value, after.value))
    error = math.hypot(before.error, after.error)
    # Compares logarithms, because disturbances multiply a time. Nothing exceeds a time of zero or less.
    return low > 0 and math.log(high / low) > max(math.log1p(EXCESS), SIGMAS * error)


def logarithms(times: Floats) -> Floats:
    """Returns the natural logarithms of times in milliseconds. Times below a microsecond, the unit of a timeline, count
    as one microsecond."""
    return np.asarray(np.log(np.maximum(times, 1e-3)))


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
    return SingleSteps(len(slow), tuple((int(steps[position]), float(relative[position])) for position in worst), every)


def drift(values: Floats) -> float | None:
    """Returns the fraction by which a series grows from beginning to end, without its first tenth; None if the growth
    may be chance, or a single jump.

    The fraction is the Theil-Sen slope, times the length of the series, over the median. A Mann-Kendall test must
    confirm the growth on the whole series, by `SIGMAS`, and on both halves, by half of them.
    """
    finite = np.flatnonzero(np.isfinite(values))
    finite = finite[len(finite) // 10 :]
    n = len(finite)
    if n < 2 * LASTING_BUCKETS:
        return None
    positions, times = finite.astype(np.float64), values[finite]
    whole_trend, first_trend, last_trend = _trend(times), _trend(times[: n // 2]), _trend(times[n // 2 :])
    middle = float(np.median(times))
    if (
        abs(whole_trend) < SIGMAS
        or min(first_trend, last_trend, key=abs) * np.sign(whole_trend) < SIGMAS / 2
        or middle <= 0
    ):
        return None
    i, j = np.triu_indices(n, 1)
    slope = float(np.median((times[j] - times[i]) / (positions[j] - positions[i])))
    return slope * float(positions[-1] - positions[0]) / middle


def _trend(values: Floats) -> float:
    """Returns the Mann-Kendall statistic, in standard deviations."""
    n = len(values)
    i, j = np.triu_indices(n, 1)
    return float(np.sign(values[j] - values[i]).sum() / np.sqrt(n * (n - 1) * (2 * n + 5) / 18))


def low_median(values: Floats) -> Floats:
    """Returns the median along the first axis, ignoring NaN; NaN if there is no value. Of two middle values it returns
    the lower one, so that one slow value of two does not move it."""
    ordered = np.sort(values, axis=0)
    counts = np.isfinite(values).sum(axis=0)
    middle = np.maximum((counts - 1) // 2, 0)
    medians: Floats = np.take_along_axis(ordered, np.expand_dims(middle, 0), axis=0)[0]
    return np.where(counts > 0, medians, np.nan)


def _level(logs: Floats, begin: int, end: int, noise: float) -> tuple[float, float]:
    stretch = logs[begin:end]
    middle = float(np.median(stretch))
    spread = max(MAD * float(np.median(np.abs(stretch - middle))), noise)
    return float(np.exp(middle)), MEDIAN_ERROR * spread / float(np.sqrt(end - begin))


def _split(logs: Floats, cumulated: Integers, begin: int, end: int, noise: float) -> list[tuple[int, int]]:
    """Returns the parts of the stretch from ``begin`` to ``end``: the part that stands out most, and those before
    and after it, each split again."""
    smooth = moving_median(logs[begin:end], 5) if end - begin >= 5 else logs[begin:end]
    # Tries the ranks of the values first, so that a few enormous values weigh no more than others. A short stretch may
    # need the values themselves.
    for values in (np.argsort(np.argsort(smooth)), smooth):
        i, j = _standing_out(values.astype(np.float64), cumulated[begin : end + 1])
        parts = list(pairwise(sorted({begin, begin + i, begin + j, end})))
        if any(_differ(logs, *left, right[1], noise) for left, right in pairwise(parts)):
            return [
                part for part_begin, part_end in parts for part in _split(logs, cumulated, part_begin, part_end, noise)
            ]
    return [(begin, end)]


def _standing_out(values: Floats, cumulated: Integers) -> tuple[int, int]:
    """Returns the stretch whose mean differs most from that of the rest (circular binary segmentation, Olshen et al.
    2004), among those that split the series into two or three lasting parts; (0, 0) if there is none. ``cumulated`` has
    the number of steps before each value."""
    n = len(values)
    sums = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    i, j = np.triu_indices(n + 1, 1)
    lengths = j - i

    def lasts(first: Integers, last: Integers, or_none: bool) -> npt.NDArray[np.bool_]:
        enough = (last - first >= LASTING_BUCKETS) & (cumulated[last] - cumulated[first] >= LASTING_STEPS)
        return enough | (first == last) if or_none else enough

    start, end = np.zeros_like(i), np.full_like(j, n)
    allowed = (lengths < n) & lasts(i, j, False) & lasts(start, i, True) & lasts(j, end, True)
    if not allowed.any():
        return 0, 0
    i, j, lengths = i[allowed], j[allowed], lengths[allowed]
    best = int(np.argmax((sums[j] - sums[i]) ** 2 / (lengths * (1 - lengths / n))))
    return int(i[best]), int(j[best])


def _merged(logs: Floats, cumulated: Integers, stretches: list[tuple[int, int]], noise: float) -> list[tuple[int, int]]:
    merged = [stretches[0]]
    for begin, end in stretches[1:]:
        if _differ(logs, merged[-1][0], begin, end, noise):
            merged.append((begin, end))
        else:
            merged[-1] = (merged[-1][0], end)
    for number in range(len(merged) - 1):
        (begin, boundary), (_, end) = merged[number], merged[number + 1]
        boundary = _edge(logs, begin, boundary, end)
        merged[number], merged[number + 1] = (begin, boundary), (boundary, end)
    return merged


def _edge(logs: Floats, begin: int, boundary: int, end: int) -> int:
    """Returns where the level before ``boundary`` ends and the level after it begins, by the least absolute deviation
    from both medians."""
    levels = np.median(logs[begin:boundary]), np.median(logs[boundary:end])
    costs = misfits(*(np.abs(logs[begin:end] - level) for level in levels))
    inner = costs[LASTING_BUCKETS : len(costs) - LASTING_BUCKETS]
    return begin + LASTING_BUCKETS + int(np.argmin(inner)) if inner.size else boundary


def _differ(logs: Floats, begin: int, boundary: int, end: int, noise: float) -> bool:
    return differ(
        Level(begin, boundary - 1, *_level(logs, begin, boundary, noise), 0),
        Level(boundary, end - 1, *_level(logs, boundary, end, noise), 0),
    )
