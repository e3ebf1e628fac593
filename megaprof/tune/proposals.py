"""What a trial was measured to take, and what to try next by its report's what-if."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.report.report import NothingToReport, analyze
from megaprof.analysis.report.text.what_if import name_of
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import options_of
from megaprof.tune import trial as runs
from megaprof.tune.state import Interval, Proposal, Trial, Tuning

#: A change is tried where it surely gains this part of the step.
LEAST = 0.01
#: Standard errors from the middle to the ends of a 90 % interval.
_TO_ENDS = 1.645


def measured(trial: Trial, directory: Path, memory_limit: int | None = None) -> Trial:
    """Returns ``trial`` with what its timelines in ``directory`` say. ``memory_limit``: bytes that a stage may have
    allocated, where that is less than its device has."""
    try:
        report = analyze(directory, memory_limit=memory_limit)
    except NothingToReport as fault:
        return replace(trial, outcome="failed", why=str(fault))
    target = next((each for each in report.targets if each.measured.target == runs.TARGET), None)
    step = None if target is None else target.measured.step_time_ms
    if target is None or step is None:
        why = (
            "no training step was recorded whole"
            if target is None
            else target.withheld.text
            if target.withheld
            else "it has no step time"
        )
        return replace(trial, outcome="failed", why=why)
    layout = target.what_if.layout
    found = replace(
        trial,
        layout=layout,
        step_ms=_interval(step),
        steps=step.count,
        memory=target.what_if.allocated,
        framework=target.measured.framework,
        role=target.measured.role,
        verdict=target.findings[0].text,
        says=target.advice.text if target.advice else "; ".join(each.text for each in target.what_if.warnings) or None,
    )
    asked = None if trial.proposal is None else trial.proposal.layout
    if None not in (asked, layout) and asked != layout:
        why = f"it ran with layout {layout} and not {asked}: the command does not take the options"
        return replace(found, outcome="not_as_asked", why=why, step_ms=None)
    found = replace(found, outcome="measured", next=tuple(_proposals(target, trial.number)))
    if memory_limit is None or found.memory is None or max(found.memory) <= memory_limit:
        return found
    return replace(
        found, outcome="above_limit", why=f"a stage had more than {memory_limit / (1 << 30):.4g} GiB allocated"
    )


def best_proposal(tuning: Tuning) -> Proposal | None:
    """Returns what to try next: of all that was predicted and not tried, what has the best lower end; None where no
    lower end gains `LEAST` over the best trial. Of two predictions of one layout the more certain one counts. Where no
    trial keeps the limit of memory, whatever is predicted to keep it gains."""
    best = tuning.best
    surest: dict[str, Proposal] = {}
    for each in (each for trial in tuning.measured for each in _untried(tuning, trial)):
        known = surest.get(each.layout)
        if known is None or _width(each) < _width(known):
            surest[each.layout] = each
    first = min(surest.values(), key=lambda each: each.step_ms.high, default=None)
    if first is None or best is None or best.step_ms is None:
        return first
    return first if first.step_ms.high * (1 + LEAST) < best.step_ms.value else None


def steps_that_tell(tuning: Tuning) -> int:
    """Returns by how many steps a repetition of the best trial would be longer to tell of layouts whether they gain,
    where none surely does; 0 where it was run again, or would be longer than the trials that are left together."""
    best = tuning.best
    if best is None or tuning.repeated(best):
        return 0
    most = (tuning.most_trials - len(tuning.trials) - 1) * tuning.steps
    return max((each.more_steps for each in _untried(tuning, best) if each.more_steps <= most), default=0)


def _untried(tuning: Tuning, trial: Trial) -> list[Proposal]:
    """What was predicted from a trial, and may still be tried: no layout of a trial, and none that needs as much memory
    on every stage as one that ran out of it."""
    asked = [(each.proposal, each.outcome) for each in tuning.trials if each.proposal is not None]
    tried = {each.layout for each, _ in asked} | {each.layout for each in tuning.trials if each.layout is not None}
    too_large = [each.memory for each, outcome in asked if outcome == "out_of_memory" and each.memory is not None]
    return [
        each
        for each in trial.next
        if each.layout not in tried and not any(_needs(each, memory) for memory in too_large)
    ]


def _needs(each: Proposal, memory: tuple[int, ...]) -> bool:
    """Whether it is predicted to need so much memory on every stage."""
    return each.memory is not None and all(need >= known for need, known in zip(each.memory, memory, strict=True))


def _proposals(target: TargetReport, number: int) -> Iterator[Proposal]:
    known = target.what_if.measured_ms
    step = target.measured.step_time_ms
    if known is None or step is None:
        return
    fitting = [each for each in target.what_if.candidates if each.flags and each.layout and each.fits is not False]
    for each in sorted(fitting, key=lambda one: -one.low):
        predicted = _predicted(each, step.mean)
        name = name_of(each, target.what_if)
        own = options_of(target.measured.framework, target.measured.role, each.flags, len(each.layers))
        options = each.flags if own is None else own
        yield Proposal(name, each.layout or "", options, predicted, number, each.needed, each.more_steps)


def _predicted(each: Prediction, measured_ms: float) -> Interval:
    """The step by how many times as fast it is, from the step time that trials are compared by."""
    return Interval(measured_ms / each.speedup, measured_ms / each.high, measured_ms / each.low)


def _interval(step: Spread) -> Interval:
    reach = _TO_ENDS * step.stdev / max(step.count - 1, 1) ** 0.5
    return Interval(step.mean, max(step.mean - reach, 1e-9), step.mean + reach)


def _width(each: Proposal) -> float:
    return each.step_ms.high - each.step_ms.low
