"""Nsight Systems. ``megaprof nsys`` prints the ``nsys profile ...`` to put in front of a training command. `files`
reads what nsys recorded.

Option names and values are those of ``nsys profile`` (Nsight Systems user guide, "CLI Profile Command Switch Options").
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from megaprof.artifacts.places import is_remote
from megaprof.autoload.ray import runtime_env
from megaprof.cli import UsageError, say
from megaprof.config.arguments import add_profile_args, config_from_args
from megaprof.config.options import ProfileConfig, flag
from megaprof.config.values import TRAIN_OVERALL
from megaprof.formats.metadata import NSYS_WINDOW
from megaprof.formats.ranges import DOMAIN

#: The APIs to trace. ``osrt`` is left out: operating system calls make up most of a report, and say little here.
TRACE = "cuda,nvtx,cudnn,cublas"
CONTROLLER_TRACE = "nvtx,osrt"
#: The ways to open a capture range, as nsys names them. The first is the default.
CAPTURES = ("cudaProfilerApi", "nvtx")
#: nsys replaces %q{NAME} by an environment variable, %h by the host's name and %p by the process id. It appends the
#: number of the capture range. If the variable is not set, nsys fails.
RANK_NAME = "nsys.rank%q{RANK}.%h.%p"
WORKER_NAME = "nsys.worker.%h.%p"
CONTROLLER_NAME = "nsys.controller.%h.%p"
#: Text that every shell passes on unchanged. ``%q{RANK}`` is no brace expansion: that needs a comma or two dots.
PLAIN = re.compile(r"[\w./%{}=@:+,-]+")

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
        choices=CAPTURES,
        default=CAPTURES[0],
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
        controller = controller_options(config, output=args.output)
    if args.ray != "controller":
        choices = {"ray": bool(args.ray), "shutdown": args.shutdown, "models": args.models, "capture": args.capture}
        worker = options(config, output=args.output, **choices)
    if args.ray is None:
        if "%q{RANK}" in worker["output"] and "RANK" not in os.environ:
            where = "put this after torchrun, or give --output"
            say(f"megaprof nsys: RANK is not set here. nsys needs it when it starts: {where}", sys.stderr)
        words = ["nsys", "profile", *(f"--{name}={value}" for name, value in worker.items())]
        # Unchanged if possible: a shell does not unquote the text that ``$(...)`` inserts.
        return " ".join(word if PLAIN.fullmatch(word) else shlex.quote(word) for word in words)
    environments: dict[str, Any] = {"worker": {"nsight": worker}, "controller": controller}
    if args.ray == "all":
        environments["controller"] = {"nsight": controller, "env_vars": config.to_env()}
        environments["worker"] = runtime_env(config, environments["worker"])
    return json.dumps(environments if args.ray == "all" else environments[args.ray], indent=2)


def options(
    config: ProfileConfig,
    *,
    ray: bool = False,
    output: str | None = None,
    shutdown: bool = False,
    models: int = 1,
    capture: str = CAPTURES[0],
) -> dict[str, str]:
    """Returns the options of ``nsys profile`` for every rank, by name. Raises ValueError if they make no sense.

    ``ray``: as a Ray actor takes them in ``runtime_env={"nsight": ...}``. Ray writes into its own log directory unless
    the output path is absolute. It starts the worker before its ``RANK`` is set, so the file name has only host and
    process; the ``.nsys.json`` next to the reports says which rank it was. The others are options of the command.
    """
    path = _output(config, output, WORKER_NAME if ray else RANK_NAME, ray=ray)
    if models < 1:
        raise ValueError(f"models={models} is not valid; it must be at least 1")
    end = "repeat"
    if shutdown:
        count = windows(config)
        if not count:  # 0: all windows are requested while the job runs
            raise ValueError(
                f"shutdown: the number of windows is not known with a {flag('schedule')} without an end, "
                f"{flag('role_select')}, {flag('discrete')}, {TRAIN_OVERALL} beside other targets, or captures on "
                f"demand alone; set {flag('steps')} alone, or leave shutdown out"
            )
        end = f"repeat-shutdown:{count * models}"
    found = {"trace": TRACE, "capture-range": capture}
    if capture == "nvtx":
        # nsys matches the exact name, then its domain. The variable has it look at unregistered names, too.
        found |= {"nvtx-capture": f"{NSYS_WINDOW}@{DOMAIN}", "env-var": "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"}
    found["capture-range-end"] = end
    if shutdown:
        found["kill"] = "none"  # by default, nsys ends the program that it profiles when it shuts down
    found |= {"sample": "none", "cpuctxsw": "none", "cuda-graph-trace": "graph", "force-overwrite": "true"}
    if config.profile_memory:
        found["cuda-memory-usage"] = "true"
    if config.with_stack:
        found["python-sampling"] = "true"
    return {**found, "o" if ray else "output": path}


def windows(config: ProfileConfig) -> int | None:
    """Returns how many windows one process captures for one model. None if the configuration does not say: with a
    schedule for the whole run, ranks per role, a window for each role's work, or targets that may be on one step."""
    if config.roles or config.discrete or (TRAIN_OVERALL in config.target and len(config.target) > 1):
        return None
    counts = [config.plan(target).windows for target in config.target]
    limits = [count for count in counts if count is not None]
    return sum(limits) if len(limits) == len(counts) else None


def controller_options(config: ProfileConfig, *, output: str | None = None) -> dict[str, str]:
    """Returns Ray's nsight options for the controller, which has no GPU and no windows. nsys records NVTX ranges
    and system calls from start to end."""
    path = _output(config, output, CONTROLLER_NAME, ray=True)
    return {"trace": CONTROLLER_TRACE, "sample": "none", "cpuctxsw": "none", "force-overwrite": "true", "o": path}


def _output(config: ProfileConfig, output: str | None, name: str, *, ray: bool) -> str:
    """Returns ``output``, or else a file called ``name`` in the save directory. Raises ValueError if nsys captures
    nothing, or cannot write there."""
    if not config.enabled or (config.steps_are_none and not config.listens):
        raise ValueError(f"there is nothing to capture: set {flag('target')}, e.g. to train_actor, and steps")
    if "nsys" not in config.tool:
        raise ValueError(f"{flag('tool')} {' '.join(config.tool)} opens no capture range: use {flag('tool')} nsys")
    if output is not None and is_remote(output):
        raise ValueError(f"output {output!r} is remote, and nsys writes local files only: give a directory")
    if not output and is_remote(str(config.dir)):
        raise ValueError(
            f"{flag('dir')} {config.dir} is remote, and nsys writes local files only: give a local --output, "
            "e.g. /tmp/nsys/rank%q{RANK}.%p"
        )
    path = output or str(Path(str(config.dir)).absolute() / name)
    if ray and not PLAIN.fullmatch(path):  # Ray joins them to a shell command, and only some of its versions quote them
        raise ValueError(f"output {path!r} has characters that Ray's shell would interpret; use letters, digits, ./_-%")
    return path
