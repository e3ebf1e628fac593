"""What a run would take otherwise: other layouts, balanced stages, no straggler, other microbatches, other chunks.

First the run's own schedule is replayed with its measured times. How far that is from the measured pipeline is the
replay error; above `MOST_ERROR` in the median step nothing is predicted. A prediction is the measured step less what
the change gains: the pipeline times the ratio of two replays, with the change and without, both from the same robust
costs (`baseline`), so that what every replay misses cancels out, and what single stalls cost is neither gained nor
scaled. What lies outside the pipeline (`replay`) is kept as measured.

Beside a rank that is slower than its peers nothing else is predicted: every stage waits for it, and it comes first.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.stages import words
from megaprof.analysis.stages.consistency import Findings, examine, opened_apart
from megaprof.analysis.stages.samples import Spread, mean_of
from megaprof.analysis.stages.stages import LONGEST, TargetStages
from megaprof.analysis.trace.calls import Call, ModuleKey, grouped
from megaprof.analysis.what_if.baseline import ERRORS, Baseline, Stall, Typical
from megaprof.analysis.what_if.by_hand import ByHand
from megaprof.analysis.what_if.candidates import (
    Fits,
    Prediction,
    balanced,
    chunk_counts,
    layouts,
    microbatch_counts,
)
from megaprof.analysis.what_if.cost_model import ChunkCost, CostFit, NoCostModel, fit_costs
from megaprof.analysis.what_if.layout_search import Cost
from megaprof.analysis.what_if.layouts import Layout, check_layout, format_layout
from megaprof.analysis.what_if.memory import measured as measured_memory
from megaprof.analysis.what_if.replay import CapturedRun, CapturedStep, Withheld, captured_run, in_flight_layers
from megaprof.formats import ranges
from megaprof.formats.metadata import ModelChunk

#: Above this replay error, as a fraction of the measured pipeline, nothing is predicted.
MOST_ERROR = 0.10
_MOST_LAYERS = 10_000
#: A pass that took so many times its median disturbs its step ...
_DISTURBED = 2.0
#: ... and as many steps as this tell a disturbance from a cost.
ENOUGH_STEPS = 5
#: An uncertainty above this, as a fraction of the step, is too much to call any layout as good as another.
TOO_NOISY = 0.05
#: What stages that share physical cores do to each other's costs, as a fraction of the step: layouts that ran on two
#: threads of one core took up to 24 % longer than predicted.
_SHARED_CORES = 0.2
#: Causes of time that is in no pass, so that a replay of passes misses it.
_BEYOND = {
    "host_bound": "the GPU waits for the host",
    "late_entry": "a stage enters the step late",
    "slow_link": "exchanges take long on one link",
}
_NO_CLOCK = "without a common clock of the stages nothing says how long exchanges take"
#: What gains less than this is no gain that a reader sees.
_GAIN = 0.01


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
    mended: tuple[int, ...] = ()
    """The slow ranks that ``best`` has as quick as their peers; empty where it is something else."""
    warnings: tuple[str, ...] = ()
    """Why something is missing."""
    replayed: tuple[CapturedRun, list[CapturedStep]] | None = field(default=None, compare=False, repr=False)
    """The run and the steps that were replayed; not in the JSON."""
    by_hand: ByHand | None = field(default=None, compare=False, repr=False)
    """What answers for changes that a person chooses; None where ``warnings`` say why, and not in the JSON."""

    def to_json(self) -> dict[str, Any]:
        """Plain data. ``replay_error`` is the mean; flags are one string, quoted for a shell."""
        costs = self.costs
        same = ("replay_ms", "measured_ms", "outside_ms", "rendezvous", "p2p_ms", "layout", "advice")
        return {
            **{name: getattr(self, name) for name in same},
            "replay_error": mean_of(self.replay_error),
            "replay_error_spread": asdict(self.replay_error) if self.replay_error else None,
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
            "warnings": list(self.warnings),
        }


def what_if(measured: TargetStages, calls: Sequence[Call], diagnosis: Diagnosis | None) -> WhatIf:
    """Replay one target, and predict changes of it. ``calls``: everything that was read, of any target."""
    if measured.unjudgeable:
        return WhatIf(warnings=(f"not replayed: {measured.unjudgeable}",))
    whose = measured.target, measured.role, measured.sizes
    captured = [call for call in calls if call.step in measured.steps]
    own = [call for call in captured if (call.label, call.role, call.metadata.sizes) == whose]
    causes = diagnosis.causes if diagnosis is not None else ()
    if measured.step_time_ms is None:
        for step in grouped(own, lambda call: call.key).values():
            if (apart := opened_apart(step)) is not None:
                return WhatIf(warnings=(f"not replayed: {apart}",))
    try:
        run, steps = _replayed(own, measured)
    except Withheld as reason:
        return WhatIf(warnings=(f"not replayed: {reason}",))
    error = Spread.of([step.replay_error for step in steps])
    outside = statistics.fmean(step.outside_ms for step in steps)
    pipeline = statistics.fmean(step.pipeline_ms for step in steps)
    measured_ms = measured.step_time_ms.mean if measured.step_time_ms else pipeline + outside
    replayed = WhatIf(
        replay_ms=measured_ms + statistics.fmean(step.replay_ms for step in steps) - pipeline,
        replay_error=error,
        measured_ms=measured_ms,
        outside_ms=outside,
        rendezvous=run.rendezvous,
        p2p_ms=run.p2p_ms,
        replayed=(run, steps),
    )
    if run.stages == 1:
        return replace(replayed, warnings=("nothing is predicted: a single stage has no other layout",))
    if (slow := next((cause for cause in causes if cause.kind == "slow_rank"), None)) is not None and diagnosis:
        return _fixed(replayed, slow, diagnosis.step_ms)
    baseline = Baseline(run, steps, measured_ms)
    if baseline.replay_error > MOST_ERROR:
        off = f"the replay is {baseline.replay_error:.1%} off the measured pipeline"
        many = f"nothing is predicted: {off}, and more than {MOST_ERROR:.0%} is too much"
        beyond = next((_BEYOND[cause.kind] for cause in causes if cause.kind in _BEYOND), None)
        if beyond is not None:
            many += f"; it is off because it knows only the passes, and here {beyond}"
        elif measured.step_time_basis == LONGEST:
            many += f"; {_NO_CLOCK}"
        elif len(steps) < ENOUGH_STEPS:
            many += f"; {_more_steps(len(steps))}: the median step counts"
        return replace(replayed, advice=_disturbed(baseline), warnings=(many,))
    found = _predict(replayed, baseline, grouped(own, lambda call: call.stage))
    told = [] if run.refit is None else [run.refit]
    if measured.step_time_basis == LONGEST:
        told.append(f"no exchange takes time in the replay: {_NO_CLOCK}")
    return replace(found, warnings=(*found.warnings, *told))


def layout_of(measured: TargetStages) -> Layout | None:
    """The layout of a captured target; None where its stages do not say what they hold."""
    chunks = {len(stage.chunks) for stage in measured.stages}
    if len(chunks) != 1 or len(measured.stages) < measured.sizes.pp:
        return None
    held = [stage.chunks[chunk].holds for chunk in range(chunks.pop()) for stage in measured.stages]
    pieces = [_piece(each) for each in held if each is not None and each.layers is not None]
    return tuple(pieces) if pieces and len(pieces) == len(held) else None


def _piece(held: ModelChunk) -> str:
    return "E" * bool(held.embedding) + "t" * (held.layers or 0) + "m" * (held.mtp or 0) + "L" * bool(held.loss)


def _replayed(calls: Sequence[Call], measured: TargetStages) -> tuple[CapturedRun, list[CapturedStep]]:
    """Raises Withheld."""
    return captured_run(examine(list(calls), measured.sizes, Findings(measured.sizes.pp)), measured.sizes.pp)


def _fixed(replayed: WhatIf, slow: Cause, step_ms: float) -> WhatIf:
    """The step without its dearest slow rank, and nothing else: every stage waits for it. ``step_ms``: what the price
    is a part of."""
    which = words.ranks(slow.ranks)
    left, speedup = step_ms - slow.price.ms, step_ms / (step_ms - slow.price.ms)
    off = (slow.price.high - slow.price.low) / 2
    fixed = Prediction(
        kind="no_straggler",
        what=f"{which} as quick as {'its' if len(slow.ranks) == 1 else 'their'} peers",
        step_ms=left,
        speedup=speedup,
        uncertainty_ms=off,
        speedup_uncertainty=speedup * off / left,
    )
    advice = (
        f"fix {which}: {words.with_error(fixed.step_ms, fixed.uncertainty_ms)} ms a step instead of "
        f"{words.number(step_ms)} ms ({_times(fixed)}); layouts are not compared while the pipeline waits for a slow "
        "rank"
    )
    return replace(replayed, candidates=(fixed,), best=fixed, advice=advice, mended=slow.ranks)


def _predict(replayed: WhatIf, baseline: Baseline, calls: dict[int, list[Call]]) -> WhatIf:
    """``calls``: by stage."""
    others = [balanced(baseline), *microbatch_counts(baseline)]
    try:
        pieces = _pieces(baseline.run, calls)
        fits = _fits(baseline, calls)
    except (Withheld, NoCostModel) as reason:
        warning = f"no other layout is predicted: {reason}"
        return replace(replayed, candidates=tuple(others), advice=_disturbed(baseline), warnings=(warning,))
    memory = measured_memory(calls, pieces, in_flight_layers(pieces, baseline.run.checked(baseline.microbatches)))
    known = ByHand(baseline, pieces, fits, memory)
    compared = layouts(known)
    shorter = [each for each in compared if each.speedup > 1.0]
    best = None if _disturbed(baseline) else _best(shorter)
    shared = _shared_cores(calls)
    return replace(
        replayed,
        warnings=() if shared is None else (shared,),
        layout=format_layout(pieces),
        costs=fits.best,
        candidates=(*shorter, *others, *chunk_counts(known)),
        by_hand=known,
        best=best,
        advice=_disturbed(baseline) or _advice(compared, best, baseline),
    )


def _fits(baseline: Baseline, calls: dict[int, list[Call]]) -> Fits:
    """What layers cost by everything captured, and by every draw of it. Raises NoCostModel."""
    error = ERRORS * baseline.cost_error
    chunks = _chunk_costs(baseline, calls)
    best = fit_costs(chunks, error)
    drawn = []
    for sample in baseline.samples:
        costs = [_drawn(chunk, place, sample.typical, baseline.run) for place, chunk in enumerate(chunks)]
        with suppress(NoCostModel):  # a draw that no model explains says nothing about layers
            drawn.append((sample, fit_costs(costs, error)))
    if not drawn:
        raise NoCostModel("the times of single passes differ too much to tell what a layer costs")
    return Fits(best, tuple(drawn), 0.0 if _shared_cores(calls) is None else _SHARED_CORES)


def _shared_cores(calls: dict[int, list[Call]]) -> str | None:
    """That more ranks than a host has cores run on it, which every layout does in another way; None where they do not
    or nothing says so."""
    for own in calls.values():
        ranks, cores = own[0].metadata.local_ranks, own[0].metadata.cores
        if ranks is not None and cores is not None and ranks > cores:
            return (
                f"{ranks} ranks share the {words.counted(cores, 'physical core')} of a host: another layout changes "
                f"what every stage costs, so its speedup is uncertain by {_SHARED_CORES:.0%} more"
            )
    return None


def _drawn(chunk: ChunkCost, place: int, typical: Typical, run: CapturedRun) -> ChunkCost:
    """A chunk with the costs of a draw; times of single layers go with them."""
    cost = Cost(*(kind[chunk.stage][place // run.stages] for kind in typical))
    share = sum(cost) / sum(chunk.cost) if sum(chunk.cost) > 0 else 1.0

    def scaled(each: Cost) -> Cost:
        return Cost(each.forward_ms * share, each.backward_ms * share)

    return replace(
        chunk,
        cost=cost,
        layers=None if chunk.layers is None else tuple(map(scaled, chunk.layers)),
        mtp_layers=None if chunk.mtp_layers is None else scaled(chunk.mtp_layers),
    )


def _held(run: CapturedRun, calls: dict[int, list[Call]]) -> list[tuple[int, int, ModelChunk]]:
    """Stage, chunk, and what that holds, in the order of the pieces."""
    every = [(stage, chunk) for chunk in range(run.chunks) for stage in range(run.stages)]
    return [(stage, chunk, calls[stage][0].metadata.chunks[chunk]) for stage, chunk in every]


def _pieces(run: CapturedRun, calls: dict[int, list[Call]]) -> Layout:
    """The captured layout. Raises Withheld where the traces do not say what a chunk holds, or say what cannot be."""
    pieces = []
    for stage, _, own in _held(run, calls):
        if own.layers is None or own.embedding is None or own.loss is None:
            raise Withheld(f"the traces of stage {stage} do not say what it holds")
        if own.layers > _MOST_LAYERS or (own.mtp or 0) > _MOST_LAYERS:
            raise Withheld(f"the traces say that stage {stage} holds {own.layers} layers")
        if any(each is not None and len(each) != own.layers for each in (own.kinds, own.layer_numbers)):
            raise Withheld(f"the traces of stage {stage} contradict themselves about its layers")
        pieces.append(_piece(own))
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
    for stage, chunk, own in _held(run, calls):
        count, mtp = own.layers or 0, own.mtp or 0
        numbers = own.layer_numbers if own.layer_numbers is not None else (None,) * count
        of_mtp = _module_costs(calls[stage], ranges.MTP_LAYER, range(1, mtp + 1), run.forward_only)
        costs.append(
            ChunkCost(
                stage=stage,
                kinds=own.kinds if own.kinds is not None else ("layer",) * count,
                cost=Cost(forward[stage][chunk], backward[stage][chunk]),
                embedding=bool(own.embedding),
                mtp=mtp,
                loss=bool(own.loss),
                layers=_module_costs(calls[stage], ranges.LAYER, numbers, run.forward_only),
                mtp_layers=Cost(*map(sum, zip(*of_mtp, strict=True))) if of_mtp else None,
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


def _best(shorter: Sequence[Prediction]) -> Prediction | None:
    """The quickest layout that gains more than its uncertainty; of those that cannot be told apart from it, one that
    fits into the memory that the stages were measured to use."""
    gaining = [each for each in shorter if each.speedup - 1.0 > each.speedup_uncertainty and each.fits is not False]
    if not gaining:
        return None
    most = gaining[0].step_ms + gaining[0].uncertainty_ms
    return next((each for each in gaining if each.memory is None and each.step_ms <= most), gaining[0])


def _disturbed(baseline: Baseline) -> str | None:
    """That one captured step, and a disturbed one, is not enough to advise from; None where it is."""
    if len(baseline.steps) > 1 or not baseline.stalls or baseline.stalls[0].factor < _DISTURBED:
        return None
    return f"too noisy to advise: {_stalled(baseline.stalls[0])}; {_more_steps(1)}"


def _stalled(stall: Stall) -> str:
    return f"one {stall.kind} of stage {stall.stage} took {stall.factor:.2g} times the median"


def _more_steps(captured: int) -> str:
    wanted = max(ENOUGH_STEPS, 2 * captured)
    return f"capture {wanted} steps"


def _advice(compared: Sequence[Prediction], best: Prediction | None, baseline: Baseline) -> str:
    """``compared``: layouts with the captured number of chunks, the shortest first."""
    if best is not None:
        return (
            f"{best.what}: {_times(best)}, {words.with_error(best.step_ms, best.uncertainty_ms)} ms a step instead of "
            f"{words.number(baseline.measured_ms)} ms"
        )
    if not compared:
        return "no other layout of these layers exists with as many stages and chunks"
    first = compared[0]
    if first.fits is False and first.speedup - 1.0 > first.speedup_uncertainty:
        return f"no layout that fits is better: {first.what} would be {_times(first)}, and {first.memory}"
    if first.noise > TOO_NOISY:
        disturbed = bool(baseline.stalls) and baseline.stalls[0].factor >= _DISTURBED
        why = _stalled(baseline.stalls[0]) if disturbed else "passes vary"
        uncertain = f"what another layout gains is uncertain by {words.percent(first.noise)}"
        return f"too noisy to advise: {why}, and {uncertain}; {_more_steps(len(baseline.steps))}"
    if first.speedup - 1.0 >= _GAIN:
        return f"no other layout is better by more than the uncertainty: {first.what} might be {_times(first)}"
    return f"with as many model chunks no other split of the layers is better: {first.what} would be {_times(first)}"


def _times(prediction: Prediction) -> str:
    return f"{words.with_error(prediction.speedup, prediction.speedup_uncertainty)} times as fast"


def _plain(prediction: Prediction) -> dict[str, Any]:
    """``step_time_ms`` is the contract; ``step_ms`` says the same, for readers of what earlier versions wrote."""
    values = asdict(prediction)
    del values["fits"]
    return {**values, "step_time_ms": prediction.step_ms, "flags": shlex.join(prediction.flags)}
