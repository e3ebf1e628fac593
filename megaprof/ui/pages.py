"""Renders the pages as HTML, from Jinja2 templates with the rules of the report: all text is escaped."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from megaprof.analysis.report import compare as differences
from megaprof.analysis.report import html
from megaprof.analysis.report.diff import Diff
from megaprof.analysis.report.drawn import polylines
from megaprof.analysis.report.text import words
from megaprof.formats.phrases import ago
from megaprof.ui import what_if
from megaprof.ui.captures import Capture
from megaprof.ui.live import Now, Point
from megaprof.ui.places import Place


@functools.cache
def _environment() -> Environment:
    made = html.environment("megaprof.ui", "megaprof.analysis.report")
    made.globals |= {"ago": ago, "differences": differences, "what_if": what_if, "date": _date, "size": _size}
    return made


def render(template: str, **values: Any) -> str:
    """Returns a page, or a part of one, as HTML."""
    return _environment().get_template(template).render(**values)


def data_of(drawn: Sequence[Mapping[str, Any] | None]) -> Markup:
    """Returns drawings for the script, as JSON that cannot end the element around it."""
    return Markup(json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c"))


def links_of(place: Place) -> tuple[tuple[str, str], ...]:
    """Returns the addresses and names of the pages that a capture links to."""
    links = [("/", "All captures"), (f"/capture/{place.id}/what-if", "What if"), (f"/compare?a={place.id}", "Compare")]
    return (*links, *([(f"/live/{place.id}", "Live")] if place.job else []))


def side_by_side(diff: Diff, captures: Sequence[Capture]) -> tuple[list[list[int] | None], list[dict[str, Any]]]:
    """Returns two lists: for each target, the places of its two drawings in the second list (None without drawings),
    and the drawings of all targets. Both of a target are on an axis as long as the longer one."""
    places: list[list[int] | None] = []
    drawings: list[dict[str, Any]] = []
    for target in diff.targets:
        drawn = [capture.drawn.get((target.target, target.role)) for capture in captures]
        steps = [step for step in drawn if step is not None]
        if len(steps) < len(drawn):
            places.append(None)
            continue
        end = max(row["span"][1] for step in steps for row in step["rows"])
        places.append([len(drawings), len(drawings) + 1])
        drawings += [step | {"end": end} for step in steps]
    return places, drawings


@dataclass(frozen=True)
class Track:
    """A curve: a quantity over time."""

    name: str
    unit: str
    """The unit of its numbers; empty for a ratio."""
    lines: tuple[str, ...]
    """The points of an SVG polyline, for each stretch without a gap."""
    top: float
    bottom: float
    last: float
    seconds: float
    """Seconds from the first to the last point."""

    def shown(self, value: float) -> str:
        """Returns a value with its unit; a ratio gets two decimals."""
        if not self.unit:
            return f"{value:.2f}"
        return f"{words.number(value) if value else 0} {self.unit}"


def track(name: str, unit: str, points: Sequence[Point], field: str, bottom: float = 0.0) -> Track | None:
    """Returns the curve of a field of ``points``; None if fewer than two values are known, or none is above
    ``bottom``."""
    numbers = [value for point in points if (value := getattr(point, field)) is not None]
    if len(numbers) < 2 or max(numbers) <= bottom:
        return None
    top, begin = max(numbers), points[0].at
    span = max(points[-1].at - begin, 1e-3)
    drawn: list[tuple[float, float | None]] = []
    for before, point in zip((points[0], *points), points, strict=False):
        value = getattr(point, field)
        if point.run != before.run:
            drawn.append((0.0, None))
        drawn.append(((point.at - begin) / span, None if value is None else (value - bottom) / (top - bottom)))
    return Track(name, unit, polylines(drawn), top, bottom, numbers[-1], span)


def now_html(now: Now, place: Place) -> str:
    """Returns the part of a live page that each look at the job of ``place`` changes."""
    tracks = [
        track("step time", "ms", now.history, "step_ms"),
        track("imbalance", "", now.history, "imbalance", bottom=1.0),
    ]
    return render("now.html", now=now, place=place, tracks=[curve for curve in tracks if curve is not None])


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _size(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
