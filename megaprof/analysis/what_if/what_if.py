"""Makes the predictions and the advice of a report: other layouts, balanced stages, microbatches, chunks and packings.

All predictions replay the steps that the diagnosis examined, with its model of the time of passes, so advice and causes
cannot contradict each other. Slow ranks stay as slow as they are: the gain without one is the price of that cause.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from megaprof.analysis.diagnosis.diagnose import Diagnosis
from megaprof.analysis.diagnosis.examine import Examined
from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.diagnosis.stages import TargetStages
from megaprof.analysis.diagnosis.terms import terms
from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Spread
from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.table.tabulate import measured
from megaprof.analysis.what_if.candidates import balanced, chunk_counts, layouts, microbatch_counts
from megaprof.analysis.what_if.changeable import Changeable
from megaprof.analysis.what_if.changes import Prediction, apart, baseline
from megaprof.analysis.what_if.contents import CostFit, Held, fitted
from megaprof.analysis.what_if.layouts import Layout, check_layout, format_layout, options_of
from megaprof.analysis.what_if.memory import in_flight_layers, peaks
from megaprof.analysis.what_if.memory import measured as measured_memory
from megaprof.analysis.what_if.packing import plans, sequences_of
from megaprof.formats.metadata import ModelChunk

_MOST_LAYERS = 10_000
_ONE_STAGE = Note("no_layout", said="a single stage has no other one")
Advice = Literal["change", "no_other", "none_fits", "open", "unsure", "none_better"]


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
    """Predictions: other layouts that are faster than the recorded one, and all other changes."""
    best: Prediction | None = None
    """Candidate to change to, whose speedup is certainly above 2 % (by the lower end); None without one."""
    quickest: Prediction | None = None
    """Fastest other layout with as many chunks, whether its gain is certain or not; None if none was compared."""
    advice: Advice | None = None
    """``change``: change to ``best``. Otherwise, why not to change: ``no_other`` layout exists; ``none_fits``:
    ``quickest`` needs too much memory; ``open``: ``more_steps`` would show; ``unsure``: no number of steps would
    show it; ``none_better``. None if nothing was predicted."""
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
    """Layouts that the captured data cannot distinguish from ``best``."""
    more_steps: int = 0
    """Number of further steps that would show whether the fastest layout gains 2 %; 0 if that is known, or if no number
    would."""


def what_if(run: Examined, diagnosis: Diagnosis, memory_limit: int | None = None) -> tuple[WhatIf, Changeable | None]:
    """Returns the predictions for a run, and the run as it can be changed by hand; None if ``warnings`` say why not.
    ``memory_limit``: bytes that a stage may allocate, if that is less than its device has."""
    table, state = run.table, run.view.state
    errors = (state.step_ms(run.replay) - table.length) / table.length
    steps, held = baseline(run), _held(table)
    replayed = WhatIf(
        layout=format_layout(held.pieces) if isinstance(held, Held) else None,
        replay_ms=run.replayed_ms,
        replay_error=Spread.of(errors.tolist()),
        measured_ms=run.step_ms,
        outside_ms=float(table.reduction.mean()),
        rendezvous=run.replay.rendezvous,
        p2p_ms=steps.p2p_ms,
        allocated=peaks(table.memory),
    )
    differ = _differ(diagnosis)
    sequences = sequences_of(run) if differ else None
    if sequences is not None:
        replayed = replace(replayed, packings=tuple(plans(sequences)), most_tokens=sequences.most)
    if table.schedule.stages == 1 and sequences is None:
        return replace(replayed, warnings=(_ONE_STAGE,)), None
    warnings = [] if table.clocks else [Note("no_exchange_time")]
    if run.missed > LEAST:
        warnings.append(Note("replay_off", factor=run.missed))
    slow = {rank for cause in diagnosis.causes if cause.kind == "slow_rank" for rank in cause.ranks}
    if slow:
        warnings.append(Note("ranks_stay_slow", ranks=tuple(sorted(slow))))
    others = [balanced(steps), *microbatch_counts(steps)]
    if isinstance(held, Note):
        return replace(replayed, candidates=tuple(others), warnings=(held, *warnings)), None
    memory = measured_memory(table.memory, held.pieces, in_flight_layers(held.pieces, table.schedule), memory_limit)
    changeable = Changeable(steps, held, memory, _slower(run, slow), sequences, differ is False)
    if table.schedule.stages == 1:
        return replace(replayed, warnings=(_ONE_STAGE,)), changeable
    compared = layouts(changeable)
    best = _best(compared, changeable.in_flight)
    advised = None if best is None else best[0]
    alike = () if best is None else _alike(best, compared)
    quicker = [prediction for prediction, _ in compared if prediction.speedup.value > 1.0]
    first = compared[0][0] if compared else None
    more = quicker[0].more_steps if best is None and quicker else 0
    predictions = replace(
        replayed,
        warnings=tuple(warnings),
        costs=fitted(changeable.costs),
        candidates=(*quicker, *others, *chunk_counts(changeable)),
        best=advised,
        host_options=options_of(table.framework, table.role, advised.flags, changeable.stages) if advised else None,
        quickest=first,
        advice=_advice(first, advised, more),
        in_flight=tuple(changeable.in_flight),
        allowed=None if memory is None else memory.allowed,
        alike=alike,
        more_steps=more,
    )
    return predictions, changeable


def _slower(run: Examined, ranks: Set[int]) -> Floats:
    """Returns [s]: how many times as long as its peers the slowest of ``ranks`` takes; 1 for a stage without any of
    them."""
    without = run
    for term in terms(run.table, run.view, run.step_ms):
        if term.kind == "slow_rank" and ranks & set(term.ranks):
            without = without.mended(term)
    ratio = run.view.state.passes / np.maximum(without.view.state.passes, 1e-9)
    slowest: Floats = ratio.mean(axis=(0, 3, 4, 5)).max(axis=0)
    return slowest


def _differ(diagnosis: Diagnosis) -> bool | None:
    """Returns whether microbatches or replicas differ in the sequences they get; None if that is not known."""
    lengths = diagnosis.lengths
    return None if lengths is None else max(lengths.squares, lengths.tokens_ratio) > 1.0 + LEAST


def withheld(reason: Note) -> WhatIf:
    """Returns the predictions of a target that cannot be replayed: none, and the reason."""
    return WhatIf(warnings=(Note("not_replayed", why=reason),))


def layout_of(measured: TargetStages) -> Layout | None:
    """Returns the layout of a captured target; None if its stages do not say what they hold."""
    chunks = {len(stage.chunks) for stage in measured.stages}
    if len(chunks) != 1 or len(measured.stages) < measured.sizes.pp:
        return None
    held = [stage.chunks[chunk].holds for chunk in range(chunks.pop()) for stage in measured.stages]
    pieces = [_piece(chunk) for chunk in held if chunk is not None and chunk.layers is not None]
    return tuple(pieces) if pieces and len(pieces) == len(held) else None


def _piece(held: ModelChunk) -> str:
    return "E" * bool(held.embedding) + "t" * (held.layers or 0) + "m" * (held.mtp or 0) + "L" * bool(held.loss)


def _held(table: Table) -> Held | Note:
    """Returns what the stages hold, or a note that says why that is not known: the files do not say it, or what they
    say is impossible."""
    schedule, pieces, kinds = table.schedule, [], list[str]()
    for chunk in range(schedule.chunks):
        for stage in range(schedule.stages):
            metadata = table.metadata[stage]
            holds = ModelChunk() if metadata is None else metadata.chunks[chunk]
            if holds.layers is None or holds.embedding is None or holds.loss is None:
                return Note("no_layout", stages=(stage,), said="the traces do not say what it holds")
            if holds.layers > _MOST_LAYERS or (holds.mtp or 0) > _MOST_LAYERS:
                return Note("no_layout", stages=(stage,), said=f"the traces say that it holds {holds.layers} layers")
            if any(listed is not None and len(listed) != holds.layers for listed in (holds.kinds, holds.layer_numbers)):
                return Note("no_layout", stages=(stage,), said="the traces contradict themselves about its layers")
            pieces.append(_piece(holds))
            kinds += holds.kinds if holds.kinds is not None else ("layer",) * holds.layers
    flat = "".join(pieces)
    if not kinds:
        return Note("no_layout", said="the stages hold no decoder layers")
    try:
        check_layout(pieces, schedule.stages, flat.count("t"), flat.count("m"))
    except ValueError as fault:
        return Note("no_layout", said=f"the captured one is not one of Megatron's: {fault}")
    return Held(tuple(pieces), tuple(kinds), schedule.stages, measured(table))


_Priced: TypeAlias = tuple[Prediction, Floats]


def _best(compared: Sequence[_Priced], held: Sequence[int]) -> _Priced | None:
    """Returns the fastest layout that certainly gains enough; of those that are as fast, one that needs no more
    activations than stages were seen to hold."""
    gaining = [each for each in compared if each[0].speedup.low > 1.0 + LEAST and each[0].fits is not False]
    as_fast = [each for each in gaining if gaining[0][0].speedup.value - each[0].speedup.value < LEAST]
    return next((each for each in as_fast if not each[0].exceeds(held)), gaining[0]) if gaining else None


def _alike(best: _Priced, compared: Sequence[_Priced]) -> tuple[str, ...]:
    return tuple(
        each.layout or ""
        for each, gains in compared
        if each is not best[0] and each.fits is not False and not apart(best[1], gains)
    )


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
