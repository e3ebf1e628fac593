"""Prints reports, comparisons and tables on a terminal: colour appears only if the terminal shows it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprof.analysis.notes import Note
from megaprof.analysis.report import diff as differences
from megaprof.analysis.report import views
from megaprof.analysis.report.diff import Diff
from megaprof.analysis.report.report import Report, TargetReport
from megaprof.analysis.report.tables import TableView
from megaprof.analysis.report.text import causes, sentences, what_if
from megaprof.analysis.report.text.sentences import Finding
from megaprof.analysis.trace.traces import REPORT, SQLITE
from megaprof.analysis.words import counted, sentence, title, with_spread
from megaprof.formats.phrases import printable

STYLES = {"slow": "bold red", "open": "", "fine": "green", "most": "bold", "": ""}
_MOST_TRACES = 8
#: Stages of a run and rows of recordings by others. A page shows all.
_MOST_ROWS = 16


def show(report: Report, console: Console) -> None:
    """Prints the whole report, each target's verdict before its tables."""
    if report.of_several is not None:
        console.print(text(report.of_several), soft_wrap=True)
    for finding in sentences.standstill_findings([report.standstill] if report.standstill else []):
        show_finding(console, finding)
    if len(report.targets) > sentences.FEW_TARGETS:
        console.print()
        show_table(console, views.targets_table(report))
    if (roles := views.roles_table(report.targets)) is not None:
        console.print()
        show_table(console, roles)
    for target in report.targets:
        _show_target(target, console)
    if (foreign := report.foreign) is not None:
        heading(console, "Recordings without ranges of megaprof's")
        for view in foreign.tables:
            show_table(console, view, _MOST_ROWS)
        for clause in foreign.clauses[:4]:
            console.print(text(sentence(clause)))
        console.print(text(foreign.limits + "."))
        show_warnings(console, foreign.warnings)
    if report.warnings:
        heading(console, "Files")
        show_warnings(console, report.warnings)
    folder = report.path.parent if report.path.is_file() else report.path
    heading(console, "Traces" if report.traces else "Timelines")
    console.print(text(str(folder.absolute())), soft_wrap=True)
    if report.timelines:
        console.print(f"  {counted(len(report.timelines), 'timeline')}")
    for path in report.traces[:_MOST_TRACES]:
        name = path.relative_to(folder) if path.is_relative_to(folder) else path
        console.print(text(f"  {name}"), soft_wrap=True)
    if len(report.traces) > _MOST_TRACES:
        console.print(f"  and {len(report.traces) - _MOST_TRACES} more")
    if not all(path.name.endswith((SQLITE, REPORT)) for path in report.traces):
        console.print(text("To open one, drag it into https://ui.perfetto.dev or load it in chrome://tracing"))
    if report.traces and report.foreign is None:  # recordings that megaprof did not make cannot be merged
        console.print(text("All ranks of a step on one timeline, in https://ui.perfetto.dev:"))
        console.print(text(f"  megaprof open {shlex.quote(report.source)}"), soft_wrap=True)


def show_diff(diff: Diff, console: Console) -> None:
    for target in diff.targets:
        heading(console, title(target.target, target.role))
        step = target.step_time
        line = f"step time {views.before_and_after(step)} ms {views.mark(step)}"
        console.print(text(line, STYLES[views.emphasis(step)]))
        console.print(text(f"causes: {target.verdict_before} → {target.verdict_after}"))
        console.print(text(differences.machine_clause(target)))
        if (kept := target.prediction) is not None:
            style = "" if kept.inside is None else STYLES["fine" if kept.inside else "slow"]
            console.print(text(differences.prediction_clause(kept), style))
        show_table(console, views.diff_table(target))
        show_warnings(console, target.notes)
    show_warnings(console, diff.warnings)
    console.print(text(views.MARKS, "dim"))


def _show_target(target: TargetReport, console: Console) -> None:
    heading(console, title(*target.key))
    for finding in target.ends:
        show_finding(console, finding)
    if (fleet := target.fleet) is not None:
        first, last = fleet.coverage.steps
        console.print(text(f"all timelines: {counted(fleet.coverage.ranks, 'rank')}, steps {first}-{last}"))
    console.print(text(", ".join(sentences.facts(target))))
    if target.step_time_ms:
        parts = f"step time {with_spread(target.step_time_ms)} ms", sentences.basis(target, target.iterations)
        console.print(text(", ".join(filter(None, parts))))
    if target.imbalance is not None:
        console.print(text(f"imbalance {target.imbalance:.2f} (slowest stage / average stage, compute only)"))
    for place, finding in enumerate(target.findings):
        show_finding(console, finding, quiet=place > 0)
    predictions = target.what_if
    if target.advice is not None:
        show_finding(console, target.advice)
        if predictions.best and (needs := what_if.memory(predictions.best, predictions)):
            console.print(text(sentence(needs)))
    if target.capture is not None:
        show_finding(console, target.capture)
    if (view := views.iterations_table(target.iterations)) is not None:
        show_table(console, view)
    if fleet is not None:
        for finding in target.changes:
            show_finding(console, finding, quiet=True)
        show_table(console, views.run_table(fleet, _MOST_ROWS))
        for note in target.notes:
            console.print(text(note, "dim"))
    for view in views.target_tables(target):
        show_table(console, view)
    if (lengths := causes.lengths(target.diagnosis)) is not None:
        console.print(text(lengths))
    if (view := views.what_if_table(predictions)) is not None:
        console.print()
        show_table(console, view)
        for change_shown in what_if.worth_showing(predictions):
            if change_shown.flags and change_shown != predictions.best:  # the flags of the best one are in the advice
                name, flags = what_if.name_of(change_shown, predictions), shlex.join(change_shown.flags)
                console.print(text(f"{name}: {flags}"), soft_wrap=True)
        for line in what_if.remarks(predictions):
            console.print(text(line, "dim"))
        show_warnings(console, predictions.warnings)
    show_warnings(console, target.warnings)


def text(content: str, style: str = "") -> Text:
    """Returns text that is safe to print: markup and control characters in it do not reach the terminal."""
    return Text("\n".join(printable(line, "\ufffd") for line in content.split("\n")), style)


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
            made = _table(view, keys + rest[:count], most, broken=view.keys if count == 1 else 0)
            if console.measure(made, options=unbounded).minimum <= console.width:
                break
        if title:
            yield text(title, "dim")
        yield made
        title, rest = f"{view.title.partition(' (')[0].partition(':')[0]}, continued", rest[count:]


def _table(view: TableView, places: Sequence[int], most: int | None, broken: int = 0) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place in places:
        column = view.columns[place]
        cells = [text(line.cells[place].text) for line in view.rows[:most]]
        width = max((part.cell_len for cell in cells for part in cell.split("\n")), default=0)
        head = text(column.name)
        if column.unit:
            head += text((", " if len(f"{column.name}, {column.unit}") <= width else "\n") + column.unit)
        breaks = column.kind == "text" or place < broken
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
