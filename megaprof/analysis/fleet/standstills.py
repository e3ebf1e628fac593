"""Finds the steps in which the whole job stood still, from timelines, with the rank that others waited for, and where
that rank was.

Such a step says nothing about usual step times, so it does not count in them. Ranks wait in an exchange or in the
gradient reduction. They wait for a rank whose own passes took the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.passes import Pass
from megaprof.formats import ranges
from megaprof.formats import timeline as format
from megaprof.formats.job import FIRST_STEP_SECONDS, Standing, Standstill, limit
from megaprof.parallel.topology import RankCoords

#: At most this many ranks have their files opened again, to see where they stood still.
_MOST_PLACES = 4


class StoodStill(NamedTuple):
    """A rank in a step in which it stood still, or that an exception ended."""

    step: int
    coords: RankCoords
    seconds: float
    """Seconds by which the step took longer than usual; 0 if the rank did not stand still."""
    computing: bool
    """True if the rank's own passes took more than half of ``seconds``."""
    failed: bool
    """True if an exception ended the step."""


def stood_still(
    calls: npt.NDArray[Any], compute: npt.NDArray[Any], coords: RankCoords
) -> tuple[npt.NDArray[np.bool_], list[StoodStill]]:
    """Returns which of a rank's ``calls``, in order, stood still, by the rule of `job.limit`, and these steps, with the
    last one if an exception ended it.

    ``compute`` has the microseconds that the passes of each call took. A step with an open window never counts, because
    the profiler makes it longer.
    """
    took_us = calls["duration"].astype(np.int64)
    failed, disturbed = (calls["flags"] & flag != 0 for flag in (format.FAILED, format.DISTURBED))
    usual = ~failed & ~disturbed
    least_us = np.full(len(calls), 1e6 * limit(_median(took_us[usual]) / 1e6))
    least_us[0] = max(least_us[0], 1e6 * FIRST_STEP_SECONDS)
    stood: npt.NDArray[np.bool_] = (np.maximum(took_us, compute) > least_us) & ~disturbed
    usual &= ~stood
    longer_us = np.where(stood, took_us - _median(took_us[usual]), 0.0)
    computing = stood & (compute - _median(compute[usual]) > longer_us / 2)
    shown = stood.copy()
    shown[-1] |= failed[-1]
    columns = (each[shown].tolist() for each in (calls["step"], longer_us / 1e6, computing, failed))
    return stood, [StoodStill(step, coords, *facts) for step, *facts in zip(*columns, strict=True)]


def _median(values: npt.NDArray[Any]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def standstills(
    stood: Iterable[StoodStill], last_step: int, call_of: Callable[[int, int, int], Sequence[Pass[int]]]
) -> tuple[Standstill, ...]:
    """Returns the standstills of the job, in order of steps, from those of its ranks. ``call_of(rank, step, index)``
    returns what a rank did in a call."""
    by_step: dict[int, list[StoodStill]] = {}
    for each in sorted(stood, key=lambda each: (each.step, each.coords.rank)):
        by_step.setdefault(each.step, []).append(each)
    found = []
    for step, ranks in by_step.items():
        waited_for = []
        for number, coords in enumerate(each.coords for each in ranks if each.computing):
            call = call_of(coords.rank, step, 0) if number < _MOST_PLACES else ()
            passes = (each for each in call if each.kind in ranges.PASSES)
            longest = max(passes, key=lambda each: each.end - each.start, default=None)
            where = () if longest is None else (longest.kind, longest.microbatch, longest.chunk)
            waited_for.append(Standing(coords.rank, coords.pp, *where))
        ended: Literal["unfinished", "last"] = "unfinished" if any(each.failed for each in ranks) else "last"
        found.append(
            Standstill(
                step,
                max(each.seconds for each in ranks),
                tuple(waited_for),
                sum(not each.computing and each.seconds > 0 for each in ranks),
                "went_on" if step < last_step else ended,
            )
        )
    return tuple(found)
