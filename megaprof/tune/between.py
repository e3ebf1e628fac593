"""The time between the steps of a trial: the optimizer, and everything else that the training loop does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from megaprof.analysis.trace.reading import find_timelines
from megaprof.formats import timeline as format


def between_ms(directory: Path, target: str) -> float | None:
    """Returns milliseconds from the end of a step to the beginning of the next one: the median on the rank with the
    shortest gap, since the gaps of other ranks include waiting for it. None if no rank made two steps."""
    medians = []
    for path in find_timelines(directory).paths:
        with suppress(format.UnreadableTimeline):
            timeline = format.read_timeline(path)
            target_numbers = [number for number, metadata in enumerate(timeline.metadata) if metadata.target == target]
            steps = timeline.steps[np.isin(timeline.steps["metadata"], target_numbers)]
            begins = steps["start_ns"].astype(np.int64)
            ends = begins + steps["duration"].astype(np.int64) * 1000
            if len(steps) > 1:
                medians.append(float(np.median(begins[1:] - ends[:-1])) / 1e6)
    return min(medians, default=None)
