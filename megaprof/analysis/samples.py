"""Summarises several samples of one quantity, and says how certain a number is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.parallel.peers import Floats as Floats

#: How certain every interval is: the number is between its ends with this probability.
CERTAIN = 0.9
#: Half the width of such an interval, in standard errors.
LEVEL = statistics.NormalDist().inv_cdf((1.0 + CERTAIN) / 2.0)
#: How many times samples are drawn to see how much their average varies.
MANY = 1000

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

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.stdev / math.sqrt(max(self.count - 1, 1))


@dataclass(frozen=True)
class Interval:
    """A number with its 90 % interval. What is calculated with several of them takes them as independent."""

    value: float
    """Most likely value."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""

    @classmethod
    def of(cls, value: float, error: float = 0.0, draws: Floats | None = None) -> Interval:
        """Returns the interval of a number. ``draws``: by how much it is off in draws of what it was made from;
        ``error``: its standard error for all other reasons."""
        ends = (0.0, 0.0) if draws is None else np.quantile(draws, ((1.0 - CERTAIN) / 2.0, (1.0 + CERTAIN) / 2.0))
        below, above = math.hypot(min(ends[0], 0.0), LEVEL * error), math.hypot(max(ends[1], 0.0), LEVEL * error)
        return cls(value, value - below, value + above)

    def __add__(self, other: Interval) -> Interval:
        below = math.hypot(self.value - self.low, other.value - other.low)
        above = math.hypot(self.high - self.value, other.high - other.value)
        value = self.value + other.value
        return Interval(value, value - below, value + above)

    def __mul__(self, factor: float) -> Interval:
        low, high = sorted((self.low * factor, self.high * factor))
        return Interval(self.value * factor, low, high)

    def over(self, other: Interval, error: float = 0.0) -> Interval:
        """Returns the ratio of two numbers above 0. ``error``: half the width of its interval for other reasons, as a
        fraction of it."""
        below, above = (
            math.hypot(math.log(one), math.log(another), math.log1p(error))
            for one, another in (
                (self.value / self.low, other.high / other.value),
                (self.high / self.value, other.value / other.low),
            )
        )
        value = self.value / other.value
        return Interval(value, value * math.exp(-below), value * math.exp(above))

    def clipped(self, least: float) -> Interval:
        """Returns the interval with everything below a bound moved to it."""
        return Interval(*(max(each, least) for each in (self.value, self.low, self.high)))

    def holds(self, number: float) -> bool:
        """Returns whether a number is inside."""
        return self.low <= number <= self.high

    def meets(self, other: Interval) -> bool:
        """Returns whether two intervals overlap, so that both may be the same number."""
        return self.low <= other.high and other.low <= self.high


def errors_of_mean(samples: Floats, often: npt.NDArray[np.int64] | None = None) -> Floats:
    """Returns by how much the average of samples is off, [draw], in draws with replacement: a few large ones make its
    interval lopsided. 0 for a single sample. ``often`` [draw, sample]: how often each is drawn, if that is known."""
    n = len(samples)
    often = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), size=MANY) if often is None else often
    # Drawn from few samples, averages differ less than those of new samples would.
    errors: Floats = (often @ samples / n - samples.mean()) * math.sqrt(n / max(n - 1, 1))
    return errors


def mean_of(spread: Spread | None) -> float | None:
    """Returns the average; None if there are no samples."""
    return spread.mean if spread else None
