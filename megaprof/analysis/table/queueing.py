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
    steps, told = timeline.steps, timeline.facts(format.WAITED)
    begin = steps["start_ns"] / 1e6
    end = begin + steps["duration"] / 1e3
    begin[1:] = np.minimum(begin[1:], end[:-1])
    length = np.maximum(end - begin, 1e-9)
    usual = length.copy()
    for shape in np.unique(steps["shape"]):
        usual[steps["shape"] == shape] = np.median(length[steps["shape"] == shape])
    found = np.zeros(len(steps))
    ends = np.array(sorted(row for row in told if row < len(steps)), dtype=np.intp)
    at = np.searchsorted(ends, rows)
    # A step that was running when the counter was read was written with the next reading.
    for i in sorted({*at.tolist(), *(at - 1).tolist()} & {*range(len(ends))}):
        span = Waited.unpack(told[int(ends[i])])
        if span is None:
            continue
        near = np.arange(ends[i - 1] + 1 if i else 0, min(ends[i] + 2, len(steps)))
        since = steps["start_ns"][ends[i]] / 1e6 + span.start / 1e3
        inside = np.minimum(end[near], since + span.length / 1e3) - np.maximum(begin[near], since)
        inside = np.maximum(inside, 0.0)
        found[near] += _above(inside, usual[near] * inside / length[near], span.waited / 1e3)
    return found[list(rows)]


def of_passes(took: Floats, waited: Iterable[tuple[Sequence[int], float]]) -> Floats:
    """Returns how long passes waited, [t, c, k, m], given how long they ``took``. ``waited``: groups of steps, and how
    many milliseconds their thread waited in them. That is an upper limit for the passes, because a thread that sleeps
    in an exchange may also wait when it wakes up."""
    found, waits = np.zeros_like(took), [(steps, ms) for steps, ms in waited if ms > 0.0]
    if not waits:
        return found
    usual = np.nanquantile(took, QUARTILE, axis=(0, 3), keepdims=True)
    usual = np.broadcast_to(usual, took.shape)
    for steps, ms in waits:
        there = np.isfinite(took[steps])
        own = np.zeros_like(took[steps])
        own[there] = _above(took[steps][there], usual[steps][there], ms, least=1.0)
        found[steps] = own
    return found


def _above(took: Floats, usual: Floats, waited: float, *, least: float = 0.0) -> Floats:
    """Returns by how much each exceeds one level, which is a multiple of its ``usual`` time. The level makes the sum
    equal to ``waited``, unless it would be below the ``least`` multiple."""
    norm = np.maximum(usual, 1e-9)
    order = np.argsort(-took / norm)
    # Taking one that is below the level would lower it, so the highest level is the right one.
    level = ((took[order].cumsum() - waited) / norm[order].cumsum()).max(initial=least)
    found: Floats = np.maximum(took - level * norm, 0.0)
    return found
