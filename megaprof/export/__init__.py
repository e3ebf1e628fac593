"""``megaprof export DIR --parquet FILE``: timelines as one Parquet file, one row per rank and step."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaprof.cli import UsageError, add_input_option, local, print_json, progress, say, writing
from megaprof.formats.inputs import path_of
from megaprof.formats.phrases import Unanswerable, counted

_MOST_WARNINGS = 20
#: The compute time of a step on each stage.
_QUERY = (
    "SELECT run, pp, count(DISTINCT step) AS steps, median(forward_us + backward_us + combined_us) / 1e3 AS compute_ms "
    "FROM read_parquet('{}') WHERE NOT captured AND NOT failed GROUP BY run, pp ORDER BY ALL"
)
EXAMPLES = (
    "megaprof export traces --parquet llama-70b.parquet --run llama-70b",
    "megaprof export traces --parquet steps.parquet --json | jq .rows",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=path_of, help="directory of timelines, or one timeline")
    parser.add_argument(
        "--parquet", metavar="FILE", type=local, required=True, help="file to write, which must not exist yet"
    )
    parser.add_argument("--run", metavar="NAME", help="name of the run (default: the name in the job's control file)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_input_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exports, and says what was written."""
    from megaprof.export.parquet import export

    out: Path = arguments.parquet
    if arguments.run is not None and not arguments.run.strip():
        raise UsageError(f"--run {arguments.run!r} is not a name")
    if not arguments.dir.exists():
        raise Unanswerable(f"{arguments.dir} does not exist")
    try:
        with progress("exporting") as advance, writing("--parquet", out, arguments.dir):
            exported = export(arguments.dir, out, run=arguments.run, progress=advance)
    except ValueError as mistake:
        raise UsageError(f"--parquet {mistake}") from None
    if arguments.json:
        print_json(exported)
        return 0
    rows, files = counted(exported.rows, "row"), counted(exported.files, "file")
    say(f"{out}: {rows} from {files}, {exported.bytes / 1e6:.1f} MB")
    quoted = str(out.absolute()).replace("'", "''")
    say(f"A query to start with, for DuckDB: {_QUERY.format(quoted)}")
    if exported.cut:
        cut_files = counted(exported.cut, "file")
        say(f"{cut_files} cut off inside a record, as happens if the job is still running or was killed")
    for warning in exported.warnings[:_MOST_WARNINGS]:
        say(f"! {warning}")
    if len(exported.warnings) > _MOST_WARNINGS:
        say(f"! and {len(exported.warnings) - _MOST_WARNINGS:,} more like it")
    return 0
