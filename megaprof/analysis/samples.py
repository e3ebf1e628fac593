"""Summarises several samples of one quantity."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Both hold asymptotically (Rousseeuw & Croux 1993).
#: Standard deviation of normal samples, divided by their median absolute deviation.
MAD = 1.4826
#: Standard error of the median of n normal samples, times the square root of n, divided by their standard deviation.
MEDIAN_ERROR = 1.2533


@dataclass(frozen=True)
class Spread:
    """Statistics of some samples of one quantity, in the unit of that quantity."""

    mean: float
    """Average."""
    median: float
    """Median."""
    min: float
    """Smallest sample."""
    max: float
    """Largest sample."""
    stdev: float
    """Standard deviation of the samples; 0 for a single one."""
    count: int
    """Number of samples."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread | None:
        """Returns the statistics of ``samples``; None if there are none."""
        if not samples:
            return None
        return cls(
            mean=statistics.fmean(samples),
            median=statistics.median(samples),
            min=min(samples),
            max=max(samples),
            stdev=float(np.std(samples)),
            count=len(samples),
        )


def mean_of(spread: Spread | None) -> float | None:
    """Returns the average; None if there are no samples."""
    return spread.mean if spread else None
