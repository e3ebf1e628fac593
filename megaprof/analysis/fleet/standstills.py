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
from megaprof.formats.job import FIRST_STEP_SECONDS, STUCK_SECONDS, Standing, Standstill, limit
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
    """Returns which of a rank's ``calls``, in order, stood still, by the rule of `standstill.limit`.

    ``compute`` has the microseconds that the passes of each call took. A step with an open window never counts, because
    the profiler makes it longer.
    """
    longest_us = np.maximum(calls["duration"].astype(np.int64), compute)
    if longest_us.max(initial=0) <= STUCK_SECONDS * 1e6:
        return np.zeros(len(calls), dtype=np.bool_)
    usable = calls["flags"] & (format.FAILED | format.DISTURBED) == 0
    usual_us = float(np.median(calls["duration"][usable])) if usable.any() else 0.0
    least_us = np.full(len(calls), 1e6 * limit(usual_us / 1e6))
    least_us[:1] = max(least_us[0], FIRST_STEP_SECONDS * 1e6) if len(calls) else 0.0
    stood: npt.NDArray[np.bool_] = (longest_us > least_us) & (calls["flags"] & format.DISTURBED == 0)
    return stood


def stood_or_failed(
    calls: npt.NDArray[Any], compute: npt.NDArray[Any], stood: npt.NDArray[np.bool_], coords: RankCoords
) -> list[StoodStill]:
    """Returns the steps of a rank that ``stood`` still, and its last step if an exception ended that."""
    failed = calls["flags"] & format.FAILED != 0
    rows = set(np.flatnonzero(stood).tolist()) | ({len(calls) - 1} if len(calls) and failed[-1] else set())
    if not rows:
        return []
    usable = ~stood & ~failed
    usual_us, usual_compute_us = (
        float(np.median(lengths_us[usable])) if usable.any() else 0.0 for lengths_us in (calls["duration"], compute)
    )
    return [
        StoodStill(
            int(calls["step"][row]),
            coords,
            (float(calls["duration"][row]) - usual_us) / 1e6 if stood[row] else 0.0,
            bool(stood[row] and compute[row] - usual_compute_us > (float(calls["duration"][row]) - usual_us) / 2),
            bool(failed[row]),
        )
        for row in sorted(rows)
    ]


def standstills(
    rank_steps: Iterable[StoodStill], last_step: int, longest_pass_of: Callable[[int, int], Pass[int] | None]
) -> tuple[Standstill, ...]:
    """Returns the standstills of the job, in order of steps, from those of its ranks. ``place(rank, step)`` returns the
    longest pass of a rank in a step."""
    by_step: dict[int, list[StoodStill]] = {}
    for rank_step in rank_steps:
        by_step.setdefault(rank_step.step, []).append(rank_step)
    return tuple(
        _standstill(step, stuck_ranks, last_step, longest_pass_of) for step, stuck_ranks in sorted(by_step.items())
    )


def _standstill(
    step: int, ranks: Sequence[StoodStill], last_step: int, longest_pass_of: Callable[[int, int], Pass[int] | None]
) -> Standstill:
    computing = sorted(
        (rank_step for rank_step in ranks if rank_step.computing), key=lambda rank_step: rank_step.coords.rank
    )
    waited_for = []
    for number, rank_step in enumerate(computing):
        inner_pass = longest_pass_of(rank_step.coords.rank, step) if number < _MOST_PLACES else None
        where = (None, None, None) if inner_pass is None else (inner_pass.kind, inner_pass.microbatch, inner_pass.chunk)
        waited_for.append(Standing(rank_step.coords.rank, rank_step.coords.pp, *where))
    outcome: Literal["went_on", "last", "unfinished"]
    outcome = (
        "went_on" if step < last_step else "unfinished" if any(rank_step.failed for rank_step in ranks) else "last"
    )
    return Standstill(
        step,
        max(rank_step.seconds for rank_step in ranks),
        tuple(waited_for),
        sum(not rank_step.computing and rank_step.seconds > 0 for rank_step in ranks),
        outcome,
    )
