"""Which ranks are captured: `--profile-select`. Each rank decides from its own coordinates, without communication.

    0                     that rank (the default)
    0,8,16-23             these ranks
    all                   every rank
    per-stage             the lowest rank of each pipeline stage
    pp=*,tp=0,dp=0        every rank with these coordinates; unnamed axes are free
    pp=0|2-4,ep=*         several positions of one axis

Selections are kept as spans of numbers, not as lists of ranks, so a rank decides at once, whatever the size of the
world.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megaprof.parallel.topology import AXES, Coords, ParallelSizes, WorldLayout

OPTION = "--profile-select"

Spans = tuple[tuple[int, int], ...]
"""Numbers as inclusive ranges (first, last), sorted, with gaps between them."""

_FORMS = "all, per-stage, ranks such as 0,8,16-23, or coordinates such as pp=*,tp=0,dp=0"
_SPAN = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", re.ASCII)


@dataclass(frozen=True)
class Selector:
    """Ranks by number (`rank_spans`) or by coordinates (`axes`); make one with `parse_selector`.

    `rank_spans` is None for a selector by coordinates. `axes` holds the constrained axes only, in the order of
    `topology.AXES`; no constraint at all is every rank. `str()` gives the text back in its shortest form.
    """

    rank_spans: Spans | None = None
    axes: tuple[tuple[str, Spans], ...] = ()

    def __str__(self) -> str:
        if self.rank_spans is not None:
            return join_spans(self.rank_spans, ",")
        if self == ALL:
            return "all"
        if self == PER_STAGE:
            return "per-stage"
        return ",".join(f"{axis}={join_spans(spans, '|')}" for axis, spans in self.axes)

    def selects(self, coords: Coords) -> bool:
        """Returns whether the rank with these coordinates is captured, in O(1)."""
        if self.rank_spans is not None:
            return _holds(self.rank_spans, coords.rank)
        return all(_holds(spans, getattr(coords, axis)) for axis, spans in self.axes)

    def absent(self, there: Collection[Coords]) -> str:
        """Returns the numbers and positions of this selection that none of these ranks has, as text."""
        clauses = []
        for axis, spans in self.axes if self.rank_spans is None else (("rank", self.rank_spans),):
            found = sorted({getattr(coords, axis) for coords in there})
            edges = zip((-1, *found), (*found, spans[-1][1] + 1), strict=True)
            gaps = [(max(low + 1, a), min(high - 1, b)) for low, high in edges for a, b in spans]
            if gaps := [gap for gap in gaps if gap[0] <= gap[1]]:
                clauses.append(f"{axis}={join_spans(_merge(gaps), '|')}")
        return ",".join(clauses)

    def ranks(self, sizes: ParallelSizes, layout: WorldLayout | None) -> list[int] | None:
        """Returns all selected global ranks of a world, ascending; None for a selection by coordinates whose layout is
        unknown. For reports; a rank asks `selects` about itself."""
        if self.rank_spans is not None:
            return [rank for first, last in self.rank_spans for rank in range(first, min(last + 1, sizes.world))]
        if layout is None:
            return None
        return [rank for rank in range(layout.sizes.world) if self.selects(layout.coords(rank))]

    def check(self, sizes: ParallelSizes, layout: WorldLayout | None = None, *, option: str = OPTION) -> None:
        """Raises a ValueError that names `option` unless every rank and coordinate exists and some rank is selected.

        Together with others, an `ep` constraint may select no rank, because the expert grid is not that of the decoder.
        Whether it does depends on the rank order, so that is checked only if a layout is given.
        """
        if self.rank_spans is not None:
            highest = max((last for _, last in self.rank_spans), default=-1)
            if highest >= sizes.world:
                raise ValueError(
                    f"{option}: rank {highest} in '{self}' is outside the world of {sizes.world} ranks "
                    f"(valid: 0..{sizes.world - 1})"
                )
            return
        for axis, spans in self.axes:
            size, highest = getattr(sizes, axis), spans[-1][1]
            if highest >= size:
                noun = "stage" if axis == "pp" else "rank"
                existing = f"{noun}s 0..{size - 1}" if size > 1 else f"{noun} 0 only"
                raise ValueError(f"{option}: {axis}={highest} in '{self}' does not exist; {axis} has {existing}")
        if layout is not None and not self.ranks(sizes, layout):
            raise ValueError(
                f"{option}: '{self}' selects no rank at all: no rank has these coordinates together "
                f"(tp={sizes.tp} pp={sizes.pp} cp={sizes.cp} ep={sizes.ep} dp={sizes.dp}, order {layout.order})"
            )


ALL, NOBODY = Selector(), Selector(rank_spans=())
PER_STAGE = Selector(axes=tuple((axis, ((0, 0),)) for axis in ("tp", "cp", "dp")))
"""The lowest rank of a stage has tp = cp = dp = 0 in every rank order, since ranks grow along each axis."""


def parse_selector(text: str, option: str = OPTION) -> Selector:
    """Returns the selector of a `--profile-select` value (grammar above; case and spaces do not matter).

    Equal selections written differently give equal selectors: `pp=*` is `all`. ValueError, which names `option`, for
    anything else.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{option}: empty value {text!r}; valid: {_FORMS}")
    word = text.strip().lower()
    if word in ("all", "per-stage"):
        return ALL if word == "all" else PER_STAGE
    items = [item.strip() for item in text.split(",")]
    if not any("=" in item for item in items):
        return Selector(rank_spans=_parse_spans(items, text, option))
    return Selector(axes=_parse_axes(items, text, option))


def _parse_axes(items: list[str], text: str, option: str) -> tuple[tuple[str, Spans], ...]:
    spans_by_axis: dict[str, Spans | None] = {}
    for item in items:
        name, equals, values = item.partition("=")
        axis = name.strip().lower()
        if not equals:
            raise ValueError(
                f"{option}: {item!r} in {text!r} is no coordinate; several positions of one axis are written pp=0|3, "
                "and ranks and coordinates cannot be mixed"
            )
        if axis not in AXES:
            raise ValueError(f"{option}: unknown coordinate {axis!r} in {text!r}; known: {', '.join(AXES)}")
        if axis in spans_by_axis:
            raise ValueError(f"{option}: coordinate {axis!r} stands twice in {text!r}; write {axis}=0|3 for several")
        spans_by_axis[axis] = None if values.strip() == "*" else _parse_spans(values.split("|"), text, option)
    return tuple((axis, spans) for axis in AXES if (spans := spans_by_axis.get(axis)) is not None)


def _parse_spans(items: list[str], text: str, option: str) -> Spans:
    spans = []
    for item in items:
        match = _SPAN.fullmatch(item)
        if match is None:
            raise ValueError(
                f"{option}: {item.strip()!r} in {text!r} is not a number from 0 or a range such as 0-7; valid: {_FORMS}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{option}: reversed range {item.strip()!r} in {text!r}; write {last}-{first}")
        spans.append((first, last))
    return _merge(spans)


def _merge(spans: Iterable[tuple[int, int]]) -> Spans:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _holds(spans: Spans, number: int) -> bool:
    return any(first <= number <= last for first, last in spans)


def spans_of(numbers: Iterable[int]) -> Spans:
    """Returns the numbers, which need not be sorted, as spans."""
    return _merge((number, number) for number in numbers)


def join_spans(spans: Spans, separator: str) -> str:
    """Returns spans as text, such as ``3,8-15`` if ``separator`` is a comma."""
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
