"""Finds since which step a rank is slow, from the timelines that it and one of its peers have written so far."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from megaprof.formats import timeline as format
from megaprof.formats.job.run import RunRecord
from megaprof.formats.names import parse_artifact_name
from megaprof.formats.timeline import UnreadableTimeline, read_timeline
from megaprof.metrics.figures import SlowRanks

#: Seconds by which the clocks of two hosts may differ.
_CLOCKS_SECONDS = 60.0
#: Steps before and after one that its running median takes in.
_AROUND = 2


def slow_since(directory: Path, run: RunRecord, slow: SlowRanks, target: str) -> int | None:
    """Returns the step of ``target`` from which on the slowest of these ranks was almost always slow, at least half as
    much as now. None if it was so from its first step on, if that comes and goes, or without timelines."""
    wanted: dict[int, dict[int, int]] = {slow.ranks[0]: {}, slow.peer: {}}
    for path in sorted(directory.glob(f"*{format.SUFFIX}")):
        name = parse_artifact_name(path.name)
        if name is not None and name.place.rank in wanted:
            wanted[name.place.rank].update(_compute_us(path, run, target))
    own, others = wanted[slow.ranks[0]], wanted[slow.peer]
    steps = sorted(own.keys() & others.keys())
    if not steps:
        return None
    own_us, others_us = (_smooth([us[step] for step in steps]) for us in (own, others))
    longer = own_us / np.maximum(others_us, 1.0) > 1.0 + (slow.ratio - 1.0) / 2
    # The step with the fewest exceptions: earlier steps in which the rank was slow, and later ones in which it was not.
    exceptions = longer.cumsum() - longer + (~longer)[::-1].cumsum()[::-1]
    first = int(exceptions.argmin())
    return steps[first] if first > 0 and exceptions[first] <= longer.sum() / 4 else None


def _smooth(times_us: list[int]) -> npt.NDArray[np.float64]:
    """Returns the running median. It removes single long steps, and keeps a change of level where it is."""
    padded = np.pad(np.array(times_us, dtype=np.float64), _AROUND, mode="edge")
    smooth: npt.NDArray[np.float64] = np.median(sliding_window_view(padded, 2 * _AROUND + 1), axis=-1)
    return smooth


def _compute_us(path: Path, run: RunRecord, target: str) -> dict[int, int]:
    """Returns the microseconds of all passes of each step in a file, as far as this run made it."""
    try:
        timeline = read_timeline(path, events=False)
    except UnreadableTimeline:
        return {}
    computed: dict[int, int] = {}
    for metadata, steps in timeline.by_metadata():
        if metadata.target != target or metadata.around_windows:
            continue
        clean = steps["flags"] & (format.FAILED | format.DISTURBED) == 0
        steps = steps[clean & (steps["start_ns"] / 1e9 > run.started - _CLOCKS_SECONDS)]
        passes_us = steps["forward"].astype(np.int64) + steps["backward"] + steps["combined"]
        computed.update(zip(steps["step"].tolist(), passes_us.tolist(), strict=True))
    return computed
