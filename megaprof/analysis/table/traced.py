"""Makes tables of passes from traces: the columns of each rank's steps become the rows of the table. With timelines of
the same job, both become one table.

Steps that belong together are found first. What is missing, recorded twice, or from another job becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.reading import CALLS, FleetReading, Key
from megaprof.analysis.notes import LAUNCHES_UNKNOWN, UNSEEN_AXIS, Note
from megaprof.analysis.table.matching import meetings
from megaprof.analysis.table.recorded import tables_of_timelines
from megaprof.analysis.table.table import DATA, GARBAGE, Floats, RankSteps, Table, Unfit
from megaprof.analysis.table.tabulate import (
    WARM_UP,
    cells_of,
    forward_share,
    modules_of,
    place_of,
    schedule_of,
    tabulate,
    warming_up,
)
from megaprof.analysis.trace.groups import INSIDE, parallel_of
from megaprof.analysis.trace.reading import Workers
from megaprof.analysis.trace.steps import WHOLE_STEP, TracedStep, grouped
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import PipelineSchedule


@dataclass
class Job:
    """The steps of one target, role and set of parallel sizes, with notes about them."""

    key: Key
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
            msgspec.structs.replace(note, stages=tuple(sorted(stages)))
            if stages and len(stages) < self.key.sizes.pp
            else note
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
        for step in job.steps:  # why its numbers are missing
            if step.unseen is not None:
                job.warn(step.unseen, step.stage, block=True)
                continue
            if not len(step.passes.kind):
                why = step.metadata.ranges.reason or "no ranges in it"
                job.warn(Note("passes_unknown", said=why), step.stage, block=True)
            if step.incomplete:
                job.warn(Note("left_out", files=(step.source,), why=step.incomplete), step.stage)
            if step.has_kernels and not step.on_gpu:
                job.warn(Note("passes_unknown", said=LAUNCHES_UNKNOWN), step.stage, block=True)
            if step.target == WHOLE_STEP:
                job.warn(Note("whole_step"), block=True)
            if (step.passes.kind == 2).any():
                why = "they ran combined, so only their sum, compute, is known"
                job.warn(Note("passes_unknown", said=why), step.stage)
            for reason in step.reasons:
                job.warn(reason, step.stage)
        jobs.append(job)
    return jobs


def _leave_out(job: Job) -> None:
    """Leaves the steps that may be averaged together: no duplicates, and only calls that every captured stage has.
    Blocks a verdict that these do not allow."""
    by_call: dict[tuple[int, int, int], TracedStep] = {}
    # Two tools may have captured the same step, but only one of them the GPU. Its file is sorted last, so it is kept.
    for step in sorted(job.steps, key=lambda step: (step.unseen is None, step.host[0], step.source)):
        key = (step.rank, *step.key)
        if key in by_call and by_call[key].unseen is None:
            job.warn(Note("twice", ranks=(step.rank,), steps=(step.step,), files=(by_call[key].source, step.source)))
        by_call[key] = step
    job.steps = [*by_call.values()]
    stages, present = job.key.sizes.pp, {step.stage for step in job.steps}
    if missing := set(range(stages)) - present:
        note = Note("stages_missing", stages=tuple(sorted(missing)), count=len(present), of=stages)
        job.warn(note, block=True)
    of_calls = grouped(job.steps, lambda step: step.key)
    stages_of = {call: {step.stage for step in same} for call, same in of_calls.items()}
    if present not in stages_of.values():
        job.warn(Note("not_comparable", said="no step was captured on every stage"), block=True)
    else:
        for call in sorted(call for call, captured in stages_of.items() if captured != present):
            captured, said = tuple(sorted(stages_of[call])), "it was not captured on the other stages"
            job.warn(Note("left_out", steps=call[:1], stages=captured, said=said))
        job.steps = [step for step in job.steps if stages_of[step.key] == present]
    _without(
        job, lambda step: step.unseen and Note("left_out", steps=(step.step,), ranks=(step.rank,), why=step.unseen)
    )
    _without(job, lambda step: step.incomplete and Note("left_out", files=(step.source,), why=step.incomplete))
    by_number = grouped(sorted(job.steps, key=lambda step: step.step), lambda step: step.step)
    lengths_ns = [max(step.extent[1] - step.extent[0] for step in same) for same in by_number.values()]
    if cold := tuple(by_number)[: warming_up(lengths_ns)]:
        job.warn(Note("first_steps", steps=cold, factor=WARM_UP))
    job.steps = [step for step in job.steps if step.step not in cold]
    _without_axes(job)


def _check_same_job(job: Job) -> None:
    """Notes what must be the same in one job and differs: the layers of a stage, the schedule, the number of
    microbatches. Only looks at steps that count, so one that is left out causes no note."""
    by_stage: dict[int, Metadata] = {}
    for step in job.steps:
        if step.metadata.chunks != by_stage.setdefault(step.stage, step.metadata).chunks:
            job.warn(Note("not_comparable", said="its ranks hold different layers"), step.stage, block=True)
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
    alike = grouped((note for _, note in notes), lambda note: msgspec.structs.replace(note, steps=()))
    for note, same in alike.items():
        numbers = {number for each in same for number in each.steps}
        job.warn(msgspec.structs.replace(note, steps=tuple(sorted(numbers))))
    job.steps = undisturbed


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
    job.steps = [replace(step, spent={**step.spent, **unknown}) for step in job.steps]


_MS = 1e-6
#: Clocks that are uncertain by more than this fraction of a step cannot tell waiting from transferring.
_MOST_UNCERTAIN = 0.02


def table_of(job: Job) -> Table:
    """Returns the table of the steps of a job. Raises Unfit if there is none, or if the steps are of different runs."""
    # If stages are missing, the times of the others are still known.
    if job.unjudgeable and job.unjudgeable.kind != "stages_missing":
        raise Unfit(job.unjudgeable)
    whole = [step for step in job.steps if not step.incomplete]
    if not whole:
        raise Unfit(Note("no_step", said="no step was recorded whole", why=job.steps[-1].incomplete))
    by_schedule = grouped(whole, lambda step: (step.metadata.schedule, step.metadata.microbatches, step.forward_only))
    alike = max(by_schedule.values(), key=len)
    steps = sorted(alike, key=lambda step: step.key)
    metadata, combined = steps[0].metadata, any((step.passes.kind == 2).any() for step in steps)
    schedule = schedule_of(metadata, steps[0].forward_only, combined=combined)
    origin = min(step.host[0] for step in steps)
    ranks = [_rank(of_rank, schedule, origin) for of_rank in grouped(steps, lambda step: step.rank).values()]
    table = tabulate(job.key, ranks, schedule, origin)
    if table.sizes.pp > 1 and all(step.on_gpu for step in steps):
        known = table.clocks and (table.aligned_ms or 0.0) <= _MOST_UNCERTAIN * table.length.min()
        transfer_ms, waiting_ms = meetings(table, steps if known else ())
        table = replace(table, spent={**table.spent, "pp": transfer_ms, "pp_waiting": waiting_ms})
    begin, end = table.entry, table.end.max(axis=(3, 4, 5))
    for t, number in enumerate(table.steps.tolist()):
        # Replicas that reduce no gradients need not run at the same time.
        for rows in [slice(None)] if "backward" in schedule.kinds else range(begin.shape[1]):
            extents = np.column_stack((begin[t, rows].ravel(), end[t, rows].ravel()))
            extents = extents[np.isfinite(extents).all(axis=1)]
            extents = extents[np.argsort(extents[:, 0])]
            if (extents[1:, 0] >= np.maximum.accumulate(extents[:-1, 1])).any():
                raise Unfit(Note("not_comparable", steps=(number,), said="stages do not overlap in time"))
    warnings = job.warnings()
    if steps[0].on_gpu and table.sizes.pp > 1 and not np.isfinite(table.spent["pp"]).all():
        warnings += (Note("exposed_unknown", names=("pp",), said="only one end of its exchanges is known"),)
    return replace(table, profiled_length=table.length, warnings=warnings)


def _rank(steps: Sequence[TracedStep], schedule: PipelineSchedule, origin: int) -> RankSteps:
    metadata = steps[0].metadata
    shape = (len(steps), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end, compute, working = (np.full(shape, np.nan) for _ in range(4))
    # If only some collectives of a group can be told apart from the rest, only those are counted.
    found = {group for step in steps for group, ns in step.passes.exposed.items() if ns.any()}
    exposed = {group: np.zeros(shape) for group in (*INSIDE, "unknown") if group in found}
    idle, collected_ms, loading_ms = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    loads = any(step.passes.data is not None for step in steps)
    reduced, work = np.full(len(steps), np.nan), np.full((len(steps), schedule.microbatches, 3), np.nan)
    sequences: dict[tuple[int, int], tuple[int, ...]] = {}
    for t, step in enumerate(steps):
        passes, of_call = step.passes, step.metadata
        if not step.forward_only and (step.on_gpu or len(step.finalize)):
            reduced[t] = ((step.extent[1] if step.on_gpu else int(step.finalize[-1, 1])) - origin) * _MS
        # The metadata only have the sequences of the first call of a window.
        is_first = (step.target, step.step, step.index) == (of_call.target, of_call.steps[0], of_call.call)
        of_microbatches = zip(of_call.tokens or (), of_call.lengths or (), strict=False) if is_first else ()
        for number, (tokens, lengths) in enumerate(of_microbatches):
            if tokens and lengths:
                sequences[t, number] = lengths
                if number < schedule.microbatches:
                    work[t, number] = tokens, len(lengths), sum(length * length for length in lengths)
        took = passes.host[:, 1] - passes.host[:, 0]
        share = forward_share(took[passes.kind == 0], took[passes.kind == 1]) if schedule.combined else 0.0
        row, places, half = cells_of(passes.kind, passes.ids, schedule)
        begin_share, end_share = np.where(half > 0, share, 0.0), np.where(half < 0, share, 1.0)
        cells, scale = (t, *places), (end_share - begin_share) * _MS
        since, length = passes.spans[row, 0] - origin, passes.end[row] - passes.spans[row, 0]
        start[cells] = (since + begin_share * length) * _MS
        end[cells] = (since + end_share * length) * _MS
        collected_ms[cells] = passes.garbage[row] * scale
        loading_ms[cells] = 0.0 if passes.data is None else passes.data[row] * scale
        idle[cells], compute[cells] = passes.idle[row] * scale, passes.compute[row] * scale
        working[cells] = passes.working[row] * scale
        for group, group_ms in exposed.items():
            group_ms[cells] = passes.exposed[group][row] * scale if group in passes.exposed else 0.0
    host_ms = idle if steps[0].on_gpu else compute  # what the host holds up
    host_ms -= collected_ms + loading_ms
    working -= 0.0 if steps[0].on_gpu else loading_ms
    core_waits_ms = np.zeros(len(steps))
    for window in grouped(range(len(steps)), lambda t: steps[t].source).values():
        core_waits_ms[window] = _core_wait([steps[t] for t in window]) / len(window)
    # Those of the first call of each window.
    expert_tokens = {step.source: sum(of) for step in steps if (of := step.metadata.expert_tokens) is not None}
    names = set.intersection(*(set(step.spent) for step in steps))
    spent = {name: np.array([step.spent[name] for step in steps]) * _MS for name in names}
    if loads:
        spent[DATA] = loading_ms.sum(axis=(1, 2, 3))
        spent |= {"host_bound": np.maximum(spent["host_bound"] - spent[DATA], 0.0)} if "host_bound" in spent else {}
    entered_and_left = (np.array([step.extent for step in steps]) - origin) * _MS
    return RankSteps(
        names=((metadata.coords.rank, metadata.host),),
        metadata=metadata,
        place=place_of(metadata.coords),
        steps=np.array([step.step << CALLS | step.index for step in steps]),
        start=start,
        end=end,
        compute=compute,
        working=working,
        spent=spent,
        idle=idle,
        core_waits=core_waits_ms,
        delays={**({GARBAGE: collected_ms} if collected_ms.any() else {}), **({DATA: loading_ms} if loads else {})},
        exposed=exposed,
        left=np.append(np.nan, entered_and_left[:-1, 1]),
        enter=entered_and_left[:, 0],
        reduced=reduced,
        work=work,
        lengths_from=metadata.lengths_from,
        experts=float(np.mean([*expert_tokens.values()])) if expert_tokens else np.nan,
        sequences=sequences,
        modules=modules_of(steps),
    )


def _core_wait(steps: Sequence[TracedStep]) -> float:
    """Returns how many milliseconds the training thread waited for a core in a window that holds only these calls."""
    profiler = steps[0].metadata.profiler
    if profiler is None or profiler.waited_ns is None or any(step.target != step.metadata.target for step in steps):
        return 0.0
    # The counter is read after the window is closed, for which the thread may wait, too.
    return min(profiler.waited_ns, max(step.extent[1] for step in steps) - min(step.extent[0] for step in steps)) * _MS


def tables(
    jobs: Iterable[Job], reading: FleetReading, fleets: Iterable[Fleet] = (), workers: Workers = 1
) -> dict[Key, Table | Unfit]:
    """Returns the table of every job, or why there is none. A table is made from traces, from timelines, or from both
    together. ``jobs``: those with traces; ``fleets``: the survey of the timelines."""
    by_key = tables_of_timelines(reading, fleets, workers)
    for job in jobs:
        recorded = by_key.get(job.key)
        try:
            traced = table_of(job)
            by_key[job.key] = (completed(recorded, traced) if isinstance(recorded, Table) else None) or traced
        except Unfit as fault:
            if not isinstance(recorded, Table):
                by_key[job.key] = fault
    return by_key


def completed(recorded: Table, traced: Table) -> Table | None:
    """Returns the table of a timeline with what a trace shows about passes. How long they take is a matter of steps
    without a profiler, and so of the timeline; what they consist of is a matter of the trace. Returns None if the two
    do not show the same passes, or one of them not as the GPU ran them. From traces that lack a stage nothing is taken.

    On a GPU, kernels take as long under a profiler as without it. So compute and transfers are taken over in
    milliseconds, and what is left of the timeline's pass is waiting: for peers, as far as their arrivals show it, and
    else for the host. On a CPU, the profiler makes compute longer, so transfers are taken over, and shares of peers.
    """
    on_gpu = "host_bound" in traced.spent
    if recorded.schedule != traced.schedule or recorded.device != on_gpu or None in recorded.metadata:
        return None
    if None in traced.metadata:
        said = "only some stages were captured; --profile-select per-stage captures one rank of each"
        unused = Note("left_out", steps=tuple(dict.fromkeys(traced.steps.tolist())), said=said)
        return replace(recorded, warnings=(*recorded.warnings, unused))
    passes, peers = recorded.passes, recorded.working.shape[3]
    usual = [np.maximum(ms, 1e-9)[..., None] for ms in (passes.mean(axis=(0, 5)), np.median(passes, axis=(0, 5)))]
    replicas = [np.flatnonzero(traced.ranks[:, 0, 0] == rank) for rank in recorded.ranks[:, 0, 0]]

    def parts(traced_ms: Floats) -> Floats:
        """Returns which part of a pass takes ``traced_ms`` [t, d, s, (p,) c, k, m] in the trace, [d, s, (p,) c, k, 1].
        By means, bursts in the other steps would look like waiting, and by medians, other microbatches."""
        of_pass = []
        for ms, took in zip((traced_ms.mean(axis=(0, -1)), np.median(traced_ms, axis=(0, -1))), usual, strict=True):
            of_replicas = np.stack([ms[same if len(same) else ...].mean(axis=0) for same in replicas])[..., None]
            of_pass.append(of_replicas / (took if of_replicas.ndim == 5 else took[:, :, None]))
        return np.where(of_pass[0] > of_pass[1], *of_pass)

    def of_peers(traced_ms: Floats) -> Floats:
        """Returns the times of the timeline's peers, [t, d, s, p, ...]; of other ones, all wait for the longest."""
        return (
            traced_ms if traced_ms.shape[3] == peers else np.repeat(traced_ms.max(axis=3, keepdims=True), peers, axis=3)
        )

    left, exposed = np.ones_like(usual[0]), dict[str, Floats]()
    for group, exposed_ms in traced.exposed.items():
        waits = recorded.spent.get(f"{group}_waiting")
        part = parts(exposed_ms)
        if waits is not None:  # even the last peer waits, because another one comes last to another collective
            of_pass = np.nanmean(waits.min(axis=3) / np.maximum(passes.sum(axis=(3, 4, 5)), 1e-9), axis=0)
            part = part + of_pass[..., None, None, None]
        part = np.minimum(part, left)
        exposed[group], left = passes * part, left - part
    working, compute, idle, spent = recorded.working, recorded.compute, recorded.idle, dict(recorded.spent)
    own = parts(of_peers(traced.working))  # [d, s, p, c, k, 1]
    if on_gpu:
        own = np.minimum(own, left[:, :, None])
        idle = np.maximum(passes * (left - own.max(axis=2)) - sum(recorded.delays.values()), 0.0)
        working = passes[:, :, :, None] * own
        compute = np.minimum(passes[:, :, :, None] * parts(of_peers(traced.compute)), working)
        spent["host_bound"] = np.broadcast_to(idle.sum(axis=(3, 4, 5))[..., None], working.shape[:4])
        for name in filter(traced.spent.__contains__, ("pp", "dp", "gradients")):  # outside of passes
            of_ranks = np.median(of_peers(traced.spent[name]), axis=0)
            usual_ms = [np.median(of_ranks[same if len(same) else ...], axis=0) for same in replicas]
            spent[name] = np.broadcast_to(np.stack(usual_ms), working.shape[:4])
    elif not any(name.endswith("_waiting") for name in spent):
        working = working * left[:, :, :, None] * (own / np.maximum(own.max(axis=2, keepdims=True), 1e-9))
        compute = np.minimum(compute, working)
    for group in exposed.keys() - spent.keys():
        others = sum(ms for other, ms in exposed.items() if other != group)
        spent[group] = (passes - idle - others).sum(axis=(3, 4, 5))[..., None] - working.sum(axis=(4, 5, 6))
        spent[group] -= np.nan_to_num(spent.get(DATA, 0.0))
    notes = [*recorded.warnings, *(note for note in traced.warnings if note.kind != "first_steps")]
    return replace(
        recorded,
        exposed=exposed,
        idle=idle,
        working=working,
        compute=compute,
        spent=spent,
        profiled_length=traced.length,
        experts=traced.experts if recorded.ranks.shape == traced.ranks.shape else None,
        sequences=traced.sequences if len(recorded.ranks) == len(traced.ranks) else (),
        modules=traced.modules,
        warnings=tuple(n for n in notes if n.kind != "exposed_unknown" or not n.names or {*n.names} - spent.keys()),
    )
