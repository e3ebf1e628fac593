"""The curves of the HTML report, as data: places in the units of their drawings, and the numbers beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.diagnosis.lengths import Lengths
from megaprof.analysis.fleet.fleet import Fleet

#: Width and height of the drawing of a curve, in its own units.
WIDTH, HEIGHT = 960, 120


@dataclass(frozen=True)
class Scatter:
    """Microbatches by the lengths of their sequences and the time they take."""

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
    shares = (None if ms is None else ms / top for ms in fleet.times.step_ms)
    lines = polylines(((step - begin) / span, share) for step, share in zip(fleet.buckets, shares, strict=True))
    onsets = {cause.since for cause in causes if cause.since is not None}
    onsets |= {shift.step for shift in fleet.shifts if shift.change > 0}
    marks = tuple((step, (step - begin) / span * WIDTH) for step in sorted(onsets))
    return Curve(lines, marks, top)


def polylines(points: Iterable[tuple[float, float | None]]) -> tuple[str, ...]:
    """Returns the points of each stretch without a gap, in the syntax of SVG. ``points``: places from left to right and
    heights, both from 0 to 1; None for a gap."""
    stretches: list[list[str]] = [[]]
    for place, height in points:
        if height is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{place * WIDTH:.1f},{(1 - height) * (HEIGHT - 10) + 5:.1f}")
    return tuple(" ".join(stretch) for stretch in stretches if stretch)
