"""``megaprof report DIR``: the stage report of traces and timelines, on the terminal, as JSON and as HTML."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.cli import CommandError, UsageError, browser
from megaprof.cli.inputs import add_input_option, heed_input_option
from megaprof.formats.files import appearing
from megaprof.formats.inputs import read_input
from megaprof.formats.remote import place

if TYPE_CHECKING:
    from megaprof.analysis.report.document import Report
    from megaprof.analysis.trace.pool import Workers


_AXES = ("tp", "pp", "cp", "ep")
EXAMPLES = (
    "megaprof report traces",
    "megaprof report traces --open",
    "megaprof report traces --html report.html",
    "megaprof report traces --json - | jq '.targets[0].causes'",
    "megaprof report step20.nsys-rep --tp 8 --pp 4",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        metavar="DIR",
        type=place,
        help="directory of traces, files of nsys and timelines, or one of them; s3://... and the like, too",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the report as JSON; '-' prints it instead of the tables",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="also write one HTML file to send, with a drawing of the pipeline",
    )
    parser.add_argument(
        "--open", action="store_true", help="open that HTML file in the browser (without --html: a temporary one)"
    )
    parser.add_argument(
        "--run",
        metavar="N",
        type=int,
        help="report on the N-th run where DIR holds timelines of several; 1 is the oldest [the newest]",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        help="processes that read [one for each processor], or a Ray cluster that is running: 'ray', or its address "
        "ray://host:10001; its machines must find DIR under the same name",
    )
    for axis in _AXES:
        parser.add_argument(
            f"--{axis}",
            metavar="N",
            type=int,
            help=f"size along {axis}, to name the groups of recordings that megaprof did not make",
        )
    add_input_option(parser)


def run(arguments: argparse.Namespace) -> int:
    heed_input_option(arguments)
    page: Path | None = arguments.html
    if arguments.open and page is None:
        page = Path(tempfile.mkdtemp(prefix="megaprof-")) / "report.html"  # the browser may read it long after we end
    code = _run(arguments, page)
    if arguments.open and page is not None and not browser.opened(page.absolute().as_uri()):
        line = browser.fetching(page)
        print(f"No browser can be opened here. On the machine where yours is: {line}", file=sys.stderr)
    return code


def _run(arguments: argparse.Namespace, page: Path | None) -> int:
    if arguments.json == "-":
        _refuse_to_lose("--html", page, _is_html_report)
        report = analyzed(arguments.dir, arguments.run, _sizes(arguments), _workers(arguments))
        fault = _write_files(report, None, page)
        sys.stdout.write(_json(report))
        if fault is not None:
            raise fault
        return 0
    json_file = Path(arguments.json) if arguments.json else None
    return report_directory(
        arguments.dir,
        json_file=json_file,
        html_file=page,
        number=arguments.run,
        sizes=_sizes(arguments),
        workers=_workers(arguments),
    )


def report_directory(
    directory: Path,
    *,
    json_file: Path | None = None,
    html_file: Path | None = None,
    number: int | None = None,
    sizes: dict[str, int] | None = None,
    workers: Workers | None = None,
) -> int:
    """Print the report on ``directory`` (the run with this ``number``, from 1), and write it to ``json_file`` and
    ``html_file``; returns the exit code 0.

    Raises CommandError when there is nothing to report on or a file cannot be written.
    """
    from rich.console import Console

    from megaprof.analysis.report.terminal import show

    _refuse_to_lose("--json", json_file, _is_json_report)
    _refuse_to_lose("--html", html_file, _is_html_report)
    report = analyzed(directory, number, sizes, workers)
    fault = _write_files(report, json_file, html_file)
    show(report, Console(highlight=False))
    if fault is not None:
        raise fault
    if json_file is not None:
        print(f"The same as JSON: {json_file}")
    if html_file is not None:
        print(f"The same to send: {html_file}")
        here = shlex.join(["python3", "-m", "webbrowser", html_file.absolute().as_uri()])
        print(f"To look at it: {here if browser.is_here() else browser.fetching(html_file)}")
    return 0


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    given = {axis: getattr(arguments, axis) for axis in _AXES if getattr(arguments, axis) is not None}
    for axis, size in given.items():
        if size < 1:
            raise UsageError(f"--{axis} {size} is not a number of ranks from 1 on")
    return given


def _workers(arguments: argparse.Namespace) -> Workers | None:
    given: str | None = arguments.workers
    if given is None or given == "ray" or given.startswith("ray://"):
        return given
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(f"--workers {given} is neither a number from 1 on, nor ray, nor ray://host:port")
    return int(given)


def analyzed(
    directory: Path, number: int | None = None, sizes: dict[str, int] | None = None, workers: Workers | None = None
) -> Report:
    """The report on the run with this ``number`` (from 1; None: the newest). Raises CommandError, and UsageError where
    there is no such run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from megaprof.analysis.report.report import NoCluster, NoSuchRun, NothingToReport, analyze

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    errors = Console(stderr=True)
    try:
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
            bar = progress.add_task("traces", total=None)
            return analyze(
                directory,
                workers=workers or os.cpu_count() or 1,
                progress=lambda done, of: progress.update(bar, completed=done, total=of),
                run=number,
                sizes=sizes,
            )
    except NothingToReport as fault:
        raise CommandError(str(fault)) from None
    except NoCluster as fault:
        raise CommandError(f"--workers {workers}: {fault}") from None
    except NoSuchRun as fault:
        raise UsageError(f"--run {fault}") from None


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"


def _html(report: Report) -> str:
    from megaprof.analysis.report.drawn import timelines
    from megaprof.analysis.report.html import page

    return page(report, timelines(report))


def _refuse_to_lose(option: str, path: Path | None, is_report: Callable[[str], bool]) -> None:
    """An older report may be replaced; a trace, or any other file, would be lost."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory, not a file")
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        older = is_report(read_input(path).decode())
    except (OSError, ValueError, RecursionError):
        older = False
    if not older:
        raise UsageError(f"{option} {path} exists and is not a report by megaprof, so it is not overwritten")


def _is_json_report(text: str) -> bool:
    found = json.loads(text)
    return isinstance(found, dict) and {"version", "targets"} <= found.keys()


def _is_html_report(text: str) -> bool:
    return text.startswith("<!DOCTYPE html>") and "<title>megaprof: " in text


def _write_files(report: Report, json_file: Path | None, html_file: Path | None) -> CommandError | None:
    """To be called before anything is printed, since the reader of that (head, less) may leave early. Returns why a
    file could not be written: that is no reason to keep the report from being printed."""
    try:
        _write("--json", json_file, lambda: _json(report))
        _write("--html", html_file, lambda: _html(report))
    except CommandError as fault:
        return fault
    return None


def _write(option: str, path: Path | None, text: Callable[[], str]) -> None:
    """Nothing for no path. Raises CommandError."""
    if path is None:
        return
    try:
        _write_whole(path, text())
    except OSError as fault:
        raise CommandError(f"{option} {path} cannot be written: {fault.strerror or fault}") from None


def _write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all; a device or a pipe is written to as it is."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with appearing(path, sync=False) as file:
        file.write(text.encode())
