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
    moving_median,
    shifts,
)
from megaprof.analysis.samples import MAD


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
        own = raised / baseline[:, None]
        relative = own / low_median(own) if len(values) > 1 else own
    noise = noise_of(relative)
    out = []
    for row in range(len(values)):
        changes: list[Shift] = []
        since = 0
        found = lasting(levels(relative[row], buckets.steps, noise), buckets.seconds)
        for shift in shifts(found, buckets.first, buckets.last):
            at = int(np.searchsorted(buckets.first, shift.step))
            end = len(buckets.last) if shift.until is None else int(np.searchsorted(buckets.last, shift.until)) + 1
            before, after = _median(values[row, since:at]), _median(values[row, at:end])
            since = at
            if (after > before) == (shift.change > 0):
                changes.append(Shift(shift.step, shift.until, before, after))
        out.append(tuple(changes))
    return out


def _quickest(row: Floats) -> float:
    """Returns the level of a row in its quickest stretch of buckets."""
    known = row[np.isfinite(row)]
    if len(known) < 2 * LASTING_BUCKETS:
        return _median(known)
    width = min(LASTING_STEPS, len(known) // 2) | 1
    return float(moving_median(known, width).min())


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")


def noise_of(relative: Floats) -> float:
    """Returns the standard deviation of the logarithm of one value. It comes from the differences between neighbouring
    buckets of a row, because a change of level hardly affects these."""
    jumps = np.abs(np.diff(logarithms(relative), axis=1))
    return MAD / float(np.sqrt(2)) * float(np.nanmedian(jumps)) if np.isfinite(jumps).any() else 0.0
