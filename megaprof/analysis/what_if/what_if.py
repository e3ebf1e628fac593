"""Makes the predictions and the advice of a report: other layouts, balanced stages, microbatches, chunks and packings.

All predictions replay the steps that the diagnosis examined, with its model of the time of passes, so advice and causes
cannot contradict each other. Slow ranks stay as slow as they are: the gain without one is the price of that cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from megaprof.analysis.diagnosis.diagnose import Diagnosis, slow_ranks
from megaprof.analysis.diagnosis.examine import Examined
from megaprof.analysis.diagnosis.policy import CERTAIN, LEAST
from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Spread
from megaprof.analysis.simulation import Indices, Replay, compiled, rescheduled
from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.what_if.changeable import WAYS, Changeable, predicted
from megaprof.analysis.what_if.changes import Change, Prediction, longest, plans, priced, sequences_of
from megaprof.analysis.what_if.contents import CostFit, Model, fitted, in_flight_layers, measured_memory
from megaprof.analysis.what_if.layout_search import search
from megaprof.analysis.what_if.layouts import (
    MOST_LAYERS,
    OVERLAP,
    Layout,
    check_layout,
    format_layout,
    options_of,
    parse_layout,
)

_MOST_LAYOUTS = 3
#: How many layouts are priced: those with the shortest undisturbed step.
_PRICED = 6
_CHUNK_COUNTS = (1, 2, 3, 4)
_ONE_STAGE = Note("no_layout", said="a single stage has no other one")
Advice = Literal["change", "no_other", "none_fits", "open", "unsure", "none_better", "slow_ranks"]


@dataclass(frozen=True)
class WhatIf:
    """The replay and the predictions of one target. A field is None if ``warnings`` say why."""

    replay_ms: float | None = None
    """Replayed step in milliseconds."""
    replay_error: Spread | None = None
    """(replayed - measured) / measured step, one sample per step."""
    measured_ms: float | None = None
    """Measured step in milliseconds."""
    outside_ms: float | None = None
    """Part of both that comes after the pipeline and is kept as measured."""
    rendezvous: bool | None = None
    """True if exchanges were replayed as a rendezvous (see `megaprof.simulate`); the choice that fits the step better.
    """
    p2p_ms: float | None = None
    """Milliseconds of one transfer: the median of all links."""
    layout: str | None = None
    """Captured layout, as Megatron writes it."""
    allocated: tuple[int, ...] | None = None
    """Bytes that each stage had allocated at its peak; None if not measured."""
    allowed: tuple[int, ...] | None = None
    """Bytes that each stage may allocate; None if not known."""
    in_flight: tuple[int, ...] | None = None
    """Largest number of layers times microbatches whose activations each stage holds at once; 0 in forward-only passes.
    None if the files do not say what the stages hold."""
    costs: CostFit | None = None
    """Cost of each kind of layer."""
    candidates: tuple[Prediction, ...] = ()
    """Predictions: layouts that are faster than the recorded one, or fit if that does not, and all other changes."""
    best: Prediction | None = None
    """Candidate to change to, whose speedup is certainly above 2 % (by the lower end); None without one."""
    quickest: Prediction | None = None
    """Fastest other layout with as many chunks, whether its gain is certain or not; None if none was compared."""
    advice: Advice | None = None
    """``change``: change to ``best``. Otherwise, why not to change: ``no_other`` layout exists; ``none_fits``:
    ``quickest`` needs too much memory; ``open``: ``more_steps`` would show; ``unsure``: no number of steps would
    show it; ``none_better``, or none with all ranks as quick as their peers (``slow_ranks``). None: no prediction."""
    packings: tuple[Prediction, ...] = ()
    """The same sequences packed differently, the fastest first, followed by the bound that no packing can beat; empty
    if microbatches do not differ or their sequences were not captured."""
    most_tokens: int | None = None
    """Largest number of tokens in a microbatch that memory is known to hold; no packing above uses more."""
    warnings: tuple[Note, ...] = ()
    """Why something is missing."""
    host_options: tuple[str, ...] | None = None
    """Flags of ``best`` as options of the host; None if there are none, or if the host takes the flags."""
    alike: tuple[str, ...] = ()
    """Layouts that may take 2 % of the step less than ``best``, as far as the captured data show."""
    more_steps: int = 0
    """Number of further steps that would show whether the fastest layout gains 2 %; 0 if that is known, or if no number
    would."""


def what_if(run: Examined, diagnosis: Diagnosis, memory_limit: int | None = None) -> tuple[WhatIf, Changeable | None]:
    """Returns the predictions for a run, and the run as it can be changed by hand; None if ``warnings`` say why not.
    ``memory_limit``: bytes that a stage may allocate, if that is less than its device has."""
    table = run.table
    errors = (run.view.step_ms - table.length) / table.length
    steps, model = longest(run), _model(table)
    peaks = [memory.peak for memory in table.memory if memory is not None]
    replayed = WhatIf(
        layout=format_layout(model.pieces) if isinstance(model, Model) else None,
        replay_ms=run.replayed_ms,
        replay_error=Spread.of(errors.tolist()),
        measured_ms=run.step_ms,
        outside_ms=float(table.reduction.mean()),
        rendezvous=run.view.replay.rendezvous and run.view.replay.schedule.stages > 1,
        p2p_ms=steps.view.p2p_ms,
        allocated=tuple(peaks) if len(peaks) == len(table.memory) else None,
    )
    lengths = diagnosis.lengths
    differ = None if lengths is None else max(lengths.squares, lengths.tokens_ratio) > 1.0 + LEAST
    sequences = sequences_of(run) if differ else None
    if sequences is not None:
        replayed = replace(replayed, packings=tuple(plans(sequences)), most_tokens=sequences.most)
    if table.schedule.stages == 1 and sequences is None:
        return replace(replayed, warnings=(_ONE_STAGE,)), None
    warnings = [] if table.clocks else [Note("no_exchange_time")]
    warnings += [Note("replay_off", factor=run.missed)] if run.missed > LEAST else []
    if slow := slow_ranks(diagnosis.causes):
        warnings.append(Note("ranks_stay_slow", ranks=tuple(sorted(slow))))
    others = [balanced(steps), *microbatch_counts(steps), *overlapped(steps, table.first.framework)]
    if isinstance(model, Note):
        return replace(replayed, candidates=tuple(others), warnings=(model, *warnings)), None
    in_flight = in_flight_layers(model.pieces, table.schedule)
    memory = measured_memory(table.memory, model.pieces, in_flight, memory_limit)
    changeable = Changeable(steps, model, memory, sequences, differ is False)
    if table.schedule.stages == 1:
        return replace(replayed, warnings=(_ONE_STAGE,)), changeable
    slow_terms = [term for term in run.terms if term.kind == "slow_rank"]
    alike_ranks = longest(run.mended(*slow_terms))
    compared = layouts(replace(changeable, baseline=alike_ranks) if slow_terms else changeable)
    if slow_terms:
        # A slow rank is not answered by a layout: only those are predicted that gain if every rank is as quick as its
        # peers, and with slow ranks as slow as they are.
        gaining = [each.layout or "" for each, _ in compared if each.speedup.value > 1.0 + LEAST]
        settings = [replace(changeable.captured, pieces=parse_layout(each, changeable.stages)) for each in gaining]
        compared = [predicted(changeable, "layout", setting) for setting in settings]
    costs = fitted(changeable.costs)
    told = "kinds_alike" not in costs.assumptions  # times alone do not tell a quick kind of layers from a quick stage
    best = _best(compared, in_flight) if told else None
    fits = memory is None or memory.fit(model.pieces, table.schedule)[0]
    advised = None if best is None else best[0]
    alike = [
        prediction.layout or ""
        for prediction, gains in compared
        if best
        and prediction.fits is not False
        and np.quantile(gains - best[1], (1.0 + CERTAIN) / 2.0) > LEAST * run.step_ms
    ]
    quicker = [one for one, _ in compared if one.speedup.value > 1.0 or (one.fits and not fits)]
    first = compared[0][0] if compared else None
    more = quicker[0].more_steps if best is None and quicker and told else 0
    predictions = replace(
        replayed,
        warnings=tuple(warnings),
        costs=costs,
        candidates=(*quicker, *others, *chunk_counts(changeable)),
        best=advised,
        host_options=options_of(table.first.framework, table.role, advised.flags, changeable.stages)
        if advised
        else None,
        quickest=first,
        advice="slow_ranks" if slow_terms and first is None else _advice(first, advised, more),
        in_flight=tuple(in_flight),
        allowed=None if memory is None else memory.allowed,
        alike=tuple(alike),
        more_steps=more,
    )
    return predictions, changeable


def _model(table: Table) -> Model | Note:
    """Returns what the stages hold, or a note that says why that is not known: the files do not say it, or what they
    say is impossible."""
    schedule, pieces, kinds = table.schedule, [], list[str]()
    for chunk in range(schedule.chunks):
        for stage in range(schedule.stages):
            holds = table.holds(stage, chunk)
            if holds.layers is None or holds.embedding is None or holds.loss is None:
                return Note("no_layout", stages=(stage,), said="the traces do not say what it holds")
            if max(holds.layers, holds.mtp or 0) > MOST_LAYERS:
                return Note("no_layout", stages=(stage,), said=f"the traces say that it holds {holds.layers} layers")
            if any(listed is not None and len(listed) != holds.layers for listed in (holds.kinds, holds.layer_numbers)):
                return Note("no_layout", stages=(stage,), said="the traces contradict themselves about its layers")
            pieces.append("E" * holds.embedding + "t" * holds.layers + "m" * (holds.mtp or 0) + "L" * holds.loss)
            kinds += holds.kinds if holds.kinds is not None else ("layer",) * holds.layers
    flat = "".join(pieces)
    if not kinds:
        return Note("no_layout", said="the stages hold no decoder layers")
    try:
        check_layout(pieces, schedule.stages, flat.count("t"), flat.count("m"))
    except ValueError as fault:
        return Note("no_layout", said=f"the captured one is not one of Megatron's: {fault}")
    return Model(tuple(pieces), tuple(kinds), schedule.stages, table.part_ms)


def _best(compared: Sequence[tuple[Prediction, Floats]], now: Sequence[int]) -> tuple[Prediction, Floats] | None:
    """Returns the fastest layout that certainly gains enough; of those that are as fast, one that needs no more
    activations than stages were seen to hold."""
    gaining = [each for each in compared if each[0].speedup.low > 1.0 + LEAST and each[0].fits is not False]
    as_fast = [each for each in gaining if gaining[0][0].speedup.value - each[0].speedup.value < LEAST]
    return next((each for each in as_fast if not each[0].exceeds(now)), gaining[0]) if gaining else None


def _advice(first: Prediction | None, best: Prediction | None, more: int) -> Advice:
    """Returns the advice. ``first``: the fastest layout with the captured number of chunks; ``more``: how many more
    steps would show whether it gains."""
    if best is not None:
        return "change"
    if first is None:
        return "no_other"
    if first.fits is False and first.speedup.low > 1.0 + LEAST:
        return "none_fits"
    if more:
        return "open"
    return "unsure" if first.speedup.high > 1.0 + LEAST else "none_better"


def layouts(run: Changeable) -> list[tuple[Prediction, Floats]]:
    """Returns the quickest layouts other than the captured one, even if they gain nothing, as `priced` does; of those
    with one name, and of those that do not fit into the measured memory, only the quickest."""
    quickest = _quickest(run, run.baseline.view.replay, _PRICED)
    tried = [predicted(run, "layout", replace(run.captured, pieces=pieces)) for pieces in quickest]
    first = dict[object, tuple[Prediction, Floats]]()
    for prediction, gains in sorted(tried, key=lambda each: each[0].step_ms.value):
        first.setdefault((prediction.layers, prediction.fits), (prediction, gains))
    return [*first.values()][:_MOST_LAYOUTS]


def _quickest(run: Changeable, replay: Replay, most: int) -> list[Layout]:
    """Returns the layouts with the shortest undisturbed step, without the captured one. If some do not fit into the
    measured memory, it returns the quickest of all, followed by the quickest that fit."""
    schedule, memory = replay.schedule, run.memory
    same = schedule.chunks == run.baseline.view.replay.schedule.chunks  # then one may be the captured layout
    factor = run.costs.factor if same else run.costs.of_stage[:, None]

    def needs(stages: Indices, layers: Indices) -> Floats:
        return np.where(layers.any(axis=1), np.zeros(len(stages)), np.inf)  # no stage may be without layers

    searched = partial(
        search, run.costs.units, replay, p2p_ms=run.baseline.view.p2p_ms, factor=factor, needs=needs, top=most + same
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
    layers, captured = "".join(run.pieces).count("t"), run.baseline.view.replay.schedule.chunks
    for chunks in _CHUNK_COUNTS:
        if chunks == captured or layers < chunks * run.stages:
            continue
        try:
            replay = rescheduled(run.baseline.view.replay, chunks, run.microbatches)
        except ValueError:
            continue  # Megatron refuses this number of microbatches with so many chunks
        for pieces in _quickest(run, replay, 1 if run.memory is None else 2):
            yield predicted(run, "chunks", replace(run.captured, pieces=pieces))[0]


def balanced(run: Examined) -> Prediction:
    """Predicts the step with the measured work spread evenly over all chunks, as if layers could be divided."""
    content, drawn = (
        np.broadcast_to(each.mean(axis=(-3, -2), keepdims=True), each.shape)
        for each in (run.view.now[0], run.draws.now)
    )
    return priced(run, "balanced", content, drawn, drawn)[0]


def microbatch_counts(run: Examined) -> Iterator[Prediction]:
    """Yields twice and half as many microbatches, with the same tokens in all. The contents of chunks need not be
    known."""
    schedule, free = run.view.replay.schedule, np.concatenate([run.draws.now] * WAYS)
    captured = schedule.microbatches
    for count in (2 * captured, captured // 2) if captured % 2 == 0 else (2 * captured,):
        try:
            change = Change(rescheduled(run.view.replay, schedule.chunks, count), captured / count)
        except ValueError:
            continue  # Megatron refuses this number of microbatches
        prediction, _ = priced(run, "microbatches", run.view.now[0], run.draws.now, free, change)
        activations = 1.0 if schedule.forward_only else change.tokens
        yield replace(prediction, microbatches=count, tokens=change.tokens, activations=activations)


def overlapped(run: Examined, framework: str | None) -> Iterator[Prediction]:
    """Yields exchanges that go on beside passes while the pipeline fills and drains, too, if they do only while it is
    full."""
    schedule = run.view.replay.schedule
    if schedule.name == "interleaved" and schedule.overlap == "steady":
        change = Change(compiled(schedule._replace(overlap="all"), run.view.replay.rendezvous))
        prediction, _ = priced(run, "overlap", run.view.now[0], run.draws.now, run.draws.now, change)
        yield replace(prediction, flags=() if framework == "ms-swift" else (OVERLAP,))  # which has no such option
