"""Tables as data: `terminal` prints them on a terminal, and ``templates/table.html`` puts them on a page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megaprof.analysis.words import ABSENT

Emphasis = Literal["", "most", "slow", "fine"]
"""``most``: what the verdict is about, or what is recommended. ``slow`` and ``fine``: as in a `Finding`."""


@dataclass(frozen=True)
class Column:
    name: str
    """Its head; a line break is one on a terminal only."""
    kind: Literal["number", "name", "text", "bars"] = "number"
    """``number``: aligned at the right. ``name``: aligned at the left. ``text``: likewise, and its lines may be broken.
    ``bars``: drawings, which only pages show."""
    unit: str = ""


@dataclass(frozen=True)
class Piece:
    """A part of a bar, in milliseconds."""

    kind: str
    """Kind of time that it shows; also its class in the style sheet."""
    start: float
    width: float
    hint: str = ""
    """Text that appears when a pointer is on it."""


@dataclass(frozen=True)
class Cell:
    """One cell. What comes after the first space of a number (or after its line break) is shown in a lighter way."""

    text: str = ""
    emphasis: Emphasis = ""
    link: str = ""
    """Address that a page leads to."""
    code: str = ""
    """Flags or the name of a file, which only pages show: below the text."""
    bars: tuple[tuple[Piece, ...], ...] = ()
    """Bars above each other, each from left to right."""


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    emphasis: Emphasis = ""


@dataclass(frozen=True)
class TableView:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    keys: int = 1
    """The first columns, which say what a row is about."""
    legend: tuple[tuple[str, str], ...] = ()
    """Kinds of the pieces of bars, each with its name."""

    @property
    def longest(self) -> float:
        """Milliseconds at the end of the axis of its bars."""
        bars = (bar for row in self.rows for cell in row.cells for bar in cell.bars)
        return max((piece.start + piece.width for bar in bars for piece in bar), default=0.0) or 1.0


def row(*cells: object, emphasis: Emphasis = "") -> Row:
    texts = (ABSENT if cell is None else cell for cell in cells)
    return Row(tuple(cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in texts), emphasis)


def table(title: str, rows: Sequence[Mapping[Column, object]], slow: Collection[int] = ()) -> TableView:
    """Returns a table whose rows have the same columns, each with its cell. ``slow``: places of slow rows."""
    made = (row(*cells.values(), emphasis="slow" if place in slow else "") for place, cells in enumerate(rows))
    return TableView(title, tuple(rows[0]) if rows else (), tuple(made))


def stacked(parts: Iterable[tuple[str, float | None, str]]) -> tuple[Piece, ...]:
    """Returns a bar of pieces behind each other. ``parts``: kind, milliseconds and hint of each."""
    pieces, start = [], 0.0
    for kind, ms, hint in parts:
        if ms:
            pieces.append(Piece(kind, start, ms, hint))
            start += ms
    return tuple(pieces)
