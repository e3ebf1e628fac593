"""The changes that a report predicts by itself: other layouts, other numbers of chunks, other microbatches, balance,
and half as many stages, which only `tune` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from megaprof.analysis.simulation.replay import Replay, rescheduled
from megaprof.analysis.table.table import Floats
from megaprof.analysis.what_if.changeable import WAYS, Changeable, flags_of, predicted
from megaprof.analysis.what_if.changes import Baseline, Change, Prediction, priced
from megaprof.analysis.what_if.layout_search import search
from megaprof.analysis.what_if.layouts import Layout, format_layout, layers_per_stage
from megaprof.analysis.what_if.memory import Whole, in_flight_layers
from megaprof.formats.phrases import counted

_MOST_LAYOUTS = 3
#: How many layouts are priced: those with the shortest undisturbed step.
_PRICED = 6
_CHUNK_COUNTS = (1, 2, 3, 4)


def layouts(run: Changeable) -> list[tuple[Prediction, Floats]]:
    """Returns the quickest layouts other than the captured one, even if they gain nothing, as `priced` does; of those
    with one name, and of those that do not fit into the measured memory, only the quickest."""
    tried = [
        predicted(run, "layout", replace(run.captured, pieces=pieces))
        for pieces in _quickest(run, run.baseline.replay, _PRICED)
    ]
    first = dict[object, tuple[Prediction, Floats]]()
    for prediction, gains in sorted(tried, key=lambda each: each[0].step_ms.value):
        first.setdefault((prediction.layers, prediction.fits), (prediction, gains))
    return [*first.values()][:_MOST_LAYOUTS]


def _quickest(run: Changeable, replay: Replay, most: int) -> list[Layout]:
    """Returns the layouts with the shortest undisturbed step, without the captured one. If some do not fit into the
    measured memory, it returns the quickest of all, followed by the quickest that fit."""
    schedule, memory = replay.schedule, run.memory
    same = schedule.chunks == run.baseline.replay.schedule.chunks
    factor = run.costs.factor if same else run.costs.of_stage[:, None]

    def needs(stages: Whole, layers: Whole) -> Floats:
        return np.where(layers.any(axis=1), np.zeros(len(stages)), np.inf)  # no stage may be without layers

    searched = partial(
        search,
        run.costs.units,
        replay,
        p2p_ms=run.baseline.p2p_ms,
        factor=factor * np.reshape(run.slower, (-1, 1, 1)),
        needs=needs,
        top=most + 1,
    )
    others = [pieces for pieces in searched() if pieces != run.pieces]
    if memory is not None and not all(memory.fit(pieces, schedule)[0] for pieces in others):
        part = partial(memory.part, schedule=schedule)
        bounded = searched(needs=lambda stages, layers: needs(stages, layers) + part(stages, layers))
        unfit = [pieces for pieces in others[:1] if not memory.fit(pieces, schedule)[0]]
        others = [*unfit, *(pieces for pieces in bounded if pieces != run.pieces)]
    return others[:most]


def chunk_counts(run: Changeable) -> Iterator[Prediction]:
    """Yields other numbers of model chunks per stage, each in its quickest layout. If that does not fit into the
    measured memory, the quickest layout that fits follows."""
    layers, captured = "".join(run.pieces).count("t"), run.baseline.replay.schedule.chunks
    for chunks in _CHUNK_COUNTS:
        if chunks == captured or layers < chunks * run.stages:
            continue
        try:
            replay = rescheduled(run.baseline.replay, chunks, run.microbatches)
        except ValueError:
            continue  # Megatron refuses this number of microbatches with so many chunks
        for pieces in _quickest(run, replay, 1 if run.memory is None else 2):
            yield predicted(run, "chunks", replace(run.captured, pieces=pieces))[0]


def balanced(run: Baseline) -> Prediction:
    """Predicts the step with the measured work spread evenly over all chunks, as if layers could be divided."""

    def even(content: Floats) -> Floats:
        return np.broadcast_to(content.mean(axis=(-3, -2), keepdims=True), content.shape)

    drawn = even(run.drawn)
    return priced(run, "balanced", even(run.content), drawn, drawn)[0]


def microbatch_counts(run: Baseline) -> Iterator[Prediction]:
    """Yields twice and half as many microbatches, with the same tokens in all. The contents of chunks need not be
    known."""
    schedule, free = run.replay.schedule, np.concatenate([run.drawn] * WAYS)
    captured = schedule.microbatches
    for count in (2 * captured, captured // 2) if captured % 2 == 0 else (2 * captured,):
        try:
            change = Change(rescheduled(run.replay, schedule.chunks, count), captured / count)
        except ValueError:
            continue  # Megatron refuses this number of microbatches
        prediction, _ = priced(run, "microbatches", run.content, run.drawn, free, change)
        activations = 1.0 if schedule.forward_only else change.tokens
        yield replace(prediction, microbatches=count, tokens=change.tokens, activations=activations)


def half_as_deep(run: Changeable) -> Prediction:
    """Predicts half as many stages on the same ranks, and so twice as many replicas, for the same global batch.

    Every stage holds what two neighbours held, and every replica gets half of the microbatches, so the times of all
    passes are known. The time in which twice as many replicas reduce the gradients of twice as many parameters is not:
    it is assumed to be twice as long, which is almost nothing if there was one replica. Raises ValueError, with the
    reason, if there is no such run or it cannot be predicted.
    """
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
    needs = in_flight_layers(pieces, change.replay.schedule)
    fits, needed = (None, None) if run.memory is None else run.memory.halved(needs)
    return replace(
        priced(baseline, "depth", baseline.content, baseline.drawn, baseline.drawn, change)[0],
        layout=format_layout(pieces),
        layers=layers_per_stage(pieces, stages),
        microbatches=microbatches,
        flags=flags,
        in_flight=tuple(needs),
        fits=fits,
        needed=needed,
    )
