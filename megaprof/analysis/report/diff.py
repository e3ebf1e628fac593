"""Compares two captures, stage by stage, and says in sentences what changed: by more than it usually varies, or not.

A change is *beyond the spread* when the 90 % interval of the difference of both means is above or below 0. The samples
are steps. If fewer than `FEWEST` steps were captured, the samples are microbatches, for the quantities that
are known per microbatch (forward, backward, and compute as their sum). If both are too few, the answer is None. Times
of models with different layers are shown, and no change of them is computed.

If the second capture ran a layout that the what-if of the first one predicted, the change of the step has three parts:
the change that the prediction expected from the layout, the change of the machine in between, and the rest, which is
the error of the prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from megaprof.analysis import words
from megaprof.analysis.diagnosis.diagnose import Diagnosis
from megaprof.analysis.diagnosis.stages import Stage, TargetStages
from megaprof.analysis.report.report import Document, TargetReport
from megaprof.analysis.report.text.evidence import KINDS
from megaprof.analysis.report.text.sentences import BASES
from megaprof.analysis.report.text.what_if import name_of
from megaprof.analysis.samples import Interval, Spread
from megaprof.formats.phrases import Unanswerable

QUANTITIES = ("forward_ms", "backward_ms", "compute_ms", "bubble_ms")
FEWEST = 3


@dataclass(frozen=True)
class Difference:
    """One quantity before and after; None if a capture does not have it."""

    before: float | None
    """Milliseconds per step in the first capture, mean."""
    after: float | None
    """Milliseconds per step in the second capture, mean."""
    change: float | None
    """``after`` / ``before`` - 1. None if a value is missing, or if the captures are of different models."""
    beyond_spread: bool | None
    """True if it changed by more than it usually varies; None if there are too few samples, or no ``change``."""
    low: float | None = None
    """Lower end of the 90 % interval of ``change``. None if there are too few samples, or no ``change``."""
    high: float | None = None
    """Upper end of that interval."""


@dataclass(frozen=True)
class StageDiff:
    """One stage of both captures, or of one of them."""

    pp: int
    """Pipeline rank."""
    layers_before: str | None
    """Layers in the first capture, in words (``emb+6``); None if only the second capture has the stage."""
    layers_after: str | None
    """Layers in the second capture, in words; None if only the first capture has the stage."""
    changes: dict[str, Difference]
    """Differences by quantity: `QUANTITIES`."""


@dataclass(frozen=True)
class Kept:
    """A layout that the first capture predicted, and what the second one measured."""

    what: str
    """The layout in words."""
    layout: str
    """The layout as in Megatron's ``--pipeline-model-parallel-layout``."""
    predicted_ms: float
    """Predicted step in milliseconds, on the machine as it was in the first capture."""
    expected_ms: Interval | None
    """Predicted step in milliseconds, on the machine as it was in the second capture: with layers as fast and
    disturbances as large as they were there. None if a capture does not show the cost of a layer, or if
    the disturbances of the first one leave nothing of the prediction."""
    measured_ms: float
    """Measured step of the second capture in milliseconds."""
    before_ms: float
    """Measured step of the first capture in milliseconds."""
    predicted: Interval
    """Predicted speedup."""
    measured: float
    """Measured speedup: ``before_ms`` / ``measured_ms``, whatever caused it."""
    error: float | None
    """Error of the prediction: ``expected_ms`` / ``measured_ms`` - 1. None if ``expected_ms`` is None."""
    inside: bool | None
    """True if ``measured_ms`` is in the interval of ``expected_ms``. None if ``expected_ms`` is None, if the predicted
    interval includes both slower and faster, or if half of the interval is at least as large as the predicted change of
    the step."""


@dataclass(frozen=True)
class TargetDiff:
    """One target and role that both captures have."""

    target: str
    """``train_actor``, ..."""
    role: str | None
    """``actor``, ...; None without roles."""
    verdict_before: str
    """Verdict on the first capture in a few words: what costs the most."""
    verdict_after: str
    """Verdict on the second capture."""
    same_model: bool
    """True if the models have the same layers, as far as the captures say. If not, no change of a time is computed."""
    comparable: bool
    """True if the steps of both captures do the same work, and are measured alike, as far as the captures say."""
    step_time: Difference
    """Duration of a step."""
    stages: tuple[StageDiff, ...]
    """Stages, by pipeline rank."""
    layer: Difference | None
    """Forward and backward of a microbatch in a decoder layer, in the quicker passes (their lower quartile). A layout
    does not change it; only another machine, load or setting does. None if a capture does not show it, or if the
    captures are of different models."""
    prediction: Kept | None
    """Prediction of the first capture for the layout of the second one; None if it made none."""
    causes: dict[str, Difference]
    """What the causes of each kind cost, in milliseconds of a step; 0 in a capture that names none of the kind. There,
    ``beyond_spread`` says that the intervals of both prices do not overlap. Empty unless both captures look for
    causes."""
    notes: tuple[str, ...]
    """Clauses: how the captures differ apart from the times, and the warnings of their reports."""

    def slower_by(self, bound: float) -> bool | None:
        """Returns whether a step is surely slower by more than the fraction ``bound`` (True), or surely not (False);
        None if that is not certain."""
        low, high = self.step_time.low, self.step_time.high
        if low is None or high is None or not self.comparable or low <= bound < high:
            return None
        return low > bound

    @property
    def quantities(self) -> tuple[str, ...]:
        """Returns the `QUANTITIES` that at least one stage has: a forward-only target has no backward."""
        had = {name for stage in self.stages for name, each in stage.changes.items() if each.before or each.after}
        return tuple(name for name in QUANTITIES if name in had)


@dataclass(frozen=True)
class Diff:
    """Two captures, compared target by target."""

    targets: tuple[TargetDiff, ...]
    """Targets that both captures have."""
    warnings: tuple[str, ...]
    """Clauses: the targets that only one capture has, other runs in a directory, and warnings about single files."""


def compare(before: Document, after: Document) -> Diff:
    """Compares two reports. Raises Unanswerable if they have no target in common."""
    # Of a target with several sizes, the first ones count.
    old, new = ({target.key: target for target in reversed(report.targets)} for report in (before, after))
    common = [key for key in reversed(old) if key in new]
    if not common:
        first, second = (", ".join(sorted(words.title(*key) for key in keys)) or "nothing" for keys in (old, new))
        raise Unanswerable(f"no target is in both: {first} in the first, {second} in the second")
    warnings = []
    for where, report, keys, others in (("first", before, old, new), ("second", after, new, old)):
        if unpaired := [words.title(*key) for key in reversed(keys) if key not in others]:
            warnings.append(f"{', '.join(unpaired)} only in the {where} capture: not compared")
        of_capture = [*filter(None, [report.of_several]), *(warning.text for warning in report.warnings)]
        warnings += (f"{where} capture: {warning}" for warning in of_capture)
    return Diff(tuple(_target(old[key], new[key]) for key in common), tuple(warnings))


def _target(before: TargetReport, after: TargetReport) -> TargetDiff:
    old = {stage.pp: stage for stage in before.stages}
    new = {stage.pp: stage for stage in after.stages}
    counts, layers = (before.microbatches, after.microbatches), (_layers_by_kind(before), _layers_by_kind(after))
    alike = counts[0] is not None and counts[0] == counts[1]
    one_model = None in layers or layers[0] == layers[1]
    same_work = one_model and (None in counts or alike) and before.sizes.dp == after.sizes.dp
    layer = _layer(before, after) if one_model else None
    predicted = one_model and alike and replace(before.sizes, vpp=1) == replace(after.sizes, vpp=1)
    causes = {}
    if one_model and before.diagnosis is not None and after.diagnosis is not None:
        for kind in dict.fromkeys(cause.kind for cause in (*before.causes, *after.causes)):
            cost, now = (_total(each.price for each in side.causes if each.kind == kind) for side in (before, after))
            change = now.value / cost.value - 1.0 if cost.value else None
            causes[kind] = Difference(cost.value, now.value, change, not now.meets(cost))
    return TargetDiff(
        target=before.target,
        role=before.role,
        verdict_before=before.in_brief(surely_in=after.diagnosis).text,
        verdict_after=after.in_brief(surely_in=before.diagnosis).text,
        same_model=one_model,
        comparable=same_work and before.step_time_basis == after.step_time_basis,
        step_time=_difference(before.step_time_ms, after.step_time_ms, one_model),
        stages=tuple(_stage(pp, old.get(pp), new.get(pp), one_model, alike) for pp in sorted(old.keys() | new.keys())),
        layer=layer,
        prediction=_kept(before, after, layer) if predicted else None,
        causes=causes,
        notes=tuple(_notes(before, after, layers)),
    )


def _layers_by_kind(measured: TargetStages) -> dict[str, int] | None:
    """Returns how many layers of each kind a model has; None if not all stages say."""
    chunks = [chunk.holds for stage in measured.stages for chunk in stage.chunks]
    if len(measured.stages) < measured.sizes.pp or not chunks:
        return None
    kinds: Counter[str] = Counter()
    for holds in chunks:
        if holds is None or holds.kinds is None:
            return None
        kinds.update(holds.kinds)
    return dict(sorted(kinds.items()))


def _layer(before: TargetReport, after: TargetReport) -> Difference | None:
    """Returns the milliseconds of a layer, averaged over all kinds of layers; None if no costs were fitted."""
    took_ms = []
    for fitted in (before.what_if.costs, after.what_if.costs):
        if fitted is None or not fitted.kinds:
            return None
        costs = [fitted.by_kind[kind] for kind in fitted.kinds if kind in fitted.by_kind]
        took_ms.append(sum(cost.forward_ms + cost.backward_ms for cost in costs) / len(fitted.kinds))
    old, new = took_ms
    return None if not old or not new else Difference(old, new, new / old - 1.0, None)


def _kept(before: TargetReport, after: TargetReport, layer: Difference | None) -> Kept | None:
    """Returns what the first capture predicted for the layout of the second one, and how that compares with the
    measurement; None if there is no such prediction."""
    layout, old, new = after.what_if.layout, before.diagnosis, after.diagnosis
    prediction = next((each for each in before.what_if.candidates if each.layout == layout), None)
    if layout in (None, before.what_if.layout) or prediction is None or old is None or new is None:
        return None
    if not old.step_ms or not new.step_ms:  # a report that was read from JSON may have none
        return None
    expected = _expected(prediction.step_ms, old, new, layer)
    error, inside = None, None
    if expected is not None:
        error = expected.value / new.step_ms - 1.0
        told = (expected.high - expected.low) / 2 < abs(old.step_ms - prediction.step_ms.value)
        inside = expected.holds(new.step_ms) if told and not prediction.speedup.holds(1.0) else None
    return Kept(
        what=name_of(prediction, before.what_if),
        layout=layout,
        predicted_ms=prediction.step_ms.value,
        expected_ms=expected,
        measured_ms=new.step_ms,
        before_ms=old.step_ms,
        predicted=prediction.speedup,
        measured=old.step_ms / new.step_ms,
        error=error,
        inside=inside,
    )


def _expected(step_ms: Interval, old: Diagnosis, new: Diagnosis, layer: Difference | None) -> Interval | None:
    """Returns what a predicted step amounts to on another machine, in milliseconds.

    A prediction leaves the disturbances of the step as they were, so they are replaced by those of the new machine. The
    rest of the step is scaled by the factor by which a layer became slower in the quicker passes. A rank or link that
    is slow in both captures is a part of the prediction; it costs another layout more or less, so only what it became
    slower counts. None if the factor of a layer is not known, or if the disturbances leave nothing of the predicted
    step: they cost less in another layout then.
    """
    then, now = _slow(old), _slow(new)
    kept = then.keys() & now.keys()
    first, second = (
        _total(
            each.price
            for each in side.causes
            if KINDS[each.kind].about == "machine" and (each.kind, each.ranks, each.link) not in kept
        )
        + Interval.of(side.rest_ms)
        for side in (old, new)
    )
    for place in kept:
        second += now[place][0] * (1.0 - then[place][1] / now[place][1])
    if layer is None or not layer.before or not layer.after or first.value >= step_ms.value:
        return None
    return ((step_ms + first * -1.0) * (layer.after / layer.before) + second).clipped(0.0)


def _slow(side: Diagnosis) -> dict[tuple[object, ...], tuple[Interval, float]]:
    """Returns what slow ranks and links cost, and how much slower than others they are, which no layout changes."""
    found: dict[tuple[object, ...], tuple[Interval, float]] = {}
    for each in (*side.causes, *side.perhaps):
        ms = each.parts.get("transfer_ms", 0.0) - each.parts.get("usual_ms", 0.0)
        slower = each.parts.get("factor", 1.0 + ms) - 1.0
        if each.kind in ("slow_rank", "slow_link") and slower > 0.0:
            found[each.kind, each.ranks, each.link] = (each.price, slower)
    return found


def _stage(pp: int, before: Stage | None, after: Stage | None, one_model: bool, alike: bool) -> StageDiff:
    """Compares one stage. ``alike``: both captures have equally many microbatches per step, so a change of the
    microbatches is a change of the step."""
    return StageDiff(
        pp=pp,
        layers_before=None if before is None else words.layers(chunk.holds for chunk in before.chunks),
        layers_after=None if after is None else words.layers(chunk.holds for chunk in after.chunks),
        changes={
            quantity: _difference(
                getattr(before, quantity, None),
                getattr(after, quantity, None),
                one_model,
                _microbatches(before, quantity) if alike else [],
                _microbatches(after, quantity) if alike else [],
            )
            for quantity in QUANTITIES
        },
    )


def _difference(
    before: Spread | None,
    after: Spread | None,
    one_model: bool,
    old: Sequence[Spread] = (),
    new: Sequence[Spread] = (),
) -> Difference:
    """Compares one quantity. ``old`` and ``new``: the samples of microbatches, used if there are too few steps."""
    if before is None or after is None or not one_model:
        return Difference(before.mean if before else None, after.mean if after else None, None, None)
    fraction = after.mean / before.mean - 1 if before.mean else None
    for samples in ([before], [after]), (old, new):
        if all(spreads and min(spread.count for spread in spreads) >= FEWEST for spreads in samples):
            earlier, later = (_total(Interval.of(each.mean, each.error) for each in spreads) for spreads in samples)
            more = later + earlier * -1.0
            low, high = (None, None) if fraction is None else (more.low / before.mean, more.high / before.mean)
            return Difference(before.mean, after.mean, fraction, not more.holds(0.0), low, high)
    return Difference(before.mean, after.mean, fraction, None)


def _total(values: Iterable[Interval]) -> Interval:
    return sum(values, Interval.of(0.0))


def _microbatches(stage: Stage | None, quantity: str) -> list[Spread]:
    if stage is None:
        return []
    forward, backward = stage.forward_per_microbatch_ms, stage.backward_per_microbatch_ms
    spreads = {"forward_ms": [forward], "backward_ms": [backward], "compute_ms": [forward, backward]}.get(quantity, [])
    return [spread for spread in spreads if spread is not None]


def machine_clause(target: TargetDiff) -> str:
    """Returns a clause that says whether the machine is the same, from the time of a layer in the quicker passes."""
    if (layer := target.layer) is None:
        why = "at least one capture does not show how long a layer takes in the quicker passes"
        why = why if target.same_model else "the captures are of different models"
        return f"whether the machine changed is not known: {why}"
    took = f"{words.number(layer.before)} → {words.number(layer.after)} ms"
    return (
        f"in the quicker passes, a layer takes {took} per microbatch ({words.percent(layer.change, sign=True)}); the "
        "machine, its load or a setting can change that, but not the layout"
    )


def bound_clause(target: TargetDiff, bound: float) -> str:
    """Returns a clause that says whether a step is slower by more than ``bound``, how sure that is, and what moved."""
    step, more = target.step_time, f"more than {words.percent(bound)} slower"
    if not target.comparable:
        return f"whether a step is {more} is not known: the steps do not do the same work or are not measured alike"
    if step.low is None or step.high is None:
        return f"whether a step is {more} is not certain: it takes three steps in each capture"
    ends = f"{words.percent(step.change, sign=True)}, between {words.percent(step.low, sign=True)} and "
    ends += words.percent(step.high, sign=True)
    slower = target.slower_by(bound)
    if slower is None:
        return f"whether a step is {more} is not certain ({ends})"
    if not slower:
        return f"a step is not {more} ({ends})"
    # If every layer takes longer, so does everything that costs time.
    machine = 1.0 if target.layer is None else 1.0 + (target.layer.change or 0.0)
    grown = {
        kind: (cause.after or 0.0) - (cause.before or 0.0) * machine
        for kind, cause in target.causes.items()
        if cause.beyond_spread
    }
    kind = max(grown, key=lambda kind: grown[kind], default=None)
    if kind is None or grown[kind] <= 0.0:
        return f"a step is surely {more} ({ends}): no cause explains it; {machine_clause(target)}"
    cause, mostly = target.causes[kind], 2.0 * grown[kind] > (step.after or 0.0) - (step.before or 0.0)
    moved = f"the price of {kind} went from {words.number(cause.before)} to {words.number(cause.after)} ms"
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


def _notes(before: TargetReport, after: TargetReport, layers: Sequence[dict[str, int] | None]) -> Iterator[str]:
    """Yields `TargetDiff.notes`. ``layers``: the number of layers of each kind in both models, if that is known."""
    if None not in layers and layers[0] != layers[1]:
        old, new = (" + ".join(f"{count} {kind}" for kind, count in (of or {}).items()) or "none" for of in layers)
        yield f"layers {old} -> {new}: another model, so no time is compared with that of the other capture"
    first, second = (
        {"schedule": side.schedule, "microbatches": side.microbatches, **asdict(side.sizes)} for side in (before, after)
    )
    for name in first:
        if first[name] != second[name]:
            old, new = (words.ABSENT if settings[name] is None else str(settings[name]) for settings in (first, second))
            yield f"{name} {old} -> {new}" + ": steps do not do the same work" * (name in ("microbatches", "dp"))
    if before.step_time_basis != after.step_time_basis:
        old, new = (BASES[side.step_time_basis] for side in (before, after))
        yield f"step times are not measured alike: {old}; {new}"
    notes, others = (
        [f"no cause of lost time is named: {note.text}" for note in filter(None, [side.withheld])]
        + [warning.text for warning in (*side.warnings, *side.what_if.warnings)]
        for side in (before, after)
    )
    yield from (f"both captures: {note}" for note in notes if note in others)
    yield from (f"first capture: {note}" for note in notes if note not in others)
    yield from (f"second capture: {note}" for note in others if note not in notes)
