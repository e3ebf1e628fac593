"""Compares two captures in sentences: their causes, the machine, a prediction, and what else makes them differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from megaprof.analysis.report.diff import Diff, Kept, TargetDiff
from megaprof.analysis.report.text import words
from megaprof.analysis.report.text.sentences import BASES


def causes_clause(target: TargetDiff) -> str:
    """Returns a clause that says what costs most before and after."""
    return f"causes: {target.before.verdict} → {target.after.verdict}"


def machine_clause(target: TargetDiff) -> str:
    """Returns a clause that says whether the machine is the same, from the time of a layer in the quicker passes."""
    layer = target.layer
    if not target.same_model:
        return "whether the machine changed is not known: the captures are of different models"
    if layer is None:
        missing = "at least one capture does not show how long a layer takes in the quicker passes"
        return f"whether the machine changed is not known: {missing}"
    took = f"{words.number(layer.before)} → {words.number(layer.after)} ms"
    return (
        f"in the quicker passes, a layer takes {took} per microbatch ({words.percent(layer.change, sign=True)}); the "
        "machine, its load or a setting can change that, but not the layout"
    )


def bound_clause(target: TargetDiff, bound: float) -> str:
    """Returns a clause that says whether a step is slower by more than ``bound``, how sure that is, and what moved."""
    step, more = target.step_time, f"more than {words.percent(bound)} slower"
    if not target.comparable:
        return f"whether a step is {more} is not known: the steps of both captures do not do the same work"
    if step.low is None or step.high is None:
        return f"whether a step is {more} is not certain: it takes three steps in each capture"
    ends = f"{words.percent(step.change, sign=True)}, between {words.percent(step.low, sign=True)} and "
    ends += words.percent(step.high, sign=True)
    slower = target.slower_by(bound)
    if not slower:
        return (
            f"a step is not {more} ({ends})" if slower is False else f"whether a step is {more} is not certain ({ends})"
        )
    grown = {
        kind: (cause.after or 0.0) - (cause.before or 0.0)
        for kind, cause in target.causes.items()
        if cause.beyond_spread
    }
    kind = max(grown, key=lambda kind: grown[kind], default=None)
    if kind is None or grown[kind] <= 0.0:
        return f"a step is surely {more} ({ends}): no cause explains it; {machine_clause(target)}"
    cause, mostly = target.causes[kind], 2.0 * grown[kind] > (step.after or 0.0) - (step.before or 0.0)
    moved = f"{kind} cost {words.number(cause.before)} ms and costs {words.number(cause.after)} ms"
    moved += ", most of the difference" if mostly else ", a part of the difference"
    return f"a step is surely {more} ({ends}): {moved}"


def prediction_clause(kept: Kept) -> str:
    """Returns a clause with what was predicted for a layout, what was measured, and whether the two agree."""
    predicted = f"{words.speedup(kept.predicted)} times as fast"
    measured = f"measured {kept.measured:.2f} times as fast ({words.number(kept.measured_ms)} ms)"
    steps = f"{words.number(kept.before_ms)} → {words.number(kept.predicted_ms)} ms"
    text = f"{kept.what}: predicted {predicted} ({steps}), {measured}"
    if kept.expected_ms is None or kept.error is None:
        return f"{text}; what of that the machine changed is not known"
    text += "; with layers as quick and steps as disturbed as in the second capture, the prediction is "
    off = f"{words.percent(abs(kept.error))} {'above' if kept.error > 0 else 'below'} the measured step"
    text += f"{words.within(kept.expected_ms)} ms, {off}"
    if kept.inside is None:
        return f"{text}, and too uncertain to be proved right or wrong"
    return f"{text}, {'inside' if kept.inside else 'outside'} its interval"


def notes(target: TargetDiff) -> Iterator[str]:
    """Yields clauses: how the captures of a target differ apart from the times, and the warnings of their reports."""
    yield from _withheld(target)
    yield from _settings(target)
    first, second = ([warning.text for warning in side.warnings] for side in (target.before, target.after))
    yield from (f"both captures: {note}" for note in first if note in second)
    for where, notes_of_side, other in (("first", first, second), ("second", second, first)):
        yield from (f"{where} capture: {note}" for note in notes_of_side if note not in other)


def warnings(diff: Diff) -> Iterator[str]:
    """Yields clauses: the targets that only one capture has, and the warnings of each report as a whole."""
    sides = (("first", diff.before), ("second", diff.after))
    for where, side in sides:
        if side.unpaired:
            names = ", ".join(words.title(*key) for key in side.unpaired)
            yield f"{names} only in the {where} capture: not compared"
    for where, side in sides:
        if side.of_several is not None:
            yield f"{where} capture: {side.of_several}"
        yield from (f"{where} capture: {warning.text}" for warning in side.warnings)


def _withheld(target: TargetDiff) -> Iterator[str]:
    first, second = target.before.withheld, target.after.withheld
    if first is not None and first == second:
        yield f"no cause of lost time is named: {first.text}"
        return
    for where, reason in (("first", first), ("second", second)):
        if reason is not None:
            yield f"no cause of lost time is named in the {where} capture: {reason.text}"


def _settings(target: TargetDiff) -> Iterator[str]:
    before, after = (
        {"schedule": side.schedule, "microbatches": side.microbatches, **asdict(side.sizes)}
        for side in (target.before, target.after)
    )
    if not target.same_model:
        old, new = (
            " + ".join(f"{count} {kind}" for kind, count in (side.layers or {}).items()) or "none"
            for side in (target.before, target.after)
        )
        yield f"layers {old} -> {new}: another model, so no time is compared with that of the other capture"
    for name in before:
        if before[name] != after[name]:
            old, new = (words.ABSENT if settings[name] is None else str(settings[name]) for settings in (before, after))
            yield f"{name} {old} -> {new}: stages and steps do not do the same work"
    if target.before.step_time_basis != target.after.step_time_basis:
        old, new = (BASES[side.step_time_basis] for side in (target.before, target.after))
        yield f"step times are not measured alike: {old}; {new}"
