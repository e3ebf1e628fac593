"""`megaprof trigger DIR`: make a running job capture, and wait for the files."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megaprof.cli import CommandError, UsageError
from megaprof.config.options import ProfileConfig
from megaprof.config.windows import TARGETS
from megaprof.control.job import NoJob, find_job
from megaprof.control.requester import Outcome, Requester, selected_ranks
from megaprof.control.requests import OPTIONS, new_request
from megaprof.formats.checks import counted
from megaprof.formats.job.requests import Refused

_LOOK_SECONDS = 0.2
EXAMPLES = (
    "megaprof trigger traces --target train_actor",
    "megaprof trigger traces --target train_actor --steps 1 --select 8-15 --with-stack",
    "megaprof trigger traces --target train_actor --json | jq -r .files[]",
)


@dataclass(frozen=True)
class Answer:
    """What became of a request: what ``--json`` prints."""

    version: int
    """Of this shape: 1."""
    request: str
    """The request's name, which is also that of its files."""
    target: str
    """What was to be captured."""
    role: str | None
    """Whose; None where the job has no roles."""
    selected: tuple[int, ...]
    """The ranks that were asked, by number."""
    captured: int
    """How many of them captured."""
    steps: tuple[int, ...]
    """The numbers of the captured steps."""
    files: tuple[str, ...]
    """What was written, below the directory as it was given."""
    reason: str | None
    """Why not every selected rank captured the steps; None when all did."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="the job's --profile-dir")
    parser.add_argument("--target", required=True, help=f"what to capture: {' | '.join(TARGETS)}")
    parser.add_argument("--steps", type=int, default=2, help="how many steps (default: %(default)s)")
    parser.add_argument(
        "--select", default="per-stage", help="which ranks, as in --profile-select (default: %(default)s)"
    )
    parser.add_argument("--role", help="whose, where several roles share a job")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds to wait altogether (default: %(default)g)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object in place of the files, also where nothing was captured",
    )
    for option in fields(ProfileConfig):
        if option.name != "tool" and option.name not in OPTIONS:
            continue
        keywords: dict[str, Any] = {"help": option.metadata["help"].replace("%", "%%")}
        if isinstance(option.default, bool):
            keywords |= {"action": "store_true"}
        else:
            keywords |= {"nargs": "+", "metavar": "NAME"}
        parser.add_argument("--" + option.name.replace("_", "-"), **keywords)


def run(arguments: argparse.Namespace) -> int:
    """Ask, wait, and print the files, one a line. Raises CommandError where there are none, or not all."""
    try:
        job = find_job(arguments.dir, arguments.role)
        if (silent := job.silence()) is not None:
            raise NoJob(silent)
    except NoJob as fault:
        raise CommandError(str(fault)) from None
    options = {name: value for name in ("tool", *OPTIONS) if (value := getattr(arguments, name))}
    try:
        request = new_request(
            job.run,
            arguments.target,
            role=arguments.role,
            steps=arguments.steps,
            select=arguments.select,
            options=options,
            timeout=arguments.timeout,
        )
        ranks = selected_ranks(job.run, request)
    except Refused as mistake:
        raise UsageError(_as_options(str(mistake))) from None
    # Whoever ends the command (timeout, a batch system) wants the capture no more than with Ctrl-C.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def answer(reason: str | None, outcome: Outcome | None = None) -> None:
        if arguments.json:
            files = tuple(str(arguments.dir / file) for file in outcome.files) if outcome else ()
            captured, steps = (outcome.ranks, outcome.steps) if outcome else (0, ())
            told = Answer(1, request.id, request.target, request.role, tuple(ranks), captured, steps, files, reason)
            print(json.dumps(asdict(told)))

    try:
        requester = Requester(job, request, ranks)
    except Refused as refusal:
        answer(str(refusal))
        raise CommandError(str(refusal)) from None
    told = ""
    try:
        while (outcome := requester.advance()) is None:
            if requester.state.partition(" ")[0] != told:  # not for every number in it
                told = requester.state.partition(" ")[0]
                _say(f"{arguments.target} on {counted(len(ranks), 'rank')}: {requester.state}")
            time.sleep(max(_LOOK_SECONDS, len(ranks) / 5000))
    except Refused as refusal:
        why = str(refusal) if requester.missing else f"refused: {refusal}"
        answer(why)
        raise CommandError(why) from None
    except (KeyboardInterrupt, SystemExit):
        _say(requester.left_behind)
        raise
    finally:
        requester.withdraw()
    if outcome.steps:
        numbers = ", ".join(map(str, outcome.steps))
        plural = "" if len(outcome.steps) == 1 else "s"
        on = f"{outcome.ranks} of {counted(len(ranks), 'rank')}"
        _say(f"{arguments.target}: captured step{plural} {numbers} on {on}")
    answer(outcome.reason, outcome)
    for file in () if arguments.json else outcome.files:
        print(arguments.dir / file)
    if outcome.reason is not None:
        raise CommandError(outcome.reason)
    return 0


def _as_options(mistake: str) -> str:
    """The job's words for it are the names of a request's fields and of its own options."""
    word, _, rest = mistake.partition(" ")
    return f"--{word} {rest}" if word in ("steps", "timeout", "select", "role") else mistake.replace("--profile-", "--")


def _say(line: str) -> None:
    print("".join(c if c.isprintable() else "\ufffd" for c in line), file=sys.stderr, flush=True)
