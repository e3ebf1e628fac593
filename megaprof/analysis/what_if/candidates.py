"""Changes of a captured run, each replayed with the run's own costs: see `what_if`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megaprof.analysis.stages import words
from megaprof.analysis.what_if.baseline import Baseline, Sample, Typical
from megaprof.analysis.what_if.cost_model import CostFit
from megaprof.analysis.what_if.layout_search import Cost, search
from megaprof.analysis.what_if.layouts import Layout, default_layout, format_layout, layers_per_stage, to_flags
from megaprof.analysis.what_if.memory import Memory
from megaprof.analysis.what_if.replay import CapturedRun, Times, in_flight_layers

_MOST_LAYOUTS = 3
#: Where some do not fit into the measured memory, so many are looked at.
_MOST_SEARCHED = 200
#: Of more stages only the two whose activations change most are told.
_MOST_STAGES = 4
_CHUNK_COUNTS = (1, 2, 3, 4)
#: No prediction is more certain than this, as a fraction of the step: runs of one layout in turns with others differ by
#: as much (`make bench-whatif`: 1 to 3 %), and one run does not show it.
_LEAST = 0.02
#: What chunks of another number may cost beyond their layers, as a fraction of the step: a published pair of GPU runs
#: had a last stage that became 3 % slower with two chunks.
OTHER_CHUNKS = 0.03


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
    """Plus or minus milliseconds, as uncertain as the speedup."""
    speedup_uncertainty: float = 0.0
    """Plus or minus, of the speedup: from the spread over steps and microbatches, the cost model's residual, the replay
    error, and what a change does to costs."""
    noise: float = 0.0
    """The part of that which more captured steps would make smaller, as a fraction of the speedup."""
    layout: str | None = None
    """As Megatron's ``--pipeline-model-parallel-layout`` writes it; None where the layout stays."""
    flags: tuple[str, ...] = ()
    """Megatron's arguments for it, in the place of all that place layers now; empty where no argument does it."""
    memory: str | None = None
    """Why some stage may need more activation memory than any was measured to hold, or None."""
    assumes: str | None = None
    """What else it rests on, or None."""
    activations: str | None = None
    """What it does to the activations that stages hold, in words; None where nothing changes."""
    fits: bool | None = None
    """Whether the devices have the memory for it; None where none was measured."""


@dataclass(frozen=True)
class Fits:
    """What each kind of layer costs, as captured and in every draw of `Baseline.samples` that gives costs."""

    best: CostFit
    """From all that was captured."""
    drawn: tuple[tuple[Sample, CostFit], ...]
    """From each draw."""
    shared: float = 0.0
    """What stages that share cores do to each other's costs, as a fraction of the step."""

    def times(self, pieces: Layout, stages: int) -> tuple[Typical, list[Typical]]:
        """One microbatch in a layout: by the best fit, and by each draw."""
        return typical_times(pieces, stages, self.best), [typical_times(pieces, stages, fit) for _, fit in self.drawn]


@dataclass(frozen=True)
class Known:
    """A captured run of which it is known what its layers cost."""

    baseline: Baseline
    """The run as it is."""
    pieces: Layout
    """The captured layout."""
    fits: Fits
    """What each kind of layer costs."""
    memory: Memory | None
    """What the stages had allocated; None where that was not measured."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.baseline.run.stages

    @cached_property
    def held(self) -> list[int]:
        """Of every stage the most layers times microbatches whose activations it holds at once."""
        return in_flight_layers(self.pieces, self.baseline.run.checked(self.baseline.microbatches))

    @cached_property
    def before(self) -> tuple[Typical, list[Typical]]:
        """The captured layout, by what its layers cost."""
        return self.fits.times(self.pieces, self.stages)


def prediction_of(
    baseline: Baseline,
    kind: str,
    what: str,
    after: tuple[Typical, Sequence[Typical]],
    before: tuple[Typical, Sequence[Typical]],
    samples: Sequence[Sample],
    *,
    run: CapturedRun | None = None,
    resize: Callable[[Times], Times] | None = None,
    beside: float = 0.0,
) -> Prediction:
    """``after`` and ``before``: the changed costs and those that stand for the run as it is, as captured and in every
    one of ``samples``; ``beside``: what else makes it uncertain, as a fraction of the step."""
    changed = run or baseline.run
    step_ms = baseline.lasting(after[0], before[0], changed, resize)
    speedup = baseline.measured_ms / step_ms if step_ms else 1.0
    noise = baseline.uncertainty(after[1], before[1], samples, changed, resize)
    relative = math.hypot(_LEAST, beside, noise)
    return Prediction(kind, what, step_ms, speedup, step_ms * relative, speedup * relative, noise)


def _resized(
    baseline: Baseline,
    kind: str,
    what: str,
    change: Callable[[Typical], Typical] | None = None,
    resize: Callable[[Times], Times] | None = None,
) -> Prediction:
    """A change of the costs themselves, or of the microbatches."""
    costs = [baseline.typical, *(sample.typical for sample in baseline.samples)]
    changed = costs if change is None else [change(each) for each in costs]
    before, after = (costs[0], costs[1:]), (changed[0], changed[1:])
    return prediction_of(baseline, kind, what, after, before, baseline.samples, resize=resize)


def relaid(
    known: Known,
    kind: str,
    what: str,
    pieces: Layout,
    needs: Sequence[int],
    *,
    run: CapturedRun | None = None,
    resize: Callable[[Times], Times] | None = None,
    draws: int | None = None,
    memory: Memory | None = None,
    assumes: str | None = None,
) -> Prediction:
    """The run with other ``pieces``, or with its own; ``needs``: as `Known.held`. Its uncertainty comes from so many
    ``draws``, None: all."""
    as_captured = pieces == known.pieces
    before = (known.baseline.typical, [each.typical for each, _ in known.fits.drawn]) if as_captured else known.before
    after = before if as_captured else known.fits.times(pieces, known.stages)
    other = OTHER_CHUNKS if len(pieces) != len(known.pieces) else 0.0
    predicted = prediction_of(
        known.baseline,
        kind,
        what,
        (after[0], after[1][:draws]),
        (before[0], before[1][:draws]),
        [sample for sample, _ in known.fits.drawn[:draws]],
        run=run,
        resize=resize,
        beside=0.0 if as_captured else math.hypot(known.fits.best.residual, known.fits.shared, other),
    )
    described = replace(
        predicted,
        layout=format_layout(pieces),
        flags=_said_aloud(pieces, known.stages),
        assumes=assumes,
        activations=_activations(needs, known.held),
    )
    if memory is None:
        return replace(described, memory=_memory(needs, known.held))
    found = memory.fit(pieces, needs)
    if not found.fits:
        return replace(described, memory=f"does not fit: {found}", fits=False)
    told = str(found) if described.activations is None else f"{described.activations}; {found}"
    return replace(described, activations=told, fits=True)


def layouts(known: Known) -> list[Prediction]:
    """The quickest layouts other than the captured one, whether they gain anything or not; of those that do not fit
    into the measured memory only the quickest."""
    run, flat, microbatches = known.baseline.run, "".join(known.pieces), known.baseline.microbatches
    found = search(
        known.fits.best.model(run.p2p_ms),
        run.stages,
        run.chunks,
        flat.count("t"),
        microbatches,
        mtp_layers=flat.count("m"),
        forward_only=run.forward_only,
        microbatch_group_size=run.group_size,
        rendezvous=run.rendezvous,
        top=_MOST_LAYOUTS + 1 if known.memory is None else _MOST_SEARCHED,
    )
    schedule = run.checked(microbatches)
    others = [each.pieces for each in found if each.pieces != known.pieces]
    if known.memory is not None:  # the quickest ones that fit, and the quickest of all
        fit = known.memory.fit
        fitting = [pieces for pieces in others if fit(pieces, in_flight_layers(pieces, schedule)).fits]
        quickest = [pieces for pieces in others[:1] if pieces not in fitting]
        others = [*quickest, *fitting[: _MOST_LAYOUTS - len(quickest)]]
    predictions = []
    for pieces in others:
        what = f"{'+'.join(map(str, layers_per_stage(pieces, run.stages)))} layers"
        needs = in_flight_layers(pieces, schedule)
        predictions.append(relaid(known, "layout", what, pieces, needs, memory=known.memory))
    return sorted(predictions, key=lambda each: each.step_ms)[:_MOST_LAYOUTS]


def with_chunks(run: CapturedRun, chunks: int) -> CapturedRun:
    """The run with so many model chunks per stage, in the schedule that Megatron then chooses."""
    if chunks == run.chunks:
        return run
    # Megatron-LM overlaps the exchanges of the interleaved schedule unless told otherwise.
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return replace(run, schedule=schedule, chunks=chunks, group_size=None, rendezvous=chunks == 1)


def chunk_counts(known: Known) -> Iterator[Prediction]:
    """Other numbers of model chunks per stage, in Megatron's even split."""
    run, flat = known.baseline.run, "".join(known.pieces)
    for chunks in _CHUNK_COUNTS:
        layout = default_layout(run.stages, chunks, flat.count("t"), flat.count("m"))
        if chunks == run.chunks or layout is None or flat.count("t") < chunks * run.stages:
            continue
        other = with_chunks(run, chunks)
        try:
            schedule = other.checked(known.baseline.microbatches)
        except ValueError:
            continue  # Megatron refuses this number of microbatches with so many chunks
        what = f"{words.counted(chunks, 'model chunk')} per stage, split evenly"
        overlapped = "" if chunks == 1 else ", and exchanges overlap with compute, as Megatron-LM has them"
        assumes = f"a chunk costs what its layers cost{overlapped}"
        needs = in_flight_layers(layout, schedule)
        yield relaid(known, "chunks", what, layout, needs, run=other, memory=known.memory, assumes=assumes)


def balanced(baseline: Baseline) -> Prediction:
    """The measured work spread evenly over all chunks, as if layers could be divided."""

    def even(costs: Typical) -> Typical:
        forward, backward = ([[statistics.fmean(ms for stage in kind for ms in stage)] for _ in kind] for kind in costs)
        return [row * baseline.run.chunks for row in forward], [row * baseline.run.chunks for row in backward]

    predicted = _resized(baseline, "balanced", "the measured work spread evenly over the stages", even)
    return replace(predicted, assumes="layers can be divided")


def microbatch_counts(baseline: Baseline) -> Iterator[Prediction]:
    """Twice and half as many microbatches, of the same tokens in all."""
    many = baseline.microbatches
    assumes = "a microbatch's time is in proportion to its tokens"
    for count, size in ((2 * many, "half"), (many // 2, "twice")):
        if count < 1 or (count < many and any(step.microbatches % 2 for step in baseline.steps)):
            continue
        try:
            what, resize = f"{words.counted(count, 'microbatch')} of {size} the size", partial(resliced, count, True)
            predicted = _resized(baseline, "microbatches", what, resize=resize)
        except ValueError:
            continue  # Megatron refuses this number of microbatches
        memory = "every microbatch holds twice the activations" if count < many else None
        yield replace(predicted, memory=None if baseline.run.forward_only else memory, assumes=assumes)


def typical_times(pieces: Layout, stages: int, costs: CostFit) -> Typical:
    """One microbatch's forward and backward in a layout, by the cost model."""
    kinds, names = iter(costs.kinds), {"E": "embedding", "m": "mtp", "L": "loss"}
    placed = [
        [costs.by_kind.get(next(kinds) if letter == "t" else names[letter], Cost(0.0)) for letter in piece]
        for piece in pieces
    ]
    forward = [sum(cost.forward_ms for cost in piece) for piece in placed]
    backward = [sum(cost.backward_ms for cost in piece) for piece in placed]
    return [forward[stage::stages] for stage in range(stages)], [backward[stage::stages] for stage in range(stages)]


def resliced(count: int, same_tokens: bool, times: Times) -> Times:
    """Other microbatches in the place of those in ``times``: ``count`` equal parts of the same tokens, or ``count`` of
    the same size, beginning again from the first one where there are more."""
    before = len(times[0][0])
    if not same_tokens:
        return [[[row[place % before] for place in range(count)] for row in stage] for stage in times]
    # What each part takes of which microbatches; whole numbers, so that halves and pairs are exact.
    shares = [
        [
            (place, (min((part + 1) * before, (place + 1) * count) - max(part * before, place * count)) / count)
            for place in range(part * before // count, -(-(part + 1) * before // count))
        ]
        for part in range(count)
    ]
    return [[[sum(row[place] * size for place, size in share) for share in shares] for row in stage] for stage in times]


def _said_aloud(pieces: Layout, stages: int) -> tuple[str, ...]:
    """Megatron's flags for a layout. Its even split needs none for its layers; said aloud, it replaces a flag that the
    run has now."""
    flags = to_flags(pieces, stages)
    if any(flag.startswith(("--decoder", "--account", "--pipeline")) for flag in flags):
        return flags
    return ("--decoder-first-pipeline-num-layers", str(layers_per_stage(pieces, stages)[0]), *flags)


def _activations(needs: Sequence[int], held: Sequence[int]) -> str | None:
    """Of the stages whose activations change most, first those that need more."""
    changed = sorted((s for s in range(len(needs)) if needs[s] != held[s]), key=lambda s: held[s] - needs[s])
    if not changed:
        return None
    shown = changed if len(changed) <= _MOST_STAGES else [changed[0], changed[-1]]
    each = [
        f"stage {stage} {words.percent(needs[stage] / held[stage] - 1, sign=True)} ({held[stage]} -> {needs[stage]})"
        for stage in shown
        if held[stage]
    ]
    more = f", and {len(changed) - len(shown)} other stages by less" if len(shown) < len(changed) else ""
    return f"activations at their peak, in layers x microbatches in flight: {', '.join(each)}{more}"


def _memory(needs: Sequence[int], held: Sequence[int]) -> str | None:
    stage = max(range(len(needs)), key=lambda each: needs[each])
    if needs[stage] <= max(held):
        return None
    return (
        f"more layers x in-flight microbatches on stage {stage} than any stage held "
        f"({needs[stage]} against {max(held)})"
    )
