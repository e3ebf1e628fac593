"""Finds stages that became slower than the others, and when. What makes a step long for all stages cancels out."""

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
    """The buckets of steps; a series has one value for each."""

    begin: int
    """The number of the first bucket, counted from step 0."""
    first: Integers
    """The first step of each."""
    last: Integers
    """The last step of each."""
    steps: Integers
    """How many steps there are of each."""
    seconds: Floats
    """How long each took."""


def relative_shifts(values: Floats, buckets: Buckets, floor_ms: float = 0.0) -> list[tuple[Shift, ...]]:
    """Returns when each row of ``values`` [row, bucket] changed its level, without changes that all rows share. A
    single row counts as it is. ``floor_ms``: added to all values, for times that matter beside longer ones."""
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
    """Returns the level of a row in its quickest stretch of some buckets."""
    known = row[np.isfinite(row)]
    if len(known) < 2 * LASTING_BUCKETS:
        return _median(known)
    width = min(LASTING_STEPS, len(known) // 2) | 1
    return float(moving_median(known, width).min())


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")


def noise_of(relative: Floats) -> float:
    """Returns the standard deviation of the logarithm of one bucket in a row, from differences between neighbours,
    which a change of level does not affect."""
    jumps = np.abs(np.diff(logarithms(relative), axis=1))
    return MAD / float(np.sqrt(2)) * float(np.nanmedian(jumps)) if np.isfinite(jumps).any() else 0.0
