"""``megaprof hang DIR``: which ranks keep a job waiting, or kept it waiting until it ended, from torch's flight
recorders. It reads dumps, or the files that the ranks of a job wrote themselves."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaprof.analysis.hang import Hang, hang_of
from megaprof.analysis.report.text.sentences import hang_sentences
from megaprof.cli import UNWELL, local, print_json, say
from megaprof.cli.look import collectives, ending_sentences, look_at, verdict, waiting_clauses
from megaprof.control.directory import find_job
from megaprof.formats.job import CONTROL
from megaprof.formats.phrases import Unanswerable

EXAMPLES = (
    "megaprof hang traces   # the --profile-dir of a job that hangs",
    "megaprof hang /tmp/dumps   # where TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/tmp/dumps/rank_ pointed to",
    "megaprof hang /tmp/dumps --json | jq .culprits[].rank",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"Exit code: {UNWELL} if something keeps the job waiting, or kept it waiting until it ended; 0 if not; 1 if "
        "there are no dumps, and no job that stood still."
    )
    parser.add_argument(
        "dir",
        metavar="DIR",
        type=local,
        help="a job's --profile-dir, or a directory with the dumps of one hang: one per rank, with names that end in "
        "the rank, pickled (as torch's watchdog writes them) or JSON",
    )
    parser.add_argument("--role", help="role, if several share the --profile-dir")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints which ranks keep the job waiting. Raises Unanswerable if no dump can be read."""
    warnings: list[str] = []
    if (arguments.dir / CONTROL).is_dir():
        hang, warnings = _of_job(arguments.dir, arguments.role)
    else:
        try:
            hang = hang_of(path for path in arguments.dir.iterdir() if path.is_file())
        except Unanswerable as fault:
            raise Unanswerable(f"{arguments.dir}: {fault}") from None
    if arguments.json:
        print_json(hang)
    else:
        for line in (*(hang_sentences(hang) if hang.ranks else ()), *warnings):
            say(line)
    over = bool(hang.standstills) and all(each.outcome == "went_on" for each in hang.standstills)
    return UNWELL if hang.culprits or hang.unended or (warnings and not over) else 0


def _of_job(directory: Path, role: str | None) -> tuple[Hang, list[str]]:
    """Returns what the ranks of a job wrote about their collectives, and further lines.

    If their collectives show no culprit, the lines say where the job stands or stood still, as `megaprof status` and
    the report say it: torch does not record exchanges of gloo, and a rank may stand still in its own work.
    """
    view = look_at(find_job(directory, role))
    hang = collectives(view)
    if hang.culprits or hang.unended:
        return hang, []
    if view.silence is None:
        whole = [str(verdict(view))] if view.state == "hangs" else []
        lines = [f"! {clause}" for clause in [*waiting_clauses(view)] or whole]
    else:
        lines = [f"! {sentence}" for sentence in ending_sentences(view)]
    if not hang.ranks and not lines:
        if view.silence is None:
            raise Unanswerable(f"no rank of the job in {directory} has reported that it stands still")
        raise Unanswerable(f"{view.silence}, and its files show no step in which it stood still")
    return hang, lines
