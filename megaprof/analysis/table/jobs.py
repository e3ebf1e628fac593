"""Finds the steps of traces that belong together, and notes what is missing, recorded twice, or from another job."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from megaprof.analysis.fleet.reading import Key
from megaprof.analysis.notes import LAUNCHES_UNKNOWN, UNSEEN_AXIS, Note
from megaprof.analysis.trace.groups import INSIDE, parallel_of
from megaprof.analysis.trace.steps import WHOLE_STEP, TracedStep, grouped
from megaprof.formats.metadata import Metadata

#: First steps are left out as long as they take this many times as long as the median step.
WARM_UP = 1.25


@dataclass
class Job:
    """The steps of one target, role and set of parallel sizes, with notes about them."""

    key: Key
    """The target, role and sizes."""
    steps: list[TracedStep]
    """One step per rank and call, of those that every captured stage has, without first ones that warm up."""
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
            replace(note, stages=tuple(sorted(stages))) if stages and len(stages) < self.key.sizes.pp else note
            for note, stages in self._notes.items()
        )


def jobs_of(steps: Iterable[TracedStep]) -> list[Job]:
    """Groups steps by target, role and parallel sizes, and leaves out those that do not count."""
    groups = grouped(steps, lambda step: Key(step.target, step.role, step.metadata.sizes))
    jobs = []
    for key, of_job in groups.items():
        job = Job(key, of_job)
        for other_key in groups:
            if other_key[:2] == key[:2] and other_key != key:
                job.warn(Note("other_sizes", said=str(other_key.sizes)))
        _leave_out(job)
        _check_same_job(job)
        for step in job.steps:
            _explain(step, job)
        jobs.append(job)
    return jobs


def _leave_out(job: Job) -> None:
    """Leaves the steps that may be averaged together: no duplicates, and only calls that every captured stage has.
    Blocks a verdict that these do not allow."""
    _without_duplicates(job)
    stages, present = job.key.sizes.pp, {step.stage for step in job.steps}
    if missing := set(range(stages)) - present:
        note = Note("stages_missing", stages=tuple(sorted(missing)), count=len(present), of=stages)
        job.warn(note, block=True)
    by_call = grouped(job.steps, lambda step: step.key)
    stages_of = {key: {step.stage for step in same} for key, same in by_call.items()}
    if present not in stages_of.values():
        job.warn(Note("not_comparable", said="no step was captured on every stage"), block=True)
    else:
        for key in sorted(key for key, captured in stages_of.items() if captured != present):
            captured, said = tuple(sorted(stages_of[key])), "it was not captured on the other stages"
            job.warn(Note("left_out", steps=key[:1], stages=captured, said=said))
        job.steps = [step for step in job.steps if stages_of[step.key] == present]
    _without(
        job,
        lambda step: step.unseen and Note("left_out", steps=(step.step,), ranks=(step.rank,), why=step.unseen),
    )
    _without(job, lambda step: step.incomplete and Note("left_out", files=(step.source,), why=step.incomplete))
    by_number = grouped(sorted(job.steps, key=lambda step: step.step), lambda step: step.step)
    lengths_ns = [max(step.extent[1] - step.extent[0] for step in same) for same in by_number.values()]
    if cold := tuple(by_number)[: warming_up(lengths_ns)]:
        job.warn(Note("first_steps", steps=cold))
    job.steps = [step for step in job.steps if step.step not in cold]
    _without_axes(job)


def _without_duplicates(job: Job) -> None:
    by_call: dict[tuple[int, int, int], TracedStep] = {}
    # Two tools may have captured the same step, but only one of them the GPU. Its file is sorted last, so it is kept.
    for step in sorted(job.steps, key=lambda step: (step.unseen is None, step.host[0], step.source)):
        key = (step.rank, *step.key)
        if key in by_call and by_call[key].unseen is None:
            job.warn(Note("twice", ranks=(step.rank,), steps=(step.step,), files=(by_call[key].source, step.source)))
        by_call[key] = step
    job.steps = [*by_call.values()]


def _check_same_job(job: Job) -> None:
    """Notes what must be the same in one job and differs: the layers of a rank, its place, the schedule, the number of
    microbatches. Only looks at steps that count, so one that is left out causes no note."""
    by_rank: dict[int, Metadata] = {}
    by_stage: dict[int, Metadata] = {}
    for metadata in (step.metadata for step in job.steps):
        rank, pp = metadata.coords.rank, metadata.coords.pp
        first = by_rank.setdefault(rank, metadata)
        if (metadata.coords, metadata.chunks) != (first.coords, first.chunks):
            job.warn(Note("not_comparable", ranks=(rank,), said="its place or its layers changed"), block=True)
        elif metadata.chunks != by_stage.setdefault(pp, metadata).chunks:
            job.warn(Note("not_comparable", said="its ranks hold different layers"), pp, block=True)
    if len({(step.metadata.schedule, step.forward_only) for step in job.steps}) > 1:
        job.warn(Note("not_comparable", said="schedules differ"), block=True)
    if len({step.has_kernels for step in job.steps}) > 1:
        job.warn(Note("not_comparable", said="only some traces hold GPU kernels"), block=True)
    counts: dict[object, set[int]] = {}
    for step in job.steps:
        if step.metadata.microbatches is not None:
            counts.setdefault((*step.key, step.metadata.coords.dp), set()).add(step.metadata.microbatches)
    if any(len(of_replica) > 1 for of_replica in counts.values()):
        job.warn(Note("not_comparable", said="stages differ in the microbatches of a step"), block=True)
    elif len(set().union(*counts.values())) > 1:
        job.warn(Note("microbatches_differ"))


def _without(job: Job, fault_in: Callable[[TracedStep], Note | None]) -> None:
    """Leaves out the calls in which ``fault_in`` finds something on a rank, if there are others."""
    notes = [(step.key, note) for step in job.steps if (note := fault_in(step)) is not None]
    faulty = {key for key, _ in notes}
    undisturbed = [step for step in job.steps if step.key not in faulty]
    if not undisturbed:
        return
    steps: dict[Note, set[int]] = {}
    for _, note in notes:
        steps.setdefault(replace(note, steps=()), set()).update(note.steps)
    for note, step_numbers in steps.items():
        job.warn(replace(note, steps=tuple(sorted(step_numbers))))
    job.steps = undisturbed


def warming_up(lengths: Sequence[float]) -> int:
    """Returns how many of the first steps take longer than the rest."""
    longest = WARM_UP * statistics.median(lengths)
    return next(number for number, length in enumerate(lengths) if length <= longest) if len(lengths) > 2 else 0


def _without_axes(job: Job) -> None:
    """Forgets exposed communication of the axes of which no rank has a single kernel, if the GPU was recorded: it goes
    by names that are not known, and is counted as compute."""
    found = frozenset().union(*(step.axes for step in job.steps))
    axes = [axis for axis in parallel_of(INSIDE, job.key.sizes) if axis not in found]
    if not axes or not any(step.on_gpu for step in job.steps):
        return
    if names := tuple(axis for axis in axes if any(np.isfinite(step.spent[axis]) for step in job.steps)):
        job.warn(Note("exposed_unknown", names=names, said=UNSEEN_AXIS))
    unknown = dict.fromkeys(axes, np.nan)
    job.steps = [dataclasses.replace(step, spent={**step.spent, **unknown}) for step in job.steps]


def _explain(step: TracedStep, job: Job) -> None:
    """Notes why numbers of ``step`` are missing."""
    pp = step.stage
    if step.unseen is not None:
        job.warn(step.unseen, pp, block=True)
        return
    if not len(step.passes.kind):
        job.warn(Note("passes_unknown", said=step.metadata.ranges.reason or "no ranges in it"), pp, block=True)
    if step.incomplete:
        job.warn(Note("left_out", files=(step.source,), why=step.incomplete), pp)
    if step.has_kernels and not step.on_gpu:
        job.warn(Note("passes_unknown", said=LAUNCHES_UNKNOWN), pp, block=True)
    elif step.lost:
        job.warn(Note("events_left_out", said="GPU activities without a launch in the trace"), pp)
    if step.target == WHOLE_STEP:
        job.warn(Note("whole_step"), block=True)
    if step.combined:
        job.warn(Note("passes_unknown", said="they ran combined, so only their sum, compute, is known"), pp)
    for reason in step.reasons:
        job.warn(reason, pp)
