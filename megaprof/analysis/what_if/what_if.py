"""What a run would take otherwise: other layouts, balanced stages, no straggler, other microbatches, other chunks.

First the run's own schedule is replayed with its measured times. How far that is from the measured pipeline is the
replay error; above `MOST_ERROR` nothing is predicted. A prediction is the measured pipeline times the ratio of two
replays, with the change and without, both from the same costs, so that what every replay misses cancels out. What lies
outside the pipeline (`replay`) is kept as measured. How a chunk's time varies over microbatches
(sequence lengths, noise) stays with its stage, in proportion.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megaprof.analysis.stages.consistency import Findings, examine
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.stages.stages import TargetStages
from megaprof.analysis.trace.calls import Call, ModuleKey
from megaprof.analysis.what_if.candidates import (
    Baseline,
    Prediction,
    balanced,
    chunk_counts,
    layouts,
    microbatch_counts,
    without_straggler,
)
from megaprof.analysis.what_if.cost_model import ChunkCost, CostFit, NoCostModel, fit_costs
from megaprof.analysis.what_if.layout_search import Cost
from megaprof.analysis.what_if.layouts import Layout, check_layout, format_layout
from megaprof.analysis.what_if.replay import CapturedRun, Withheld, captured_run
from megaprof.formats import ranges

__all__ = ["MOST_ERROR", "Prediction", "WhatIf", "what_if"]

#: Above this replay error, as a fraction of the measured pipeline, nothing is predicted.
MOST_ERROR = 0.10
_MOST_LAYERS = 10_000
# Predictions replay each of these for every candidate, and average over them.
_MOST_STEPS = 8


@dataclass(frozen=True)
class WhatIf:
    """Replay and predictions of one target. A field is None where ``warnings`` say why."""

    replay_ms: float | None = None
    """Milliseconds of the replayed step."""
    replay_error: Spread | None = None
    """(replayed - measured) / measured pipeline, one sample per captured step."""
    measured_ms: float | None = None
    """Milliseconds of the measured step."""
    outside_ms: float | None = None
    """The part of both that is no pipeline and is kept as measured."""
    rendezvous: bool | None = None
    """Whether exchanges were replayed as a rendezvous, see `megaprof.simulate`."""
    p2p_ms: float | None = None
    """Milliseconds of one transfer."""
    layout: str | None = None
    """The captured layout, as Megatron writes it."""
    costs: CostFit | None = None
    """What each kind of layer costs."""
    candidates: tuple[Prediction, ...] = ()
    """The predictions."""
    best: Prediction | None = None
    """The candidate to change to; None when no other layout gains more than its uncertainty."""
    advice: str | None = None
    """That as a sentence."""
    warnings: tuple[str, ...] = ()
    """Why something is missing."""

    def to_json(self) -> dict[str, Any]:
        """Plain data. ``replay_error`` is the mean; flags are one string, quoted for a shell."""
        costs = self.costs
        return {
            "replay_ms": self.replay_ms,
            "replay_error": self.replay_error.mean if self.replay_error else None,
            "replay_error_spread": asdict(self.replay_error) if self.replay_error else None,
            "measured_ms": self.measured_ms,
            "outside_ms": self.outside_ms,
            "rendezvous": self.rendezvous,
            "p2p_ms": self.p2p_ms,
            "layout": self.layout,
            "costs": None
            if costs is None
            else {
                "by_kind": {kind: cost._asdict() for kind, cost in costs.by_kind.items()},
                "residual": costs.residual,
                "source": costs.source,
                "assumptions": list(costs.assumptions),
            },
            "candidates": [_plain(candidate) for candidate in self.candidates],
            "best": _plain(self.best) if self.best else None,
            "advice": self.advice,
            "warnings": list(self.warnings),
        }


def what_if(measured: TargetStages, calls: Sequence[Call]) -> WhatIf:
    """Replay one target, and predict changes of it. ``calls``: everything that was read, of any target."""
    if measured.unjudgeable:
        return WhatIf(warnings=(f"not replayed: {measured.unjudgeable}",))
    own = [call for call in calls if _belongs(call, measured)]
    try:
        run, steps = captured_run(examine(own, measured.sizes, Findings(measured.sizes.pp)), measured.sizes.pp)
    except Withheld as reason:
        return WhatIf(warnings=(f"not replayed: {reason}",))
    error = Spread.of([step.replay_error for step in steps])
    outside = statistics.fmean(step.outside_ms for step in steps)
    replayed = WhatIf(
        replay_ms=statistics.fmean(step.replay_ms for step in steps) + outside,
        replay_error=error,
        measured_ms=statistics.fmean(step.pipeline_ms for step in steps) + outside,
        outside_ms=outside,
        rendezvous=run.rendezvous,
        p2p_ms=run.p2p_ms,
    )
    missed = statistics.fmean(abs(step.replay_error) for step in steps)
    if missed > MOST_ERROR:
        off = f"the replay is {missed:.1%} off the measured pipeline"
        return replace(replayed, warnings=(f"nothing is predicted: {off}, and more than {MOST_ERROR:.0%} is too much",))
    if run.stages == 1:
        return replace(replayed, warnings=("nothing is predicted: a single stage has no other layout",))
    by_stage: dict[int, list[Call]] = {}
    for call in own:
        by_stage.setdefault(call.metadata.coords.pp, []).append(call)
    return _predict(replayed, Baseline(run, steps[:_MOST_STEPS]), by_stage)


def _belongs(call: Call, measured: TargetStages) -> bool:
    whose = (call.label, call.metadata.role, call.metadata.sizes)
    return whose == (measured.target, measured.role, measured.sizes) and call.step in measured.steps


def _predict(replayed: WhatIf, baseline: Baseline, calls: dict[int, list[Call]]) -> WhatIf:
    """``calls``: by stage."""
    others = [balanced(baseline)]
    if (straggler := without_straggler(baseline)) is not None:
        others.append(straggler)
    others += microbatch_counts(baseline)
    try:
        pieces = _pieces(baseline.run, calls)
        costs = fit_costs(_chunk_costs(baseline, calls))
    except (Withheld, NoCostModel) as reason:
        return replace(replayed, candidates=tuple(others), warnings=(f"no other layout is predicted: {reason}",))
    found = layouts(baseline, pieces, costs)
    best = _best(found, baseline.measured_ms)
    return replace(
        replayed,
        layout=format_layout(pieces),
        costs=costs,
        candidates=(*found, *others, *chunk_counts(baseline, pieces, costs)),
        best=best,
        advice=_advice(found, best, baseline.measured_ms),
    )


def _pieces(run: CapturedRun, calls: dict[int, list[Call]]) -> Layout:
    """The captured layout. Raises Withheld where the traces do not say what a chunk holds, or say what cannot be."""
    pieces = []
    for chunk in range(run.chunks):
        for stage in range(run.stages):
            own = calls[stage][0].metadata.chunks[chunk]
            if own.layers is None or own.embedding is None or own.loss is None:
                raise Withheld(f"the traces of stage {stage} do not say what it holds")
            if own.layers > _MOST_LAYERS or (own.mtp or 0) > _MOST_LAYERS:
                raise Withheld(f"the traces say that stage {stage} holds {own.layers} layers")
            if any(each is not None and len(each) != own.layers for each in (own.kinds, own.layer_numbers)):
                raise Withheld(f"the traces of stage {stage} contradict themselves about its layers")
            pieces.append("E" * own.embedding + "t" * own.layers + "m" * (own.mtp or 0) + "L" * own.loss)
    flat = "".join(pieces)
    try:
        check_layout(pieces, run.stages, flat.count("t"), flat.count("m"))
    except ValueError as fault:
        raise Withheld(f"the captured layout is not one of Megatron's: {fault}") from None
    return tuple(pieces)


def _chunk_costs(baseline: Baseline, calls: dict[int, list[Call]]) -> list[ChunkCost]:
    """What every chunk holds and takes, in the order of the pieces."""
    run, (forward, backward) = baseline.run, baseline.typical
    costs = []
    for chunk in range(run.chunks):
        for stage in range(run.stages):
            own = calls[stage][0].metadata.chunks[chunk]
            count, mtp = own.layers or 0, own.mtp or 0
            numbers = own.layer_numbers if own.layer_numbers is not None else (None,) * count
            each = _module_costs(calls[stage], ranges.LAYER, numbers, run.forward_only)
            of_mtp = _module_costs(calls[stage], ranges.MTP_LAYER, range(1, mtp + 1), run.forward_only)
            costs.append(
                ChunkCost(
                    stage=stage,
                    kinds=own.kinds if own.kinds is not None else ("layer",) * count,
                    cost=Cost(forward[stage][chunk], backward[stage][chunk]),
                    embedding=bool(own.embedding),
                    mtp=mtp,
                    loss=bool(own.loss),
                    layers=each,
                    mtp_layers=Cost(sum(c[0] for c in of_mtp), sum(c[1] for c in of_mtp)) if of_mtp else None,
                )
            )
    return costs


def _module_costs(
    calls: Sequence[Call], label: str, numbers: Iterable[int | None], forward_only: bool
) -> tuple[Cost, ...] | None:
    """The median passes of the modules with these numbers, None when one of them was not captured."""
    costs = []
    for number in numbers:
        passes = []
        for kind in (ranges.FORWARD,) if forward_only else (ranges.FORWARD, ranges.BACKWARD):
            samples = [ns for call in calls for ns in call.modules.get(ModuleKey(label, number, None, kind), ())]
            if number is None or not samples:
                return None
            passes.append(statistics.median(samples) / 1e6)
        costs.append(Cost(*passes))
    return tuple(costs)


def _best(found: Sequence[Prediction], measured_ms: float) -> Prediction | None:
    """The quickest layout that gains more than its uncertainty; of those that cannot be told apart from it, one that
    fits into the memory that the stages were measured to use."""
    gaining = [each for each in found if measured_ms - each.step_ms > each.uncertainty_ms]
    if not gaining:
        return None
    quickest = gaining[0]
    return next(
        (
            each
            for each in gaining
            if each.memory is None and each.step_ms - quickest.step_ms <= quickest.uncertainty_ms
        ),
        quickest,
    )


def _advice(found: Sequence[Prediction], best: Prediction | None, measured_ms: float) -> str:
    if best is not None:
        return (
            f"{best.what}: {_ms(best.step_ms)} ± {_uncertainty(best)} ms a step instead of {_ms(measured_ms)} ms "
            f"({best.speedup:.2f} times as fast)"
        )
    if not found:
        return "this layout is as good as any other: none has a shorter step in the replay"
    first = found[0]
    return (
        f"no other layout is better by more than the uncertainty: {first.what} would take {_ms(first.step_ms)} ± "
        f"{_uncertainty(first)} ms a step instead of {_ms(measured_ms)} ms"
    )


def _plain(prediction: Prediction) -> dict[str, Any]:
    values = asdict(prediction)
    return {**values, "step_time_ms": values.pop("step_ms"), "flags": shlex.join(prediction.flags)}


def _uncertainty(prediction: Prediction) -> str:
    return f"{prediction.uncertainty_ms:.0f}" if prediction.step_ms >= 100 else _ms(prediction.uncertainty_ms)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
