"""Predicts half as many pipeline stages on the same ranks, and so twice as many replicas, for the same global batch.

Every stage holds what two neighbours held, and every replica gets half of the microbatches, so the times of all passes
are known. The time in which twice as many replicas reduce the gradients of twice as many parameters is not known: it is
assumed to be twice as long, which is almost nothing if there was one replica.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megaprof.analysis.simulation.replay import rescheduled
from megaprof.analysis.what_if.changeable import Changeable, flags_of
from megaprof.analysis.what_if.changes import Change, Prediction, priced
from megaprof.analysis.what_if.layouts import format_layout, layers_per_stage
from megaprof.analysis.what_if.memory import in_flight_layers
from megaprof.formats.phrases import counted


def half_as_deep(run: Changeable) -> Prediction:
    """Returns the prediction. Raises ValueError, with the reason, if there is no such run or it cannot be predicted."""
    baseline, held, schedule = run.baseline, run.held, run.baseline.replay.schedule
    if schedule.stages % 2:
        raise ValueError(f"{schedule.stages} stages cannot be halved")
    if schedule.microbatches % 2:
        raise ValueError(f"twice as many replicas cannot share {schedule.microbatches} microbatches evenly")
    if np.any(np.asarray(run.slower) > 1.0):
        raise ValueError("a slow rank would hold a neighbour's layers, too")
    stages, microbatches = schedule.stages // 2, schedule.microbatches // 2
    pieces = tuple(map("".join, zip(held.pieces[::2], held.pieces[1::2], strict=True)))
    flags = flags_of(replace(held, stages=stages), pieces)
    if not flags:
        raise ValueError("no option of Megatron's says the layout of such a model")
    try:
        change = Change(rescheduled(baseline.replay, schedule.chunks, microbatches, stages), reductions=2.0)
    except ValueError:
        shape = f"{schedule.chunks} chunks on {counted(stages, 'stage')} and {counted(microbatches, 'microbatch')}"
        raise ValueError(f"Megatron has no schedule of {shape}") from None
    outcome = priced(baseline, "depth", baseline.content, baseline.drawn, baseline.drawn, change)
    needs = in_flight_layers(pieces, change.replay.schedule)
    fit = None if run.memory is None else run.memory.halved(needs)
    return replace(
        outcome.prediction,
        layout=format_layout(pieces),
        layers=layers_per_stage(pieces, stages),
        microbatches=microbatches,
        flags=flags,
        in_flight=tuple(needs),
        fits=None if fit is None else fit.fits,
        needed=None if fit is None else fit.needed,
    )
