"""``megaprof nsys``: the ``nsys profile ...`` that goes before a training command."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys

from megaprof.config.arguments import add_profile_args, config_from_args

DESCRIPTION = """Print the 'nsys profile' command line for a configuration: the same --profile-... options (or
MEGAPROF_ variables) as the training gets. In use:
torchrun ... --no-python $(megaprof nsys --profile-...) python train.py ... --profile-..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("-o", "--output", help="nsys's own --output (default: a file per rank in --profile-dir)")
    parser.add_argument(
        "--shutdown", action="store_true", help="end nsys, not the training, after the last window of a process"
    )
    parser.add_argument("--models", type=int, default=1, help="models with hooks in a process, for --shutdown")
    parser.add_argument(
        "--ray", choices=("worker", "controller"), help="print Ray's nsight options as JSON instead of a command line"
    )
    add_profile_args(parser)


def run(args: argparse.Namespace) -> int:
    from megaprof.recorders import nsys_command as nsys

    try:
        config = config_from_args(args)
        if args.ray == "worker":
            env = nsys.ray_runtime_env(config, output=args.output, shutdown=args.shutdown, models=args.models)
            print(json.dumps(env, indent=2))
        elif args.ray == "controller":
            print(json.dumps(nsys.controller_options(config, output=args.output), indent=2))
        else:
            command = nsys.command(config, output=args.output, shutdown=args.shutdown, models=args.models)
            print(" ".join(map(_quoted, command)))
    except ValueError as mistake:
        print(f"megaprof nsys: {mistake}", file=sys.stderr)
        return 2
    return 0


def _quoted(argument: str) -> str:
    """For a shell, and unchanged where it can be: what ``$(...)`` inserts is not unquoted again. ``%q{RANK}`` is no
    brace expansion, which needs a comma or two dots."""
    return argument if re.fullmatch(r"[\w./%{}=@:+,-]+", argument) else shlex.quote(argument)
