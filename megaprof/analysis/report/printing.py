"""Prints what all views share on a terminal: text that is safe there, tables, and findings in colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprof.analysis.notes import Note
from megaprof.analysis.report.tables import TableView
from megaprof.analysis.report.text.sentences import Finding

STYLES = {"slow": "bold red", "open": "", "fine": "green", "most": "bold", "": ""}


def text(content: str, style: str = "") -> Text:
    """Returns text that is safe to print. Names come from files, so their markup and control characters must not reach
    the terminal."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in content), style)


def heading(console: Console, title: str) -> None:
    console.print()
    console.print(text(title, "bold"))


def show_finding(console: Console, finding: Finding, *, quiet: bool = False) -> None:
    """Prints a finding in the colour of its severity (``quiet``: without), and below it its command, unbroken."""
    console.print(text(finding.text, "" if quiet else STYLES[finding.severity]))
    for command in filter(None, (finding.command, finding.host_command)):
        console.print(text("  " + command), soft_wrap=True)


def show_warnings(console: Console, warnings: Iterable[Note | str]) -> None:
    for warning in warnings:
        console.print(text(f"! {warning if isinstance(warning, str) else warning.text}", "yellow"))


def show_table(console: Console, view: TableView, most: int | None = None) -> None:
    """Prints a table with its first ``most`` rows, and how many more there are."""
    for part in tables(view, console, most):
        console.print(part)
    if most is not None and len(view.rows) > most:
        console.print(f"and {len(view.rows) - most} more", style="dim")


def tables(view: TableView, console: Console, most: int | None = None) -> Iterator[Table | Text]:
    """Yields a table as wide as the terminal at most, below its title; the columns that do not fit follow in others,
    which begin with the same keys."""
    shown = [place for place, column in enumerate(view.columns) if column.kind != "bars"]
    keys, rest = shown[: view.keys], shown[view.keys :]
    unbounded = console.options.update(max_width=10_000)
    title = view.title
    while rest:
        for count in range(len(rest), 0, -1):
            made = _table(view, keys + rest[:count], most)
            if console.measure(made, options=unbounded).minimum <= console.width:
                break
        if title:
            yield text(title, "dim")
        yield made
        title, rest = f"{view.title.partition(' (')[0]}, continued", rest[count:]


def _table(view: TableView, places: Sequence[int], most: int | None) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place in places:
        column = view.columns[place]
        cells = [text(line.cells[place].text) for line in view.rows[:most]]
        width = max((part.cell_len for cell in cells for part in cell.split("\n")), default=0)
        head = text(column.name)
        if column.unit:
            head += text((", " if len(f"{column.name}, {column.unit}") <= width else "\n") + column.unit)
        breaks = column.kind == "text"
        made.add_column(
            head,
            justify="right" if column.kind == "number" else "left",
            no_wrap=not breaks,
            min_width=None if breaks else max(width, *(part.cell_len for part in head.split("\n"))),
        )
    for line in view.rows[:most]:
        shown = [line.cells[place] for place in places]
        made.add_row(*(text(cell.text, STYLES[cell.emphasis]) for cell in shown), style=STYLES[line.emphasis])
    return made
