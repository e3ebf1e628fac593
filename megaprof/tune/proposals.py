"""Reads what a trial measured, and chooses what to try next from what its report predicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from megaprof.analysis.report.report import NothingToReport, analyze
from megaprof.analysis.report.text.what_if import assumptions, name_of
from megaprof.analysis.samples import Spread
from megaprof.analysis.what_if.changeable import Changeable
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.depth import half_as_deep
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.tune import trial as runs
from megaprof.tune.between import between_ms
from megaprof.tune.state import Interval, Proposal, Trial, Tuning

#: A layout is tried if it certainly gains this fraction of the step.
LEAST = 0.01
#: Standard errors from the middle to the ends of a 90 % interval.
_TO_ENDS = 1.645
_GIB = 1 << 30


def as_measured(trial: Trial, directory: Path, memory_limit: int | None = None, first: Trial | None = None) -> Trial:
    """Returns ``trial`` with the results from its timelines in ``directory``. ``memory_limit``: bytes that a stage may
    allocate, if that is less than its device has; ``first``: the trial of the command as it was given."""
    try:
        report = analyze(directory, memory_limit=memory_limit)
    except NothingToReport as fault:
        return replace(trial, outcome="failed", why=str(fault))
    both = zip(report.targets, report.by_hand, strict=True)
    target, known = next((each for each in both if each[0].measured.target == runs.TARGET), (None, None))
    if target is None:
        return replace(trial, outcome="failed", why="no training step was recorded whole")
    step = target.measured.step_time_ms
    if step is None:
        return replace(trial, outcome="failed", why=target.withheld.text if target.withheld else "it has no step time")
    layout, between = target.what_if.layout, between_ms(directory, runs.TARGET)
    more_between = 0.0
    if first is not None and first.stages not in (None, target.measured.sizes.pp):
        more_between = (between or 0.0) - (first.between_ms or 0.0)
    measured = replace(
        trial,
        layout=layout,
        stages=target.measured.sizes.pp,
        step_ms=_interval(step).plus(more_between),
        between_ms=between,
        steps=step.count,
        memory=target.what_if.allocated,
        framework=target.measured.framework,
        role=target.measured.role,
        verdict=target.findings[0].text,
        says=target.advice.text if target.advice else "; ".join(each.text for each in target.what_if.warnings) or None,
    )
    unlike = trial.proposal and _unlike(trial.proposal, layout, target.measured.microbatches)
    if unlike:
        return replace(measured, outcome="not_as_asked", why=unlike, step_ms=None)
    proposed = partial(_proposal, target.what_if, measured, step.mean, more_between)
    fitting = [each for each in target.what_if.candidates if each.flags and each.layout and each.fits is not False]
    proposals = tuple(proposed(each) for each in sorted(fitting, key=lambda one: -one.low))
    half = None if known is None else _half_as_deep(known)
    deep = proposed(half) if isinstance(half, Prediction) else half
    measured = replace(measured, outcome="measured", next=proposals, half_as_deep=deep)
    if memory_limit is None or measured.memory is None or max(measured.memory) <= memory_limit:
        return measured
    why = f"a stage had more than {memory_limit / _GIB:.4g} GiB allocated"
    return replace(measured, outcome="above_limit", why=why)


def _unlike(asked: Proposal, layout: str | None, microbatches: int | None) -> str | None:
    """Returns why a run is not the one that was asked for; None if nothing contradicts it."""
    if layout is not None and layout != asked.layout:
        return f"it ran with layout {layout} and not {asked.layout}: the command does not take the options"
    if None not in (asked.microbatches, microbatches) and microbatches != asked.microbatches:
        return (
            f"each replica ran {microbatches} microbatches and not {asked.microbatches}: the command does not keep the "
            "batch that all replicas have together"
        )
    return None


def best_proposal(tuning: Tuning) -> Proposal | None:
    """Returns what to try next: of all layouts that were predicted and not tried, the one with the best lower end.

    If no layout gains `LEAST` over the best trial at its lower end, returns half as many stages, if they may be tried
    and gain as much; otherwise None. If a layout was predicted twice, the more certain prediction counts. If no trial
    keeps the memory limit, any layout that is predicted to keep it counts as a gain.
    """
    best = _best(tuning, (each for trial in tuning.measured for each in trial.next))
    if best is None and tuning.depth:
        best = _best(tuning, (each for trial in tuning.measured if isinstance(each := trial.half_as_deep, Proposal)))
    return best


def _best(tuning: Tuning, proposals: Iterable[Proposal]) -> Proposal | None:
    best = tuning.best
    surest: dict[_Which, Proposal] = {}
    for each in _untried(tuning, proposals):
        other = surest.get(_which(each))
        if other is None or _width(each) < _width(other):
            surest[_which(each)] = each
    first = min(surest.values(), key=lambda each: each.step_ms.high, default=None)
    if first is None or best is None or best.step_ms is None:
        return first
    return first if first.step_ms.high * (1 + LEAST) < best.step_ms.value else None


def steps_that_tell(tuning: Tuning) -> int:
    """Returns how many more steps a repetition of the best trial needs to tell whether layouts gain, when none
    certainly does; 0 if it was repeated already, or would take longer than all remaining trials together."""
    best = tuning.best
    if best is None or tuning.repeated(best):
        return 0
    most = (tuning.most_trials - len(tuning.trials) - 1) * tuning.steps
    return max((each.more_steps for each in _untried(tuning, best.next) if each.more_steps <= most), default=0)


_Which: TypeAlias = tuple[int | None, str]
"""Stages and layout: the same pieces may be chunks of fewer stages."""


def _which(each: Proposal) -> _Which:
    return each.stages, each.layout


def _untried(tuning: Tuning, proposals: Iterable[Proposal]) -> list[Proposal]:
    """Returns the proposals that may still be tried. Leaves out layouts that have been tried, and proposals that need
    at least as much memory on every stage as one that ran out of memory."""
    asked = [(each.proposal, each.outcome) for each in tuning.trials if each.proposal is not None]
    tried = {_which(each) for each, _ in asked}
    tried |= {(each.stages, each.layout) for each in tuning.trials if each.layout is not None}
    too_large = [each.memory for each, outcome in asked if outcome == "out_of_memory" and each.memory is not None]
    return [
        each
        for each in proposals
        if _which(each) not in tried and not any(_needs(each, memory) for memory in too_large)
    ]


def _needs(each: Proposal, memory: tuple[int, ...]) -> bool:
    """Returns whether a proposal has as many stages as ``memory``, and is predicted to need at least that much on each
    of them."""
    needed = each.memory or ()
    return len(needed) == len(memory) and all(need >= least for need, least in zip(needed, memory, strict=True))


def _proposal(what_if: WhatIf, trial: Trial, step_ms: float, more_between: float, each: Prediction) -> Proposal:
    """Returns the proposal to try a prediction. ``step_ms``: the part of the trial's step that a change may shorten, in
    milliseconds; ``more_between``: the milliseconds that were added to it."""
    predicted, deep = _predicted(each, step_ms).plus(more_between), each.kind == "depth"
    if deep:
        between = trial.between_ms or 0.0
        predicted = Interval(predicted.value + between / 2, predicted.low, predicted.high + between)
    return Proposal(
        what=name_of(each, what_if),
        layout=each.layout or "",
        flags=each.flags,
        step_ms=predicted,
        against=trial.number,
        memory=each.needed,
        more_steps=each.more_steps,
        stages=len(each.layers),
        microbatches=each.microbatches if deep else None,
        assumes=tuple(assumptions(each)),
    )


def _half_as_deep(known: Changeable) -> Prediction | str:
    """Returns the prediction of half as many stages, or why there is none."""
    try:
        half = half_as_deep(known)
    except ValueError as reason:
        return str(reason)
    if half.fits is False:
        return f"a stage of half as many would need {max(half.needed or ()) / _GIB:.4g} GiB"
    return half


def _predicted(each: Prediction, measured_ms: float) -> Interval:
    """Returns the predicted step: the measured step that trials are compared by, divided by the predicted speedup."""
    return Interval(measured_ms / each.speedup, measured_ms / each.high, measured_ms / each.low)


def _interval(step: Spread) -> Interval:
    reach = _TO_ENDS * step.stdev / max(step.count - 1, 1) ** 0.5
    return Interval(step.mean, max(step.mean - reach, 1e-9), step.mean + reach)


def _width(each: Proposal) -> float:
    return each.step_ms.high - each.step_ms.low
