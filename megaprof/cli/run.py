"""``megaprof run ... -- COMMAND``: profiles a host without editing it.

The command replaces this process (``exec``), so its exit code, signals, arguments and ``__main__`` are its own. The
configuration of the profiling is in its environment, and so in the environment of every process that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from megaprof.autoload.arming import environment
from megaprof.cli import UsageError
from megaprof.config.arguments import add_profile_args, config_from_args
from megaprof.config.options import flag
from megaprof.formats.phrases import Unanswerable

DESCRIPTION = """Run COMMAND with profiling, without editing it. COMMAND is a launcher (torchrun, srun, ray job submit,
bash), a Python script, or -m and a module. The hooks are installed in each process that asks Megatron-Core for its
schedule. It also works under torchrun: torchrun ... -m megaprof run --profile-target ... -- pretrain_gpt.py ..."""

EXAMPLES = (
    "megaprof run --profile-target train_actor --profile-dir traces --profile-select per-stage -- torchrun train.py",
    "megaprof run --profile-target train_actor --profile-tool timeline --profile-dir traces -- srun python train.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.usage = "megaprof run [--profile-... VALUE] -- COMMAND [ARGUMENT ...]"
    parser.add_argument(
        "--ray-runtime-env",
        action="store_true",
        help="run nothing; print a runtime_env as JSON that does the same in every worker of a Ray cluster",
    )
    add_profile_args(parser)
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def run(args: argparse.Namespace) -> int:
    """Replaces this process with the command, so it returns only with ``--ray-runtime-env``. Raises UsageError for
    arguments that make no sense, and Unanswerable if the command cannot be started."""
    try:
        config = config_from_args(args)
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None
    if args.ray_runtime_env:
        from megaprof.autoload.ray import runtime_env

        print(json.dumps(runtime_env(config)))
        return 0
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise UsageError(
            f"no command; put it after '--', e.g. megaprof run {flag('target')} train_actor {flag('dir')} traces "
            "-- torchrun ... pretrain_gpt.py ..."
        )
    if not config.enabled:
        print(f"megaprof run: no {flag('target')}, so nothing is profiled", file=sys.stderr)
    program, arguments = resolve(command)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, arguments, environment(config, os.environ))
    except OSError as fault:
        raise Unanswerable(f"{command[0]}: {fault.strerror}") from None


def resolve(command: list[str]) -> tuple[str, list[str]]:
    """Returns the program to execute and its arguments, which begin with the name that it is called by.

    ``-m MODULE`` and a file that ends in ``.py`` run under this interpreter, with this interpreter's options.
    Raises UsageError if there is no such program.
    """
    program_name = command[0]
    if program_name == "-m" or (program_name.endswith(".py") and os.path.isfile(program_name)):
        # This interpreter's options are the words before ``-m megaprof``, or before the script.
        leading = sys.orig_argv[1 : len(sys.orig_argv) - (len(sys.argv) - 1)]
        options = leading[:-2] if leading[-2:-1] == ["-m"] else leading[:-1]
        return sys.executable, [sys.executable, *options, *command]
    program = shutil.which(program_name)
    if program is None:
        raise UsageError(f"{program_name}: neither a program on the PATH nor an existing Python script")
    return program, command
