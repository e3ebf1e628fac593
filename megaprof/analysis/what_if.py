"""What this run would take otherwise: other layouts, balanced stages, no straggler, other microbatches, other chunks.

First the run's own schedule is replayed with its measured times. How far that is from the measured pipeline is the
replay error; above `MOST_ERROR` nothing is predicted. A prediction is the measured pipeline times the ratio of two
replays, of the changed run and of the run as it is, both from the same costs, so that what every replay misses cancels
out. What lies outside the pipeline (:mod:`~megaprof.analysis.replay`) is kept as measured.

How a chunk's time varies over microbatches (sequence lengths, noise) stays with its stage and chunk, in proportion.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megaprof import ranges
from megaprof.analysis.calls import Call
from megaprof.analysis.consistency import Findings, examine
from megaprof.analysis.cost_model import ChunkCost, CostFit, NoCostModel, fit_costs
from megaprof.analysis.layer_times import LayerTimes
from megaprof.analysis.layout_search import Cost, search
from megaprof.analysis.layouts import Layout, check_layout, default_layout, format_layout, layers_per_stage, to_flags
from megaprof.analysis.replay import CapturedStep, Run, Times, Withheld, captured_run, in_flight_layers
from megaprof.analysis.samples import Spread
from megaprof.analysis.stages import TargetStages

__all__ = ["MOST_ERROR", "Prediction", "WhatIf", "what_if"]

#: Above this replay error, as a fraction of the measured pipeline, nothing is predicted.
MOST_ERROR = 0.10
#: Uncertainties cover this many standard errors of the stages' times.
ERRORS = 2.0
#: A pipeline rank is a straggler where it computes this much longer than its peers, as a fraction.
_STRAGGLES = 0.10
_LAYOUTS = 3
_CHUNK_COUNTS = (1, 2, 3, 4)
# Predictions average over this many of the captured steps, and replay each of them for every candidate.
_MOST_STEPS = 8
# Standard error of a median, see megaprof.analysis.advice.
_MEDIAN_ERROR = 1.2533 * 1.4826


@dataclass(frozen=True)
class Prediction:
    """One change of the run and what it would take.

    ``kind``: ``layout``, ``balanced``, ``no_straggler``, ``microbatches`` or ``chunks``. ``flags``: Megatron's
    arguments for it, in the place of all arguments that place layers now; empty where no argument does it.
    ``step_ms``: predicted step, to be compared with the measured one; ``uncertainty_ms``: plus or minus, from the
    spread of the measured times, the cost model's residual and the replay error. ``memory``: why it may need more
    activation memory on some stage than any stage was measured to hold, or None. ``assumes``: what else it rests on.
    """

    kind: str
    what: str
    layout: str | None
    flags: tuple[str, ...]
    step_ms: float
    speedup: float
    uncertainty_ms: float
    memory: str | None = None
    assumes: str | None = None


@dataclass(frozen=True)
class WhatIf:
    """Replay and predictions of one target.

    ``replay_error``: (replayed - measured pipeline) / measured pipeline, one sample per captured step. ``replay_ms``
    and ``measured_ms``: whole steps; ``outside_ms``: the part of both that is kept as measured. ``best``: the candidate
    to change to, None when none gains more than its uncertainty. ``advice``: the answer as a sentence. ``warnings``:
    why something is missing.
    """

    replay_ms: float | None = None
    replay_error: Spread | None = None
    measured_ms: float | None = None
    outside_ms: float | None = None
    rendezvous: bool | None = None
    p2p_ms: float | None = None
    layout: str | None = None
    costs: CostFit | None = None
    candidates: tuple[Prediction, ...] = ()
    best: Prediction | None = None
    advice: str | None = None
    warnings: tuple[str, ...] = ()


def what_if(measured: TargetStages, calls: Sequence[Call], layers: LayerTimes | None = None) -> WhatIf:
    """Replay one target and predict changes of it.

    ``calls``: all calls that were read, of any target; ``layers``: the times of single layers, where captured.
    """
    if measured.unjudgeable:
        return WhatIf(warnings=(f"not replayed: {measured.unjudgeable}",))
    own = [call for call in calls if _belongs(call, measured)]
    try:
        run, steps = captured_run(examine(own, measured.sizes, Findings(measured.sizes.pp)), measured.sizes.pp)
    except Withheld as reason:
        return WhatIf(warnings=(f"not replayed: {reason}",))
    replayed = _replayed(run, steps)
    error = replayed.replay_error
    if error is None or abs(error.mean) > MOST_ERROR:
        off = f"the replay is {error.mean:+.1%} off the measured pipeline" if error else "nothing was replayed"
        return replace(replayed, warnings=(f"nothing is predicted: {off}, more than {MOST_ERROR:.0%}",))
    if run.stages == 1:
        return replace(replayed, warnings=("nothing is predicted: one stage has no other layout",))
    return _predict(replayed, _Model(run, steps[:_MOST_STEPS], own, layers or LayerTimes(), measured))


def _belongs(call: Call, measured: TargetStages) -> bool:
    own = (measured.target, measured.role, measured.sizes)
    return (call.label, call.metadata.role, call.metadata.sizes) == own and call.step in measured.steps


def _replayed(run: Run, steps: Sequence[CapturedStep]) -> WhatIf:
    outside = statistics.fmean(step.outside_ms for step in steps)
    return WhatIf(
        replay_ms=statistics.fmean(step.replay_ms for step in steps) + outside,
        replay_error=Spread.of([step.replay_ms / step.pipeline_ms - 1.0 for step in steps]),
        measured_ms=statistics.fmean(step.pipeline_ms for step in steps) + outside,
        outside_ms=outside,
        rendezvous=run.rendezvous,
        p2p_ms=run.p2p_ms,
    )


class _Model:
    """What one run's measured times say about other runs."""

    def __init__(
        self, run: Run, steps: Sequence[CapturedStep], calls: Sequence[Call], layers: LayerTimes, measured: TargetStages
    ) -> None:
        self.run, self.steps, self.measured = run, steps, measured
        self.forward = _medians([step.forward_ms for step in steps])
        self.backward = _medians([step.backward_ms for step in steps if step.backward_ms])
        self.measured_ms = statistics.fmean(step.pipeline_ms + step.outside_ms for step in steps)
        self.microbatches = steps[0].microbatches
        self.noise = ERRORS * max(
            _relative_error([step.forward_ms[stage][chunk] for step in steps])
            for stage in range(run.stages)
            for chunk in range(run.chunks)
        )
        self.replay_error = abs(statistics.fmean(step.replay_ms / step.pipeline_ms - 1.0 for step in steps))
        self.held = {call.metadata.coords.pp: call.metadata.chunks for call in calls}
        self._calls, self._layers = calls, layers

    def pieces(self) -> Layout:
        """The captured layout. Raises Withheld where the traces do not say what a chunk holds, or say what cannot be."""
        pieces = []
        for chunk in range(self.run.chunks):
            for stage in range(self.run.stages):
                holds = self.held[stage][chunk]
                if holds.layers is None or holds.embedding is None or holds.loss is None:
                    raise Withheld(f"the traces of stage {stage} do not say which layers it holds")
                if holds.kinds is not None and len(holds.kinds) != holds.layers:
                    raise Withheld(f"the traces of stage {stage} contradict themselves about its layers")
                pieces.append("E" * holds.embedding + "t" * holds.layers + "m" * (holds.mtp or 0) + "L" * holds.loss)
        flat = "".join(pieces)
        try:
            check_layout(pieces, self.run.stages, flat.count("t"), flat.count("m"))
        except ValueError as fault:
            raise Withheld(str(fault)) from None
        return tuple(pieces)

    def chunk_costs(self) -> list[ChunkCost]:
        """In the order of the pieces."""
        found = []
        target = (self.measured.target, self.measured.role)
        forward_only = self.run.forward_only
        for chunk in range(self.run.chunks):
            for stage in range(self.run.stages):
                holds = self.held[stage][chunk]
                mtp = range(1, (holds.mtp or 0) + 1)
                layers = self._layers.costs(
                    target, ranges.LAYER, holds.layer_numbers or [None] * (holds.layers or 0), forward_only=forward_only
                )
                mtp_layers = self._layers.costs(target, ranges.MTP_LAYER, mtp, forward_only=forward_only)
                found.append(
                    ChunkCost(
                        stage=stage,
                        kinds=holds.kinds or ("layer",) * (holds.layers or 0),
                        cost=Cost(self.forward[stage][chunk], self.backward[stage][chunk] if self.backward else 0.0),
                        embedding=bool(holds.embedding),
                        mtp=holds.mtp or 0,
                        loss=bool(holds.loss),
                        layers=None if layers is None else tuple(layers),
                        mtp_layers=Cost(*map(sum, zip(*mtp_layers, strict=True))) if mtp_layers else None,
                    )
                )
        return found

    def scaled(self, step: CapturedStep, forward: list[list[float]], backward: list[list[float]]) -> float:
        """Replay one step with other typical times ``[stage][chunk]``, each varying as the measured ones did."""
        return self.run.simulate(
            _varied(step.forward_ms, self.forward, forward),
            None if step.backward_ms is None else _varied(step.backward_ms, self.backward, backward),
        ).step_ms

    def relative(self, change: Callable[[CapturedStep], float], now: Callable[[CapturedStep], float]) -> float:
        """The predicted step in milliseconds: both functions replay a captured step, with the change and as it is."""
        return statistics.fmean(
            step.outside_ms + step.pipeline_ms * (change(step) / base if (base := now(step)) > 0 else 1.0)
            for step in self.steps
        )

    def uncertainty(self, step_ms: float, residual: float = 0.0) -> float:
        return step_ms * math.hypot(self.noise, self.replay_error, residual)

    def prediction(self, kind: str, what: str, step_ms: float, *, residual: float = 0.0, **more: object) -> Prediction:
        values: dict[str, object] = {"layout": None, "flags": (), **more}
        speedup = self.measured_ms / step_ms if step_ms > 0 else 1.0
        return Prediction(  # type: ignore[arg-type]
            kind, what, step_ms=step_ms, speedup=speedup, uncertainty_ms=self.uncertainty(step_ms, residual), **values
        )


def _predict(replayed: WhatIf, model: _Model) -> WhatIf:
    warnings: list[str] = []
    others = [*_balanced(model), *_without_straggler(model)]
    pieces: Layout | None = None
    costs: CostFit | None = None
    layouts: list[Prediction] = []
    try:
        pieces = model.pieces()
        costs = fit_costs(model.chunk_costs())
        layouts = _layouts(model, pieces, costs)
        others += [*_chunk_counts(model, pieces, costs)]
    except (Withheld, NoCostModel) as reason:
        warnings.append(f"no other layout is predicted: {reason}")
    others += _microbatch_counts(model)
    best = _best(model, layouts)
    return replace(
        replayed,
        layout=format_layout(pieces) if pieces else None,
        costs=costs,
        candidates=(*layouts, *others),
        best=best,
        advice=_advice(model, layouts, best) if costs else None,
        warnings=tuple(warnings),
    )


def _layouts(model: _Model, pieces: Layout, costs: CostFit) -> list[Prediction]:
    """The layouts with the shortest predicted step, without the captured one and any that is no shorter than it."""
    run, flat = model.run, "".join(pieces)
    found = search(
        costs.model(run.p2p_ms),
        run.stages,
        run.chunks,
        flat.count("t"),
        model.microbatches,
        mtp_layers=flat.count("m"),
        forward_only=run.forward_only,
        microbatch_group_size=run.group_size,
        rendezvous=run.rendezvous,
        top=_LAYOUTS + 2,
    )
    as_is = _typical(pieces, run.stages, costs)
    held = in_flight_layers(pieces, run.checked(model.microbatches))
    predictions = []
    for candidate in found:
        if candidate.pieces == pieces:
            continue
        typical = _typical(candidate.pieces, run.stages, costs)
        step_ms = model.relative(lambda step, t=typical: model.scaled(step, *t), lambda step: model.scaled(step, *as_is))
        if step_ms < model.measured_ms:
            needs = in_flight_layers(candidate.pieces, run.checked(model.microbatches))
            predictions.append(
                model.prediction(
                    "layout",
                    f"{'+'.join(map(str, candidate.layers))} layers",
                    step_ms,
                    residual=costs.residual,
                    layout=candidate.layout,
                    flags=_flags(candidate.pieces, run.stages, candidate.flags),
                    memory=_memory(needs, held),
                )
            )
    return sorted(predictions, key=lambda each: each.step_ms)[:_LAYOUTS]


def _flags(pieces: Layout, stages: int, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Megatron's even split needs no flag; said aloud, it also takes the place of a flag that the run has now."""
    first = "--decoder-first-pipeline-num-layers"
    places = any(flag.startswith(("--decoder", "--account", "--pipeline")) for flag in flags)
    return flags if places else (first, str(layers_per_stage(pieces, stages)[0]), *flags)


def _typical(pieces: Layout, stages: int, costs: CostFit) -> tuple[list[list[float]], list[list[float]]]:
    """Forward and backward of one microbatch ``[stage][chunk]`` in a layout, by the cost model."""
    kinds = iter(costs.kinds)
    names = {"E": "embedding", "m": "mtp", "L": "loss"}
    free = Cost(0.0, 0.0)
    placed = [
        [costs.by_kind.get(next(kinds) if letter == "t" else names[letter], free) for letter in piece] for piece in pieces
    ]
    times = [[sum(cost[i] for cost in piece) for piece in placed] for i in (0, 1)]
    forward, backward = ([each[stage::stages] for stage in range(stages)] for each in times)
    return forward, backward


def _memory(needs: Sequence[float], held: Sequence[float]) -> str | None:
    most = max(held)
    over = [stage for stage, layers in enumerate(needs) if layers > most]
    if not over:
        return None
    stage = max(over, key=lambda each: needs[each])
    return f"more layers x in-flight microbatches on stage {stage} than any stage held ({needs[stage]:g} against {most:g})"


def _balanced(model: _Model) -> Iterator[Prediction]:
    def even(times: Times) -> Times:
        passes = [row for stage in times for row in stage]
        mean = [statistics.fmean(same) for same in zip(*passes, strict=True)]
        return [[mean] * model.run.chunks for _ in range(model.run.stages)]

    def change(step: CapturedStep) -> float:
        backward = None if step.backward_ms is None else even(step.backward_ms)
        return model.run.simulate(even(step.forward_ms), backward).step_ms

    step_ms = model.relative(change, lambda step: step.replay_ms)
    yield model.prediction("balanced", "the measured work spread evenly over the stages", step_ms)


def _without_straggler(model: _Model) -> Iterator[Prediction]:
    """Where several pipelines were captured whole: every rank as quick as the median of its stage's ranks."""
    if any(step.peers_forward_ms is None for step in model.steps):
        return

    def work(times: Times | None, stage: int) -> float:
        return sum(map(sum, times[stage])) if times else 0.0

    stages = [
        stage
        for stage in range(model.run.stages)
        if statistics.fmean(work(s.forward_ms, stage) + work(s.backward_ms, stage) for s in model.steps)
        > (1 + _STRAGGLES)
        * statistics.fmean(work(s.peers_forward_ms, stage) + work(s.peers_backward_ms, stage) for s in model.steps)
    ]
    if not stages:
        return
    step_ms = model.relative(
        lambda step: model.run.simulate(step.peers_forward_ms or [], step.peers_backward_ms).step_ms,
        lambda step: step.replay_ms,
    )
    named = f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}"
    yield model.prediction("no_straggler", f"every rank of {named} as quick as its peers", step_ms)


def _microbatch_counts(model: _Model) -> Iterator[Prediction]:
    """Twice and half as many microbatches of the same tokens in all."""
    for factor, size in ((2.0, "half"), (0.5, "twice")):
        count = int(model.microbatches * factor)
        if count < 1 or count != model.microbatches * factor:
            continue

        def resized(times: Times, factor: float = factor) -> Times:
            if factor > 1:
                return [[[ms / 2 for ms in row for _ in range(2)] for row in stage] for stage in times]
            return [[[a + b for a, b in zip(r[::2], r[1::2], strict=True)] for r in stage] for stage in times]

        def change(step: CapturedStep, resized: Callable[[Times], Times] = resized) -> float:
            backward = None if step.backward_ms is None else resized(step.backward_ms)
            return model.run.simulate(resized(step.forward_ms), backward).step_ms

        try:
            model.run.checked(count)
            step_ms = model.relative(change, lambda step: step.replay_ms)
        except ValueError:
            continue  # Megatron refuses this number of microbatches, or an odd one cannot be halved
        yield model.prediction(
            "microbatches",
            f"{count} microbatches of {size} the size",
            step_ms,
            memory="each microbatch holds twice the activations" if factor < 1 else None,
            assumes="a microbatch's time is in proportion to its tokens",
        )


def _chunk_counts(model: _Model, pieces: Layout, costs: CostFit) -> Iterator[Prediction]:
    """Other numbers of model chunks per stage, in Megatron's even split."""
    run, flat = model.run, "".join(pieces)
    as_is = _typical(pieces, run.stages, costs)
    held = in_flight_layers(pieces, run.checked(model.microbatches))
    for chunks in _CHUNK_COUNTS:
        layout = default_layout(run.stages, chunks, flat.count("t"), flat.count("m"))
        if chunks == run.chunks or layout is None or "t" not in layout[0]:
            continue
        interleaved = chunks > 1
        other = replace(
            run,
            chunks=chunks,
            schedule="interleaved" if interleaved else "1f1b",
            group_size=None,
            rendezvous=not interleaved or (run.forward_only and run.stages > 2),
        )
        try:
            schedule = other.checked(model.microbatches)
        except ValueError:
            continue
        forward, backward = _typical(layout, run.stages, costs)

        def change(
            step: CapturedStep, other: Run = other, forward: Times | list[list[float]] = forward, backward: object = backward
        ) -> float:
            return 0.0

        step_ms = model.relative(change, lambda step: model.scaled(step, *as_is))
        yield model.prediction(
            "chunks",
            f"{chunks} model chunk{'s' if interleaved else ''} per stage",
            step_ms,
            residual=costs.residual,
            layout=format_layout(layout),
            flags=to_flags(layout, run.stages),
            memory=_memory(in_flight_layers(layout, schedule), held),
            assumes="exchanges overlap with compute (--overlap-p2p-communication)" if interleaved else None,
        )
