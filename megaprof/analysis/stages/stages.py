"""Metrics of every pipeline stage, per step and per microbatch, from the schedule calls of one target.

All times are milliseconds. A number that the traces do not allow is None, and a warning says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from megaprof.analysis.notes import Note
from megaprof.analysis.stages.consistency import Findings, check_same_job, examine
from megaprof.analysis.stages.samples import Spread, mean_of
from megaprof.analysis.stages.steps import Step, lay_out
from megaprof.analysis.trace.calls import GROUPS, WHOLE_STEP, Call, grouped
from megaprof.analysis.trace.intervals import total
from megaprof.analysis.trace.passes import MeasuredPass
from megaprof.formats import ranges
from megaprof.formats.metadata import ModelChunk, WithoutRange
from megaprof.parallel.topology import ParallelSizes

#: How a step is timed: from the first stage's start to the last stage's end; so for each replica by itself; or, where
#: the stages have no common clock, as long as the longest stage's own range.
Basis = Literal["one_clock", "of_replicas", "longest_stage"]
ONE_CLOCK: Final = "one_clock"
OF_REPLICAS: Final = "of_replicas"
LONGEST: Final = "longest_stage"

_TARGET_ORDER = (WHOLE_STEP, "train_actor", "train_log_probs", "evaluate")
_StepOf = Callable[[Call], Step]
#: What of a stage's bubble lies before its first backward, between, and behind its last forward.
BUBBLE_PARTS = ("warmup_ms", "steady_ms", "cooldown_ms")
#: The first of several steps is left out when it takes this many times as long as the others: it warms up.
WARM_UP = 1.25


@dataclass(frozen=True)
class ChunkTimes:
    """One model chunk of a stage: what it holds, and what a pass over it takes."""

    chunk: int
    """Its number on the stage, from 0."""
    holds: ModelChunk | None
    """Its layers and what is beside them; None where the traces do not say."""
    forward_ms: Spread | None
    """Milliseconds of a whole forward; on a GPU, of what it computed for one."""
    backward_ms: Spread | None
    """The same of a backward."""


@dataclass(frozen=True)
class Collectives:
    """The collectives of one group in passes, from when its ranks came to them. The rank that comes last makes the
    others wait; what is left is the transfer."""

    waiting_ms: Spread | None
    """Until the last rank of the group came."""
    transferring_ms: Spread | None
    """From then on."""
    reason: Literal["arrivals_unknown", "durations_unknown", "computed_beside"] | None
    """Why a number is missing: of no step it is known when all ranks came; torch does not say how long they ran; passes
    compute beside them."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage. The `Spread` of a quantity is over steps and the stage's captured ranks, in milliseconds per
    step where nothing else is said; None where the traces do not allow it."""

    pp: int
    """Its pipeline rank."""
    ranks: tuple[int, ...]
    """The captured ranks, by their global numbers."""
    chunks: tuple[ChunkTimes, ...]
    """Its model chunks."""
    forward_ms: Spread | None
    """All forwards of a step."""
    backward_ms: Spread | None
    """All backwards of a step."""
    compute_ms: Spread | None
    """Forward, backward and combined passes without exposed communication."""
    exposed_ms: dict[str, Spread | None]
    """Communication that no compute hides, by group: ``tp``, ``ep``, ``cp``, ``pp``, ``dp``, and ``unknown`` where the
    recording does not tell the group. None for a group that the unknown part may be of."""
    bubble_ms: Spread | None
    """Waiting for other stages: what compute, exposed communication, ``gradients_ms`` and ``host_bound_ms`` leave of
    the step."""
    bubble_fraction: float | None
    """The part of the step that this is, from 0 to 1."""
    forward_per_microbatch_ms: Spread | None
    """Milliseconds of one microbatch's forward on all chunks of the stage, over microbatches too."""
    backward_per_microbatch_ms: Spread | None
    """The same of its backward."""
    dp_tail_ms: Spread | None
    """Data-parallel communication after the last pass."""
    pp_waiting_ms: Spread | None
    """Of the time in exchanges, what was waiting for the neighbour; the bubble contains it."""
    gradients_ms: Spread | None
    """Work outside of passes, as finalising gradients is, without the communication in it that ``exposed_ms`` has."""
    host_bound_ms: Spread | None
    """Inside passes, where the GPU idled because nothing was launched; None on a CPU."""
    modules_ms: dict[str, Spread]
    """Milliseconds of every pass through a module, by its label and the kind of pass."""
    bubble_split: dict[str, Spread | None] = field(default_factory=partial(dict.fromkeys, BUBBLE_PARTS))
    """The bubble's parts, each of `BUBBLE_PARTS`."""
    host_ms: dict[str, Spread | None] = field(default_factory=dict)
    """On a GPU trace the host's time in ``forward`` and ``backward``."""
    collectives: dict[str, Collectives] = field(default_factory=dict)
    """From timelines: those of ``tp``, ``ep`` and ``cp``, where there are several ranks."""


@dataclass(frozen=True)
class TargetStages:
    """The stages of one target and role."""

    target: str
    """What was captured: ``train_actor``, ..."""
    role: str | None
    """``actor``, ``ref``, ...; None without roles."""
    sizes: ParallelSizes
    """The parallel sizes of the job."""
    schedule: str | None
    """``1f1b``, ``interleaved``, ...; None where the traces do not say."""
    forward_only: bool
    """Whether there is no backward."""
    microbatches: int | None
    """Microbatches per step; None where steps differ or the traces do not say."""
    steps: tuple[int, ...]
    """The captured steps, ascending."""
    step_time_ms: Spread | None
    """Milliseconds of a step; None where no step is whole."""
    step_time_basis: Basis
    """How that was measured: from the first stage's start to the last stage's end (``one_clock``), so for each replica
    by itself (``of_replicas``), or, without a common clock, as the longest stage's own range (``longest_stage``)."""
    stages: tuple[Stage, ...]
    """By pipeline rank; those that were captured."""
    unjudgeable: Note | None
    """Why no stage may be called slow; None where one may."""
    warnings: tuple[Note, ...]
    """What is missing, and why."""
    imbalance: float | None = None
    """Compute of the slowest stage over the average over stages; None without a pipeline, and where that of a stage is
    not known or ``unjudgeable`` says why."""
    slow_ranks: tuple[Stage, ...] = ()
    """What slow ranks took that ``stages`` are not of: of each its stage with the times of this rank alone."""
    framework: str | None = None
    """The host that trained; None for another one."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Kinds of passes: ``forward``, and ``backward`` where there is one."""
        return ("forward",) if self.forward_only else ("forward", "backward")

    @property
    def shown(self) -> list[Stage]:
        """Rows of a table: the stages, and slow ranks below their own."""
        return sorted((*self.stages, *self.slow_ranks), key=lambda each: each.pp)

    @property
    def step_ms(self) -> float:
        """Milliseconds of the mean step; 0 where no step is whole."""
        return mean_of(self.step_time_ms) or 0.0


def measure(calls: Iterable[Call]) -> list[TargetStages]:
    """Group calls by label, role and parallel sizes, and measure the stages of each group."""
    groups = grouped(calls, lambda call: (call.label, call.role, call.metadata.sizes))
    measured = []
    for label, role, sizes in groups:
        findings = Findings(stages=sizes.pp)
        for other in groups:
            if other[:2] == (label, role) and other[2] != sizes:
                findings.warn(Note("other_sizes", said=str(other[2])))
        measured.append(_measure(sizes, counted(groups[label, role, sizes], sizes, findings), findings))
    return sorted(measured, key=order)


def counted(calls: list[Call], sizes: ParallelSizes, findings: Findings) -> list[Call]:
    """The calls of one target and role that count, see `examine`, without the first step where that warms up."""
    kept = _without_warm_up(examine(calls, sizes, findings), findings)
    check_same_job(kept, findings)
    return kept


def order(stages: TargetStages) -> tuple[int, str, str, str]:
    """Returns where a target stands among others."""
    known = _TARGET_ORDER.index(stages.target) if stages.target in _TARGET_ORDER else len(_TARGET_ORDER)
    return known, stages.target, stages.role or "", str(stages.sizes)


def _without_warm_up(calls: list[Call], findings: Findings) -> list[Call]:
    """Without the first step, where it is far longer than the others."""
    by_step = grouped(calls, lambda call: call.key)
    lengths = {key: max(end - begin for begin, end in (call.extent for call in own)) for key, own in by_step.items()}
    first = min(call.step for call in calls)
    own = [ns for (step, _), ns in lengths.items() if step == first]
    others = [ns for (step, _), ns in lengths.items() if step != first]
    if len(others) < 2 or max(own) <= WARM_UP * statistics.median(others):
        return calls
    times = max(own) / max(1.0, statistics.median(others))
    findings.warn(Note("first_step_longer", steps=(first,), factor=times))
    return [call for call in calls if call.step != first]


def of_ranks(calls: Iterable[Call], sizes: ParallelSizes, ranks: Collection[int]) -> tuple[Stage, ...]:
    """Returns the stages of single ranks that share them with others: with their times alone."""
    findings = Findings(stages=sizes.pp)
    kept = counted(list(calls), sizes, findings)
    _, step_of = _laid_out(kept, findings)
    by_rank = grouped(kept, lambda call: call.rank)
    stages = grouped(kept, lambda call: call.stage).items()
    shared = {call.rank: pp for pp, own in stages if len({call.rank for call in own}) > 1 for call in own}
    return tuple(_stage(shared[rank], by_rank[rank], step_of, findings) for rank in sorted(shared.keys() & set(ranks)))


def _laid_out(calls: list[Call], findings: Findings) -> tuple[list[Step], _StepOf]:
    """Returns the steps, and which of them a call is of."""
    apart = _by_themselves(calls)

    def pipeline(call: Call) -> tuple[int, int, int]:
        return (*call.key, call.metadata.coords.dp if apart else 0)

    found = {key: lay_out(step, findings) for key, step in grouped(calls, pipeline).items()}
    return list(found.values()), lambda call: found[pipeline(call)]


def _measure(sizes: ParallelSizes, calls: list[Call], findings: Findings) -> TargetStages:
    by_stage = grouped(calls, lambda call: call.stage)
    steps, step_of = _laid_out(calls, findings)
    uncertain = [step.uncertain_ns for step in steps if step.uncertain_ns is not None]
    if uncertain:
        findings.warn(Note("clocks_aligned", ms=(max(uncertain) / 1e6,)))
    first = calls[0]
    counts = {call.metadata.microbatches for call in calls if call.label == call.metadata.target}
    for note in without_ranges(each for call in calls for each in call.metadata.ranges.without):
        findings.warn(note)
    stages = tuple(_stage(pp, by_stage[pp], step_of, findings) for pp in sorted(by_stage))
    return TargetStages(
        target=first.label,
        role=first.role,
        sizes=sizes,
        schedule=first.metadata.schedule,
        forward_only=first.forward_only,
        microbatches=counts.pop() if len(counts) == 1 else None,
        steps=tuple(sorted({call.step for call in calls})),
        step_time_ms=Spread.of([step.ms for step in steps if step.ms is not None]),
        step_time_basis=(OF_REPLICAS if _by_themselves(calls) else ONE_CLOCK)
        if all(step.one_clock for step in steps)
        else LONGEST,
        stages=stages,
        imbalance=None if findings.unjudgeable else imbalance(stages, sizes),
        unjudgeable=findings.unjudgeable,
        warnings=findings.warnings(),
        framework=first.metadata.framework,
    )


def without_ranges(modules: Iterable[WithoutRange]) -> Iterator[Note]:
    """Yields which modules have no range: those of the same layers, for the same reason, together."""
    layers: dict[tuple[str, str], set[int]] = {}
    for each in modules:
        layers.setdefault((each.reason, each.module), set()).update(n for n in each.layers if n is not None)
    for (why, of), same in grouped(layers, lambda key: (key[0], tuple(sorted(layers[key])))).items():
        yield Note("modules_without_range", names=tuple(module for _, module in same), layers=of, said=why)


def imbalance(stages: Sequence[Stage], sizes: ParallelSizes) -> float | None:
    """Returns the slowest stage's compute over the average over stages; None without a pipeline, or where that of a
    stage is not known."""
    compute = [stage.compute_ms.mean for stage in stages if stage.compute_ms]
    if sizes.pp == 1 or len(compute) < sizes.pp or max(compute) <= 0:
        return None
    return max(compute) / statistics.fmean(compute)


def _by_themselves(calls: Sequence[Call]) -> bool:
    """Whether each of several replicas is a step of its own: those that reduce no gradients do not wait for each other,
    and each was captured on all stages that any was."""
    if not calls[0].forward_only or calls[0].label == WHOLE_STEP or len({c.metadata.coords.dp for c in calls}) == 1:
        return False
    replicas = grouped(calls, lambda call: (*call.key, call.metadata.coords.dp)).values()
    return all({call.stage for call in own} == {call.stage for call in calls} for own in replicas)


def _stage(pp: int, calls: list[Call], step_of: _StepOf, findings: Findings) -> Stage:
    for call in calls:
        _explain(call, pp, findings)
    combined = any(phase.kind == ranges.COMBINED for call in calls for phase in call.phases)
    if combined:
        findings.warn(Note("combined"), pp)
    whole = [call for call in calls if call.phases and not call.incomplete]
    separate = [] if combined else whole
    measured = [call for call in whole if call.gpu is not None or not call.has_kernels]
    on_gpu = [call for call in measured if call.gpu is not None]
    hosted = [call for call in on_gpu if not call.replayed]
    of_one_pass = [] if calls[0].label == WHOLE_STEP else [call for call in calls if call.phases]
    apart = [] if combined else of_one_pass
    bubbles = [(bubble, step) for call in measured if (bubble := (step := step_of(call)).bubble(call))]
    lasted = sum(step.ms or 0.0 for _, step in bubbles)
    met = [step.met[call.rank] for call in on_gpu if call.rank in (step := step_of(call)).met]
    if on_gpu and calls[0].metadata.sizes.pp > 1 and len(met) < len(on_gpu):
        findings.warn(Note("pp_not_split"), pp)
    return Stage(
        pp=pp,
        ranks=tuple(sorted({call.rank for call in calls})),
        chunks=_chunks(of_one_pass) or _holding(calls),
        forward_ms=_of_passes(separate, ranges.FORWARD, "pass_ns"),
        backward_ms=_of_passes(separate, ranges.BACKWARD, "pass_ns"),
        compute_ms=Spread.of([sum(phase.compute_ns for phase in call.phases) / 1e6 for call in measured]),
        exposed_ms=_exposed(whole, step_of),
        bubble_ms=Spread.of([bubble.total / 1e6 for bubble, _ in bubbles]),
        bubble_fraction=sum(bubble.total for bubble, _ in bubbles) / 1e6 / lasted if lasted else None,
        forward_per_microbatch_ms=Spread.of(_per_microbatch(apart, ranges.FORWARD)),
        backward_per_microbatch_ms=Spread.of(_per_microbatch(apart, ranges.BACKWARD)),
        bubble_split={
            "warmup_ms": _spread([bubble.warmup for bubble, _ in bubbles]),
            "steady_ms": _spread([bubble.steady for bubble, _ in bubbles]),
            "cooldown_ms": _spread([bubble.cooldown for bubble, _ in bubbles]),
        },
        dp_tail_ms=_spread([step_of(call).tail_ns(call) for call in whole]),
        pp_waiting_ms=_spread([each.waiting_ns for each in met]) if len(met) == len(on_gpu) else None,
        gradients_ms=_spread([step_of(call).gradients_ns(call) for call in whole]),
        host_bound_ms=_spread([total(call.gpu.host_bound) for call in on_gpu if call.gpu]),
        host_ms={kind: _of_passes([] if combined else hosted, kind, "duration_ns") for kind in ranges.PASSES[:2]},
        modules_ms=_modules(calls),
    )


def _explain(call: Call, pp: int, findings: Findings) -> None:
    """Note why numbers of ``call`` are missing."""
    if call.unseen is not None:
        return  # that was said
    if not call.phases:
        findings.warn(Note("no_passes", said=call.metadata.ranges.reason or ""), pp, block=True)
    if call.incomplete:
        findings.warn(Note("file_left_out", files=(call.source,), why=call.incomplete), pp)
    if call.has_kernels and call.gpu is None:
        findings.warn(Note("launches_unknown"), pp, block=True)
    elif call.gpu is not None and call.gpu.lost:
        findings.warn(Note("kernels_without_launch"), pp)
    if call.label == WHOLE_STEP:
        findings.warn(Note("whole_step"), block=True)
    for reason in call.reasons:
        findings.warn(reason, pp)


def _of_passes(calls: list[Call], kind: str, time: str) -> Spread | None:
    """Of all passes of one kind in a call, one of the times that `MeasuredPass` has."""
    return Spread.of([sum(getattr(each, time) for each in call.phases if each.kind == kind) / 1e6 for call in calls])


def _spread(nanoseconds: list[int | None]) -> Spread | None:
    """None as soon as one sample is not known: an average of the others would be of something else."""
    return Spread.of([ns / 1e6 for ns in nanoseconds if ns is not None]) if None not in nanoseconds else None


def _exposed(calls: list[Call], step_of: _StepOf) -> dict[str, Spread | None]:
    return {group: _spread([step_of(call).exposed_ns(call, group) for call in calls]) for group in GROUPS}


def _parts(passes: Iterable[MeasuredPass]) -> dict[int, list[MeasuredPass]]:
    """By microbatch, where that is known."""
    return {number: own for number, own in grouped(passes, lambda each: each.microbatch).items() if number is not None}


def _modules(calls: list[Call]) -> dict[str, Spread]:
    samples: dict[str, list[float]] = {}
    for call in calls:
        for key, each in call.modules.items():
            samples.setdefault(f"{key.label} {key.kind}", []).extend(ns / 1e6 for ns in each)
    return {name: spread for name, each in sorted(samples.items()) if (spread := Spread.of(each))}


def _chunks(calls: list[Call]) -> tuple[ChunkTimes, ...]:
    holds = calls[0].metadata.chunks if calls else ()
    by_chunk: dict[int, list[MeasuredPass]] = {chunk: [] for chunk in range(len(holds))}
    for call in calls:
        for phase in call.phases:
            if phase.chunk is not None:
                by_chunk.setdefault(phase.chunk, []).append(phase)
    return tuple(
        ChunkTimes(
            chunk=chunk,
            holds=holds[chunk] if chunk < len(holds) else None,
            forward_ms=Spread.of([p.pass_ns / 1e6 for p in passes if p.kind == ranges.FORWARD]),
            backward_ms=Spread.of([p.pass_ns / 1e6 for p in passes if p.kind == ranges.BACKWARD]),
        )
        for chunk, passes in sorted(by_chunk.items())
    )


def _holding(calls: list[Call]) -> tuple[ChunkTimes, ...]:
    """What the chunks of a whole step hold; the times of its passes are those of the calls inside it."""
    return tuple(ChunkTimes(chunk, holds, None, None) for chunk, holds in enumerate(calls[0].metadata.chunks))


def _per_microbatch(calls: list[Call], kind: str) -> list[float]:
    """One sample per microbatch, step and rank: its passes on all chunks of the stage, in milliseconds.

    A microbatch that is not there on every chunk, or a pass whose microbatch is unknown, gives no sample (but with
    one chunk every pass is one).
    """
    samples = []
    for call in calls:
        passes = [phase for phase in call.phases if phase.kind == kind]
        if len(call.metadata.chunks) == 1:
            samples += [phase.pass_ns / 1e6 for phase in passes]
            continue
        parts = _parts(passes)
        complete = len(call.metadata.chunks) or max(map(len, parts.values()), default=0)
        samples += [sum(one.pass_ns for one in each) / 1e6 for each in parts.values() if len(each) == complete]
    return samples
