"""``megaprof report DIR``: the stage report of a directory of traces, on the terminal and as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.cli import CommandError, UsageError

if TYPE_CHECKING:
    from megaprof.analysis.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="directory of captured traces, or one trace")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the report as JSON; '-': to standard output, and nothing else there"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.json == "-":
        sys.stdout.write(_json(_analyze(arguments.dir)))
        return 0
    return report_directory(arguments.dir, json_file=Path(arguments.json) if arguments.json else None)


def report_directory(directory: Path, *, json_file: Path | None = None) -> int:
    """Print the report on ``directory``, and write it to ``json_file``; returns the exit code 0.

    Raises CommandError when there is nothing to report on or ``json_file`` cannot be written.
    """
    from rich.console import Console

    from megaprof.analysis.terminal import show

    if json_file is not None:
        _refuse_to_lose(json_file)
    report = _analyze(directory)
    show(report, Console(highlight=False))
    if json_file is not None:
        try:
            _write(json_file, _json(report))
        except OSError as fault:
            raise CommandError(f"--json {json_file} cannot be written: {fault.strerror or fault}") from None
        print(f"The same as JSON: {json_file}")
    return 0


def _analyze(directory: Path) -> Report:
    from megaprof.analysis.report import NothingToReport, analyze

    try:
        return analyze(directory)
    except NothingToReport as fault:
        raise CommandError(str(fault)) from None


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"


def _refuse_to_lose(path: Path) -> None:
    """An older report may be replaced; a trace, or any other file, would be lost."""
    if path.is_dir():
        raise UsageError(f"--json {path} is a directory, not a file")
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        is_report = isinstance(found, dict) and {"version", "targets"} <= found.keys()
    except (OSError, ValueError, RecursionError):
        is_report = False
    if not is_report:
        raise UsageError(f"--json {path} exists and is no report of megaprof's: it is not overwritten")


def _write(path: Path, text: str) -> None:
    """The file appears whole or not at all; a device or a pipe is written to as it is."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
