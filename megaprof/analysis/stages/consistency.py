"""Do these calls belong together? What is missing, doubled or of another run, noted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from megaprof.analysis.clocks.exchanges import MOST_UNCERTAIN, aligned, uncertainty
from megaprof.analysis.notes import Note
from megaprof.analysis.trace.calls import Call, grouped
from megaprof.formats.metadata import Metadata
from megaprof.parallel.topology import ParallelSizes

#: How far apart ranks may begin a step behind the opening of a tool, of the step, until that is told.
OPENED = 0.01


@dataclass
class Findings:
    """Collects what a reader must know: warnings, facts about single stages, and why no stage may be called slow."""

    stages: int
    """How many stages the job has."""
    unjudgeable: Note | None = None
    """Why no stage may be called slow."""
    _notes: dict[Note, set[int]] = field(default_factory=dict)

    def warn(self, note: Note, stage: int | None = None, *, block: bool = False) -> None:
        """A warning about the whole target or one stage; the same one about several stages is kept once. ``block``: it
        allows no verdict about imbalance; the first such warning is the one that is told."""
        self._notes.setdefault(note, set()).update(() if stage is None else (stage,))
        if block:
            self.unjudgeable = self.unjudgeable or note

    def warnings(self) -> tuple[Note, ...]:
        return tuple(
            replace(note, stages=tuple(sorted(stages))) if stages and len(stages) < self.stages else note
            for note, stages in self._notes.items()
        )


@dataclass(frozen=True)
class Clocks:
    """Whether the calls of one step can be laid on one time axis."""

    one_clock: bool
    """Whether they can."""
    problems: tuple[Note, ...] = ()
    """What must be known about it."""
    different_runs: bool = False
    """Whether they are of different runs, because they do not overlap."""
    offset: dict[int, int] = field(default_factory=dict)
    """Nanoseconds to add to a rank's times, where clocks had to be aligned."""
    uncertain_ns: int | None = None
    """How uncertain that is; None where they had not to be aligned."""


def examine(calls: list[Call], sizes: ParallelSizes, findings: Findings) -> list[Call]:
    """The calls that may be averaged together: no duplicates, and only steps that every captured stage has.

    Adds what it leaves out to ``findings``, and blocks a verdict that the rest does not allow.
    """
    calls = _without_duplicates(calls, findings)
    missing = set(range(sizes.pp)) - {call.stage for call in calls}
    if missing:
        there = sizes.pp - len(missing)
        findings.warn(Note("stages_missing", stages=tuple(sorted(missing)), count=there, of=sizes.pp), block=True)
    seen = _without_unseen(_common_steps(calls, findings), findings)
    return _without_openings(_without_incomplete(seen, findings), findings)


def comparable(step: list[Call]) -> Clocks:
    """Returns whether all calls of one step ran on one host's clock, and touch each other in time as one step's do."""
    if len(step) == 1:
        return Clocks(one_clock=True)
    hosts = {call.metadata.host for call in step}
    offset: dict[int, int] = {}
    warnings: tuple[Note, ...] = ()
    uncertain = None
    if len(hosts) > 1 or None in hosts:
        found = _offsets(step)
        if found is None:
            return Clocks(one_clock=False, problems=(_no_clock(step),))
        offset, uncertain, warnings = found
    reach = None
    for begin, end in sorted(shifted(call, offset) for call in step):
        if reach is not None and begin >= reach:
            return Clocks(one_clock=False, problems=(Note("stages_apart", steps=(step[0].step,)),), different_runs=True)
        reach = end if reach is None else max(reach, end)
    return Clocks(one_clock=True, problems=warnings, offset=offset, uncertain_ns=uncertain)


def _no_clock(step: list[Call]) -> Note:
    """Returns why the calls of one step have no clock in common."""
    unnamed = {call.stage for call in step if call.metadata.host is None}
    if unnamed:
        return Note("host_unnamed", stages=tuple(sorted(unnamed)))
    return Note("clocks_apart", names=tuple(sorted({str(call.metadata.host) for call in step})))


def shifted(call: Call, offset: Mapping[int, int]) -> tuple[int, int]:
    """Returns when a call ran, on the clock that ``offset`` puts each rank on."""
    begin, end = call.extent
    by = offset.get(call.rank, 0)
    return begin + by, end + by


def _offsets(step: list[Call]) -> tuple[dict[int, int], int, tuple[Note, ...]] | None:
    """Offsets between hosts, how uncertain they are, and what must be told; None where that is too much of a step."""
    alignment = aligned(step)
    worst = uncertainty(alignment)
    if worst is None or worst > MOST_UNCERTAIN * max(end - begin for begin, end in (call.extent for call in step)):
        return None
    return {rank: alignment.offset(rank) for rank in alignment.hosts}, worst, alignment.warnings


def _without_duplicates(calls: list[Call], findings: Findings) -> list[Call]:
    kept: dict[tuple[int, int, int], Call] = {}
    # Two tools may have captured the same step, and one of them the GPU: the other one's file comes first here.
    for call in sorted(calls, key=lambda c: (c.unseen is None, c.start, c.source)):
        key = (call.rank, call.step, call.index)
        if key in kept and kept[key].unseen is None:
            files = kept[key].source, call.source
            findings.warn(Note("twice", ranks=(call.rank,), steps=(call.step,), files=files))
        kept[key] = call
    return list(kept.values())


def check_same_job(calls: list[Call], findings: Findings) -> None:
    """Adds to ``findings`` what is one job's own and yet differs: the layers of a rank, its place, the schedule, the
    number of microbatches. Asked of the calls that count only: a step that is left out warns of nothing."""
    of_rank: dict[int, Metadata] = {}
    at_stage: dict[int, Metadata] = {}
    for metadata in (call.metadata for call in calls):
        rank, pp = metadata.coords.rank, metadata.coords.pp
        first = of_rank.setdefault(rank, metadata)
        if (metadata.coords, metadata.chunks) != (first.coords, first.chunks):
            findings.warn(Note("other_jobs", ranks=(rank,)), block=True)
        elif metadata.chunks != at_stage.setdefault(pp, metadata).chunks:
            findings.warn(Note("other_layers"), pp, block=True)
    if len({(call.metadata.schedule, call.forward_only) for call in calls}) > 1:
        findings.warn(Note("other_schedules"), block=True)
    if len({call.has_kernels for call in calls}) > 1:
        findings.warn(Note("kernels_in_some"), block=True)
    counted = [call for call in calls if call.metadata.microbatches is not None]
    replicas = grouped(counted, lambda call: (*call.key, call.metadata.coords.dp)).values()
    counts = [
        frozenset(call.metadata.microbatches for call in own)
        for own in grouped(counted, lambda call: call.key).values()
    ]
    if any(len({call.metadata.microbatches for call in own}) > 1 for own in replicas):
        findings.warn(Note("stages_differ"), block=True)
    elif any(len(each) > 1 for each in counts):
        findings.warn(Note("replicas_differ"))
    elif len(set(counts)) > 1:
        findings.warn(Note("steps_differ"))


def _without_unseen(calls: list[Call], findings: Findings) -> list[Call]:
    """Returns the calls without the steps in which kernels of a rank were not recorded, if there are others."""
    unseen = {call.key: call for call in calls if call.unseen is not None}
    others = [call for call in calls if call.key not in unseen]
    if unseen and others:
        for call in unseen.values():
            findings.warn(Note("step_unseen", steps=(call.step,), ranks=(call.rank,), why=call.unseen))
        return others
    for call in calls:
        if call.unseen is not None:
            findings.warn(call.unseen, call.stage, block=True)
    return calls


def _without_incomplete(calls: list[Call], findings: Findings) -> list[Call]:
    """Returns the calls without the steps of which a rank has a part only, if there are others: what stages compute is
    told of the same steps on all of them."""
    parts = [call for call in calls if call.incomplete]
    keys = {call.key for call in parts}
    others = [call for call in calls if call.key not in keys]
    if not others:
        return calls
    for call in parts:
        findings.warn(Note("file_left_out", files=(call.source,), why=call.incomplete), call.stage)
    return others


def _without_openings(calls: list[Call], findings: Findings) -> list[Call]:
    """Returns the calls without the steps that begin with the opening of a tool, if there are others."""
    nsys = {call.key for call in calls if call.after_opening}
    torch = {key: apart for key, own in grouped(calls, lambda call: call.key).items() if (apart := opened_apart(own))}
    others = [call for call in calls if call.key not in nsys and call.key not in torch]
    if not others:
        return calls
    if nsys:
        findings.warn(Note("opened_by_nsys", steps=tuple(sorted({step for step, _ in nsys}))))
    for (step, _), apart in torch.items():
        findings.warn(Note("step_left_out", steps=(step,), why=apart))
    return others


def opened_apart(step: Sequence[Call]) -> Note | None:
    """Returns why the stages of one step waited for each other more than they would have: the torch profiler, started
    before it, delayed some ranks more than others; None where it did not."""
    delays = [call.opening_ns for call in step if call.opening_ns is not None]
    longest = max(end - begin for begin, end in (call.extent for call in step))
    if step[0].metadata.sizes.pp == 1 or len(delays) < 2 or max(delays) - min(delays) <= OPENED * longest:
        return None
    return Note("entered_apart", ms=(min(delays) / 1e6, max(delays) / 1e6))


def _common_steps(calls: list[Call], findings: Findings) -> list[Call]:
    stages = {key: {call.stage for call in own} for key, own in grouped(calls, lambda call: call.key).items()}
    captured = {call.stage for call in calls}
    common = {key for key, present in stages.items() if present == captured}
    if not common:
        findings.warn(Note("no_common_step"), block=True)
        return calls
    for step, index in sorted(stages.keys() - common):
        there = tuple(sorted(stages[step, index]))
        findings.warn(Note("stages_missing_in_step", steps=(step,), count=index, stages=there))
    return [call for call in calls if call.key in common]
