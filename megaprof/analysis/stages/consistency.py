"""Do these calls belong together? What is missing, doubled or of another run, said once and in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megaprof.analysis.clocks.exchanges import MOST_UNCERTAIN, aligned, uncertainty
from megaprof.analysis.stages.words import stages as stages_in_words
from megaprof.analysis.stages.words import steps as steps_in_words
from megaprof.analysis.trace.calls import Call, grouped
from megaprof.formats.metadata import Metadata
from megaprof.parallel.topology import ParallelSizes

#: How far apart ranks may begin a step behind the opening of a tool, of the step, until that is told.
OPENED = 0.01

#: What is not known without a common clock.
_UNKNOWN = (
    "the step time is the longest stage's own range, and neither slow links nor stages that enter late can be seen"
)


@dataclass
class Findings:
    """Collects what a reader must know: warnings, facts about single stages, and why no stage may be called slow."""

    stages: int
    """How many stages the job has."""
    unjudgeable: str | None = None
    """Why no stage may be called slow, a clause."""
    _notes: dict[str, set[int]] = field(default_factory=dict)

    def warn(self, message: str) -> None:
        """A warning about the whole target; the same one is kept once."""
        self._notes.setdefault(message, set())

    def note(self, message: str, stage: int) -> None:
        """A warning about one stage; the same one about several stages becomes one line."""
        self._notes.setdefault(message, set()).add(stage)

    def block(self, reason: str) -> None:
        """No verdict about imbalance; the first reason is the one that is told."""
        self.unjudgeable = self.unjudgeable or reason

    def warnings(self) -> tuple[str, ...]:
        return tuple(
            f"{stages_in_words(stages)}: {message}" if stages and len(stages) < self.stages else message
            for message, stages in self._notes.items()
        )


@dataclass(frozen=True)
class Clocks:
    """Whether the calls of one step can be laid on one time axis."""

    one_clock: bool
    """Whether they can."""
    problems: tuple[str, ...] = ()
    """What must be known about it, clauses."""
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
        captured = f"{sizes.pp - len(missing)} of {sizes.pp} stages"
        advice = "--profile-select per-stage captures one rank of every stage"
        findings.warn(f"{captured} captured, without {stages_in_words(missing)}; times between stages cover only those")
        findings.block(f"{captured} captured; {advice}")
    return _without_openings(_without_unseen(_common_steps(calls, findings), findings), findings)


def comparable(step: list[Call]) -> Clocks:
    """Returns whether all calls of one step ran on one host's clock, and touch each other in time as one step's do."""
    if len(step) == 1:
        return Clocks(one_clock=True)
    hosts = {call.metadata.host for call in step}
    offset: dict[int, int] = {}
    warnings: tuple[str, ...] = ()
    uncertain = None
    if len(hosts) > 1 or None in hosts:
        found = _offsets(step)
        if found is None:
            return Clocks(one_clock=False, problems=(f"{_no_clock(step)}; {_UNKNOWN}",))
        offset, uncertain, warnings = found
    reach = None
    for begin, end in sorted(shifted(call, offset) for call in step):
        if reach is not None and begin >= reach:
            problem = (
                f"the stages of step {step[0].step} do not overlap in time: their traces are of different "
                "runs, or of replicas that run at different times; the step time is the longest stage's own range"
            )
            return Clocks(one_clock=False, problems=(problem,), different_runs=True)
        reach = end if reach is None else max(reach, end)
    return Clocks(one_clock=True, problems=warnings, offset=offset, uncertain_ns=uncertain)


def _no_clock(step: list[Call]) -> str:
    """Returns why the calls of one step have no clock in common."""
    unnamed = {call.stage for call in step if call.metadata.host is None}
    if unnamed:
        return f"no host is named for {stages_in_words(unnamed)}, so nothing says whether the stages share a clock"
    hosts = sorted({str(call.metadata.host) for call in step})
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    return f"the stages ran on {len(hosts)} hosts ({shown}), whose clocks are not aligned"


def shifted(call: Call, offset: Mapping[int, int]) -> tuple[int, int]:
    """Returns when a call ran, on the clock that ``offset`` puts each rank on."""
    begin, end = call.extent
    by = offset.get(call.rank, 0)
    return begin + by, end + by


def _offsets(step: list[Call]) -> tuple[dict[int, int], int, tuple[str, ...]] | None:
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
            findings.warn(
                f"rank {key[0]} has step {call.step} twice ({kept[key].source}, {call.source}): the later one counts"
            )
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
            findings.warn(f"rank {rank}'s traces are of different jobs: its coordinates or its layers changed")
            findings.block("the traces are of different jobs")
        elif metadata.chunks != at_stage.setdefault(pp, metadata).chunks:
            findings.note("its ranks do not hold the same layers, so their traces are of different jobs", pp)
            findings.block("the traces are of different jobs")
    if len({(call.metadata.schedule, call.forward_only) for call in calls}) > 1:
        findings.warn("the traces are of different schedules")
        findings.block("the traces are of different schedules")
    if len({call.has_kernels for call in calls}) > 1:
        findings.warn("some traces hold GPU kernels and some do not: their times are not comparable")
        findings.block("some traces hold GPU kernels and some do not")
    counted = [call for call in calls if call.metadata.microbatches is not None]
    replicas = grouped(counted, lambda call: (*call.key, call.metadata.coords.dp)).values()
    counts = [
        frozenset(call.metadata.microbatches for call in own)
        for own in grouped(counted, lambda call: call.key).values()
    ]
    if any(len({call.metadata.microbatches for call in own}) > 1 for own in replicas):
        findings.warn("within one step the stages report different numbers of microbatches")
        findings.block("the stages report different numbers of microbatches")
    elif any(len(each) > 1 for each in counts):
        findings.warn(
            "within one step replicas have different numbers of microbatches; times per step are their average"
        )
    elif len(set(counts)) > 1:
        findings.warn("the steps have different numbers of microbatches; times per step are averaged over all of them")


def _without_unseen(calls: list[Call], findings: Findings) -> list[Call]:
    """Returns the calls without the steps in which kernels of a rank were not recorded, if there are others."""
    unseen = {call.key: call for call in calls if call.unseen is not None}
    others = [call for call in calls if call.key not in unseen]
    if unseen and others:
        for call in unseen.values():
            findings.warn(f"step {call.step} is left out: on rank {call.rank} {call.unseen}")
        return others
    for call in calls:
        if call.unseen is not None:
            findings.note(call.unseen, call.stage)
            findings.block(call.unseen)
    return calls


def _without_openings(calls: list[Call], findings: Findings) -> list[Call]:
    """Returns the calls without the steps that begin with the opening of a tool, if there are others."""
    nsys = {call.key for call in calls if call.after_opening}
    torch = {key: apart for key, own in grouped(calls, lambda call: call.key).items() if (apart := opened_apart(own))}
    others = [call for call in calls if call.key not in nsys and call.key not in torch]
    if not others:
        return calls
    if nsys:
        which = steps_in_words(sorted({step for step, _ in nsys}))
        findings.warn(
            f"{which} left out: the first that nsys recorded after it was opened, and ranks do not open it at once"
        )
    for (step, _), apart in torch.items():
        findings.warn(f"step {step} is left out: {apart}")
    return others


def opened_apart(step: Sequence[Call]) -> str | None:
    """Returns why the stages of one step waited for each other more than they would have: the torch profiler, started
    before it, delayed some ranks more than others; None where it did not."""
    delays = [call.opening_ns for call in step if call.opening_ns is not None]
    longest = max(end - begin for begin, end in (call.extent for call in step))
    if step[0].metadata.sizes.pp == 1 or len(delays) < 2 or max(delays) - min(delays) <= OPENED * longest:
        return None
    least, most = (f"{ns / 1e6:.3g}" for ns in (min(delays), max(delays)))
    return f"the profiler's start before it took {least} to {most} ms, so its ranks entered it apart"


def _common_steps(calls: list[Call], findings: Findings) -> list[Call]:
    stages = {key: {call.stage for call in own} for key, own in grouped(calls, lambda call: call.key).items()}
    captured = {call.stage for call in calls}
    common = {key for key, present in stages.items() if present == captured}
    if not common:
        findings.warn("no step was captured on every stage: the stages' times are of different steps")
        findings.block("no step was captured on every stage")
        return calls
    for step, index in sorted(stages.keys() - common):
        which = f"step {step}" + (f" (call {index})" if index else "")
        findings.warn(f"{which} was captured on {stages_in_words(stages[step, index])} only and is left out")
    return [call for call in calls if call.key in common]
