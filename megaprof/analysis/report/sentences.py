"""What a report says, in sentences: made here from data, for every output."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megaprof.analysis.fleet.fleet import Ended, Fleet
from megaprof.analysis.fleet.slow import Straggler
from megaprof.analysis.fleet.trends import LASTING_BUCKETS, LASTING_STEPS, Shift
from megaprof.analysis.foreign.facts import Foreign, Late
from megaprof.analysis.report import standstills
from megaprof.analysis.stages.loads import Cause
from megaprof.analysis.stages.slow import EXCESS
from megaprof.analysis.stages.stages import TargetStages
from megaprof.analysis.stages.verdict import Comparison, Verdict
from megaprof.analysis.stages.words import counted, milliseconds, number, percent, ranks, sentence, spans, steps
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import options_of
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.job.standstill import Standstill
from megaprof.parallel.selectors import Selector

#: A report on more targets begins with a table of them.
FEW_TARGETS = 3
_MOST = 8
#: Predictions that gain less than this are in the JSON only.
_WORTH_SHOWING = 1.01
#: What recordings without our ranges lack, and how to have it next time.
_TO_SEE = "record with --profile-target train_actor --profile-select per-stage"
FOREIGN = (
    "These recordings hold no ranges of megaprof's: no stages, microbatches or bubbles can be told from them, and no "
    f"layout can be predicted. To see them, {_TO_SEE}"
)
FOREIGN_STAGES = (
    "These recordings hold no ranges of megaprof's. Stages and microbatches are told from the exchanges of the "
    "pipeline group, whose order is that of 1F1B; work before the first exchange of a step and behind the last one "
    f"does not count, and no layout can be predicted. To see more, {_TO_SEE}"
)
FROM_EXCHANGES = "stages, from exchanges, not from ranges"
_INSIDE = {"tp": "tensor-parallel", "ep": "expert-parallel", "cp": "context-parallel"}
_COLLECTIVE = "the collective is slow, not a rank's compute"
_TIED = " (with tied embeddings the first and the last stage wait for each other in it)"


@dataclass(frozen=True)
class Finding:
    """One thing that a report says."""

    kind: str
    """What it is about: ``slow_stage``, ``slow_rank``, ``layers``, ..."""
    severity: Literal["slow", "open", "fine"]
    """``slow``: something is; ``fine``: nothing is; ``open``: that is not known, or this only explains."""
    text: str
    """One sentence or several; the last one ends in a colon where a command follows."""
    command: str | None = None
    """A command to run, or flags to use, quoted for a shell."""
    host_command: str | None = None
    """The flags in the host's own options, with its name in front; None where it takes the flags."""

    @property
    def plain(self) -> str:
        """The text with the command behind it, in backticks."""
        return self.text if self.command is None else f"{self.text} `{self.command}`"


def of_verdict(verdict: Verdict) -> Finding | None:
    """Whether a stage is slow; None where there is nothing to say."""
    if verdict.withheld is not None:
        return Finding("no_verdict", "open", f"No stage is called slow: {verdict.withheld}.")
    if (found := verdict.comparison) is None:
        return None
    if found.outcome == "slow":
        also = "".join(f" Stage {each.stage} is slow, too: it {_compared(each)}." for each in verdict.also_slow)
        return Finding("slow_stage", "slow", f"Stage {found.stage} is slow: it {_compared(found)}.{also}")
    slowest = f"stage {found.stage} is the slowest and {_compared(found)}"
    if found.outcome == "within":
        text = f"No stage is slow: {slowest}; a stage is called slow when it is more than {EXCESS:.0%} above."
        return Finding("no_slow_stage", "fine", text)
    but = (
        f"but microbatches vary so much that this may be chance (standard error {number(found.error_ms)} ms)"
        if found.outcome == "chance"
        else f"but it is slower in some microbatches only: its quickest one takes {number(found.quickest_ms)} ms, on "
        f"average over stages the quickest one takes {number(found.average_quickest_ms)} ms"
    )
    return Finding("no_slow_stage", "open", f"No stage is called slow: {slowest}, {but}.")


def in_brief(verdict: Verdict, fleet: Fleet | None, standstill: Standstill | None = None) -> Finding:
    """The verdict in a few words, for a table of targets; ``standstill``: where the job stands or was killed."""
    if standstill is not None:
        text = "stands still in" if standstill.outcome == "lasts" else "ended in the middle of"
        text = f"{text} step {standstill.step}"
        return Finding("in_brief", "slow", text)
    told, slow = [], sorted(verdict.slow_stages)
    if slow:
        told.append(f"{'stage' if len(slow) == 1 else 'stages'} {spans(slow)} slow")
    over_the_run = [each.kind for each in of_fleet(fleet) if each.severity == "slow"] if fleet else []
    if fleet is not None and fleet.standstills:
        told.insert(0, f"stood still in {steps(sorted(fleet.stood_still))}")
        over_the_run = [kind for kind in over_the_run if kind != "standstill"]
    told += [f"{kind.replace('_', ' ')} over the run" for kind in dict.fromkeys(over_the_run)]
    if told:
        return Finding("in_brief", "slow", ", ".join(told))
    if (said := of_verdict(verdict)) is None or verdict.withheld is not None:
        return Finding("in_brief", "open", "no verdict")
    return Finding(
        "in_brief", said.severity, "no stage is slow" if said.severity == "fine" else "no stage is called slow"
    )


def _compared(found: Comparison) -> str:
    above = percent(found.median_ms / found.average_ms - 1)
    return (
        f"computes {number(found.median_ms, found.error_ms)} ms per microbatch (median), {above} above the average "
        f"over stages ({number(found.average_ms, found.error_ms)} ms)"
    )


def of_cause(cause: Cause) -> Finding:
    """Why time is lost, and how much."""
    if cause.gain_ms is None:
        costs = f"It takes {number(cause.excess_ms)} ms {cause.basis}."
    else:
        costs = f"It costs {milliseconds(cause.gain_ms)} of the step."
    return Finding(cause.kind, "open", f"{sentence(cause.evidence)} {costs}")


def of_what_if(found: WhatIf, framework: str | None = None, role: str | None = None) -> Finding | None:
    """Which rank to mend, which layout to change to, with its flags and in the options of ``framework`` for ``role``,
    or that none is better."""
    if found.advice is None:
        return None
    if found.best is None or found.best.kind == "no_straggler":
        return Finding("layout" if found.best is None else "straggler", "open", sentence(found.advice))
    own = options_of(framework, role, found.best.flags)
    told = None if own is None else f"{framework}: {shlex.join(own)}"
    return Finding("layout", "fine", sentence(found.advice), shlex.join(found.best.flags), told)


def worth_showing(found: WhatIf) -> list[Prediction]:
    """The predictions that gain something, without those of which noise leaves nothing; all are in the JSON."""
    return [each for each in _gaining(found) if each == found.best or not _is_noise(each)]


def left_out(found: WhatIf) -> str | None:
    """How many predictions are not shown because they are noise; None where there are none."""
    count = len(_gaining(found)) - len(worth_showing(found))
    if not count:
        return None
    which, gain = ("1 prediction is", "it gains") if count == 1 else (f"{count} predictions are", "they gain")
    return f"{which} left out: what {gain} is within the uncertainty, which more captured steps would make smaller."


def _gaining(found: WhatIf) -> list[Prediction]:
    return [each for each in found.candidates if each.speedup >= _WORTH_SHOWING or each == found.best]


def _is_noise(each: Prediction) -> bool:
    return each.more_steps > 0


def caveats(shown: Sequence[Prediction]) -> list[str]:
    """What predictions rest on and what they need, each said once, with those that it is about."""
    about: dict[str, list[str]] = {}
    for each in shown:
        for caveat in (f"assumes that {each.assumes}" if each.assumes else None, each.memory):
            if caveat is not None:
                about.setdefault(caveat, []).append(each.what)
    return [f"{' / '.join(whats)}: {caveat}." for caveat, whats in about.items()]


def facts(measured: TargetStages) -> list[str]:
    """What was captured, in a few words each."""
    count = measured.microbatches
    return [
        steps(measured.steps),
        measured.schedule or "unknown schedule",
        *([] if count is None else [counted(count, "microbatch")]),
        *(["forward only"] if measured.forward_only else []),
    ]


@dataclass(frozen=True)
class _Told:
    """A finding on the whole run, with what orders it."""

    finding: Finding
    """What is said."""
    cost_ms: float
    """Milliseconds by which the step would be shorter without it."""
    over: bool = False
    """Whether it has ended."""


def of_fleet(fleet: Fleet) -> tuple[Finding, ...]:
    """What is slow or gone in the whole run: what costs the step most comes first, and what is over behind what is not;
    one finding that nothing is, where nothing is."""
    of_a_place = (*_stragglers(fleet), *_slower_stages(fleet), *_synchronisation(fleet))
    told = (*of_a_place, *_unequal(fleet), *_steps(fleet))
    found = [*of_standstills(fleet.standstills)]
    found += [each.finding for each in sorted(told, key=lambda each: (each.over, -each.cost_ms))]
    found += _ended(fleet)
    nothing = "Over the run nothing became slower, and no rank is slower than its peers."
    return tuple(found) or (Finding("nothing_slow", "fine", nothing),)


def of_standstills(found: Sequence[Standstill]) -> Iterator[Finding]:
    """Steps in which a job stood still or ended, the longest first: a hang is told before anything else."""
    return (Finding("standstill", "slow", text) for text in standstills.told(found))


def _stragglers(fleet: Fleet) -> Iterator[_Told]:
    texts = {"compute": _computes_longer, "synchronisation": _slow_group, "arrival": _comes_last}
    for each in fleet.stragglers:
        which = each.capture or (str(Selector.of_ranks(each.ranks)) if each.what == "arrival" else None)
        text, command = sentence(texts[each.what](fleet, each)), None
        if which is not None:
            text += f" A capture shows {'what it is' if each.what == 'arrival' else 'which of them it is'}:"
            command = _trigger(fleet, which)
        yield _Told(Finding("slow_rank", "slow", text, command), each.cost_ms, each.until is not None)


def _computes_longer(fleet: Fleet, s: Straggler) -> str:
    several, over = len(s.ranks) > 1, s.until is not None
    verb = ("were" if several else "was") if over else ("have been" if several else "has been")
    alone = "its peer" if s.peers == 1 else f"its {s.peers} peers"
    others = f"the {counted(s.peers, 'other such group')} of the stage" if several else alone
    waiting = ", which wait for each other inside a microbatch," if several else ""
    slower = f"{percent(s.factor - 1)} slower than" if s.factor < 2 else f"{s.factor:.1f} times as slow as"
    if s.share is not None:
        return (
            f"{ranks(s.ranks)} ({_where(s)}){waiting} {'are' if several else 'is'} slow again and again: {slower} "
            f"{others} in {percent(s.share)} of the steps, first in step {s.from_step}, last in step {s.last_step}, "
            f"computing {milliseconds(s.own_ms)} in such a step instead of {milliseconds(s.peers_ms)}"
            f"{_unseen(fleet, s)}"
        )
    grown = ""
    if not s.since_start:
        changes = (c for c in fleet.times.step_shifts if c.change > 0 and _together(fleet, c.step, s.from_step))
        grown = next((f"; the step takes {percent(c.change)} longer since then" for c in changes), "")
    return (
        f"{ranks(s.ranks)} ({_where(s)}){waiting} {verb} {slower} {others} {_when_slow(fleet, s)}, computing "
        f"{milliseconds(s.own_ms)} per step instead of {milliseconds(s.peers_ms)}{grown}{_unseen(fleet, s)}"
    )


def _unseen(fleet: Fleet, s: Straggler) -> str:
    if not s.unseen:
        return ""
    axes = "- or ".join(axis for axis in ("tp", "cp", "ep") if getattr(fleet.key.sizes, axis) > 1)
    return f"; it may as well be one of the {axes} peers {spans(s.unseen, _MOST)}, which have no timeline"


def _slow_group(fleet: Fleet, s: Straggler) -> str:
    verb = "took" if s.until is not None else "has taken"
    return (
        f"gradient synchronisation among {ranks(s.ranks)} ({_where(s)}) {verb} {milliseconds(s.own_ms)} "
        f"{_when_slow(fleet, s)}; in the {counted(s.peers, 'other group')} of the stage it takes "
        f"{milliseconds(s.peers_ms)}"
    )


def _comes_last(fleet: Fleet, s: Straggler) -> str:
    several = len(s.ranks) > 1
    come = "came" if s.until is not None else "have come" if several else "has come"
    they = "they spend" if several else "it spends"
    lost = s.peers_ms - s.own_ms
    if s.computing_ms is not None and s.computing_ms > lost / 2:
        why = (
            f"In these steps a stage of the same pipeline computes {milliseconds(s.computing_ms)} longer than its peers"
        )
    elif s.entering_ms is not None and s.entering_ms > lost / 2:
        enter = "They enter" if several else "It enters"
        why = (
            f"{enter} the step {milliseconds(s.entering_ms)} late, since something between the steps takes longer than "
            "on the others: data loading or other work of the host"
        )
    else:
        none = "None of them computes" if several else "It does not compute"
        why = f"{none} longer in these steps, so it may be exchanges, data loading or work between steps"
    return (
        f"{ranks(s.ranks)} {come} last to the gradient synchronisation {_when_slow(fleet, s)}: the others spend "
        f"{milliseconds(s.peers_ms)} in it, {they} {milliseconds(s.own_ms)}. {why}"
    )


def evidence(fleet: Fleet, s: Straggler) -> str:
    """That ranks compute longer than their peers in the whole run, as the evidence of a cause."""
    when = _when_slow(fleet, s) if s.share is None else f"in {percent(s.share)} of the steps"
    return (
        f"{ranks(s.ranks)} of stage {s.stage} compute{'s' * (len(s.ranks) == 1)} {milliseconds(s.own_ms)} per step "
        f"{when}, other ranks of the stage compute {milliseconds(s.peers_ms)} for the same work"
    )


def _shifted(shift: Shift, kind: str, text: str, command: str | None = None) -> _Told:
    return _Told(Finding(kind, "slow", text, command), shift.after_ms - shift.before_ms, shift.until is not None)


def _slower_stages(fleet: Fleet) -> Iterator[_Told]:
    for stage in fleet.stages:
        for shift in stage.shifts:
            if shift.change <= EXCESS:
                continue
            if fleet.key.sizes.pp == 1:
                yield _shifted(shift, "slow_run", f"The compute of a step {_went(fleet, shift)}, on all ranks alike.")
                continue
            text = (
                f"Stage {stage.pp} {'was' if shift.until is not None else 'has been'} {percent(shift.change)} slower "
                f"{_when(fleet, shift.step, shift.until)}, compared with the other stages: most of its ranks compute "
                f"{milliseconds(shift.after_ms)} per step instead of {milliseconds(shift.before_ms)}. A capture shows "
                "why:"
            )
            yield _shifted(shift, "slow_stage", text, _trigger(fleet, f"pp={stage.pp}"))


def _synchronisation(fleet: Fleet) -> Iterator[_Told]:
    for shift in fleet.synchronisation.synchronisation_shifts:
        text = (
            f"Gradient synchronisation {_went(fleet, shift)}, even for the rank that comes last to it: {_COLLECTIVE}."
        )
        yield _shifted(shift, "slow_synchronisation", text)
    for pp, shift in fleet.synchronisation.stage_synchronisation:
        tied = _TIED if pp in (0, fleet.key.sizes.pp - 1) else ""
        text = (
            f"Gradient synchronisation of stage {pp} {_went(fleet, shift)}, compared with that of the other stages: "
            f"{_COLLECTIVE}{tied}. A capture shows whether one of its ranks is slow:"
        )
        yield _shifted(shift, "slow_synchronisation", text, _trigger(fleet, f"pp={pp}"))


def _steps(fleet: Fleet) -> Iterator[_Told]:
    told = [
        *(s.from_step for s in fleet.stragglers if not s.since_start),
        *(s.until + 1 for s in fleet.stragglers if s.until is not None),
        *(shift.step for shift in fleet.shifts),
    ]
    for shift in fleet.times.step_shifts:
        # What became slower at that time is named already, with its own onset.
        if shift.change > EXCESS and not any(_together(fleet, shift.step, step) for step in told):
            if any(_comes_and_goes(s, shift) for s in fleet.stragglers):
                continue
            yield _shifted(shift, "slow_step", f"The step {_went(fleet, shift)}.")
    if not fleet.times.step_shifts and fleet.times.drift is not None and abs(fleet.times.drift) > EXCESS:
        drifted = percent(fleet.times.drift, sign=True)
        text = f"Step times drift: they change by {drifted} from the first step to the last."
        typical = fleet.times.step.p50 if fleet.times.step else 0.0
        yield _Told(Finding("drift", "slow", text), fleet.times.drift * typical)


def _comes_and_goes(s: Straggler, shift: Shift) -> bool:
    """Whether a rank that is slow again and again takes as much longer as the step does from ``shift`` on: which of its
    slow steps there are the most of before and after a step looks like a change of level."""
    if s.share is None or not s.from_step <= shift.step <= (s.until if s.until is not None else shift.step):
        return False
    return s.own_ms - s.peers_ms >= (1 - EXCESS) * (shift.after_ms - shift.before_ms)


def _unequal(fleet: Fleet) -> Iterator[_Told]:
    if (found := fleet.unbalanced) is not None:
        text = (
            "The replicas get unequal work, another one the most in every step: the slowest computes "
            f"{found.ratio:.2f} times as long as the average, and the others wait for it in the gradient "
            "synchronisation. With the same work for all the step would take about "
            f"{milliseconds(found.balanced_ms)} instead of {milliseconds(found.step_ms)}: spread long sequences evenly "
            "over the replicas of a step."
        )
        yield _Told(Finding("unequal_replicas", "slow", text), found.step_ms - found.balanced_ms)


def _ended(fleet: Fleet) -> Iterator[Finding]:
    if ended := fleet.coverage.ended:
        listed = ", ".join(map(_end, ended[:_MOST]))
        more = f" and {counted(len(ended) - _MOST, 'more rank')}" if len(ended) > _MOST else ""
        text = f"Data end early, as when a process dies or hangs: {listed}{more}."
        yield Finding("ended", "slow", f"{text} The last step of the other ranks is {fleet.coverage.steps[1]}.")


def _end(ended: Ended) -> str:
    host = f", {ended.host}" if ended.host else ""
    return f"rank {ended.rank} (stage {ended.stage}{host}) after step {ended.last_step}"


def notes_of(fleet: Fleet) -> Iterator[str]:
    """What a reader of a fleet's numbers must know, in sentences."""
    sizes, coverage, single = fleet.key.sizes, fleet.coverage, fleet.times.single
    if coverage.missing:
        have = "has" if coverage.ranks == 1 else "have"
        yield f"{coverage.ranks} of {sizes.world} ranks {have} a timeline; missing: {spans(coverage.missing, _MOST)}."
    if single.count:
        worst = ", ".join(f"step {step} ({factor:.1f} times as long)" for step, factor in single.worst)
        every = f", one every {single.every} steps" if single.every else ""
        yield (
            f"{counted(single.count, 'single step')} took much longer than the steps around, as for checkpoints or "
            f"garbage collection{every}: {worst}."
        )
    if (stalls := fleet.stalls) is not None:
        shown = ", ".join(f"rank {rank} in step {step}" for rank, step in stalls.examples)
        yield (
            f"Single stalls hit {len(stalls.ranks)} of {coverage.ranks} ranks, each in other steps: "
            f"{counted(stalls.count, 'step')} of a rank took about {milliseconds(stalls.longer_ms)} longer ({shown}). "
            "Python's garbage collection does this: try Megatron's --manual-gc, with which all ranks collect at once."
        )
    inside = [name for axis, name in _INSIDE.items() if getattr(sizes, axis) > 1]
    if inside:
        yield f"Compute contains {' and '.join(inside)} communication, which a timeline does not tell apart."
    if fleet.recording.clock == "device":
        yield "Times are the GPU's: an exchange between stages is what the computing stream waited for it."
    if coverage.left_out:
        one = coverage.left_out == 1
        yield (
            f"Up to {counted(coverage.left_out, 'step')} of a rank {'is' if one else 'are'} left out, because a window "
            f"was open in {'it or it' if one else 'them or they'} failed."
        )
    if coverage.again:
        again = counted(coverage.again, "step")
        yield f"Up to {again} of a rank ran twice, as after a restart from a checkpoint; the later ones count."
    if coverage.calls < LASTING_STEPS:
        few = f"{counted(coverage.calls, 'step')} {'is' if coverage.calls == 1 else 'are'} too few"
        yield f"{few} to call anything lastingly slow; {LASTING_STEPS} are needed."
    cost = fleet.recording
    if cost.own_us is None or cost.own_error_us is None or cost.own_fraction is None:
        yield "What recording cost is not known: the run was too short to measure it."
    else:
        yield (
            f"Recording added {cost.own_us:.0f} ± {cost.own_error_us:.0f} µs to a step ({cost.own_fraction:.2%}), "
            f"and {cost.own_cpu_us:.0f} µs of CPU time."
        )


def _where(s: Straggler) -> str:
    return f"stage {s.stage}" + (f", {s.hosts[0]}" if len(s.hosts) == 1 else "")


def _when_slow(fleet: Fleet, s: Straggler) -> str:
    return _when(fleet, None if s.since_start else s.from_step, s.until)


def _when(fleet: Fleet, from_step: int | None, until: int | None) -> str:
    """``from_step``: None for the first step; ``until``: None for the last."""
    begin = "the first step" if from_step is None else _about(fleet, from_step)
    return f"since {begin}" if until is None else f"from {begin} to {_about(fleet, until)}"


def _about(fleet: Fleet, step: int) -> str:
    return f"step {step}" if fleet.width == 1 else f"about step {step}"


def _went(fleet: Fleet, shift: Shift) -> str:
    verb = "took" if shift.until is not None else "has taken"
    return (
        f"{verb} {milliseconds(shift.after_ms)} instead of {milliseconds(shift.before_ms)} "
        f"({percent(shift.change, sign=True)}) {_when(fleet, shift.step, shift.until)}"
    )


def _trigger(fleet: Fleet, selection: str) -> str:
    where, target = shlex.quote(str(fleet.directory)), shlex.quote(fleet.key.target)
    return f"megaprof trigger {where} --target {target} --steps 2 --select {shlex.quote(selection)}"


def _together(fleet: Fleet, one: int, other: int) -> bool:
    return abs(one - other) <= 2 * fleet.width + LASTING_BUCKETS


def of_foreign(foreign: Foreign) -> str:
    """What recordings without ranges can tell, and how to see more."""
    return FOREIGN_STAGES if foreign.stages else FOREIGN


def of_late(late: Late) -> str:
    """Who comes last to a group's collectives."""
    often = f"{late.times} of {late.matched} times"
    return (
        f"rank {late.rank} came last to {late.operation} of {late.group} {often}: there the others' kernels took "
        f"{number(late.waited_ms)} ms longer (median)"
    )
