"""Two captures side by side, stage by stage: what changed, and whether by more than it varies anyway.

A change is *beyond the spread* when the means differ by more than `NOISE` standard errors of their difference (Welch).
The samples are steps; where fewer than `FEWEST` were captured, they are microbatches, for what is known of each
(forward, backward, and compute as their sum). Where neither is enough, that stays open: None.

Where the second capture ran a layout that the first one's what-if predicted, the change of the step is divided: what
the layout was to change, what the machine did meanwhile, and what is left, which is the error of the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from megaprof.analysis.diagnosis.diagnose import Diagnosis
from megaprof.analysis.report.document import Document, TargetReport
from megaprof.analysis.report.text import words
from megaprof.analysis.report.text.sentences import basis
from megaprof.analysis.report.text.what_if import name_of
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.stages.stages import Stage, TargetStages
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import format_layout
from megaprof.analysis.what_if.what_if import layout_of

NOISE = 2.0
FEWEST = 3
#: Causes that another machine, or its load, would not have. No layout mends them.
_OF_MACHINE = frozenset(
    (
        "processor_wait",
        "garbage_collection",
        "stalls",
        "slow_rank",
        "slow_link",
        "late_entry",
        "data_wait",
        "host_bound",
    )
)
QUANTITIES = ("forward_ms", "backward_ms", "compute_ms", "bubble_ms")


class NothingToCompare(Exception):
    """The two captures have no target in common; the message says which they have."""


@dataclass(frozen=True)
class Change:
    """One quantity before and after; None where a capture does not have it."""

    before: float | None
    """Milliseconds per step, the mean."""
    after: float | None
    """The same in the second capture."""
    change: float | None
    """``after`` over ``before``, minus 1."""
    beyond_spread: bool | None
    """Whether it changed by more than it varies anyway; None where too few samples tell."""


@dataclass(frozen=True)
class StageDiff:
    """One stage of both captures, or of one of them."""

    pp: int
    """Its pipeline rank."""
    layers_before: str | None
    """Its layers in words (``emb+6``); None for a stage that is only in the second capture."""
    layers_after: str | None
    """The same in the second capture."""
    changes: dict[str, Change]
    """By quantity: `QUANTITIES`."""


@dataclass(frozen=True)
class Kept:
    """A layout that was predicted from the first capture, and what the second one measured."""

    what: str
    """The layout in words."""
    layout: str
    """As Megatron's ``--pipeline-model-parallel-layout`` writes it."""
    predicted_ms: float
    """Milliseconds of the step that was predicted, on the machine as the first capture found it."""
    expected_ms: float | None
    """The same on the machine as the second capture found it: with layers as quick, and as much lost to disturbances,
    as there. None where a capture does not tell what an undisturbed layer takes."""
    uncertain_ms: float | None
    """By how much that may be off: half of its 90 % interval."""
    measured_ms: float
    """Milliseconds of the step that it took, without what closing other windows added to it, as predictions are."""
    before_ms: float
    """The same of the first capture."""
    predicted: float
    """The predicted speedup."""
    low: float
    """The lower end of its 90 % interval."""
    high: float
    """The upper end."""
    measured: float
    """The step before over the step after, whatever changed it."""
    error: float | None
    """``expected_ms`` over ``measured_ms``, minus 1."""
    inside: bool | None
    """Whether ``measured_ms`` is within ``uncertain_ms`` of ``expected_ms``; None where nothing was predicted, because
    the interval spans quicker and slower, and where what the machine changed is less certain than what was predicted.
    """

    @property
    def told(self) -> str:
        """All of it, a clause."""
        predicted = f"{words.speedup(self.predicted, (self.low, self.high))} times as fast"
        measured = f"measured {self.measured:.2f} times as fast"
        if self.low <= 1.0 <= self.high:
            return f"{self.what}: could not be predicted ({predicted}: quicker or slower), {measured}"
        steps = f"{words.number(self.before_ms)} → {words.number(self.predicted_ms)} ms"
        text = f"{self.what}: predicted {predicted} ({steps}), {measured} ({words.number(self.measured_ms)} ms)"
        if self.expected_ms is None or self.uncertain_ms is None or self.error is None:
            return f"{text}; what of that the machine changed is not known"
        ends = self.expected_ms - self.uncertain_ms, self.expected_ms + self.uncertain_ms
        text += "; with layers as quick and steps as disturbed as in the second capture, the prediction is "
        text += f"{words.within(self.expected_ms, ends)} ms"
        if self.inside is None:
            return f"{text}: too uncertain to judge it by"
        off = f"{words.percent(self.error, sign=True)} off"
        return f"{text}: {off}, {'inside' if self.inside else 'outside'} its interval"


@dataclass(frozen=True)
class TargetDiff:
    """One target and role that both captures have."""

    target: str
    """``train_actor``, ..."""
    role: str | None
    """``actor``, ...; None without roles."""
    step_time: Change
    """The time of a step."""
    stages: tuple[StageDiff, ...]
    """By pipeline rank."""
    verdict_before: str
    """What costs most in the first capture, in a few words."""
    verdict_after: str
    """The same in the second capture."""
    layer: Change | None
    """What a microbatch takes in a decoder layer that nothing disturbs, forward and backward, whatever the layout: only
    another machine, load or setting changes it. None where a capture does not tell."""
    prediction: Kept | None
    """What the first capture predicted of the second one's layout; None where it did not."""
    notes: tuple[str, ...]
    """What makes the captures differ besides the times, in sentences."""

    @property
    def told(self) -> tuple[str, ...]:
        """What costs most before and after, and whether the machine is the same, clauses."""
        causes = f"causes: {self.verdict_before} → {self.verdict_after}"
        if self.layer is None:
            return causes, "what an undisturbed layer takes is not known of both captures, nor what the machine changed"
        layer = f"{words.number(self.layer.before)} → {words.number(self.layer.after)} ms"
        return (
            causes,
            f"undisturbed, a layer takes {layer} per microbatch ({words.percent(self.layer.change, sign=True)}): no "
            "layout changes that, but another machine, load or setting does",
        )

    @property
    def quantities(self) -> tuple[str, ...]:
        """Those of `QUANTITIES` that a stage has: a forward-only target has no backward."""
        had = {name for stage in self.stages for name, each in stage.changes.items() if each.before or each.after}
        return tuple(name for name in QUANTITIES if name in had)


@dataclass(frozen=True)
class Diff:
    """Two captures, target by target."""

    targets: tuple[TargetDiff, ...]
    """Those that both captures have."""
    warnings: tuple[str, ...]
    """The targets that only one of them has, and what each capture's report warns of, in sentences."""


def compare(before: Document, after: Document) -> Diff:
    """Compare two reports. Raises NothingToCompare."""
    old, new = _by_key(before), _by_key(after)
    common = [key for key in old if key in new]
    if not common:
        raise NothingToCompare(f"no target is in both: {_names(old)} in the first, {_names(new)} in the second")
    sides = (("first", before), ("second", after))
    warnings = [
        f"{_names(only)} only in the {where} capture: not compared"
        for where, only in (("first", old.keys() - new.keys()), ("second", new.keys() - old.keys()))
        if only
    ]
    said = [
        (where, [*filter(None, [report.of_several]), *(each.text for each in report.warnings)])
        for where, report in sides
    ]
    warnings += [f"{where} capture: {each}" for where, lines in said for each in lines]
    return Diff(tuple(_target(old[key], new[key]) for key in common), tuple(warnings))


_Key = tuple[str, str | None]


def _by_key(report: Document) -> dict[_Key, TargetReport]:
    found: dict[_Key, TargetReport] = {}
    for target in report.targets:
        found.setdefault(target.key, target)  # of several sizes the first
    return found


def _names(keys: Iterable[_Key]) -> str:
    return ", ".join(sorted(words.title(*key) for key in keys)) or "nothing"


def _target(before: TargetReport, after: TargetReport) -> TargetDiff:
    first, second = before.measured, after.measured
    old = {stage.pp: stage for stage in first.stages}
    new = {stage.pp: stage for stage in second.stages}
    alike = first.microbatches is not None and first.microbatches == second.microbatches
    layer = _layer(before, after)
    return TargetDiff(
        target=first.target,
        role=first.role,
        step_time=_change(first.step_time_ms, second.step_time_ms, [], []),
        stages=tuple(_stage(pp, old.get(pp), new.get(pp), alike) for pp in sorted(old.keys() | new.keys())),
        verdict_before=before.in_brief().text,
        verdict_after=after.in_brief().text,
        layer=layer,
        prediction=_kept(before, after, layer) if alike and first.sizes.pp == second.sizes.pp else None,
        notes=(*_withheld(before, after), *_notes(first, second), *_said(before, after)),
    )


def _layer(before: TargetReport, after: TargetReport) -> Change | None:
    old, new = (_of_a_layer(each) for each in (before, after))
    return None if not old or not new else Change(old, new, new / old - 1.0, None)


def _of_a_layer(target: TargetReport) -> float | None:
    """Milliseconds, of all kinds of layers on average; None where nothing was fitted."""
    fitted = target.what_if.costs
    if fitted is None or not fitted.kinds:
        return None
    each = [fitted.by_kind[kind] for kind in fitted.kinds if kind in fitted.by_kind]
    return sum(cost.forward_ms + cost.backward_ms for cost in each) / len(fitted.kinds)


def _kept(before: TargetReport, after: TargetReport, layer: Change | None) -> Kept | None:
    """Both steps are without what closing other windows added to them, as predictions are."""
    pieces, old, new = layout_of(after.measured), before.diagnosis, after.diagnosis
    if pieces is None or pieces == layout_of(before.measured) or old is None or new is None:
        return None
    if not old.step_ms or not new.step_ms:  # a report of which only the JSON is left may have none
        return None
    layout = format_layout(pieces)
    for each in before.what_if.candidates:
        if each.layout == layout:
            expected, uncertain = _expected(each, old, new, layer)
            judged = each.tells and uncertain is not None and uncertain < abs(old.step_ms - each.step_ms)
            return Kept(
                what=name_of(each, before.what_if),
                layout=layout,
                predicted_ms=each.step_ms,
                expected_ms=expected,
                uncertain_ms=uncertain,
                measured_ms=new.step_ms,
                before_ms=old.step_ms,
                predicted=each.speedup,
                low=each.low,
                high=each.high,
                measured=old.step_ms / new.step_ms,
                error=None if expected is None else expected / new.step_ms - 1.0,
                inside=abs(expected - new.step_ms) <= uncertain if judged and expected and uncertain else None,
            )
    return None


def _expected(
    each: Prediction, old: Diagnosis, new: Diagnosis, layer: Change | None
) -> tuple[float | None, float | None]:
    """What a prediction comes to on another machine, in milliseconds, and by how much that may be off. A prediction
    keeps what disturbs the step as it was; the rest of it takes as many times as long as a layer does."""
    if layer is None or not layer.before or not layer.after:
        return None, None
    slower = layer.after / layer.before
    (first, of_first), (second, of_second) = _disturbed(old), _disturbed(new)
    reach = (each.step_ms * (each.speedup / end - 1.0) for end in (each.low, each.high) if end > 0.0)
    of_layout = max(map(abs, reach), default=math.inf)
    expected = (each.step_ms - first) * slower + second
    return expected, math.hypot(of_layout * slower, of_first * slower, of_second)


def _disturbed(found: Diagnosis) -> tuple[float, float]:
    """Milliseconds of a step that go to what comes from the machine, and half of their interval."""
    prices = [cause.price for cause in found.causes if cause.kind in _OF_MACHINE]
    return sum(each.ms for each in prices) + found.rest_ms, math.hypot(*((p.high - p.low) / 2 for p in prices))


def _withheld(before: TargetReport, after: TargetReport) -> Iterator[str]:
    """Why there is no diagnosis, where that is so."""
    first, second = before.withheld, after.withheld
    if first is not None and first == second:
        yield f"no cause of lost time is named: {first.text}"
        return
    for where, reason in (("first", first), ("second", second)):
        if reason is not None:
            yield f"no cause of lost time is named in the {where} capture: {reason.text}"


def _said(before: TargetReport, after: TargetReport) -> Iterator[str]:
    """Of which steps the causes and predictions are, and what each report warns of."""
    first, second = (
        [*filter(None, [each.basis]), *(note.text for note in (*each.measured.warnings, *each.what_if.warnings))]
        for each in (before, after)
    )
    yield from (f"both captures: {each}" for each in first if each in second)
    for where, own, other in (("first", first, second), ("second", second, first)):
        yield from (f"{where} capture: {each}" for each in own if each not in other)


def _notes(before: TargetStages, after: TargetStages) -> list[str]:
    old_sizes, new_sizes = asdict(before.sizes), asdict(after.sizes)
    notes = []
    for name, old, new in (
        ("schedule", before.schedule, after.schedule),
        ("microbatches", before.microbatches, after.microbatches),
        *((axis, old_sizes.get(axis), new_sizes.get(axis)) for axis in {**old_sizes, **new_sizes}),
    ):
        if old != new:
            shown = [words.ABSENT if value is None else value for value in (old, new)]
            notes.append(f"{name} {shown[0]} -> {shown[1]}: stages and steps do not do the same work")
    if before.step_time_basis != after.step_time_basis:
        told = "; ".join(map(basis, (before, after)))
        notes.append(f"step times are not measured alike: {told}")
    return notes


def _stage(pp: int, before: Stage | None, after: Stage | None, alike: bool) -> StageDiff:
    """``alike``: steps of equally many microbatches, so that a change of these is one of the step."""
    return StageDiff(
        pp=pp,
        layers_before=_layers(before),
        layers_after=_layers(after),
        changes={
            quantity: _change(
                getattr(before, quantity, None),
                getattr(after, quantity, None),
                _microbatches(before, quantity) if alike else [],
                _microbatches(after, quantity) if alike else [],
            )
            for quantity in QUANTITIES
        },
    )


def _layers(stage: Stage | None) -> str | None:
    return None if stage is None else words.layers(chunk.holds for chunk in stage.chunks)


def _change(before: Spread | None, after: Spread | None, old: list[Spread], new: list[Spread]) -> Change:
    """``old`` and ``new`` are the samples of microbatches, to fall back on."""
    if before is None or after is None:
        return Change(before.mean if before else None, after.mean if after else None, None, None)
    fraction = after.mean / before.mean - 1 if before.mean else None
    beyond = _beyond([before], [after])
    if beyond is None and old and new:
        beyond = _beyond(old, new)
    return Change(before.mean, after.mean, fraction, beyond)


def _beyond(before: list[Spread], after: list[Spread]) -> bool | None:
    """Whether two sums of independent means differ; None with too few samples of one of them."""
    if any(spread.count < FEWEST for spread in (*before, *after)):
        return None
    difference = sum(s.mean for s in after) - sum(s.mean for s in before)
    # `stdev` is that of the samples themselves, so n - 1 gives the unbiased error of their mean.
    error = math.sqrt(sum(s.stdev**2 / (s.count - 1) for s in (*before, *after)))
    return abs(difference) > NOISE * error


def _microbatches(stage: Stage | None, quantity: str) -> list[Spread]:
    if stage is None:
        return []
    forward, backward = stage.forward_per_microbatch_ms, stage.backward_per_microbatch_ms
    spreads = {"forward_ms": [forward], "backward_ms": [backward], "compute_ms": [forward, backward]}.get(quantity, [])
    return [spread for spread in spreads if spread is not None]
