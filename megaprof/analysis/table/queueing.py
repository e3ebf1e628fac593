"""How long ranks waited for a processor core in a step, and in which passes.

Linux counts that for a whole thread, and it is read about once a second (`megaprof.recorders.processor`). Which steps
and passes it was in follows from what waiting does: it only adds. So those had it that took longest, against what
others of their kind took, down to one level at which all of it is spent.

What passes take undisturbed is their lower quartile, so no pass is cut below that: where a thread waits all the time,
its passes are slow, and why is told beside that (`megaprof.analysis.diagnosis.diagnose`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megaprof.analysis.table.table import QUARTILE, Floats
from megaprof.formats import timeline as format
from megaprof.formats.timeline import Timeline, Waited


def of_steps(timeline: Timeline, rows: Sequence[int]) -> Floats:
    """Returns [row] milliseconds that the thread waited in these steps of a file, by their positions, and since those
    before; 0 where nobody read it."""
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
    # A step that was running at one reading was written with the next one.
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
    """Returns [t, c, k, m] how long passes that ``took`` so long waited. ``waited``: steps, and milliseconds that their
    thread waited in them, at most: one that sleeps in an exchange may wait, too, when it wakes up."""
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
    """Returns what is above one level, in times ``usual``, of what each ``took``: ``waited`` in sum, unless the level
    came below the ``least`` then."""
    norm = np.maximum(usual, 1e-9)
    order = np.argsort(-took / norm)
    # Of those above it so many are taken as make the level highest: one that is below it would lower it.
    level = ((took[order].cumsum() - waited) / norm[order].cumsum()).max(initial=least)
    found: Floats = np.maximum(took - level * norm, 0.0)
    return found
