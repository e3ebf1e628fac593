"""Half as many pipeline stages on the same ranks, and so twice as many replicas: what a step of the same batch takes.

Every stage holds what two neighbours held, and every replica gets half of the microbatches, so no pass is guessed. No
captured step shows how long twice as many replicas reduce the gradients of twice as many parameters: it is taken as
twice as long, which is next to nothing where there was one replica.
"""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import numpy as np

from megaprof.analysis.simulation.replay import rescheduled
from megaprof.analysis.what_if.changeable import RERUN, Changeable, flags_of
from megaprof.analysis.what_if.changes import Change, Prediction, priced
from megaprof.analysis.what_if.layouts import format_layout, layers_per_stage
from megaprof.analysis.what_if.memory import in_flight_layers
from megaprof.formats.phrases import counted


def half_as_deep(known: Changeable) -> Prediction:
    """Predicts it. Raises ValueError, which says why there is no such run, or why nothing tells what it would take."""
    run, held, schedule = known.run, known.held, known.run.replay.schedule
    if schedule.stages % 2:
        raise ValueError(f"{schedule.stages} stages cannot be halved")
    if schedule.microbatches % 2:
        raise ValueError(f"twice as many replicas cannot share {schedule.microbatches} microbatches evenly")
    if np.any(np.asarray(known.slower) > 1.0):
        raise ValueError("a slow rank would hold a neighbour's layers, too")
    stages, microbatches = schedule.stages // 2, schedule.microbatches // 2
    pieces = tuple(map("".join, zip(held.pieces[::2], held.pieces[1::2], strict=True)))
    flags = flags_of(replace(held, stages=stages), pieces)
    if not flags:
        raise ValueError("no option of Megatron's says the layout of such a model")
    try:
        change = Change(rescheduled(run.replay, schedule.chunks, microbatches, stages), reductions=2.0)
    except ValueError:
        shape = f"{schedule.chunks} chunks on {counted(stages, 'stage')} and {counted(microbatches, 'microbatch')}"
        raise ValueError(f"Megatron has no schedule of {shape}") from None
    found = priced(run, "depth", run.content, run.drawn, run.drawn, change, hypot(known.shared, RERUN))
    needs = in_flight_layers(pieces, change.replay.schedule)
    fit = None if known.memory is None else known.memory.halved(needs)
    return replace(
        found.prediction,
        layout=format_layout(pieces),
        layers=layers_per_stage(pieces, stages),
        microbatches=microbatches,
        flags=flags,
        in_flight=tuple(needs),
        fits=None if fit is None else fit.fits,
        needed=None if fit is None else fit.needed,
    )
