"""Samples of one quantity, summed up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The mean of some samples and how far they lie apart (``stdev`` of these samples, 0 for one)."""

    mean: float
    median: float
    min: float
    max: float
    stdev: float
    count: int

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
            stdev=statistics.pstdev(samples),
            count=len(samples),
        )
