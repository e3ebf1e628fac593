"""`megaprof trigger DIR`: makes a running job capture, and waits for the files."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from dataclasses import fields
from typing import Any

from megaprof.cli import UsageError, local, print_json, say
from megaprof.config.options import ProfileConfig
from megaprof.config.values import BUILTIN, TARGETS
from megaprof.control.request import OPTIONS, SELECT, STEPS, TIMEOUT, Requester, requester_for
from megaprof.formats.job import Refused
from megaprof.formats.phrases import Unanswerable, counted

EXAMPLES = (
    "megaprof trigger traces --target train_actor",
    "megaprof trigger traces --target train_actor --steps 1 --select 8-15 --with-stack",
    "megaprof trigger traces --target train_actor --json | jq -r .files[]",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=local, help="the job's --profile-dir")
    parser.add_argument("--target", required=True, help=f"what to capture: {' | '.join(TARGETS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of steps (default: %(default)s)")
    parser.add_argument("--select", default=SELECT, help="ranks, as in --profile-select (default: %(default)s)")
    parser.add_argument("--role", help="role, if several share the --profile-dir")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help="longest time for the whole command, in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of the file names, even if nothing was captured",
    )
    for option in fields(ProfileConfig):
        if option.name != "tool" and option.name not in OPTIONS:
            continue
        tools = f"what records: {' | '.join(BUILTIN)} (default: torch)" if option.name == "tool" else None
        keywords: dict[str, Any] = {"help": (tools or option.metadata["help"]).replace("%", "%%")}
        if isinstance(option.default, bool):
            keywords |= {"action": "store_true"}
        else:
            keywords |= {"nargs": "+", "metavar": "NAME"}
        parser.add_argument("--" + option.name.replace("_", "-"), **keywords)


def prepare(arguments: argparse.Namespace) -> Requester:
    """Returns a requester for what the command's arguments ask. Requests nothing yet. Raises Unanswerable if there is
    no such job, and UsageError for arguments that make no sense."""
    fields = {name: getattr(arguments, name) for name in ("role", "steps", "select", "timeout")}
    options = {name: value for name in ("tool", *OPTIONS) if (value := getattr(arguments, name))}
    try:
        return requester_for(arguments.dir, arguments.target, options=options, **fields)
    except Refused as mistake:
        raise UsageError(str(mistake).replace("--profile-", "--")) from None  # the command's option, not the job's


def run(arguments: argparse.Namespace) -> int:
    """Requests a capture, waits, and prints the files, one per line. Raises Unanswerable unless every selected rank
    captured."""
    requester = prepare(arguments)
    # SIGTERM (from timeout, or a batch system) withdraws the request, as Ctrl-C does.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    last_phase, ranks = "", counted(len(requester.ranks), "rank")
    try:
        while (outcome := requester.advance()) is None:
            if (phase := requester.state.partition(" ")[0]) != last_phase:  # not for every change of a number in it
                last_phase = phase
                say(f"{arguments.target} on {ranks}: {requester.state}", sys.stderr)
            time.sleep(requester.pause)
    except (KeyboardInterrupt, SystemExit):
        say(requester.left_behind, sys.stderr)
        raise
    finally:
        requester.withdraw()
    if outcome.steps:
        numbers = ", ".join(map(str, outcome.steps))
        plural = "" if len(outcome.steps) == 1 else "s"
        say(f"{arguments.target}: captured step{plural} {numbers} on {outcome.captured} of {ranks}", sys.stderr)
    if arguments.json:
        print_json(outcome)
    else:
        for file in outcome.files:
            print(file)
    if outcome.reason is not None:
        raise Unanswerable(outcome.reason)
    return 0
