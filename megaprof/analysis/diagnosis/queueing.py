"""How long passes waited for a processor core, from how long their thread did in a span of time.

Linux counts that for a whole thread, and it is read about once a second (`megaprof.recorders.processor`). Which pass it
was in follows from what waiting does: it only adds. So those passes had it that took longest, against what passes of
their kind usually take, down to one level at which all of it is spent; where a thread waited all the time, every pass is
above that level in the same proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megaprof.analysis.diagnosis.table import Floats
from megaprof.formats import timeline as format
from megaprof.formats.timeline import Timeline, Waited


def above(took: Floats, usual: Floats, waited: float) -> Floats:
    """Returns what is above one level, relative to ``usual``, of what each ``took``: ``waited`` in sum, or all."""
    norm = np.maximum(usual, 1e-9)
    order = np.argsort(-took / norm)
    # Of those above it as many are taken as make the level highest: one that is below it would lower it.
    level = ((took[order].cumsum() - waited) / norm[order].cumsum()).max(initial=0.0)
    found: Floats = np.maximum(took - level * norm, 0.0)
    return found


def of_passes(took: Floats, waited: Iterable[tuple[Sequence[int], float]]) -> Floats:
    """Returns [t, c, k, m] how long passes waited that ``took`` so long; ``waited``: steps, and what they waited together."""
    usual = np.broadcast_to(np.nanmedian(took, axis=(0, 3), keepdims=True), took.shape)
    found = np.zeros_like(took)
    for steps, ms in waited:
        own = took[steps]
        there = np.isfinite(own)
        if ms > 0.0 and there.any():
            of_steps = np.zeros_like(own)
            of_steps[there] = above(own[there], usual[steps][there], ms)
            found[steps] = of_steps
    return found


def of_steps(timeline: Timeline, rows: Sequence[int]) -> Floats:
    """Returns [row] milliseconds that the thread waited in passes of these steps of a file, by their positions; 0 where
    nobody read it."""
    steps, told = timeline.steps, timeline.facts(format.WAITED)
    begin, took = steps["start_ns"] / 1e6, steps["duration"] / 1e3
    passes = (steps["forward"].astype(float) + steps["backward"] + steps["combined"]) / 1e3
    usual = passes.copy()
    for shape in np.unique(steps["shape"]):
        usual[steps["shape"] == shape] = np.median(passes[steps["shape"] == shape])
    found = np.zeros(len(steps))
    ends = np.array(
        sorted(row for row in told if row < len(steps)), dtype=np.intp
    )  # of steps that were written at once
    at = np.searchsorted(ends, rows)
    # A step that was running at one reading was written with the next one.
    for i in sorted({*at.tolist(), *(at - 1).tolist()} & {*range(len(ends))}):
        span = Waited.unpack(told[int(ends[i])])
        if span is None:
            continue
        near = np.arange(ends[i - 2] + 1 if i > 1 else 0, min(ends[i] + 2, len(steps)))
        since = begin[ends[i]] + span.start / 1e3
        inside = np.minimum(begin + took, since + span.length / 1e3)[near] - np.maximum(begin, since)[near]
        part = np.maximum(inside, 0.0) / np.maximum(took[near], 1e-9)
        own = passes[near] * part
        waited = in_passes(span.waited / 1e3, span.length / 1e3, own.sum(), (steps["p2p"][near] * part).sum() / 1e3)
        found[near] += above(own, usual[near] * part, waited)
    return found[list(rows)]


def in_passes(waited_ms: float, span_ms: float, passes_ms: float, exchanges_ms: float) -> float:
    """Returns how much of what a thread waited in a span of time it waited in passes: it may have waited whenever it was
    not in an exchange, where it sleeps."""
    return waited_ms * passes_ms / max(span_ms - exchanges_ms, passes_ms, 1e-9)
