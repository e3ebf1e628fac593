"""``megaprof export DIR --parquet OUT``: timelines as a Parquet dataset, one row per rank and step."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megaprof.cli import CommandError, UsageError, say
from megaprof.cli.inputs import add_input_option, heed_input_option, progress, writing
from megaprof.formats.phrases import counted
from megaprof.formats.remote import place

_MOST_WARNINGS = 20
#: What a step takes on each stage.
_QUERY = (
    "SELECT run, pp, count(DISTINCT step) AS steps, median(forward_us + backward_us + combined_us) / 1e3 AS compute_ms "
    "FROM read_parquet('{}', hive_partitioning = true) WHERE NOT captured AND NOT failed GROUP BY run, pp ORDER BY ALL"
)
EXAMPLES = (
    "megaprof export traces --parquet history --run llama-70b",
    "megaprof export traces --parquet history --json | jq .rows",
)


@dataclass(frozen=True)
class Answer:
    """What was exported: what ``--json`` prints."""

    version: int
    """Of this shape: 1."""
    out: str
    """The directory of the dataset, as it was given."""
    runs: tuple[str, ...]
    """The names of the runs that were written."""
    files: int
    """Timelines that were read."""
    rows: int
    """Rows that were written, one for each rank and step."""
    partitions: int
    """Partitions that were written."""
    kept: int
    """Partitions of an earlier export that hold more than the timelines still do, and stay."""
    bytes: int
    """Bytes that were written."""
    cut: int
    """Files that end inside a record, as those of a job do that runs or was killed."""
    warnings: tuple[str, ...]
    """What must be known about single files, in sentences."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=place, help="directory of timelines, or one timeline")
    parser.add_argument(
        "--parquet",
        metavar="OUT",
        type=Path,
        required=True,
        help="directory of the dataset, partitioned by run, stage and hour; an earlier one is added to",
    )
    parser.add_argument("--run", metavar="NAME", help="name of the run (default: what the job's control file says)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")
    add_input_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export, and say what was written."""
    heed_input_option(arguments)
    from megaprof.analysis.convert.export import NothingToExport, export

    out: Path = arguments.parquet
    if arguments.run is not None and not arguments.run.strip():
        raise UsageError(f"--run {arguments.run!r} is no name")
    if not arguments.dir.exists():
        raise CommandError(f"{arguments.dir} does not exist")
    _allow_many_files()
    try:
        with progress("exporting") as advance, writing("--parquet", out, arguments.dir):
            exported = export(arguments.dir, out, run=arguments.run, progress=advance)
    except NothingToExport as fault:
        raise CommandError(str(fault)) from None
    except ValueError as mistake:
        raise UsageError(f"--parquet {mistake}") from None
    if arguments.json:
        print(json.dumps(asdict(Answer(**{**vars(exported), "version": 1, "out": str(out)}))))
        return 0
    say(
        f"{out}: {counted(exported.rows, 'row')} from {counted(exported.files, 'file')}, "
        f"{counted(exported.partitions, 'partition')}, "
        f"{exported.bytes / 1e6:.1f} MB; run {', '.join(exported.runs)}"
    )
    files = str(out.absolute() / "*/*/*/*.parquet").replace("'", "''")
    say(f"A query to begin with, for DuckDB: {_QUERY.format(files)}")
    if exported.kept:
        kept = counted(exported.kept, "partition")
        say(f"{kept} kept unchanged: more rows are there than the timelines still hold")
    if exported.cut:
        cut = counted(exported.cut, "file")
        say(f"{cut} cut off inside a record, as happens in a job that still runs or was killed")
    for warning in exported.warnings[:_MOST_WARNINGS]:
        say(f"! {warning}")
    if len(exported.warnings) > _MOST_WARNINGS:
        say(f"! and {len(exported.warnings) - _MOST_WARNINGS:,} more like it")
    return 0


def _allow_many_files() -> None:
    """A stage has a file open for each hour; the soft limit of most systems, 1,024, is six weeks."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
