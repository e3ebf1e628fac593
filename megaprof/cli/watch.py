"""`megaprof watch DIR`: a running job's stages as a live table."""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.tables import TableView
from megaprof.analysis.report.views import iterations_table
from megaprof.analysis.words import number, percent, ratio
from megaprof.cli import local
from megaprof.cli.look import View, look_at, silence, stages_table, verdict, waiting_clauses
from megaprof.cli.status import find
from megaprof.control.directory import find_job
from megaprof.formats.phrases import Unanswerable, counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LINES = 32
#: The fraction of the time in which the timelines are read: those of a large job take seconds.
_REPORT_PART = 0.25
EXAMPLES = (
    "megaprof watch traces",
    "megaprof watch traces --once",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=local, help="the job's --profile-dir")
    parser.add_argument("--role", help="role, if several share the --profile-dir")
    parser.add_argument("--once", action="store_true", help="print the table once and exit")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    # A pipe or a file gets each table as soon as it is made; a live table would be written only at the end.
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not arguments.once else None
    so_far: tuple[str | None, TableView | None] = None, None
    report_at = 0.0
    try:
        view = look_at(find(arguments.dir, arguments.role, 0.0 if arguments.once else math.inf), patient=False)
        if view.silence is not None:
            raise Unanswerable(silence(view))
        with live or nullcontext():
            while view.silence is None:
                if (begun := time.monotonic()) >= report_at:
                    so_far = _so_far(view)
                    report_at = begun + (time.monotonic() - begun) / _REPORT_PART
                if live is None:
                    console.print(_table(view, *so_far, console))
                    sys.stdout.flush()
                else:
                    live.update(_table(view, *so_far, console), refresh=True)
                if arguments.once:
                    return 0
                time.sleep(max(0.2, view.job.run.interval))
                view = look_at(find_job(arguments.dir, arguments.role), patient=False)
        if view.state != "ended":
            raise Unanswerable(silence(view))
        console.print(silence(view))
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)  # after the terminal's ^C
        return 0


def _so_far(view: View) -> tuple[str | None, TableView | None]:
    """Returns what the report names first for the timelines so far: a link, say, about which no status tells. None if
    it names nothing that has gone wrong, or if the job stands still. Also returns where an iteration goes."""
    if view.blame.still:
        return None, None
    try:
        report = analyze(view.job.directory)
    except Unanswerable:
        return None, None
    named = (finding for target in report.targets for finding in target.findings if finding.severity == "slow")
    wrong = next((finding.text for finding in named if finding.kind != "few_microbatches"), None)
    goes = next(filter(None, (iterations_table(target.iterations) for target in report.targets)), None)
    return None if wrong is None else f"The report so far: {wrong}", goes


def _table(view: View, cause: str | None, goes: TableView | None, console: Console) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from megaprof.analysis.report.terminal import tables

    job, summary = view.job, view.summary
    heard = len(view.heard)
    parts = [counted(job.run.world, "rank") + ("" if heard == job.run.world else f", {heard} of them answering")]
    if summary.step_ms is None:
        parts.append("no step has been timed yet")
    else:
        # Without a timeline, nobody knows how long a step takes, but only how often one begins.
        parts.append(f"{'step' if summary.recent else 'one step every'} {number(summary.step_ms)} ms")
        parts.append(f"imbalance {ratio(summary.imbalance)}")
        parts.append(f"bubble {percent(summary.bubble_fraction)}")
    if summary.recent:
        parts.append(f"medians of the last {counted(summary.recent, 'step')}")
    if len(summary.stages) > _LINES:
        parts.append(f"{len(summary.stages) - _LINES} more stages")
    lines: list[RenderableType] = [*tables(stages_table(view), console, _LINES), ", ".join(parts)]
    lines += [] if goes is None else tables(goes, console)
    wrong = [*filter(None, [cause, verdict(view)]), *waiting_clauses(view)]
    if view.blame.stuck or view.blame.culprits:
        wrong.append(f"More: megaprof status {job.directory}")
    lines += (Text(line, style="bold red", overflow="fold") for line in wrong)
    return Group(*lines)
