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
from megaprof.formats import timeline as format
from megaprof.formats.job.standstill import FIRST_STEP_SECONDS, STUCK_SECONDS, STUCK_STEPS, Standing, Standstill
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


def stood_still(calls: npt.NDArray[Any], compute: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Returns which of a rank's ``calls``, in order, stood still, by the rule of `standstill.stands_still`.

    ``compute`` has the microseconds that the passes of each call took. A step with an open window never counts, because
    the profiler makes it longer.
    """
    longest = np.maximum(calls["duration"].astype(np.int64), compute)
    if longest.max(initial=0) <= STUCK_SECONDS * 1e6:
        return np.zeros(len(calls), dtype=np.bool_)
    usable = calls["flags"] & (format.FAILED | format.CAPTURED) == 0
    usual = float(np.median(calls["duration"][usable])) if usable.any() else 0.0
    least = np.full(len(calls), max(STUCK_SECONDS * 1e6, STUCK_STEPS * usual))
    least[:1] = max(least[0], FIRST_STEP_SECONDS * 1e6) if len(calls) else 0.0
    found: npt.NDArray[np.bool_] = (longest > least) & (calls["flags"] & format.CAPTURED == 0)
    return found


def told_by(
    calls: npt.NDArray[Any], compute: npt.NDArray[Any], stood: npt.NDArray[np.bool_], coords: RankCoords
) -> list[StoodStill]:
    """Returns the steps of a rank that ``stood`` still, and its last step if an exception ended that."""
    failed = calls["flags"] & format.FAILED != 0
    which = set(np.flatnonzero(stood).tolist()) | ({len(calls) - 1} if len(calls) and failed[-1] else set())
    if not which:
        return []
    usable = ~stood & ~failed
    usual, computes = (float(np.median(each[usable])) if usable.any() else 0.0 for each in (calls["duration"], compute))
    return [
        StoodStill(
            int(calls["step"][n]),
            coords,
            (float(calls["duration"][n]) - usual) / 1e6 if stood[n] else 0.0,
            bool(stood[n] and compute[n] - computes > (float(calls["duration"][n]) - usual) / 2),
            bool(failed[n]),
        )
        for n in sorted(which)
    ]


def standstills(
    found: Iterable[StoodStill], last_step: int, place: Callable[[int, int], Pass[int] | None]
) -> tuple[Standstill, ...]:
    """Returns the standstills of the job, in order of steps, from those of its ranks. ``place(rank, step)`` returns the
    longest pass of a rank in a step."""
    by_step: dict[int, list[StoodStill]] = {}
    for each in found:
        by_step.setdefault(each.step, []).append(each)
    return tuple(_together(step, own, last_step, place) for step, own in sorted(by_step.items()))


def _together(
    step: int, ranks: Sequence[StoodStill], last_step: int, place: Callable[[int, int], Pass[int] | None]
) -> Standstill:
    computing = sorted((each for each in ranks if each.computing), key=lambda each: each.coords.rank)
    waited_for = []
    for number, each in enumerate(computing):
        inside = place(each.coords.rank, step) if number < _MOST_PLACES else None
        where = (None, None, None) if inside is None else (inside.kind, inside.microbatch, inside.chunk)
        waited_for.append(Standing(each.coords.rank, each.coords.pp, *where))
    outcome: Literal["went_on", "last", "unfinished"]
    outcome = "went_on" if step < last_step else "unfinished" if any(each.failed for each in ranks) else "last"
    return Standstill(
        step,
        max(each.seconds for each in ranks),
        tuple(waited_for),
        sum(not each.computing and each.seconds > 0 for each in ranks),
        outcome,
    )
