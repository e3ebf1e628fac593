"""Finds the calls of traces that belong together, and notes what is missing, recorded twice, or from another job."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from megaprof.analysis.notes import LAUNCHES_UNKNOWN, UNSEEN_AXIS, Note
from megaprof.analysis.trace.calls import WHOLE_STEP, Call, grouped
from megaprof.analysis.trace.groups import INSIDE, parallel_of
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata
from megaprof.parallel.topology import ParallelSizes

#: First steps are left out as long as they take this many times as long as the median step.
WARM_UP = 1.25


@dataclass
class Findings:
    """Collects notes about a job and its stages, and the reason why no stage may be called slow."""

    stages: int
    """Number of stages of the job."""
    unjudgeable: Note | None = None
    """Why no stage may be called slow."""
    _notes: dict[Note, set[int]] = field(default_factory=dict)

    def warn(self, note: Note, stage: int | None = None, *, block: bool = False) -> None:
        """Adds a note about the whole job or one stage; the same note about several stages is kept once. ``block``: it
        allows no verdict about imbalance; the first such note is the reason."""
        self._notes.setdefault(note, set()).update(() if stage is None else (stage,))
        if block:
            self.unjudgeable = self.unjudgeable or note

    def warnings(self) -> tuple[Note, ...]:
        return tuple(
            replace(note, stages=tuple(sorted(stages))) if stages and len(stages) < self.stages else note
            for note, stages in self._notes.items()
        )


@dataclass(frozen=True)
class Counted:
    """The calls of one target, role and set of parallel sizes that count together."""

    calls: list[Call]
    """One call per rank and step, of the steps that every captured stage has, without first steps that warm up."""
    findings: Findings
    """Notes about what was left out, and about the rest."""

    @property
    def target(self) -> tuple[str, str | None, ParallelSizes]:
        """Their target, role and parallel sizes."""
        return self.calls[0].label, self.calls[0].role, self.calls[0].metadata.sizes


def counted(calls: Iterable[Call]) -> list[Counted]:
    """Groups calls by target, role and parallel sizes, and leaves out those that do not count."""
    groups = grouped(calls, lambda call: (call.label, call.role, call.metadata.sizes))
    counted_groups = []
    for (label, role, sizes), group_calls in groups.items():
        findings = Findings(stages=sizes.pp)
        for other_key in groups:
            if other_key[:2] == (label, role) and other_key[2] != sizes:
                findings.warn(Note("other_sizes", said=str(other_key[2])))
        kept = _without_axes(_without_warm_up(_examine(group_calls, sizes, findings), findings), sizes, findings)
        _check_same_job(kept, findings)
        for call in kept:
            _explain(call, findings)
        counted_groups.append(Counted(kept, findings))
    return counted_groups


def _examine(calls: list[Call], sizes: ParallelSizes, findings: Findings) -> list[Call]:
    """Returns the calls that may be averaged together: no duplicates, and only steps that every captured stage has.

    Adds what it leaves out to ``findings``, and blocks a verdict that the rest does not allow.
    """
    calls = _without_duplicates(calls, findings)
    missing_stages = set(range(sizes.pp)) - {call.stage for call in calls}
    if missing_stages:
        stages_present = sizes.pp - len(missing_stages)
        findings.warn(
            Note("stages_missing", stages=tuple(sorted(missing_stages)), count=stages_present, of=sizes.pp), block=True
        )
    calls = _common_steps(calls, findings)
    for faults_in in (_unseen, _in_part):
        calls = _without(calls, findings, faults_in)
    return calls


def _without_duplicates(calls: list[Call], findings: Findings) -> list[Call]:
    call_by_key: dict[tuple[int, int, int], Call] = {}
    # Two tools may have captured the same step, but only one of them the GPU. Its file is sorted last, so it is kept.
    for call in sorted(calls, key=lambda call: (call.unseen is None, call.start, call.source)):
        key = (call.rank, call.step, call.index)
        if key in call_by_key and call_by_key[key].unseen is None:
            files = call_by_key[key].source, call.source
            findings.warn(Note("twice", ranks=(call.rank,), steps=(call.step,), files=files))
        call_by_key[key] = call
    return list(call_by_key.values())


def _check_same_job(calls: list[Call], findings: Findings) -> None:
    """Adds to ``findings`` what must be the same in one job and differs: the layers of a rank, its place, the schedule,
    the number of microbatches. Only looks at calls that count, so a step that is left out causes no note."""
    by_rank: dict[int, Metadata] = {}
    by_stage: dict[int, Metadata] = {}
    for metadata in (call.metadata for call in calls):
        rank, pp = metadata.coords.rank, metadata.coords.pp
        first = by_rank.setdefault(rank, metadata)
        if (metadata.coords, metadata.chunks) != (first.coords, first.chunks):
            findings.warn(Note("not_comparable", ranks=(rank,), said="its place or its layers changed"), block=True)
        elif metadata.chunks != by_stage.setdefault(pp, metadata).chunks:
            findings.warn(Note("not_comparable", said="its ranks hold different layers"), pp, block=True)
    if len({(call.metadata.schedule, call.forward_only) for call in calls}) > 1:
        findings.warn(Note("not_comparable", said="schedules differ"), block=True)
    if len({call.has_kernels for call in calls}) > 1:
        findings.warn(Note("not_comparable", said="only some traces hold GPU kernels"), block=True)
    with_microbatches = [call for call in calls if call.metadata.microbatches is not None]
    replicas = grouped(with_microbatches, lambda call: (*call.key, call.metadata.coords.dp)).values()
    if any(len({call.metadata.microbatches for call in replica_calls}) > 1 for replica_calls in replicas):
        findings.warn(Note("not_comparable", said="stages differ in the microbatches of a step"), block=True)
    elif len({call.metadata.microbatches for call in with_microbatches}) > 1:
        findings.warn(Note("microbatches_differ"))


def _without(
    calls: list[Call], findings: Findings, faults_in: Callable[[Sequence[Call]], Iterable[Note]]
) -> list[Call]:
    """Returns the calls without the steps in which ``faults_in`` finds something, if there are other steps."""
    notes_by_step = {key: tuple(faults_in(step)) for key, step in grouped(calls, lambda call: call.key).items()}
    undisturbed = [call for call in calls if not notes_by_step[call.key]]
    if not undisturbed:
        return calls
    steps: dict[Note, set[int]] = {}
    for note in (note for notes in notes_by_step.values() for note in notes):
        steps.setdefault(replace(note, steps=()), set()).update(note.steps)
    for note, step_numbers in steps.items():
        findings.warn(replace(note, steps=tuple(sorted(step_numbers))))
    return undisturbed


def _unseen(step: Sequence[Call]) -> Iterator[Note]:
    """Yields a note for each rank whose kernels were not recorded."""
    for call in step:
        if call.unseen is not None:
            yield Note("left_out", steps=(call.step,), ranks=(call.rank,), why=call.unseen)


def _in_part(step: Sequence[Call]) -> Iterator[Note]:
    """Yields a note for each rank that has only a part of the step."""
    for call in step:
        if call.incomplete:
            yield Note("left_out", files=(call.source,), why=call.incomplete)


def _common_steps(calls: list[Call], findings: Findings) -> list[Call]:
    stages_by_key = {
        key: {call.stage for call in step_calls} for key, step_calls in grouped(calls, lambda call: call.key).items()
    }
    captured_stages = {call.stage for call in calls}
    common_keys = {key for key, present in stages_by_key.items() if present == captured_stages}
    if not common_keys:
        findings.warn(Note("not_comparable", said="no step was captured on every stage"), block=True)
        return calls
    for key in sorted(stages_by_key.keys() - common_keys):
        stages_present, said = tuple(sorted(stages_by_key[key])), "it was not captured on the other stages"
        findings.warn(Note("left_out", steps=key[:1], stages=stages_present, said=said))
    return [call for call in calls if call.key in common_keys]


def warming_up(lengths: Sequence[float]) -> int:
    """Returns how many of the first steps take longer than the rest."""
    longest = WARM_UP * statistics.median(lengths)
    return next(number for number, length in enumerate(lengths) if length <= longest) if len(lengths) > 2 else 0


def _without_warm_up(calls: list[Call], findings: Findings) -> list[Call]:
    by_step = grouped(sorted(calls, key=lambda call: call.step), lambda call: call.step)
    lengths_ns = [
        max(end - begin for begin, end in (call.extent for call in step_calls)) for step_calls in by_step.values()
    ]
    cold_steps = tuple(by_step)[: warming_up(lengths_ns)]
    if cold_steps:
        findings.warn(Note("first_steps", steps=cold_steps))
    return [call for call in calls if call.step not in cold_steps]


def _without_axes(calls: list[Call], sizes: ParallelSizes, findings: Findings) -> list[Call]:
    """Returns the calls without exposed communication of the axes of which no rank has a single kernel, if the GPU was
    recorded: it goes by names that are not known, and is counted as compute."""
    found = frozenset().union(*(call.gpu.axes for call in calls if call.gpu is not None))
    axes = tuple(axis for axis in parallel_of(INSIDE, sizes) if axis not in found)
    if not axes or not any(call.gpu is not None for call in calls):
        return calls
    if names := tuple(axis for axis in axes if any(call.exposed_ns[axis] is not None for call in calls)):
        findings.warn(Note("exposed_unknown", names=names, said=UNSEEN_AXIS))
    return [dataclasses.replace(call, exposed_ns={**call.exposed_ns, **dict.fromkeys(axes)}) for call in calls]


def _explain(call: Call, findings: Findings) -> None:
    """Adds notes about why numbers of ``call`` are missing."""
    pp = call.stage
    if call.unseen is not None:
        findings.warn(call.unseen, pp, block=True)
        return
    if not call.phases:
        findings.warn(Note("passes_unknown", said=call.metadata.ranges.reason or "no ranges in it"), pp, block=True)
    if call.incomplete:
        findings.warn(Note("left_out", files=(call.source,), why=call.incomplete), pp)
    if call.has_kernels and call.gpu is None:
        findings.warn(Note("passes_unknown", said=LAUNCHES_UNKNOWN), pp, block=True)
    elif call.gpu is not None and call.gpu.lost:
        findings.warn(Note("events_left_out", said="GPU activities without a launch in the trace"), pp)
    if call.label == WHOLE_STEP:
        findings.warn(Note("whole_step"), block=True)
    if any(phase.kind == ranges.COMBINED for phase in call.phases):
        findings.warn(Note("passes_unknown", said="they ran combined, so only their sum, compute, is known"), pp)
    for reason in call.reasons:
        findings.warn(reason, pp)
