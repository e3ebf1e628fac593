"""Half as many pipeline stages on the same ranks, and so twice as many replicas: what a step of the same batch takes.

Every stage holds what two neighbours held, and every replica gets half of the microbatches, so no pass is guessed. No
captured step shows how long twice as many replicas reduce the gradients of twice as many parameters: it is taken as
twice as long, which is next to nothing where there was one replica.
"""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import numpy as np

from megaprof.analysis.diagnosis.examine import Price
from megaprof.analysis.simulation.replay import rescheduled
from megaprof.analysis.what_if.candidates import RERUN, Known, placed
from megaprof.analysis.what_if.changes import Change, Prediction, priced
from megaprof.analysis.what_if.layouts import format_layout, layers_per_stage
from megaprof.analysis.what_if.memory import in_flight_layers
from megaprof.formats.phrases import counted


def half_as_deep(known: Known) -> Prediction:
    """Predicts it. Raises ValueError, which says why there is no such run, or why nothing tells what it would take."""
    run, held = known.run, known.held
    own = run.replay.schedule
    if own.stages % 2:
        raise ValueError(f"{own.stages} stages cannot be halved")
    if own.microbatches % 2:
        raise ValueError(f"twice as many replicas cannot share {own.microbatches} microbatches evenly")
    if np.any(np.asarray(known.slower) > 1.0):
        raise ValueError("a slow rank would hold a neighbour's layers, too")
    stages = own.stages // 2
    pieces = tuple(map("".join, zip(held.pieces[::2], held.pieces[1::2], strict=True)))
    flags = placed(replace(held, stages=stages), pieces)
    if not flags:
        raise ValueError("no option of Megatron's says the layout of such a model")
    try:
        change = Change(rescheduled(run.replay, own.chunks, own.microbatches // 2, stages))
    except ValueError:
        shape = f"{own.chunks} chunks on {counted(stages, 'stage')} and {counted(own.microbatches // 2, 'microbatch')}"
        raise ValueError(f"Megatron has no schedule of {shape}") from None
    found = priced(run, "depth", run.content[0], run.drawn, run.drawn, change, hypot(known.shared, RERUN)).prediction
    low, high = found.reach_ms
    less = run.measured_ms - float(run.tail.mean())
    gain = Price(less - found.step_ms, less - high, less - low)
    needs = in_flight_layers(pieces, change.replay.schedule)
    fit = None if known.memory is None else known.memory.halved(needs)
    return replace(
        Prediction.of("depth", run.measured_ms, gain, found.more_steps),
        layout=format_layout(pieces),
        layers=layers_per_stage(pieces, stages),
        microbatches=own.microbatches // 2,
        flags=flags,
        in_flight=tuple(needs),
        fits=None if fit is None else fit.fits,
        needed=None if fit is None else fit.needed,
    )
