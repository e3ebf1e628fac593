"""The command ``megaprof``, and what its subcommands share. Each of these is a module, here or in a folder of its
own, and imported only if used.

A subcommand's module has ``EXAMPLES`` (command lines that its help shows), ``add_arguments(parser)`` and
``run(arguments) -> exit code``. It raises `Unanswerable` if its input is not sufficient.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import NoReturn, TextIO

import msgspec

from megaprof.formats import inputs
from megaprof.formats.inputs import RemotePath, Unreachable, path_of
from megaprof.formats.phrases import Unanswerable, json_of, printable
from megaprof.version import __version__

#: The module of each command, and what the command does.
COMMANDS = {
    "demo": ("demo", "run a small real Megatron-Core pipeline on the CPU, capture it, and report on it"),
    "diff": ("cli.diff", "compare two captures stage by stage"),
    "export": ("export", "write timelines as a Parquet file, for a query engine"),
    "hang": ("cli.hang", "name the ranks that keep a job waiting, and the collective, from flight recorders"),
    "mcp": ("agents", "serve an agent through the Model Context Protocol"),
    "merge": ("cli.merge", "put all captured ranks of a step on one Perfetto timeline"),
    "nsys": ("nsys", "print the nsys command line to put before a training command"),
    "open": ("cli.open", "open a captured step in Perfetto's UI in the browser"),
    "rehearse": ("rehearse.cli", "predict the step and the memory of a whole job from one device"),
    "report": ("cli.report", "say which pipeline stage is slow, and why, from traces and timelines"),
    "run": ("cli.run", "run a training command with profiling, without editing it"),
    "status": ("cli.status", "show what a running job is doing, and which rank it waits for when it hangs"),
    "trigger": ("cli.trigger", "make a running job capture some steps, and wait for the files"),
    "tune": ("tune", "run your training command with the layouts that should be faster"),
    "ui": ("ui", "show captures and running jobs in the browser"),
    "what-if": ("cli.what_if", "predict the effect of another layout, other microbatches or another packing"),
    "watch": ("cli.watch", "show a running job's stages as a live table"),
}
#: The exit codes beside 0, with the meanings in docs/scripts.md, which never change.
FAILED, USAGE, UNWELL, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143
_INPUT_LIMIT = "--max-input-mib"
_HELP_WIDTH = 78
#: Packages that are installed with an extra, and the name of that extra.
_PIP_EXTRAS = {
    **dict.fromkeys(("jinja2", "markupsafe", "rich"), "report"),
    **dict.fromkeys(("megatron", "torch"), "train"),
    **dict.fromkeys(("starlette", "uvicorn"), "ui"),
    **{"mcp": "mcp", "pyarrow": "export"},
}


class UsageError(Unanswerable):
    """The arguments make no sense together; the message is for the user, on one line."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name that this terminal cannot show is no reason to fail
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command not in COMMANDS:
        parser = _overview()
        if command is not None and not arguments[0].startswith("-"):
            parser.error(f"there is no command {printable(command)!r}{meant(command, COMMANDS)}")
        parser.parse(arguments)
        parser.print_help()
        return 0
    position = arguments.index(command)
    if position:
        _overview().parse(arguments[:position])  # --help, --version, or an error: all of them exit
    try:
        module = import_module(f"megaprof.{COMMANDS[command][0]}")
        given = parser_of(command).parse(arguments[position + 1 :])
        if (mib := getattr(given, "max_input_mib", None)) is not None and mib < 1:
            raise UsageError(f"{_INPUT_LIMIT} {mib} must be at least 1 (MiB)")
        inputs.allow(None if mib is None else mib << 20)
        code: int = module.run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Without this, Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print(f"\nmegaprof {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as fault:
        if (line := in_a_line(fault)) is None:
            raise
        print(f"megaprof {command}: {line}", file=sys.stderr)
        return USAGE if isinstance(fault, UsageError) else FAILED


def say(line: str, file: TextIO | None = None) -> None:
    """Prints one line to ``file``, by default to standard output, without control characters."""
    print(printable(line, "\ufffd"), file=file, flush=True)


def print_json(answer: object) -> None:
    """Prints the answer of a command with ``--json``: a dataclass, a struct, or plain data."""
    print(msgspec.json.format(json_of(answer), indent=2).decode())


def in_a_line(fault: Exception) -> str | None:
    """Returns the line that a command prints for a fault that its user can fix; None if the fault is megaprof's own."""
    text = None
    if isinstance(fault, Unanswerable):
        text = str(fault)
    elif isinstance(fault, Unreachable):
        text = f"the files cannot be reached: {fault}"
    elif isinstance(fault, FileNotFoundError) or (isinstance(fault, OSError) and fault.filename is not None):
        text = f"{fault.filename or 'the working directory'} cannot be read: {fault.strerror}"  # os.getcwd names none
    elif isinstance(fault, ImportError) and (package := (fault.name or "").partition(".")[0]) in _PIP_EXTRAS:
        is_there = sys.modules.get(package) is not None  # in a version that lacks a part
        text = f"needs {'a later ' * is_there}{package}: pip install 'megaprof[{_PIP_EXTRAS[package]}]'"
        text += ", in another environment if something in this one needs the version that it has" * is_there
    return None if text is None else printable(text)


def add_input_option(parser: argparse.ArgumentParser, *, runs: bool = False) -> None:
    """Adds ``--max-input-mib``, and with ``runs`` also ``--run``."""
    if runs:
        numbered = "number of the run, if DIR holds several; 1 is the oldest (default: the newest)"
        parser.add_argument("--run", metavar="N", type=int, help=numbered)
    parser.add_argument(
        _INPUT_LIMIT,
        metavar="N",
        type=int,
        help="largest file to read, in MiB, also after decompression (default: no limit for traces; for others, a "
        "quarter of the free memory, but at least 64)",
    )


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar if standard error is a terminal. Yields ``advance(completed, total)``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda completed, total: bar.update(task, completed=completed, total=total)


def local(text: str) -> Path:
    """Returns a path on this machine. Raises ArgumentTypeError for an address, ``-`` and nothing."""
    path = path_of(text)
    if isinstance(path, RemotePath) or text in ("-", ""):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: a path on this machine")
    return path


@contextmanager
def writing(option: str, path: Path, source: Path | None = None) -> Iterator[None]:
    """Surrounds code that writes ``path``, which ``option`` names, from files that it reads in ``source``. Raises
    Unanswerable if ``path`` cannot be written."""
    try:
        yield
    except OSError as fault:
        name, of_output = fault.filename, True  # the system names no file while it writes; a bare name is next to it
        if isinstance(name, str) and os.path.dirname(name):
            # The output itself, a file in it, the temporary file that becomes it, or a directory above it.
            output, faulty = Path(os.path.realpath(path)), Path(os.path.realpath(name))
            of_output = faulty in output.parents
            if output.parent in faulty.parents:
                of_output = output.name in faulty.relative_to(output.parent).parts[0]
        if isinstance(fault, Unreachable) or name == str(source) or not of_output:
            raise  # reading failed, not writing
        raise Unanswerable(f"{option} {path} cannot be written: {fault.strerror or fault}") from None


class Parser(argparse.ArgumentParser):
    """The parser of one command's arguments. Its help keeps the lines of examples as they are written."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses all arguments. If one is unknown, prints this command's usage and the option that was probably meant,
        and exits with code 2."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            option = next((argument for argument in unknown if argument.startswith("-")), unknown[0]).partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant(option, options)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits. For a mistyped choice, adds the one that was probably meant."""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            message += meant(match[1], [choice.strip(" '") for choice in match[2].split(",")])
        super().error(message)


def meant(typed: str, candidates: Iterable[str]) -> str:
    """Returns ``; did you mean ...?``, or an empty string if none of ``candidates`` is similar."""
    matches = difflib.get_close_matches(typed, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def parser_of(command: str) -> Parser:
    module_name, text = COMMANDS[command]
    module = import_module(f"megaprof.{module_name}")
    parser = Parser(f"megaprof {command}", text)
    module.add_arguments(parser)
    parser.description = fill(parser.description or "", _HELP_WIDTH)
    examples = "\n".join(["examples:", *(f"  {example}" for example in module.EXAMPLES)])
    parser.epilog = f"{fill(parser.epilog, _HELP_WIDTH)}\n\n{examples}" if parser.epilog else examples
    return parser


def _overview() -> Parser:
    """Returns the parser of ``megaprof --help``, which shows every command. Imports none of their modules."""
    parser = Parser("megaprof", "Profiling for Megatron-Core training.")
    parser.epilog = "megaprof COMMAND --help has the details, with examples.\nTry megaprof demo first; it needs no GPU."
    parser.add_argument("--version", action="version", version=f"megaprof {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser
