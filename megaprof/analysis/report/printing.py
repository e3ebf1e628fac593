"""The parts that all printed reports share: text that is safe on a terminal, tables, and findings in colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprof.analysis.diagnosis.stages import Stage
from megaprof.analysis.notes import Note
from megaprof.analysis.report.text.sentences import Finding
from megaprof.analysis.report.text.words import layers, some

STYLES = {"slow": "bold red", "open": "", "fine": "green"}


def text(content: str, style: str = "") -> Text:
    """Returns text that is safe to print. Names come from files, so their markup and control characters must not reach
    the terminal."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in content), style)


def heading(console: Console, title: str) -> None:
    console.print()
    console.print(text(title, "bold"))


def show_finding(console: Console, finding: Finding, *, quiet: bool = False) -> None:
    """Prints a finding in the colour of its severity, with its command below it, unbroken so that it can be copied.

    ``quiet``: print it without colour, because another finding is the headline.
    """
    console.print(text(finding.text, "" if quiet else STYLES[finding.severity]))
    if finding.command is not None:
        console.print(text("  " + finding.command), soft_wrap=True)
    if finding.host_command is not None:
        console.print(text("  " + finding.host_command), soft_wrap=True)


def show_warnings(console: Console, warnings: Iterable[Note | str]) -> None:
    for warning in warnings:
        console.print(text(f"! {warning if isinstance(warning, str) else warning.text}", "yellow"))


def table(title: str | None = None, left: Sequence[str] = ()) -> Table:
    """Returns an empty table. ``left``: the names of its text columns; `number_columns` adds columns of numbers."""
    made = Table(
        title=title, title_justify="left", title_style="dim", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for name in left:
        made.add_column(name)
    return made


def number_columns(made: Table, *names: str) -> None:
    for name in names:
        made.add_column(name, justify="right", no_wrap=True)


def stage_table(title: str, *columns: str) -> Table:
    """Returns an empty table for one row per stage. Each row begins with the `stage_cells` of its stage."""
    made = table(title)
    made.add_column("stage", justify="right", no_wrap=True)
    made.add_column("ranks")
    made.add_column("layers", no_wrap=True)
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    return made


def stage_cells(stage: Stage) -> tuple[str, str, Text]:
    return str(stage.pp), some(stage.ranks), text(layers(chunk.holds for chunk in stage.chunks))
