"""Finds stages that became slower than the others, and when. What slows down all stages alike cancels out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaprof.analysis.fleet.trends import (
    LASTING_BUCKETS,
    LASTING_STEPS,
    Floats,
    Integers,
    Shift,
    lasting,
    levels,
    logarithms,
    low_median,
    shifts,
)
from megaprof.analysis.samples import MAD
from megaprof.parallel.comparing import moving_median


@dataclass(frozen=True)
class Buckets:
    """The buckets of steps. A series has one value per bucket."""

    begin: int
    """Number of the first bucket, counted from step 0."""
    first: Integers
    """First step of each bucket."""
    last: Integers
    """Last step of each bucket."""
    steps: Integers
    """Number of steps in each bucket."""
    seconds: Floats
    """Seconds that each bucket took."""


def relative_shifts(values: Floats, buckets: Buckets, floor_ms: float = 0.0) -> list[tuple[Shift, ...]]:
    """Returns when each row of ``values``, [row, bucket], changed its level. Changes that all rows share do not count,
    unless there is only one row. ``floor_ms`` is added to all values; it keeps small changes of short times from
    counting."""
    raised = values + floor_ms
    baseline = np.array([_quickest(row) for row in raised])
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = raised / baseline[:, None]
        relative = factors / low_median(factors) if len(values) > 1 else factors
    noise = noise_of(relative)
    shifts_by_row = []
    for row in range(len(values)):
        changes: list[Shift] = []
        since_bucket = 0
        stretches = lasting(levels(relative[row], buckets.steps, noise), buckets.seconds)
        for shift in shifts(stretches, buckets.first, buckets.last):
            bucket = int(np.searchsorted(buckets.first, shift.step))
            end_bucket = (
                len(buckets.last) if shift.until is None else int(np.searchsorted(buckets.last, shift.until)) + 1
            )
            before_ms, after_ms = _median(values[row, since_bucket:bucket]), _median(values[row, bucket:end_bucket])
            since_bucket = bucket
            if (after_ms > before_ms) == (shift.change > 0):
                changes.append(Shift(shift.step, shift.until, before_ms, after_ms))
        shifts_by_row.append(tuple(changes))
    return shifts_by_row


def _quickest(row: Floats) -> float:
    """Returns the level of a row in its quickest stretch of buckets."""
    finite = row[np.isfinite(row)]
    if len(finite) < 2 * LASTING_BUCKETS:
        return _median(finite)
    width = min(LASTING_STEPS, len(finite) // 2) | 1
    return float(moving_median(finite, width).min())


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")


def noise_of(relative: Floats) -> float:
    """Returns the standard deviation of the logarithm of one value. It comes from the differences between neighbouring
    buckets of a row, because a change of level hardly affects these."""
    jumps = np.abs(np.diff(logarithms(relative), axis=1))
    return MAD / float(np.sqrt(2)) * float(np.nanmedian(jumps)) if np.isfinite(jumps).any() else 0.0
