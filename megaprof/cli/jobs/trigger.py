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

from megaprof.cli import CommandError, UsageError, say
from megaprof.config.options import ProfileConfig
from megaprof.config.tools import BUILTIN
from megaprof.config.windows import TARGETS
from megaprof.control.job import NoJob, find_job
from megaprof.control.requester import Outcome, Requester, selected_ranks
from megaprof.control.requests import OPTIONS, check_draft, new_request
from megaprof.formats.job.requests import Refused
from megaprof.formats.phrases import counted

#: What is asked for unless the user says otherwise.
STEPS, SELECT, TIMEOUT = 2, "per-stage", 300.0
_LOOK_SECONDS = 0.2
EXAMPLES = (
    "megaprof trigger traces --target train_actor",
    "megaprof trigger traces --target train_actor --steps 1 --select 8-15 --with-stack",
    "megaprof trigger traces --target train_actor --json | jq -r .files[]",
)


@dataclass(frozen=True)
class TriggerAnswer:
    """The result of a request, as ``--json`` prints it."""

    version: int
    """The version of this object: 1."""
    request: str
    """The id of the request."""
    target: str
    """The target that was asked for."""
    role: str | None
    """The role that was asked for; None if none was named."""
    selected: tuple[int, ...]
    """The ranks that were asked, by number."""
    captured: int
    """How many of them captured."""
    steps: tuple[int, ...]
    """The numbers of the captured steps."""
    files: tuple[str, ...]
    """What was written, below the directory as it was given."""
    reason: str | None
    """Why not every selected rank captured the steps; None if all did."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="the job's --profile-dir")
    parser.add_argument("--target", required=True, help=f"what to capture: {' | '.join(TARGETS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="how many steps (default: %(default)s)")
    parser.add_argument("--select", default=SELECT, help="which ranks, as in --profile-select (default: %(default)s)")
    parser.add_argument("--role", help="whose, where several roles share a job")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="S", help="seconds to wait altogether (default: %(default)g)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object in place of the files, also where nothing was captured",
    )
    for option in fields(ProfileConfig):
        if option.name != "tool" and option.name not in OPTIONS:
            continue
        told = f"what records: {' | '.join(BUILTIN)} (default: torch)" if option.name == "tool" else None
        keywords: dict[str, Any] = {"help": (told or option.metadata["help"]).replace("%", "%%")}
        if isinstance(option.default, bool):
            keywords |= {"action": "store_true"}
        else:
            keywords |= {"nargs": "+", "metavar": "NAME"}
        parser.add_argument("--" + option.name.replace("_", "-"), **keywords)


@dataclass(frozen=True)
class Asking:
    """A capture that a job can be asked for. A caller that stops looking before there is an answer must withdraw it."""

    directory: Path
    """The job's save directory, as it was given."""
    requester: Requester
    """Asks for it."""

    @property
    def pause(self) -> float:
        """Seconds from one look at the answers to the next."""
        return max(_LOOK_SECONDS, len(self.requester.ranks) / 5000)

    def look(self) -> TriggerAnswer | None:
        """Looks once at what the ranks say; the first look asks. Returns the answer when there is one."""
        try:
            outcome = self.requester.advance()
        except Refused as refusal:
            answered = not self.requester.missing
            return self._answer(f"refused: {refusal}" if answered else str(refusal))
        return None if outcome is None else self._answer(outcome.reason, outcome)

    def _answer(self, reason: str | None, outcome: Outcome | None = None) -> TriggerAnswer:
        """Returns the answer; ``outcome`` is None if nothing was captured."""
        files = tuple(str(self.directory / file) for file in outcome.files) if outcome else ()
        captured, steps = (outcome.ranks, outcome.steps) if outcome else (0, ())
        request, ranks = self.requester.request, self.requester.ranks
        return TriggerAnswer(1, request.id, request.target, request.role, ranks, captured, steps, files, reason)


def wanted(
    directory: Path,
    target: str,
    *,
    role: str | None = None,
    steps: int = STEPS,
    select: str = SELECT,
    timeout: float = TIMEOUT,
    options: dict[str, Any] | None = None,
) -> Asking:
    """Returns a capture that the job in ``directory`` can be asked for. Nothing is asked yet. Raises CommandError if
    there is no such job, and UsageError for arguments that make no sense."""
    asked: dict[str, Any] = {
        "role": role,
        "steps": steps,
        "select": select,
        "options": options or {},
        "timeout": timeout,
    }
    try:
        check_draft(target, **asked)
    except Refused as mistake:
        raise UsageError(_as_options(mistake)) from None
    try:
        job = find_job(directory, role)
        if (silent := job.silence()) is not None:
            raise NoJob(silent)
    except NoJob as fault:
        raise CommandError(str(fault)) from None
    try:
        request = new_request(job.run, target, **asked)
        return Asking(directory, Requester(job, request, selected_ranks(job.run, request)))
    except Refused as mistake:
        raise UsageError(_as_options(mistake)) from None


def run(arguments: argparse.Namespace) -> int:
    """Asks, waits, and prints the files, one per line. Raises CommandError unless every selected rank captured."""
    asking = wanted(
        arguments.dir,
        arguments.target,
        role=arguments.role,
        steps=arguments.steps,
        select=arguments.select,
        timeout=arguments.timeout,
        options={name: value for name in ("tool", *OPTIONS) if (value := getattr(arguments, name))},
    )
    # Whoever ends the command (timeout, a batch system) wants the capture no more than with Ctrl-C.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    requester, told = asking.requester, ""
    ranks = counted(len(requester.ranks), "rank")
    try:
        while (answer := asking.look()) is None:
            if requester.phase != told:  # not for every number in its state
                told = requester.phase
                say(f"{arguments.target} on {ranks}: {requester.state}", sys.stderr)
            time.sleep(asking.pause)
    except (KeyboardInterrupt, SystemExit):
        say(requester.left_behind, sys.stderr)
        raise
    finally:
        requester.withdraw()
    if answer.steps:
        numbers = ", ".join(map(str, answer.steps))
        plural = "" if len(answer.steps) == 1 else "s"
        say(f"{arguments.target}: captured step{plural} {numbers} on {answer.captured} of {ranks}", sys.stderr)
    if arguments.json:
        print(json.dumps(asdict(answer)))
    else:
        for file in answer.files:
            print(file)
    if answer.reason is not None:
        raise CommandError(answer.reason)
    return 0


def _as_options(mistake: Refused) -> str:
    """Returns a refusal with the command's option instead of the request's field or the job's option."""
    return f"--{mistake}" if mistake.field else str(mistake).replace("--profile-", "--")
