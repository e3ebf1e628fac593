"""What the server answers. Tools: the JSON of the commands, made by the same functions, with a headline in front.
Documents for readers of that: pages of the documentation, a command's help, and the schema of its JSON."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from mcp.server.mcpserver.exceptions import ResourceNotFoundError

from megaprof.analysis.report.document import Report, TargetReport
from megaprof.analysis.report.text.words import milliseconds, ratio, title
from megaprof.analysis.simulation.simulate import simulate
from megaprof.analysis.trace.reading import RECORDINGS
from megaprof.cli import COMMANDS, UsageError, parser_of
from megaprof.cli import status as job_status
from megaprof.cli.report import report_on
from megaprof.cli.what_if import CHOICES, answer_to, in_words
from megaprof.formats.phrases import json_of
from megaprof.formats.remote import RemotePath, files_below
from megaprof.metrics.look import look_at

#: Pages of docs/ and what they are about. setup.py puts the same pages into the installed package.
PAGES = {
    "on-demand": "a running job: status, captures on demand",
    "options": "every option of a job, with its variable and default",
    "report": "how to read a report: words, causes, what-if; how it measures, and why a number may be missing",
    "scripts": "exit codes, JSON, and these tools: parts of answers, limits, what the user is asked before a capture",
    "timeline": "the timeline that every rank can keep",
}
#: Fields that a summary leaves out of every document: tables, and series over the steps of a run.
_TABLES = "candidates costs events replay_error single stages status"
_SERIES = "buckets step_ms synchronisation_ms"
DETAILS = frozenset(f"{_TABLES} {_SERIES}".split())
#: The most passes that are replayed; more would keep the server busy.
_MOST_PASSES = 200_000


def of_report(directory: Path, run: int | None = None) -> dict[str, Any]:
    """Returns the JSON of ``megaprof report DIR --json -``. Raises CommandError, and the errors of reading files."""
    report = _report(directory, run)
    headline = [*filter(None, [report.of_several]), *map(_in_brief, report.targets)]
    if report.section is not None:
        headline.append(report.section.limits)
    return {"headline": headline, **report.to_json()}


def of_change(given: Namespace) -> dict[str, Any]:
    """Returns the JSON of ``megaprof what-if DIR --json``. Raises CommandError, and the errors of reading files."""
    choices = {name: getattr(given, name) for name in CHOICES}
    answer = answer_to(_report(given.dir, given.run), choices, given.target, given.role)
    return {"headline": in_words(answer), **msgspec.json.decode(json_of(answer))}


def of_status(given: Namespace) -> dict[str, Any]:
    """Returns the JSON of ``megaprof status DIR --json``. Raises NoJob."""
    view = look_at(job_status.find(given.dir, given.role))
    return {
        "headline": [line for line in job_status.in_words(view) if line],
        **msgspec.to_builtins(job_status.answer(view)),
    }


def of_simulation(given: Namespace) -> dict[str, Any]:
    """Returns the result of `megaprof.simulate` as JSON. Raises UsageError."""
    options = {name: getattr(given, name) for name in signature(simulate).parameters}
    kinds = sum(options[f"{kind}_ms"] is not None for kind in ("forward", "backward", "weight"))
    passes = given.microbatches * sum(map(len, given.forward_ms)) * kinds
    if passes > _MOST_PASSES:
        raise UsageError(f"{passes:,} passes are too many; {_MOST_PASSES:,} can be replayed")
    try:
        simulation = simulate(**options)
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None
    return {
        "step_ms": simulation.step_ms,
        "bubble_fraction": list(simulation.bubble_fraction),
        "stage_ms": list(simulation.stage_ms),
        "schedule": simulation.schedule._asdict(),
        "events": [
            {name: getattr(event, name) for name in ("stage", "chunk", "microbatch", "phase", "start_ms", "end_ms")}
            for event in simulation.events
        ],
    }


def _in_brief(target: TargetReport) -> str:
    """Returns a line about a target, with the content of its row in the table that begins a report on many targets."""
    imbalance = "" if target.imbalance is None else f"; imbalance {ratio(target.imbalance)}"
    step = f"; a step takes {milliseconds(target.step_ms)}" if target.step_ms else ""
    return f"{title(*target.key)}: {target.in_brief().text}{imbalance}{step}"


def _report(directory: Path, run: int | None) -> Report:
    """Returns the report on a directory. Agents ask for the parts of one report one after the other, so it is kept, and
    read again only if a file has changed."""
    stamp = _stamp(directory)
    return _cached_report(directory, run, stamp) if stamp else report_on(directory, run)


@lru_cache(maxsize=2)
def _cached_report(directory: Path, run: int | None, stamp: Hashable) -> Report:
    return report_on(directory, run)


def _stamp(path: Path) -> Hashable:
    """Returns a value that changes when a file is written; None if that cannot be known. Raises TooMuch."""
    if isinstance(path, RemotePath):
        return None
    try:
        files = files_below(path, RECORDINGS) if path.is_dir() else [path]
        return frozenset((str(file), status.st_size, status.st_mtime_ns) for file in files if (status := file.stat()))
    except OSError:
        return None


def page(name: str) -> str:
    """Returns the text of one of `PAGES`."""
    return (_docs() / f"{name}.md").read_text(encoding="utf-8")


def help_of(command: str) -> str:
    """Returns the text that ``megaprof COMMAND --help`` prints. Raises ResourceNotFoundError."""
    if command not in COMMANDS:
        raise ResourceNotFoundError(f"there is no command {command}; there are {', '.join(COMMANDS)}")
    return parser_of(command).format_help()


def schema_of(command: str) -> str:
    """Returns the JSON Schema of the output of ``megaprof COMMAND --json``. Raises ResourceNotFoundError."""
    schemas = {path.stem: path for path in sorted((_docs() / "schemas").glob("*.json"))}
    if command not in schemas:
        raise ResourceNotFoundError(f"there is no schema {command}; there are {', '.join(schemas)}")
    return schemas[command].read_text(encoding="utf-8")


def _docs() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "docs"
    return installed if installed.is_dir() else package.parent / "docs"
