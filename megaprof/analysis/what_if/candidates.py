"""Changes of a captured run, each replayed with the run's own times: see `what_if`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megaprof.analysis.stages.slow import exceeds
from megaprof.analysis.what_if.cost_model import CostFit
from megaprof.analysis.what_if.layout_search import Cost, search
from megaprof.analysis.what_if.layouts import Layout, default_layout, format_layout, layers_per_stage, to_flags
from megaprof.analysis.what_if.replay import CapturedRun, CapturedStep, Times, in_flight_layers

__all__ = ["Baseline", "Prediction", "balanced", "chunk_counts", "layouts", "microbatch_counts", "without_straggler"]

#: Uncertainties cover this many standard errors of the stages' times.
ERRORS = 2.0
_MOST_LAYOUTS = 3
_CHUNK_COUNTS = (1, 2, 3, 4)
# Standard error of a median, see megaprof.analysis.stages.loads.
_MEDIAN_ERROR = 1.2533 * 1.4826

_Typical = tuple[list[list[float]], list[list[float]]]
"""Forward and backward milliseconds of one microbatch as ``[stage][chunk]``."""


@dataclass(frozen=True)
class Prediction:
    """One change of the run and what it would take."""

    kind: str
    """``layout``, ``balanced``, ``no_straggler``, ``microbatches`` or ``chunks``."""
    what: str
    """The change in words."""
    step_ms: float
    """The predicted step in milliseconds."""
    speedup: float
    """Measured step / predicted step."""
    uncertainty_ms: float
    """Plus or minus milliseconds, from the spread of the measured times and steps, the cost model's residual and the
    replay error."""
    layout: str | None = None
    """As Megatron's ``--pipeline-model-parallel-layout`` writes it; None where the layout stays."""
    flags: tuple[str, ...] = ()
    """Megatron's arguments for it, in the place of all that place layers now; empty where no argument does it."""
    memory: str | None = None
    """Why some stage may need more activation memory than any was measured to hold, or None."""
    assumes: str | None = None
    """What else it rests on, or None."""


class Baseline:
    """The run as it is: what every change is compared with.

    ``typical``: the median forward and backward of every chunk over microbatches and steps.
    """

    def __init__(self, run: CapturedRun, steps: Sequence[CapturedStep]) -> None:
        self.run, self.steps = run, steps
        self.typical: _Typical = (
            _medians([step.forward_ms for step in steps]),
            _medians([step.backward_ms or _zeros(step.forward_ms) for step in steps]),
        )
        self.measured_ms = statistics.fmean(step.pipeline_ms + step.outside_ms for step in steps)
        self.microbatches = steps[0].microbatches
        replay_error = statistics.fmean(abs(step.replay_error) for step in steps)
        self._error = math.hypot(ERRORS * _noise(steps), ERRORS * _drift(steps), replay_error)

    def replay(self, run: CapturedRun, typical: _Typical, step: CapturedStep) -> float:
        """Milliseconds of one captured step's pipeline with other typical times, each varying over the microbatches as
        the measured times of its stage (and chunk, where there are as many) do."""
        forward = _varied(step.forward_ms, self.typical[0], typical[0])
        backward = None if step.backward_ms is None else _varied(step.backward_ms, self.typical[1], typical[1])
        return run.simulate(forward, backward).step_ms

    def prediction(
        self,
        kind: str,
        what: str,
        change: Callable[[CapturedStep], float],
        as_is: Callable[[CapturedStep], float] | None = None,
        *,
        residual: float = 0.0,
    ) -> Prediction:
        """``change`` and ``as_is`` replay one captured step's pipeline, with the change and without; ``as_is`` None is
        the replay of the measured times. ``residual``: of the cost model that both rest on."""
        step_ms = 0.0
        for step in self.steps:
            now = step.replay_ms if as_is is None else as_is(step)
            step_ms += (step.outside_ms + step.pipeline_ms * (change(step) / now if now else 1.0)) / len(self.steps)
        speedup = self.measured_ms / step_ms if step_ms else 1.0
        return Prediction(kind, what, step_ms, speedup, step_ms * math.hypot(self._error, residual))


def layouts(baseline: Baseline, pieces: Layout, costs: CostFit) -> list[Prediction]:
    """Layouts with a shorter predicted step than the captured one (``pieces``), the shortest first."""
    run, flat = baseline.run, "".join(pieces)
    found = search(
        costs.model(run.p2p_ms),
        run.stages,
        run.chunks,
        flat.count("t"),
        baseline.microbatches,
        mtp_layers=flat.count("m"),
        forward_only=run.forward_only,
        microbatch_group_size=run.group_size,
        rendezvous=run.rendezvous,
        top=_MOST_LAYOUTS + 1,
    )
    as_is = partial(baseline.replay, run, typical_times(pieces, run.stages, costs))
    schedule = run.checked(baseline.microbatches)
    held = in_flight_layers(pieces, schedule)
    predictions = []
    for candidate in found:
        if candidate.pieces == pieces:
            continue
        change = partial(baseline.replay, run, typical_times(candidate.pieces, run.stages, costs))
        what = f"{'+'.join(map(str, candidate.layers))} layers"
        predicted = baseline.prediction("layout", what, change, as_is, residual=costs.residual)
        if predicted.step_ms < baseline.measured_ms:
            predictions.append(
                replace(
                    predicted,
                    layout=candidate.layout,
                    flags=_said_aloud(candidate.pieces, run.stages, candidate.flags),
                    memory=_memory(in_flight_layers(candidate.pieces, schedule), held),
                )
            )
    return sorted(predictions, key=lambda each: each.step_ms)[:_MOST_LAYOUTS]


def chunk_counts(baseline: Baseline, pieces: Layout, costs: CostFit) -> Iterator[Prediction]:
    """Other numbers of model chunks per stage, in Megatron's even split."""
    run, flat = baseline.run, "".join(pieces)
    as_is = partial(baseline.replay, run, typical_times(pieces, run.stages, costs))
    held = in_flight_layers(pieces, run.checked(baseline.microbatches))
    for chunks in _CHUNK_COUNTS:
        layout = default_layout(run.stages, chunks, flat.count("t"), flat.count("m"))
        if chunks == run.chunks or layout is None or flat.count("t") < chunks * run.stages:
            continue
        schedule_name = "1f1b" if chunks == 1 else "interleaved"
        # Megatron-LM overlaps the exchanges of the interleaved schedule unless told otherwise.
        other = replace(run, schedule=schedule_name, chunks=chunks, group_size=None, rendezvous=chunks == 1)
        try:
            schedule = other.checked(baseline.microbatches)
        except ValueError:
            continue  # Megatron refuses this number of microbatches with so many chunks
        predicted = baseline.prediction(
            "chunks",
            f"{chunks} model chunk{'' if chunks == 1 else 's'} per stage, split evenly",
            partial(baseline.replay, other, typical_times(layout, run.stages, costs)),
            as_is,
            residual=costs.residual,
        )
        yield replace(
            predicted,
            layout=format_layout(layout),
            flags=_said_aloud(layout, run.stages, to_flags(layout, run.stages)),
            memory=_memory(in_flight_layers(layout, schedule), held),
            assumes="a chunk costs what its layers cost"
            + ("" if chunks == 1 else ", and exchanges overlap with compute, as Megatron-LM has them"),
        )


def balanced(baseline: Baseline) -> Prediction:
    """The measured work spread evenly over all chunks, as if layers could be divided."""

    def even(times: Times) -> Times:
        mean = [statistics.fmean(same) for same in zip(*(row for stage in times for row in stage), strict=True)]
        return [[mean] * baseline.run.chunks] * baseline.run.stages

    what = "the measured work spread evenly over the stages"
    return baseline.prediction("balanced", what, partial(_changed, baseline.run, even))


def without_straggler(baseline: Baseline) -> Prediction | None:
    """Every rank as quick as the median of its stage's ranks; None where no peers were captured, or no rank is slow."""

    def work(stage: int, *passes: Times | None) -> float:
        return sum(sum(map(sum, times[stage])) for times in passes if times)

    slow = set()
    for step in baseline.steps:
        if step.peers_forward_ms is None:
            return None
        for stage in range(baseline.run.stages):
            own = work(stage, step.forward_ms, step.backward_ms)
            if exceeds(own, work(stage, step.peers_forward_ms, step.peers_backward_ms)):
                slow.add(stage)
    if not slow:
        return None
    named = f"stage{'' if len(slow) == 1 else 's'} {', '.join(map(str, sorted(slow)))}"
    return baseline.prediction(
        "no_straggler",
        f"every rank of {named} as quick as its peers",
        lambda step: baseline.run.simulate(step.peers_forward_ms or step.forward_ms, step.peers_backward_ms).step_ms,
    )


def microbatch_counts(baseline: Baseline) -> Iterator[Prediction]:
    """Twice and half as many microbatches, of the same tokens in all."""
    many = baseline.microbatches
    assumes = "a microbatch's time is in proportion to its tokens"
    for count, size, resized in ((2 * many, "half", _halved), (many // 2, "twice", _joined)):
        if count < 1 or (count < many and any(step.microbatches % 2 for step in baseline.steps)):
            continue
        try:
            predicted = baseline.prediction(
                "microbatches",
                f"{count} microbatches of {size} the size",
                partial(_changed, baseline.run, resized),
            )
        except ValueError:
            continue  # Megatron refuses this number of microbatches
        memory = "every microbatch holds twice the activations" if count < many else None
        yield replace(predicted, memory=None if baseline.run.forward_only else memory, assumes=assumes)


def typical_times(pieces: Layout, stages: int, costs: CostFit) -> _Typical:
    """One microbatch's forward and backward in a layout, by the cost model."""
    kinds, names = iter(costs.kinds), {"E": "embedding", "m": "mtp", "L": "loss"}
    placed = [
        [costs.by_kind.get(next(kinds) if letter == "t" else names[letter], Cost(0.0)) for letter in piece]
        for piece in pieces
    ]
    forward = [sum(cost.forward_ms for cost in piece) for piece in placed]
    backward = [sum(cost.backward_ms for cost in piece) for piece in placed]
    return [forward[stage::stages] for stage in range(stages)], [backward[stage::stages] for stage in range(stages)]


def _changed(run: CapturedRun, change: Callable[[Times], Times], step: CapturedStep) -> float:
    backward = None if step.backward_ms is None else change(step.backward_ms)
    return run.simulate(change(step.forward_ms), backward).step_ms


def _halved(times: Times) -> Times:
    return [[[ms / 2 for ms in row for _ in range(2)] for row in stage] for stage in times]


def _joined(times: Times) -> Times:
    return [[[a + b for a, b in zip(row[::2], row[1::2], strict=True)] for row in stage] for stage in times]


def _zeros(times: Times) -> Times:
    return [[[0.0] * len(row) for row in stage] for stage in times]


def _medians(steps: Sequence[Times]) -> list[list[float]]:
    return [
        [statistics.median(ms for step in steps for ms in step[stage][chunk]) for chunk in range(len(steps[0][stage]))]
        for stage in range(len(steps[0]))
    ]


def _varied(measured: Times, typical: list[list[float]], other: list[list[float]]) -> Times:
    """``other`` for every microbatch, in proportion to how ``measured`` lies around ``typical``."""
    varied = []
    for rows, usual, wanted in zip(measured, typical, other, strict=True):
        shapes = [[ms / middle if middle > 0 else 1.0 for ms in row] for row, middle in zip(rows, usual, strict=True)]
        if len(wanted) != len(shapes):
            shapes = [[statistics.fmean(same) for same in zip(*shapes, strict=True)]] * len(wanted)
        varied.append([[ms * share for share in shape] for ms, shape in zip(wanted, shapes, strict=True)])
    return varied


def _noise(steps: Sequence[CapturedStep]) -> float:
    """Relative standard error of a stage's median share in a microbatch's work, of the least certain stage.

    Shares, because what all stages have in common (the length of a microbatch's sequences) is no noise.
    """
    shares: list[list[float]] = [[] for _ in steps[0].forward_ms]
    for step in steps:
        passes = [step.forward_ms] if step.backward_ms is None else [step.forward_ms, step.backward_ms]
        for microbatch in range(step.microbatches):
            work = [sum(row[microbatch] for times in passes for row in times[stage]) for stage in range(len(shares))]
            for own, each in zip(shares, work, strict=True):
                own.append(each / sum(work) if sum(work) > 0 else 0.0)
    worst = 0.0
    for own in shares:
        middle = statistics.median(own)
        deviation = statistics.median(abs(share - middle) for share in own)
        worst = max(worst, _MEDIAN_ERROR * deviation / math.sqrt(len(own)) / middle if middle > 0 else 0.0)
    return worst


def _drift(steps: Sequence[CapturedStep]) -> float:
    """Relative standard error of the mean pipeline over the captured steps; 0 for one step, which cannot say."""
    times = [step.pipeline_ms for step in steps]
    if len(times) < 2:
        return 0.0
    return statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)


def _said_aloud(pieces: Layout, stages: int, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Megatron's even split needs no flag for its layers; said aloud, it replaces a flag that the run has now."""
    if any(flag.startswith(("--decoder", "--account", "--pipeline")) for flag in flags):
        return flags
    return ("--decoder-first-pipeline-num-layers", str(layers_per_stage(pieces, stages)[0]), *flags)


def _memory(needs: Sequence[int], held: Sequence[int]) -> str | None:
    stage = max(range(len(needs)), key=lambda each: needs[each])
    if needs[stage] <= max(held):
        return None
    return (
        f"more layers x in-flight microbatches on stage {stage} than any stage held "
        f"({needs[stage]} against {max(held)})"
    )
