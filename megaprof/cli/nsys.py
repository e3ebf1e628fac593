"""``megaprof nsys``: prints the ``nsys profile ...`` to put in front of a training command."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from megaprof.autoload.ray import runtime_env
from megaprof.cli import UsageError, say
from megaprof.config.arguments import add_profile_args, config_from_args
from megaprof.config.options import ProfileConfig
from megaprof.recorders import nsys

DESCRIPTION = """Print the 'nsys profile' command line for a configuration. Give it the same --profile-... options (or
MEGAPROF_ variables) as the training. For example:
torchrun ... --no-python $(megaprof nsys --profile-...) python train.py ... --profile-..."""

EXAMPLES = ("megaprof nsys --profile-tool nsys --profile-target train_actor --profile-dir traces",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("-o", "--output", help="--output of nsys (default: one file per rank in --profile-dir)")
    parser.add_argument(
        "--shutdown",
        action="store_true",
        help="end nsys, but not the training, after the last window of a process (recommended: files come early)",
    )
    parser.add_argument(
        "--models", type=int, default=1, help="number of models with hooks in a process, for --shutdown (default: 1)"
    )
    parser.add_argument(
        "--capture",
        choices=nsys.CAPTURES,
        default=nsys.CAPTURES[0],
        help="what opens a window: cudaProfilerStart, or an NVTX range, which needs no CUDA (default: cudaProfilerApi)",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="all",
        choices=("all", "worker", "controller"),
        help="print Ray runtime environments for workers and controller as JSON, or only the nsight options of one of "
        "them",
    )
    add_profile_args(parser)


def run(args: argparse.Namespace) -> int:
    try:
        config = config_from_args(args)
        print(_text(config, args))
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None
    if not args.shutdown:
        killed = "nsys writes most files when the process ends, and none if nsys is killed"
        say(f"megaprof nsys: without --shutdown, {killed}", sys.stderr)
    # If its directory is missing, nsys writes into the temporary directory.
    directory = Path(args.output).parent if args.output else Path(str(config.dir))
    if "%" not in str(directory):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            why = f"it cannot be created here: {fault.strerror or fault}"
            say(f"megaprof nsys: create {directory} where the job runs, before it starts; {why}", sys.stderr)
    return 0


def _text(config: ProfileConfig, args: argparse.Namespace) -> str:
    """Returns the requested output: a command line, or JSON with ``--ray``. Raises ValueError."""
    if args.ray == "all" and args.output is not None:
        raise ValueError(
            "--output is one name, but --ray prints two environments: use --ray worker or --ray controller"
        )
    controller = worker = {}
    if args.ray in ("controller", "all"):
        controller = nsys.controller_options(config, output=args.output)
    if args.ray != "controller":
        choices = {"ray": bool(args.ray), "shutdown": args.shutdown, "models": args.models, "capture": args.capture}
        worker = nsys.options(config, output=args.output, **choices)
    if args.ray is None:
        if "%q{RANK}" in worker["output"] and "RANK" not in os.environ:
            where = "put this after torchrun, or give --output"
            say(f"megaprof nsys: RANK is not set here. nsys needs it when it starts: {where}", sys.stderr)
        words = ["nsys", "profile", *(f"--{name}={value}" for name, value in worker.items())]
        # Unchanged if possible: a shell does not unquote the text that ``$(...)`` inserts.
        return " ".join(word if nsys.PLAIN.fullmatch(word) else shlex.quote(word) for word in words)
    environments: dict[str, Any] = {"worker": {"nsight": worker}, "controller": controller}
    if args.ray == "all":
        environments["controller"] = {"nsight": controller, "env_vars": config.to_env()}
        environments["worker"] = runtime_env(config, environments["worker"])
    return json.dumps(environments if args.ray == "all" else environments[args.ray], indent=2)
