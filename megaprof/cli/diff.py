"""``megaprof diff A B``: two captures side by side, stage by stage."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaprof.cli import CommandError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from megaprof.analysis.report.diff import Change, Diff, StageDiff, TargetDiff


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "directory of captured traces, or the JSON file of a report"
    parser.add_argument("before", metavar="A", type=Path, help=what)
    parser.add_argument("after", metavar="B", type=Path, help=what)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print tables or JSON. Raises CommandError when there is nothing to compare."""
    from megaprof.analysis.report.diff import NothingToCompare, compare

    before, after = _report(arguments.before), _report(arguments.after)
    try:
        diff = compare(before, after)
    except NothingToCompare as fault:
        raise CommandError(f"{arguments.before} and {arguments.after}: {fault}") from None
    if arguments.json:
        sys.stdout.write(json.dumps(diff.to_json(), indent=2, allow_nan=False) + "\n")
    else:
        _show(diff)
    return 0


def _report(path: Path) -> Any:
    from megaprof.analysis.report.report import NothingToReport, analyze

    if path.is_file() and not path.name.endswith((".pt.trace.json", ".gz")):
        try:
            return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
        except (OSError, ValueError, RecursionError) as fault:
            raise CommandError(f"{path} cannot be read as the JSON of a report: {fault}") from None
    try:
        return analyze(path).to_json()
    except NothingToReport as fault:
        raise CommandError(str(fault)) from None


def _show(diff: Diff) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for target in diff.targets:
        _show_target(target, console.print)
    for warning in diff.warnings:
        console.print(_text(f"! {warning}", "yellow"))
    marks = "* beyond the spread of the samples; ~ within it; ? too few samples to tell"
    console.print(_text(marks, "dim"))


def _show_target(target: TargetDiff, show: Any) -> None:
    from megaprof.analysis.report import words

    show()
    show(_text(words.title({"target": target.target, "role": target.role}), "bold"))
    step = target.step_time
    line = f"step time {words.number(step.before)} → {words.number(step.after)} ms {_mark(step)}"
    show(_text(line, _style(step)))
    slow = [f"stage {pp}" if pp is not None else "none" for pp in (target.slowest_before, target.slowest_after)]
    show(_text(f"slow stage: {slow[0]} → {slow[1]}"))
    show(_table(target))
    for note in target.notes:
        show(_text(f"! {note}", "yellow"))


def _table(target: TargetDiff) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="per step, ms",
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("stage", justify="right")
    table.add_column("layers", no_wrap=True)
    shown = [q for q in target.stages[0].changes if any(_known(stage, q) for stage in target.stages)]
    for quantity in shown:
        table.add_column(quantity.removesuffix("_ms"), justify="right")
    for stage in target.stages:
        cells = [_cell(stage.changes[quantity]) for quantity in shown]
        table.add_row(str(stage.pp), _text(_layers(stage)), *cells)
    return table


def _known(stage: StageDiff, quantity: str) -> bool:
    change = stage.changes[quantity]
    return bool(change.before or change.after)


def _layers(stage: StageDiff) -> str:
    before, after = (layers if layers is not None else "-" for layers in (stage.layers_before, stage.layers_after))
    return before if before == after else f"{before} → {after}"


def _cell(change: Change) -> Text:
    from megaprof.analysis.report import words

    return _text(f"{words.number(change.before)} → {words.number(change.after)}\n{_mark(change)}", _style(change))


def _mark(change: Change) -> str:
    from megaprof.analysis.report import words

    if change.change is None:
        return ""
    mark = {True: "*", False: "~", None: "?"}[change.beyond_spread]
    return f"{words.percent(change.change, sign=True)} {mark}"


def _style(change: Change) -> str:
    if not change.beyond_spread or change.change is None:
        return ""
    return "red" if change.change > 0 else "green"


def _text(content: str, style: str = "") -> Text:
    """Names come from files: neither markup nor control characters of theirs reach the terminal."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in content), style)
