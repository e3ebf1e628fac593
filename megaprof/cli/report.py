"""``megaprof report DIR``: the report on the stages from traces and timelines, on the terminal, as JSON and as HTML."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

import msgspec

from megaprof.analysis.report.report import Report, analyze
from megaprof.analysis.report.text.sentences import standstill_findings
from megaprof.analysis.trace.reading import NoSuchRun, Workers
from megaprof.cli import UsageError, add_input_option, local, progress, writing
from megaprof.cli.look import last_stand
from megaprof.cli.open import browser_is_here, fetching, opened_in_browser
from megaprof.formats.inputs import RemotePath, path_of, read_input
from megaprof.formats.names import appearing
from megaprof.formats.phrases import Unanswerable

#: What a file holds, by the option that names it, if it is an older report, which may be overwritten.
_MARKS = {"--json": ('"version"', '"targets"'), "--html": ("<!DOCTYPE html>", "<title>megaprof: ")}
EXAMPLES = (
    "megaprof report traces",
    "megaprof report traces --open",
    "megaprof report traces --html report.html",
    "megaprof report traces --json - | jq '.targets[0].diagnosis.causes'",
    "megaprof report step20.nsys-rep",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        metavar="DIR",
        type=path_of,
        help="directory of traces, timelines or files of nsys, or a single one; may be remote (s3://...)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON; '-' prints it instead of tables")
    html = "also write the report as one HTML file, with a drawing of the pipeline"
    parser.add_argument("--html", metavar="FILE", type=local, help=html)
    parser.add_argument(
        "--open", action="store_true", help="open the HTML file in the browser (a temporary one without --html)"
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        help="number of processes that read files (default: one per processor), or a running Ray cluster: 'ray' or its "
        "address ray://host:10001. Its machines must find DIR under the same name",
    )
    add_input_option(parser, runs=True)


def run(arguments: argparse.Namespace) -> int:
    workers: Workers | None = arguments.workers
    if workers is not None and str(workers).isdecimal() and int(workers):
        workers = int(workers)
    elif workers is not None and workers != "ray" and not str(workers).startswith("ray://"):
        raise UsageError(f"--workers {workers} must be a number of at least 1, ray, or ray://host:port")
    page: Path | None = arguments.html
    if arguments.open and page is None and browser_is_here():
        page = Path(tempfile.mkdtemp(prefix="megaprof-")) / "report.html"  # the browser may read it after we end
    report_directory(arguments.dir, json=arguments.json, html=page, number=arguments.run, workers=workers)
    if arguments.open and page is None:
        how = _ui_command(arguments.dir) or f"megaprof report {shlex.quote(str(arguments.dir))} --html report.html"
        print(f"No browser can be opened here. To see the report in yours: {how}", file=sys.stderr)
    elif arguments.open and page is not None and not opened_in_browser(page.absolute().as_uri()):
        print(f"No browser can be opened here. On your own machine: {fetching(page)}", file=sys.stderr)
    return 0


def report_directory(
    directory: Path,
    *,
    json: str | None = None,
    html: Path | None = None,
    number: int | None = None,
    workers: Workers | None = None,
) -> Report:
    """Prints the report on ``directory`` (the run with this ``number``, from 1), writes it to the files ``json`` and
    ``html``, and returns it. With ``json="-"``, it is printed as JSON instead of tables.

    Raises Unanswerable if there is nothing to report on or a file cannot be written.
    """
    from rich.console import Console

    from megaprof.analysis.report.html import page
    from megaprof.analysis.report.terminal import show

    named = {"--json": None if json is None or json == "-" else Path(json), "--html": html}
    files = {option: path for option, path in named.items() if path is not None}
    for option, path in files.items():
        _refuse_to_lose(option, path)
    report = report_on(directory, number, workers)
    # Files are written before anything is printed, because the reader of the output (head, less) may leave early. If a
    # file cannot be written, the report is still printed.
    fault = None
    for option, path in files.items():
        content = page(report, report.steps()).encode() if option == "--html" else _json(report)
        try:
            with writing(option, path):
                if path.exists() and not path.is_file():  # a device, or a pipe
                    path.write_bytes(content)
                else:
                    with appearing(path, sync=False) as file:
                        file.write(content)
        except Unanswerable as why:
            fault = why
    if json == "-":
        sys.stdout.write(_json(report).decode())
    else:
        show(report, Console(highlight=False))
    if fault is not None:
        raise fault
    if json == "-":
        return report
    if html is not None and (ui_command := _ui_command(directory)):
        print(f"To see it in your browser: {ui_command}")
    if json is not None:
        print(f"Report as JSON: {json}")
    if html is not None:
        print(f"Report as one HTML file: {html}")
        if not browser_is_here():
            print(f"To copy it to your own machine: {fetching(html)}")
    return report


def _ui_command(source: Path) -> str | None:
    """Returns the command that shows ``source`` in the browser; None if it is no directory of this machine."""
    return None if isinstance(source, RemotePath) or source.is_file() else shlex.join(["megaprof", "ui", str(source)])


def report_on(directory: Path, number: int | None = None, workers: Workers | None = None) -> Report:
    """Returns the report on the run with this ``number`` (from 1; None: the newest). Raises Unanswerable, and
    UsageError if there is no such run."""
    last = last_stand(directory) if not isinstance(directory, RemotePath) and directory.is_dir() else None
    try:
        with progress("reading") as advance:
            report = analyze(directory, workers=workers or os.cpu_count() or 1, progress=advance, run=number)
    except NoSuchRun as fault:
        raise UsageError(f"--run {fault}") from None
    except Unanswerable as fault:
        if last is None:
            raise
        told = " ".join(finding.text for finding in standstill_findings(last[:1]))
        raise Unanswerable(f"{told} Nothing else can be reported: {fault}") from None
    return report if last is None else report.with_standstill(*last)


def _refuse_to_lose(option: str, path: Path) -> None:
    """Raises UsageError if ``path`` is a file that must not be overwritten: anything but an older report."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory, not a file")
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        content = read_input(path)
    except (OSError, ValueError):
        content = b""
    if not all(mark.encode() in content for mark in _MARKS[option]):
        raise UsageError(f"{option} {path} exists and is not a report by megaprof, so it is not overwritten")


def _json(report: Report) -> bytes:
    return msgspec.json.format(report.json(), indent=2) + b"\n"
