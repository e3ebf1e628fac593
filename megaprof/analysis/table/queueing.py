"""Estimates how long ranks waited for a processor core in each step, and in which passes.

Linux counts this time per thread, and megaprof reads it about once a second (`megaprof.recorders.processor`). Waiting
only adds, so it is attributed to the steps and passes that took longest compared with others of their kind: all of them
are cut down to one level, chosen so that exactly the counted time is cut off.

No pass is cut below its lower quartile, which is what it takes undisturbed. So if a thread waits all the time, its
passes remain slow, and `megaprof.analysis.diagnosis.diagnose` names the waiting as the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megaprof.analysis.table.table import QUARTILE, Floats
from megaprof.formats import timeline as format
from megaprof.formats.timeline import Timeline, Waited


def of_steps(timeline: Timeline, rows: Sequence[int]) -> Floats:
    """Returns how many milliseconds the thread waited in each of these steps of a file and since the step before,
    [row]; 0 if the counter was not read."""
    steps, facts = timeline.steps, timeline.facts(format.WAITED)
    begin_ms = steps["start_ns"] / 1e6
    end_ms = begin_ms + steps["duration"] / 1e3
    begin_ms[1:] = np.minimum(begin_ms[1:], end_ms[:-1])
    length_ms = np.maximum(end_ms - begin_ms, 1e-9)
    usual_ms = length_ms.copy()
    shapes = steps["shape"][list(rows)]
    for shape in np.unique(shapes):
        usual_ms[steps["shape"] == shape] = np.median(length_ms[list(rows)][shapes == shape])
    waits_ms = np.zeros(len(steps))
    ends = np.array(sorted(row for row in facts if row < len(steps)), dtype=np.intp)
    reading_of_row = np.searchsorted(ends, rows)
    # A step that was running when the counter was read was written with the next reading.
    for reading in sorted({*reading_of_row.tolist(), *(reading_of_row - 1).tolist()} & {*range(len(ends))}):
        span = Waited.unpack(facts[int(ends[reading])])
        if span is None:
            continue
        near_rows = np.arange(ends[reading - 1] + 1 if reading else 0, min(ends[reading] + 2, len(steps)))
        since_ms = steps["start_ns"][ends[reading]] / 1e6 + span.start / 1e3
        until_ms = since_ms + span.length / 1e3
        inside_ms = np.maximum(np.minimum(end_ms[near_rows], until_ms) - np.maximum(begin_ms[near_rows], since_ms), 0.0)
        usual_inside_ms = usual_ms[near_rows] * inside_ms / length_ms[near_rows]
        # The step that was running may not be in the file yet. What came of it later must not matter.
        usual_inside_ms = np.where(near_rows > ends[reading], inside_ms, usual_inside_ms)
        after_ms = max(until_ms - max(end_ms[near_rows[-1]], since_ms), 0.0)
        waits_ms[near_rows] += _excess(
            np.append(inside_ms, after_ms), np.append(usual_inside_ms, after_ms), span.waited / 1e3
        )[:-1]
    return waits_ms[list(rows)]


def of_passes(took: Floats, waited: Iterable[tuple[Sequence[int], float]]) -> Floats:
    """Returns how long passes waited, [t, c, k, m], given how long they ``took``. ``waited``: groups of steps, and how
    many milliseconds their thread waited in them. That is an upper limit for the passes, because a thread that sleeps
    in an exchange may also wait when it wakes up."""
    waits_ms, counted_waits = np.zeros_like(took), [(steps, ms) for steps, ms in waited if ms > 0.0]
    if not counted_waits:
        return waits_ms
    usual_ms = np.nanquantile(took, QUARTILE, axis=(0, 3), keepdims=True)
    usual_ms = np.broadcast_to(usual_ms, took.shape)
    for steps, ms in counted_waits:
        recorded = np.isfinite(took[steps])
        step_waits_ms = np.zeros_like(took[steps])
        step_waits_ms[recorded] = _excess(took[steps][recorded], usual_ms[steps][recorded], ms, least_level=1.0)
        waits_ms[steps] = step_waits_ms
    return waits_ms


def _excess(took_ms: Floats, usual_ms: Floats, waited_ms: float, *, least_level: float = 0.0) -> Floats:
    """Returns by how much each time exceeds one level, which is a multiple of its ``usual_ms``. The level makes the sum
    equal to ``waited_ms``, unless it would be below the multiple ``least_level``."""
    norm = np.maximum(usual_ms, 1e-9)
    order = np.argsort(-took_ms / norm)
    # Taking one that is below the level would lower it, so the highest level is the right one.
    level = ((took_ms[order].cumsum() - waited_ms) / norm[order].cumsum()).max(initial=least_level)
    excess_ms: Floats = np.maximum(took_ms - level * norm, 0.0)
    return excess_ms
