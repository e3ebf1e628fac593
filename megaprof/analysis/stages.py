"""Metrics of every pipeline stage, per step and per microbatch, from the schedule calls of one target.

All times are milliseconds. A number that the traces do not allow is None, and a warning says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megaprof import ranges
from megaprof.analysis.calls import GROUPS, WHOLE_STEP, Call, Phase
from megaprof.analysis.consistency import Findings, comparable, examine
from megaprof.analysis.samples import Spread
from megaprof.analysis.traces import Chunk, Sizes

ONE_CLOCK = "from the first stage's start to the last stage's end"
LONGEST = "the longest stage's own range"

_TARGET_ORDER = (WHOLE_STEP, "train_actor", "train_log_probs", "evaluate")
_StepKey = tuple[int, int]  # step, and which of its calls


@dataclass(frozen=True)
class ChunkTimes:
    """One model chunk of a stage: what it holds, and one sample per microbatch, step and rank.

    ``forward_ms`` and ``backward_ms`` are whole passes; ``compute_ms`` holds the same samples by kind of pass
    (``forward``, ``backward``, ``combined``) without exposed communication.
    """

    chunk: int
    holds: Chunk | None
    forward_ms: Spread | None
    backward_ms: Spread | None
    compute_ms: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage. The `Spread` of a quantity per step is over steps and the stage's captured ranks.

    ``compute_ms`` is the time in forward, backward and combined passes without exposed communication; ``bubble_ms``
    what is left of the step after it, exposed communication and gradient finalisation. Per microbatch, the passes on
    all chunks of the stage are added up.
    """

    pp: int
    ranks: tuple[int, ...]
    chunks: tuple[ChunkTimes, ...]
    forward_ms: Spread | None
    backward_ms: Spread | None
    compute_ms: Spread | None
    exposed_ms: dict[str, Spread | None]
    bubble_ms: Spread | None
    bubble_fraction: float | None
    forward_per_microbatch_ms: Spread | None
    backward_per_microbatch_ms: Spread | None


@dataclass(frozen=True)
class TargetStages:
    """The stages of one target and role. ``unjudgeable``: why no stage may be called slow, or None."""

    target: str
    role: str | None
    sizes: Sizes
    schedule: str | None
    forward_only: bool
    microbatches: int | None
    steps: tuple[int, ...]
    step_time_ms: Spread | None
    step_time_basis: str
    stages: tuple[Stage, ...]
    unjudgeable: str | None
    warnings: tuple[str, ...]


def measure(calls: Iterable[Call]) -> list[TargetStages]:
    """Group calls by label, role and parallel sizes, and measure the stages of each group."""
    groups: dict[tuple[str, str | None, Sizes], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.label, call.metadata.role, call.metadata.sizes), []).append(call)
    measured = []
    for label, role, sizes in sorted(groups, key=lambda key: (_order(key[0]), key[0], key[1] or "", str(key[2]))):
        findings = Findings(stages=sizes.pp)
        for other in groups:
            if other[:2] == (label, role) and other[2] != sizes:
                findings.warn(f"the directory also holds traces with other sizes ({other[2]}), reported on their own")
        measured.append(_measure(sizes, examine(groups[label, role, sizes], sizes, findings), findings))
    return measured


def _order(label: str) -> int:
    return _TARGET_ORDER.index(label) if label in _TARGET_ORDER else len(_TARGET_ORDER)


def _measure(sizes: Sizes, calls: list[Call], findings: Findings) -> TargetStages:
    by_step: dict[_StepKey, list[Call]] = {}
    by_stage: dict[int, list[Call]] = {}
    for call in calls:
        by_step.setdefault((call.step, call.index), []).append(call)
        by_stage.setdefault(call.metadata.coords.pp, []).append(call)
    spans = {key: _span(step, findings) for key, step in by_step.items()}
    first = calls[0]
    counts = {call.metadata.microbatches for call in calls}
    return TargetStages(
        target=first.label,
        role=first.metadata.role,
        sizes=sizes,
        schedule=first.metadata.schedule,
        forward_only=first.forward_only,
        microbatches=counts.pop() if len(counts) == 1 and first.label == first.metadata.target else None,
        steps=tuple(sorted({call.step for call in calls})),
        step_time_ms=Spread.of([span.ms for span in spans.values() if span.ms is not None]),
        step_time_basis=ONE_CLOCK if all(span.one_clock for span in spans.values()) else LONGEST,
        stages=tuple(_stage(pp, by_stage[pp], spans, findings) for pp in sorted(by_stage)),
        unjudgeable=findings.unjudgeable,
        warnings=findings.warnings(),
    )


@dataclass(frozen=True)
class _Span:
    """How long a step took, None when a rank's part is incomplete; ``waits``: its stages waited for each other."""

    ms: float | None
    one_clock: bool
    waits: bool


def _span(step: list[Call], findings: Findings) -> _Span:
    clocks = comparable(step)
    if clocks.problem:
        findings.warn(clocks.problem)
    if clocks.different_runs:
        findings.block("the stages' traces are of different runs")
    if any(call.incomplete for call in step):
        return _Span(None, clocks.one_clock, waits=False)
    if clocks.one_clock:
        nanoseconds = max(call.end for call in step) - min(call.start for call in step)
    else:
        nanoseconds = max(call.end - call.start for call in step)
    return _Span(nanoseconds / 1e6, clocks.one_clock, waits=not clocks.different_runs)


def _stage(pp: int, calls: list[Call], spans: dict[_StepKey, _Span], findings: Findings) -> Stage:
    for call in calls:
        _explain(call, pp, findings)
    combined = any(phase.kind == ranges.COMBINED for call in calls for phase in call.phases)
    if combined:
        findings.note("forward and backward run combined: only their sum, compute, is known", pp)
    whole = [call for call in calls if call.phases and not call.incomplete]
    separate = [] if combined else whole
    on_cpu = [call for call in whole if not call.has_kernels]
    of_one_pass = [] if calls[0].label == WHOLE_STEP else [call for call in calls if call.phases]
    bubbles, fractions = _bubbles(on_cpu, spans)
    apart = [] if combined else of_one_pass
    return Stage(
        pp=pp,
        ranks=tuple(sorted({call.metadata.coords.rank for call in calls})),
        chunks=_chunks(of_one_pass),
        forward_ms=Spread.of([_milliseconds(call, ranges.FORWARD) for call in separate]),
        backward_ms=Spread.of([_milliseconds(call, ranges.BACKWARD) for call in separate]),
        compute_ms=Spread.of([sum(phase.compute_ns for phase in call.phases) / 1e6 for call in on_cpu]),
        exposed_ms={group: _exposed(whole, group) for group in GROUPS},
        bubble_ms=Spread.of(bubbles),
        bubble_fraction=sum(fractions) / len(fractions) if fractions else None,
        forward_per_microbatch_ms=Spread.of(_per_microbatch(apart, ranges.FORWARD)),
        backward_per_microbatch_ms=Spread.of(_per_microbatch(apart, ranges.BACKWARD)),
    )


def _explain(call: Call, pp: int, findings: Findings) -> None:
    """Say why numbers of ``call`` are missing."""
    if not call.phases:
        reason = call.metadata.ranges.reason or "the trace holds none"
        findings.note(f"no microbatch ranges, so only the time of the step is known: {reason}", pp)
        findings.block("there are no microbatch ranges")
    if call.incomplete:
        findings.note(f"{call.source} is left out of the times per step: {call.incomplete}", pp)
    if call.has_kernels:
        findings.note("GPU kernels are not read: forward and backward are the host's time, not the GPU's", pp)
        findings.block("GPU traces are not judged, because their ranges are the host's time")
    if call.label == WHOLE_STEP:
        findings.warn("a whole step is more than its pipeline: microbatches and bubbles stand with the calls inside it")
        findings.block("a whole step is more than its pipeline")
    for reason in call.reasons:
        findings.note(reason, pp)


def _bubbles(calls: list[Call], spans: dict[_StepKey, _Span]) -> tuple[list[float], list[float]]:
    """Bubble of every call in milliseconds, and as a fraction of its step."""
    bubbles, fractions = [], []
    for call in calls:
        span = spans[call.step, call.index]
        if call.metadata.sizes.pp == 1:
            bubbles.append(0.0)  # nobody to wait for
            fractions.append(0.0)
        elif span.ms and span.waits and call.label != WHOLE_STEP:
            bubbles.append(max(0.0, span.ms - call.busy_ns / 1e6))
            fractions.append(bubbles[-1] / span.ms)
    return bubbles, fractions


def _milliseconds(call: Call, kind: str) -> float:
    return sum(phase.duration_ns for phase in call.phases if phase.kind == kind) / 1e6


def _exposed(calls: list[Call], group: str) -> Spread | None:
    """None as soon as one call cannot tell: an average of the others would be of something else."""
    samples = [call.exposed_ns[group] for call in calls]
    return Spread.of([ns / 1e6 for ns in samples if ns is not None]) if None not in samples else None


def _chunks(calls: list[Call]) -> tuple[ChunkTimes, ...]:
    holds = calls[0].metadata.chunks if calls else ()
    by_chunk: dict[int, list[Phase]] = {chunk: [] for chunk in range(len(holds))}
    for call in calls:
        for phase in call.phases:
            if phase.chunk is not None:
                by_chunk.setdefault(phase.chunk, []).append(phase)
    return tuple(
        ChunkTimes(
            chunk=chunk,
            holds=holds[chunk] if chunk < len(holds) else None,
            forward_ms=Spread.of([p.duration_ns / 1e6 for p in phases if p.kind == ranges.FORWARD]),
            backward_ms=Spread.of([p.duration_ns / 1e6 for p in phases if p.kind == ranges.BACKWARD]),
            compute_ms={
                kind: tuple(p.compute_ns / 1e6 for p in phases if p.kind == kind)
                for kind in (ranges.FORWARD, ranges.BACKWARD, ranges.COMBINED)
            },
        )
        for chunk, phases in sorted(by_chunk.items())
    )


def _per_microbatch(calls: list[Call], kind: str) -> list[float]:
    """One sample per microbatch, step and rank: its passes on all chunks of the stage, in milliseconds.

    A microbatch that is not there on every chunk, or a pass whose microbatch is unknown, gives no sample (but with
    one chunk every pass is one).
    """
    samples = []
    for call in calls:
        passes = [phase for phase in call.phases if phase.kind == kind]
        if len(call.metadata.chunks) == 1:
            samples += [phase.duration_ns / 1e6 for phase in passes]
            continue
        parts: dict[int, list[int]] = {}
        for phase in passes:
            if phase.microbatch is not None:
                parts.setdefault(phase.microbatch, []).append(phase.duration_ns)
        complete = len(call.metadata.chunks) or max(map(len, parts.values()), default=0)
        samples += [sum(each) / 1e6 for each in parts.values() if len(each) == complete]
    return samples
