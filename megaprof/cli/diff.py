"""``megaprof diff A B``: two captures side by side, stage by stage."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import suppress
from pathlib import Path

from megaprof.analysis import words
from megaprof.analysis.report.diff import Diff, bound_clause, compare
from megaprof.analysis.report.report import Document, analyze
from megaprof.analysis.trace.reading import RECORDINGS
from megaprof.cli import UNWELL, add_input_option, print_json, say
from megaprof.formats.inputs import Unreachable, path_of, read_input
from megaprof.formats.phrases import Unanswerable

EXAMPLES = (
    "megaprof diff traces-before traces-after",
    "megaprof diff main.json traces --fail-above 3%",
    "megaprof diff before.json traces-after --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "directory of captured traces, a single trace, or the JSON file of a report"
    parser.add_argument("before", metavar="A", type=path_of, help=help_text)
    parser.add_argument("after", metavar="B", type=path_of, help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--fail-above",
        metavar="PERCENT",
        type=_percent,
        help="exit with 3 if a step of B is surely slower by more than this, and say what moved; what is not certain "
        "is said and does not fail",
    )
    add_input_option(parser)


def _percent(text: str) -> float:
    """Reads ``3%`` or ``3`` as a fraction. Raises ArgumentTypeError."""
    with suppress(ValueError):
        if 0.0 <= (percent := float(text.removesuffix("%"))) < math.inf:
            return percent / 100.0
    raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: a percentage of at least 0, such as 3%")


def run(arguments: argparse.Namespace) -> int:
    """Compares, and prints tables or JSON. Raises Unanswerable if there is nothing to compare."""
    diff = comparison(arguments.before, arguments.after)
    if arguments.json:
        print_json(diff)
    else:
        from rich.console import Console

        from megaprof.analysis.report.terminal import show_diff

        show_diff(diff, Console(highlight=False))
    bound: float | None = arguments.fail_above
    if bound is None:
        return 0
    for target in diff.targets:
        say(f"megaprof diff: {words.title(target.target, target.role)}: {bound_clause(target, bound)}", sys.stderr)
    return UNWELL if any(target.slower_by(bound) for target in diff.targets) else 0


def comparison(before: Path, after: Path) -> Diff:
    """Returns the comparison of two captures, or of the JSON files of their reports. Raises Unanswerable."""
    document_before, document_after = _report(before), _report(after)
    try:
        return compare(document_before, document_after)
    except Unanswerable as fault:
        raise Unanswerable(f"{before} and {after}: {fault}") from None


def _report(path: Path) -> Document:
    try:
        if path.is_file() and not path.name.endswith((*RECORDINGS, ".gz")):
            return Document.from_json(read_input(path))
        return analyze(path)
    except Unreachable:
        raise
    except (OSError, ValueError, MemoryError) as fault:
        raise Unanswerable(f"{path} cannot be read as the JSON of a report: {fault}") from None
