"""Samples of one quantity, summed up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Standard deviation of normal samples by their median absolute deviation (Rousseeuw & Croux 1993).
MAD = 1.4826


@dataclass(frozen=True)
class Spread:
    """Some samples of one quantity, in the unit of that."""

    mean: float
    """Their average."""
    median: float
    """The middle one."""
    min: float
    """The smallest one."""
    max: float
    """The largest one."""
    stdev: float
    """Standard deviation of these samples; 0 of one."""
    count: int
    """How many there are."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread | None:
        """None for no samples."""
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
    """The average; None for no samples."""
    return spread.mean if spread else None
