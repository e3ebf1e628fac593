"""The charts of the HTML report, as data: lengths in percent of the chart's width, and the numbers beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.diagnosis.lengths import Lengths
from megaprof.analysis.diagnosis.stages import Stage, TargetStages
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.report.text.what_if import name_of, worth_showing
from megaprof.analysis.report.text.words import number, percent
from megaprof.analysis.samples import Spread, mean_of
from megaprof.analysis.trace.calls import GROUPS
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.what_if import WhatIf

#: Width and height of the drawing of a curve, in its own units.
WIDTH, HEIGHT = 960, 120


@dataclass(frozen=True)
class Piece:
    """A part of a bar."""

    kind: str
    """Kind of time that the piece shows; also its class in the style sheet."""
    width: float
    """Percent of the longest bar."""
    hint: str
    """Text that appears when a pointer is on the piece."""


@dataclass(frozen=True)
class Bar:
    """The bar of one stage or of a slow rank: where the time of a step goes."""

    stage: Stage
    """Stage or slow rank that the bar shows, as a row of the tables."""
    pieces: tuple[Piece, ...]
    """Pieces from left to right."""
    numbers: tuple[float | None, ...]
    """Milliseconds for the columns of `Bars`."""
    most: bool
    """True if the verdict is about this row."""


@dataclass(frozen=True)
class Bars:
    """The bars of all stages and of slow ranks."""

    columns: tuple[str, ...]
    """Headings of the numbers beside a bar."""
    kinds: tuple[tuple[str, str], ...]
    """Kinds of pieces, each with its name."""
    rows: tuple[Bar, ...]
    """Bars by pipeline rank."""
    longest: float
    """Milliseconds of a bar of 100%."""


@dataclass(frozen=True)
class Scatter:
    """A scatter plot of microbatches: the lengths of their sequences, and the time they take."""

    dots: tuple[tuple[float, float, float], ...]
    """One entry per microbatch: distance from the left, distance from the top as measured, and distance from the top as
    the lengths predict."""
    widest: float
    """Sum of squared lengths at the right end."""
    longest: float
    """Longest time in milliseconds; it is drawn near the top."""


def scatter(lengths: Lengths) -> Scatter:
    """Returns the scatter plot of ``lengths``, in the units of `WIDTH` and `HEIGHT`."""
    widest = max(squares for squares, _, _ in lengths.drawn)
    longest = max(max(measured, by_work) for _, measured, by_work in lengths.drawn)

    def top(ms: float) -> float:
        return HEIGHT * (1.0 - 0.95 * ms / longest)

    dots = tuple((0.98 * WIDTH * squares / widest, top(ms), top(by_work)) for squares, ms, by_work in lengths.drawn)
    return Scatter(dots, widest, longest)


def bars(target: TargetReport) -> Bars | None:
    """Returns the bars of a target; None if no stage computed anything."""
    measured, stages = target.measured, target.shown
    parts = [_parts(stage) for stage in stages]
    longest = max([sum(row.values()) for row in parts] + [mean_of(measured.step_time_ms) or 0.0], default=0.0)
    if not longest or not any(stage.compute_ms for stage in stages):
        return None
    beside = [kind for kind in _BESIDE if any(row[kind] for row in parts)]
    passes = measured.passes
    rows = [
        Bar(
            stage,
            tuple(Piece(kind, 100 * ms / longest, _hint(stage, kind, ms)) for kind, ms in row.items() if ms),
            (
                *(mean_of(getattr(stage, f"{name}_ms")) for name in (*passes, "compute")),
                *(mean_of(_spreads(stage)[kind]) for kind in beside),
            ),
            target.marked(stage),
        )
        for stage, row in zip(stages, parts, strict=True)
    ]
    named = [(kind, _BESIDE[kind]) for kind in beside]
    columns = (*passes, "compute", *(name for _, name in named), "bubble")
    return Bars(columns, (("compute", "compute"), *named, ("bubble", "bubble")), tuple(rows), longest)


#: What a stage does besides computing and waiting for other stages, with names.
_BESIDE = {**{group: f"exposed {group}" for group in GROUPS}, "gradients": "gradients", "host": "waiting for the host"}


def _spreads(stage: Stage) -> dict[str, Spread | None]:
    """Returns the parts of a step on a stage. They add up to the step."""
    beside = {**stage.exposed_ms, "gradients": stage.gradients_ms, "host": stage.host_bound_ms}
    return {"compute": stage.compute_ms, **{kind: beside[kind] for kind in _BESIDE}, "bubble": stage.bubble_ms}


def _parts(stage: Stage) -> dict[str, float]:
    return {kind: mean_of(spread) or 0.0 for kind, spread in _spreads(stage).items()}


def _hint(stage: Stage, kind: str, ms: float) -> str:
    split = stage.bubble_split if kind == "bubble" else {}
    parts = ", ".join(f"{part} {number(spread.mean)}" for part, spread in split.items() if spread and spread.mean)
    return f"{kind} {number(ms)} ms" + (f" ({parts})" if parts else "")


@dataclass(frozen=True)
class Whisker:
    """The spread of the microbatches of one kind of pass."""

    kind: str
    """``forward`` or ``backward``."""
    spread: Spread
    """Times of one microbatch in milliseconds."""
    low: float
    """Time of the quickest microbatch, in percent of the longest one of all stages."""
    middle: float
    """Median, in the same percent."""
    reach: float
    """Distance from the quickest to the slowest microbatch, in the same percent."""


@dataclass(frozen=True)
class Whiskers:
    """The whiskers of all stages, a row for each."""

    longest: float
    """Milliseconds at the end of the axis."""
    rows: tuple[tuple[Stage, tuple[Whisker | None, ...]], ...]
    """One entry per stage: the stage, and a whisker for every kind of pass; None if it was not timed."""


def whiskers(measured: TargetStages) -> Whiskers | None:
    """Returns the whiskers of a target; None if no microbatch was timed."""
    kinds = measured.passes
    spreads = [[getattr(stage, f"{kind}_per_microbatch_ms") for kind in kinds] for stage in measured.shown]
    longest = max((spread.max for row in spreads for spread in row if spread), default=0.0)
    if not longest:
        return None
    rows = zip(measured.shown, spreads, strict=True)
    return Whiskers(longest, tuple((stage, tuple(map(_whisker, kinds, row, [longest] * 2))) for stage, row in rows))


def _whisker(kind: str, spread: Spread | None, longest: float) -> Whisker | None:
    if spread is None:
        return None
    low, middle, high = (100 * ms / longest for ms in (spread.min, spread.median, spread.max))
    return Whisker(kind, spread, low, middle, high - low)


@dataclass(frozen=True)
class StepBar:
    """One row of what-if: a step as it is, or as it would be."""

    kind: str
    """``before``, ``after``, or ``best`` for what is recommended."""
    what: str
    """The step in words."""
    ms: float
    """Milliseconds of the step."""
    width: float
    """Length of the row in percent of the longest one."""
    prediction: Prediction | None
    """The prediction; None for a step as it is."""


def changes(predictions: WhatIf) -> list[StepBar]:
    """Returns the measured step, its replay, and the predictions worth showing; empty without a replay."""
    if predictions.measured_ms is None or predictions.replay_ms is None or predictions.replay_error is None:
        return []
    off = f"off by {percent(predictions.replay_ms / predictions.measured_ms - 1.0, sign=True)}"
    rows: list[tuple[str, str, float, Prediction | None]] = [
        ("before", "as captured", predictions.measured_ms, None),
        ("before", f"replayed, {off}", predictions.replay_ms, None),
    ]
    for change in worth_showing(predictions):
        kind = "best" if change == predictions.best else "after"
        rows.append((kind, name_of(change, predictions), change.step_ms, change))
    longest = max(ms for _, _, ms, _ in rows)
    return [StepBar(kind, what, ms, 100 * ms / longest, prediction) for kind, what, ms, prediction in rows]


@dataclass(frozen=True)
class Curve:
    """A curve of the step time over the run."""

    lines: tuple[str, ...]
    """Points of each stretch without a gap, in the syntax of SVG."""
    marks: tuple[tuple[int, float], ...]
    """Steps from which on something is slow, each with its distance from the left."""
    top: float
    """Milliseconds at the upper end of the axis."""


def curve(fleet: Fleet, causes: Iterable[Cause]) -> Curve | None:
    """Returns the step time over the run, with a mark where something became slow; None if fewer than two points are
    known."""
    times = [ms for ms in fleet.times.step_ms if ms is not None]
    if len(times) < 2 or max(times) <= 0:
        return None
    top, begin = max(times), fleet.buckets[0]
    span = max(fleet.buckets[-1] - begin, 1)
    stretches: list[list[str]] = [[]]
    for step, ms in zip(fleet.buckets, fleet.times.step_ms, strict=True):
        if ms is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{(step - begin) / span * WIDTH:.1f},{(1 - ms / top) * (HEIGHT - 10) + 5:.1f}")
    onsets = {cause.since for cause in causes if cause.since is not None}
    onsets |= {shift.step for shift in fleet.shifts if shift.change > 0}
    marks = tuple((step, (step - begin) / span * WIDTH) for step in sorted(onsets))
    return Curve(tuple(" ".join(points) for points in stretches if points), marks, top)
