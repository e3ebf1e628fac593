"""Says what was measured, in which steps a run stood still, what became slower, and who keeps a hanging job waiting."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.diagnosis.stages import Basis, TargetStages
from megaprof.analysis.fleet.fleet import EXCESS, LASTING_STEPS, Fleet, Shift
from megaprof.analysis.hang import Awaited, Culprit, Hang, Why
from megaprof.analysis.table.iterations import Iterations
from megaprof.analysis.trace.groups import axis_of
from megaprof.analysis.words import (
    ago,
    capital,
    counted,
    milliseconds,
    percent,
    ranks,
    sentence,
    spans,
    steps,
)
from megaprof.formats.job import Standing, Standstill

#: A report on more targets than this begins with a table of them.
FEW_TARGETS = 3
_MOST = 8
#: At most this many standstills, and ranks that were waited for in one, are described one by one.
_FEW = 3
#: How a step was timed.
BASES: dict[Basis, str] = {
    "one_clock": "from the first stage's start to the last stage's end",
    "longest_stage": "the longest stage's own range",
}
#: What to say of a culprit, and where the ranks that wait are named after it.
_OF_CULPRITS: dict[Why, str] = {
    "absent": "{who} did not {come} {operation}",
    "held_up": "{who} did not {come} {operation}, because it waits for rank {waits_for}",
    "no_dump": "{who} left no dump: it has died, or its file is not here. {Waits} for it in {operation}",
    "unreadable": "{waits} for {who}, of which nothing is known, in {operation}",
    "stuck": "{who} does not finish {operation}, which others of the group have finished: look at its GPU",
    "not_begun": "the GPU of {who} has not begun {operation}, which others have: look at what runs on it",
    "crossed": "{waits} for {who} in {operation}, while it waits itself in {instead}",
    "differs": "in the same group, {who} called {instead} where {waiting} called {operation}",
}
_ALSO = ("absent", "held_up", "stuck", "not_begun")
_COLLECTIVE = "the collective is slow, not a rank's compute"
_TIED = " (with tied embeddings the first and the last stage wait for each other in it)"


@dataclass(frozen=True)
class Finding:
    """One statement of a report."""

    kind: str
    """Subject: ``slow_stage``, ``slow_rank``, ``layers``, ..."""
    severity: Literal["slow", "open", "fine"]
    """``slow``: something is slow. ``fine``: nothing is. ``open``: not known, or only an explanation."""
    text: str
    """One or more sentences; the last one ends in a colon if a command follows."""
    command: str | None = None
    """Command to run, or flags to use, quoted for a shell."""
    host_command: str | None = None
    """The flags as options of the host framework, after its name; None if it takes the flags as they are."""


def basis(measured: TargetStages, iterations: Iterations | None = None) -> str:
    """Returns from when to when a step of a pipeline is measured, why it is longer than one of the ``iterations``, if
    it is, and what a profiler changes about it; maybe empty."""
    clauses, profiled = [], measured.profiled_step_time_ms
    if measured.sizes.pp > 1:
        missing = measured.sizes.pp - len(measured.stages)
        clauses.append(BASES[measured.step_time_basis] + (", of those that were captured" if missing else ""))
        # Nothing makes the stages of a pass without gradients begin together.
        longer = iterations is not None and measured.step_ms > (1 + LEAST) * iterations.ms
        if longer and measured.forward_only and not measured.profiled:
            clauses.append("longer than an iteration: a stage begins the next pass while others are in this one")
    if measured.profiled:
        clauses.append("while a profiler recorded it; other steps may be shorter, and the host's delays have no price")
    elif profiled is not None and measured.step_time_ms is not None:
        count = counted(measured.step_time_ms.count, "step")
        clauses.append(f"in {count} without a profiler; {milliseconds(profiled.mean)} while it recorded")
    return ", ".join(clauses)


def facts(measured: TargetStages) -> list[str]:
    """Returns facts about the capture, each in a few words; the parallel sizes come last."""
    count = measured.microbatches
    return [
        steps(measured.steps),
        measured.schedule or "unknown schedule",
        *([] if count is None else [counted(count, "microbatch")]),
        *(["forward only"] if measured.forward_only else []),
        str(measured.sizes),
    ]


def ends(fleet: Fleet) -> tuple[Finding, ...]:
    """Returns in which steps the job stood still, and which ranks' data end early."""
    found = [*standstill_findings(fleet.standstills)]
    if ended := fleet.coverage.ended:
        places = [(each, f"stage {each.stage}, {each.host}") for each in ended[:_MOST]]
        shown = ", ".join(f"rank {each.rank} ({place}) after step {each.last_step}" for each, place in places)
        more = f" and {counted(len(ended) - _MOST, 'more rank')}" if len(ended) > _MOST else ""
        text = f"Data end early, as when a process dies or hangs: {shown}{more}."
        found.append(Finding("ended", "slow", f"{text} The last step of the other ranks is {fleet.coverage.steps[1]}."))
    return tuple(found)


def standstill_findings(standstills: Sequence[Standstill]) -> Iterator[Finding]:
    """Yields the steps in which a job stood still, or in the middle of which it ended.

    The longest come first, each in a sentence or two; one more sentence names all others. A report shows these before
    anything else.
    """
    ordered = sorted(standstills, key=lambda standstill: -standstill.seconds)
    for standstill in ordered[:_FEW]:
        if standstill.inside:
            yield Finding("standstill", "slow", _standstill(standstill))
        else:
            yield Finding("standstill", "open", f"{unmoved(standstill)}.")
    if more := ordered[_FEW:]:
        where = spans(sorted(standstill.step for standstill in more), 8)
        yield Finding("standstill", "slow", f"It stood still in {counted(len(more), 'more step')}: {where}.")


def _standstill(standstill: Standstill) -> str:
    lasts, seconds = standstill.outcome == "lasts", ago(standstill.seconds)
    step = step_of(standstill)
    text = {
        "went_on": f"The job stood still in {step} for {seconds}, and then went on",
        "last": f"The job stood still in {step} for {seconds}, and did no other step after it",
        "unfinished": f"The job ended in the middle of {step}"
        + (f", in which it had stood still for {seconds}" if standstill.seconds else ""),
        "lasts": f"The job stands still in {step}, for {seconds} by now",
    }[standstill.outcome]
    if standstill.waited_for:
        shown = [_standing(rank, "stands" if lasts else "stood") for rank in standstill.waited_for[:_FEW]]
        more = len(standstill.waited_for) - len(shown)
        text += ": " + "; ".join([*shown, *([f"and {more} more"] if more else [])])
        if standstill.waiting:
            wait = ("waits" if standstill.waiting == 1 else "wait") if lasts else "waited"
            for_whom = "it" if len(standstill.waited_for) == 1 else "them"
            text += f"; {counted(standstill.waiting, 'rank')} {wait} for {for_whom}"
    return f"{text}. This step counts for no time."


def unmoved(standstill: Standstill) -> str:
    """Returns that no rank moved outside of a step, or where only a timeline would have shown where."""
    if not standstill.seconds:
        return f"The job was cut off in step {standstill.step} or after it"
    since = f"since step {standstill.step} " + ("ended" if standstill.inside is False else "began")
    if standstill.outcome == "lasts":
        return f"No rank has moved for {ago(standstill.seconds)}, {since}"
    return f"When the job ended, no rank had moved for {ago(standstill.seconds)}, {since}"


def step_of(standstill: Standstill) -> str:
    """Returns the step of a standstill, with its target if the job has several: ``step 8 of train_log_probs``."""
    return f"step {standstill.step}" + (f" of {standstill.target}" if standstill.target else "")


def _standing(rank: Standing, verb: str) -> str:
    place = f"rank {rank.rank} (stage {rank.stage})"
    if rank.phase is None:
        return f"{place} {verb} outside of the schedule's ranges"
    microbatch = "" if rank.microbatch is None else f" of microbatch {rank.microbatch}"
    chunk = f" (chunk {rank.chunk})" if rank.chunk else ""
    return f"{place} {verb} in {rank.phase}{microbatch}{chunk}"


def hang_sentences(hang: Hang) -> Iterator[str]:
    """Yields which ranks keep the job waiting, and in which operations; then notes about the dumps."""
    yield from map(_culprit, (*hang.culprits, *hang.held_up))
    for awaited in hang.unended:
        called = f"{capital(ranks(awaited.ranks))} all called {_operation(awaited)}, and it does not end."
        yield f"{called} No rank is to blame: look at their GPUs and at the network between them. {_since(awaited)}"
    if (hang.culprits or hang.held_up) and hang.behind:
        they = "it waits for them" if hang.behind == 1 else "they wait for them or for each other"
        yield f"{counted(hang.behind, 'other rank')} cannot go on, because {they}."
    if not hang.culprits and not hang.held_up and not hang.unended:
        waiting = f"{counted(hang.behind, 'rank')} with something in flight" if hang.behind else "nothing in flight"
        yield f"No rank keeps another waiting in a collective: the dumps show {waiting}."
    if hang.missing and not any(culprit.why == "no_dump" for culprit in hang.culprits):
        yield f"No dump of {ranks(hang.missing)} is here."
    yield from (sentence(note.text) for note in hang.warnings)


def _culprit(culprit: Culprit) -> str:
    awaited, waiting = culprit.awaited, culprit.waiting
    who = ranks([culprit.rank]) + ("" if culprit.stage is None else f" (stage {culprit.stage})")
    waits = f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    finding = _OF_CULPRITS[culprit.why].format(
        who=who,
        come="answer" if awaited.number is None else "come to",
        operation=_operation(awaited),
        waiting=ranks(waiting),
        waits=waits,
        Waits=capital(waits),
        instead=culprit.instead,
        waits_for=culprit.waits_for,
    )
    also = f" {capital(waits)} for it." if waiting and culprit.why in _ALSO else ""
    return f"{sentence(finding)}{also} {_since(awaited)}"


def _operation(awaited: Awaited) -> str:
    """Returns an operation in words: ``_all_gather_base number 87749, of 2048x1x5120 elements, in the tp group of ranks
    8-11``."""
    number = "" if awaited.number is None else f" number {awaited.number}"
    shapes = " and ".join("x".join(map(str, shape)) for shape in awaited.sizes if shape)
    group = axis_of(awaited.group) or awaited.group
    size = f", of {shapes} element{'s' * (shapes != '1')}," if shapes else ""
    members = f"of {ranks(awaited.ranks)}" if number else "between ranks {} and {}".format(*awaited.ranks)
    return f"{awaited.operation}{number}{size} in the {group} group {members}"


def _since(awaited: Awaited) -> str:
    return f"That was called at {datetime.fromtimestamp(awaited.since, UTC):%Y-%m-%d %H:%M:%S} UTC."


def changes(fleet: Fleet, job: Path) -> tuple[Finding, ...]:
    """Returns what took longer from some step on. The largest change comes first, and changes that are over come last.

    These are measurements, which do not say why. ``job``: the directory in which a capture can be requested.
    """
    found: list[tuple[Shift, Finding]] = []

    def add(shift: Shift, kind: str, text: str, stage: int | None = None) -> None:
        command = None if stage is None else trigger(job, fleet.target, f"pp={stage}")
        found.append((shift, Finding(kind, "slow", text, command)))

    for stage in fleet.stages:
        for shift in (shift for shift in stage.shifts if shift.change > EXCESS):
            if fleet.sizes.pp == 1:
                add(shift, "slow_run", f"The compute of a step {_went(fleet, shift)}, on all ranks alike.")
                continue
            text = (
                f"Stage {stage.pp} {'was' if shift.until is not None else 'has been'} {percent(shift.change)} slower "
                f"{_when(fleet, shift)}, compared with the other stages: most of its ranks compute "
                f"{milliseconds(shift.after_ms)} per step instead of {milliseconds(shift.before_ms)}. While the "
                "job runs, a capture shows why:"
            )
            add(shift, "slow_stage", text, stage.pp)
    for shift in fleet.synchronisation.synchronisation_shifts:
        whose = "even for the rank that comes last to it"
        add(shift, "slow_synchronisation", f"Gradient synchronisation {_went(fleet, shift)}, {whose}: {_COLLECTIVE}.")
    for pp, shift in fleet.synchronisation.stage_synchronisation:
        tied = _TIED if pp in (0, fleet.sizes.pp - 1) else ""
        text = (
            f"Gradient synchronisation of stage {pp} {_went(fleet, shift)}, compared with that of the other stages: "
            f"{_COLLECTIVE}{tied}. While the job runs, a capture shows whether one of its ranks is slow:"
        )
        add(shift, "slow_synchronisation", text, pp)
    for shift in fleet.times.step_shifts:
        if shift.change > EXCESS:
            add(shift, "slow_step", f"The step {_went(fleet, shift)}.")
    found.sort(key=lambda each: (each[0].until is not None, each[0].before_ms - each[0].after_ms))
    return tuple(finding for _, finding in found)


def run_notes(fleet: Fleet) -> Iterator[str]:
    """Yields what a reader of a fleet's numbers must know, in sentences."""
    coverage, single = fleet.coverage, fleet.times.single
    if coverage.missing:
        missing = spans(coverage.missing, _MOST)
        yield f"Timelines of {coverage.ranks} of {fleet.sizes.world} ranks are here; missing: {missing}."
    if single.count:
        worst = ", ".join(f"step {step} ({factor:.1f} times as long)" for step, factor in single.worst)
        every = f", one every {single.every} steps" if single.every else ""
        yield (
            f"{counted(single.count, 'single step')} took much longer than the steps around, as for checkpoints or "
            f"garbage collection{every}: {worst}."
        )
    if coverage.left_out:
        most = counted(coverage.left_out, "step")
        yield f"Left out, because a window was open in them or they failed: up to {most} of a rank."
    if coverage.again:
        again = counted(coverage.again, "step")
        yield f"Up to {again} of a rank ran twice, as after a restart from a checkpoint; the later ones count."
    if coverage.calls < LASTING_STEPS:
        few = f"{counted(coverage.calls, 'step')} {'is' if coverage.calls == 1 else 'are'} too few"
        yield f"{few} to call anything lastingly slow; {LASTING_STEPS} are needed."


def _when(fleet: Fleet, shift: Shift) -> str:
    about = "step" if fleet.width == 1 else "about step"
    since = f"{about} {shift.step}"
    return f"since {since}" if shift.until is None else f"from {since} to {about} {shift.until}"


def _went(fleet: Fleet, shift: Shift) -> str:
    verb = "took" if shift.until is not None else "has taken"
    return (
        f"{verb} {milliseconds(shift.after_ms)} instead of {milliseconds(shift.before_ms)} "
        f"({percent(shift.change, sign=True)}) {_when(fleet, shift)}"
    )


def trigger(job: Path, target: str, selection: str = "per-stage", steps: int = 2) -> str:
    """Returns the command that captures some ranks of the job that writes to the directory ``job``."""
    where = f"{shlex.quote(str(job))} --target {shlex.quote(target)}"
    return f"megaprof trigger {where} --steps {steps} --select {shlex.quote(selection)}"
