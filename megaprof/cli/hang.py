"""``megaprof hang DIR``: which ranks keep a job waiting, from dumps of torch's flight recorder."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megaprof.cli import UNWELL, CommandError, say

EXAMPLES = (
    "megaprof hang /tmp/dumps   # where TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/tmp/dumps/rank_ pointed to",
    "megaprof hang /tmp/dumps --json | jq .culprits[].rank",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Exit code: {UNWELL}, something keeps the job waiting; 0, nothing does; 1, there are no dumps."
    parser.add_argument(
        "dir",
        metavar="DIR",
        type=Path,
        help="directory of the dumps of one hang, one for each rank, whose names end in the rank: pickled as torch's "
        "watchdog writes them, or JSON",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def run(arguments: argparse.Namespace) -> int:
    """Print who keeps the job waiting. Raises CommandError where no dump can be read."""
    from megaprof.analysis.collectives.dumps import BadDump
    from megaprof.analysis.collectives.hang import hang_of
    from megaprof.analysis.collectives.sentences import sentences

    try:
        hang = hang_of(path for path in arguments.dir.iterdir() if path.is_file())
    except (BadDump, OSError) as fault:
        raise CommandError(f"{arguments.dir}: {fault}") from None
    if arguments.json:
        print(json.dumps(asdict(hang)))
    else:
        for line in sentences(hang):
            say(line)
    return UNWELL if hang.culprits or hang.unended else 0
