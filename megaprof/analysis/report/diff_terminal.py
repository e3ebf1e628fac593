"""Prints two captures side by side on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprof.analysis.report.diff import Diff, Difference, StageDiff, TargetDiff
from megaprof.analysis.report.printing import heading, show_warnings, table, text
from megaprof.analysis.report.text import diff as sentences
from megaprof.analysis.report.text.words import ABSENT, number, percent, title

_KEPT = {True: "green", False: "red", None: ""}
_MARKS = {True: "*", False: "~", None: "?"}


def show_diff(diff: Diff, console: Console) -> None:
    """Prints a table for every target that both captures have."""
    for target in diff.targets:
        _show_target(target, console)
    show_warnings(console, sentences.warnings(diff))
    console.print(text("* beyond the spread of the samples; ~ within it; ? too few samples to tell", "dim"))


def _show_target(target: TargetDiff, console: Console) -> None:
    heading(console, title(target.target, target.role))
    step = target.step_time
    line = f"step time {number(step.before)} → {number(step.after)} ms {_mark(step)}"
    console.print(text(line, _style(step)))
    console.print(text(sentences.of_causes(target)))
    console.print(text(sentences.of_machine(target)))
    if target.prediction is not None:
        console.print(text(sentences.of_prediction(target.prediction), _KEPT[target.prediction.inside]))
    console.print(_table(target))
    show_warnings(console, sentences.notes(target))


def _table(target: TargetDiff) -> Table:
    made = table("per step, ms")
    made.add_column("stage", justify="right")
    made.add_column("layers", no_wrap=True)
    for quantity in target.quantities:
        made.add_column(quantity.removesuffix("_ms"), justify="right")
    for stage in target.stages:
        made.add_row(
            str(stage.pp), text(_layers(stage)), *(_cell(stage.changes[quantity]) for quantity in target.quantities)
        )
    return made


def _layers(stage: StageDiff) -> str:
    before, after = (layers if layers is not None else ABSENT for layers in (stage.layers_before, stage.layers_after))
    return before if before == after else f"{before} → {after}"


def _cell(change: Difference) -> Text:
    return text(f"{number(change.before)} → {number(change.after)}\n{_mark(change)}", _style(change))


def _mark(change: Difference) -> str:
    return "" if change.change is None else f"{percent(change.change, sign=True)} {_MARKS[change.beyond_spread]}"


def _style(change: Difference) -> str:
    if not change.beyond_spread or change.change is None:
        return ""
    return "red" if change.change > 0 else "green"
