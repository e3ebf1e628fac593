"""Finds since which step a rank is slow, or waits for its host, from the timelines that ranks have written so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megaprof.formats import timeline as format
from megaprof.formats.job import RunRecord
from megaprof.formats.names import parse_artifact_name
from megaprof.formats.timeline import UnreadableTimeline, read_timeline
from megaprof.metrics.figures import HostBound, SlowRanks
from megaprof.parallel.comparing import began, moving_median

#: Seconds by which the clocks of two hosts may differ.
_CLOCKS_SECONDS = 60.0
#: Steps of a running median, in which two unlike ones do not count.
_WIDTH = 5

Floats = npt.NDArray[np.float64]


def slow_since(directory: Path, run: RunRecord, slow: SlowRanks, target: str) -> int | None:
    """Returns the step of ``target`` from which on the slowest of these ranks was almost always slow, at least half as
    much as now. None if it was so from its first step on, if that comes and goes, or without timelines."""
    own, others = (_by_step(directory, run, rank, target, "passes_us") for rank in (slow.ranks[0], slow.peer))
    both = {step: (own[step], others[step]) for step in own.keys() & others.keys()}
    return _began(both, lambda us: us[:, 0] / np.maximum(us[:, 1], 1.0) > 1.0 + (slow.ratio - 1.0) / 2)


def host_bound_since(directory: Path, run: RunRecord, waits: HostBound, target: str) -> int | None:
    """Returns the step of ``target`` from which on the GPU of ``waits.rank`` almost always waited for its host in most
    passes. None if it did so from its first step on, if that comes and goes, or without timelines."""
    shares = _by_step(directory, run, waits.rank, target, "host_bound")
    return _began({step: (share,) for step, share in shares.items()}, lambda share: share[:, 0] > 0.5)


def _began(by_step: Mapping[int, tuple[float, ...]], is_there: Callable[[Floats], npt.NDArray[np.bool_]]) -> int | None:
    """Returns the step since which something is there by its values in each step; None if it is from the first one on,
    or if it comes and goes. Running medians remove single unlike steps, and keep a change of level where it is."""
    if not by_step:
        return None
    steps = sorted(by_step)
    columns = np.array([by_step[step] for step in steps], dtype=np.float64).T
    first = began(is_there(np.stack([moving_median(column, _WIDTH) for column in columns], axis=-1)))
    return steps[first] if first else None


def _by_step(
    directory: Path, run: RunRecord, rank: int, target: str, figure: Literal["passes_us", "host_bound"]
) -> dict[int, float]:
    """Returns a figure of each step that this run made on a rank, without those that failed or that a profiler
    disturbed: the microseconds of its passes, or the part of them in which the GPU waited for its host."""
    values: dict[int, float] = {}
    for path in sorted(directory.glob(f"*{format.SUFFIX}")):
        name = parse_artifact_name(path.name)
        if name is None or name.place.rank != rank:
            continue
        try:
            timeline = read_timeline(path, events=figure == "host_bound")
        except UnreadableTimeline:
            continue
        steps = timeline.steps
        described = [each.target == target and not each.around_windows for each in timeline.metadata]
        clean = np.isin(steps["metadata"], np.flatnonzero(described))
        clean &= steps["flags"] & (format.FAILED | format.DISTURBED) == 0
        rows = np.flatnonzero(clean & (steps["start_ns"] / 1e9 > run.started - _CLOCKS_SECONDS))
        made: Iterable[float | None] = (
            steps["forward"][rows].astype(float) + steps["backward"][rows] + steps["combined"][rows]
        )
        if figure == "host_bound":
            made = map(timeline.host_bound_passes, rows.tolist())
        numbers = steps["step"][rows].tolist()
        values.update((step, value) for step, value in zip(numbers, made, strict=True) if value is not None)
    return values
