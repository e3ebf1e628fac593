"""`megaprof watch DIR`: a running job's stages as a live table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING

from megaprof.cli import CommandError, UsageError
from megaprof.control.blame import find_culprits
from megaprof.control.job import NoJob, RunningJob, find_job
from megaprof.formats.phrases import counted
from megaprof.metrics.compute import SlowRanks, Summary, summarise
from megaprof.metrics.look import View, verdict, waited_for

if TYPE_CHECKING:
    from rich.console import RenderableType

_LINES = 32
EXAMPLES = (
    "megaprof watch traces",
    "megaprof watch traces --once",
    "megaprof watch traces --once --json | jq .now.imbalance",
)


@dataclass(frozen=True)
class Look:
    """One look at a running job, as ``--json`` prints it."""

    version: int
    """The version of this object: 1."""
    run: str
    """The run's random name."""
    role: str | None
    """Whose model it is; None without roles."""
    ranks: int
    """How many ranks the job has."""
    heard: int
    """Of how many ranks a status was read."""
    now: Summary
    """The figures computed from their status files."""
    still_s: float
    """Seconds since any rank moved, if the job appears to hang; else 0."""
    stuck: tuple[int, ...]
    """The ranks that have not moved for a long time."""
    slow: SlowRanks | None
    """The ranks that are slower than their peers; null if there are none."""
    waits: dict[int, float]
    """The ranks that wait for a processor core, the one that waits longest first, and for which part of the time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="the job's --profile-dir")
    parser.add_argument("--role", help="whose, where several roles share a save directory")
    parser.add_argument("--once", action="store_true", help="print the table once and end")
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON object in place of the table")
    parser.add_argument(
        "--every", type=float, metavar="S", help="seconds between two looks (default: the job's own interval)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows the table until the job ends or Ctrl-C is pressed."""
    if arguments.json and not arguments.once:
        raise UsageError("--json is one look: it needs --once")
    if arguments.every is not None and not 0 < arguments.every <= TIMEOUT_MAX:
        raise UsageError(f"--every {arguments.every:g} is not a number of seconds")
    try:
        job = find_job(arguments.dir, arguments.role)
        if (silence := job.silence()) is not None:
            raise NoJob(silence)
        if arguments.json:
            print(json.dumps(asdict(_look(job)[0])))
            return 0
        from rich.console import Console
        from rich.live import Live

        console = Console(highlight=False)
        if arguments.once:
            console.print(_table(job))
            return 0
        # A pipe or a file gets each table as it is made: a live one would be written when it ends.
        live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        with live or nullcontext():
            while (silence := job.silence()) is None:
                if live is None:
                    console.print(_table(job))
                    sys.stdout.flush()
                else:
                    live.update(_table(job), refresh=True)
                time.sleep(max(0.2, arguments.every or job.run.interval))
                job = find_job(arguments.dir, arguments.role)
        if job.run.ended is None:
            raise NoJob(silence)
        console.print(silence)
        return 0
    except NoJob as fault:
        raise CommandError(str(fault)) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)  # behind the terminal's ^C
        return 0


def _look(job: RunningJob) -> tuple[Look, View]:
    statuses = job.statuses()
    now = job.now(statuses, None)
    view = View(job, statuses, now, find_culprits(job.run, statuses, now), None)
    look = Look(
        version=1,
        run=job.run.run,
        role=job.run.role,
        ranks=job.run.world,
        heard=len(statuses),
        now=summarise(job.run, statuses.values()),
        still_s=round(view.blame.still, 3),
        stuck=view.blame.stuck,
        slow=view.slow,
        waits=dict(view.waits),
    )
    return look, view


def _table(job: RunningJob) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    look, view = _look(job)
    summary = look.now
    table = Table(box=None, header_style="bold")
    for name in (
        "stage",
        "ranks",
        "step",
        "step ms",
        "compute ms",
        "gradients ms",
        "imbalance",
        "slowest rank",
        "its ms",
    ):
        table.add_column(name, justify="right")
    for stage in summary.stages[:_LINES]:
        table.add_row(
            str(stage.pp),
            str(stage.ranks),
            "-" if stage.step is None else str(stage.step),
            _number(stage.step_ms),
            _number(stage.compute_ms),
            _number(stage.gradients_ms),
            _number(stage.imbalance, 2),
            "-" if stage.slowest_rank is None else str(stage.slowest_rank),
            _number(stage.slowest_ms),
            style="bold red" if stage.pp == summary.slow_stage else None,
        )
    parts = [
        counted(job.run.world, "rank") + ("" if look.heard == job.run.world else f", {look.heard} of them answering"),
        f"step {_number(summary.step_ms)} ms",
        f"imbalance {_number(summary.imbalance, 2)}",
        f"bubble {_percent(summary.bubble_fraction)}",
    ]
    if summary.recent:
        parts.append(f"medians of the last {counted(summary.recent, 'step')}")
    if len(summary.stages) > _LINES:
        parts.append(f"{len(summary.stages) - _LINES} more stages")
    lines: list[RenderableType] = [table, ", ".join(parts)]
    wrong = [*filter(None, [verdict(view)]), *waited_for(view)]
    if view.blame.stuck or view.blame.culprits:
        wrong.append(f"More: megaprof status {job.directory}")
    lines += (Text(line, style="bold red", overflow="fold") for line in wrong)
    return Group(*lines)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2g} %"
