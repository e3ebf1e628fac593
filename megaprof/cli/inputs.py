"""Parts of commands that read files of any origin: the limit on their size, a progress bar, errors of writing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megaprof.cli import CommandError, UsageError
from megaprof.formats import inputs
from megaprof.formats.inputs import Unreachable

_OPTION = "--max-input-mib"


def add_input_option(parser: argparse.ArgumentParser, *, runs: bool = False) -> None:
    """Adds ``--max-input-mib``, and with ``runs`` also ``--run``."""
    if runs:
        numbered = "number of the run, if DIR holds several; 1 is the oldest (default: the newest)"
        parser.add_argument("--run", metavar="N", type=int, help=numbered)
    parser.add_argument(
        _OPTION,
        metavar="N",
        type=int,
        help="largest file to read, in MiB, also after decompression (default: no limit for traces; for others, a "
        "quarter of the free memory, but at least 64)",
    )


def heed_input_option(arguments: argparse.Namespace) -> None:
    """Applies the option ``--max-input-mib`` to this process and to those that it starts. Raises UsageError."""
    limit = arguments.max_input_mib
    if limit is not None and limit < 1:
        raise UsageError(f"{_OPTION} {limit} must be at least 1 (MiB)")
    inputs.allow(None if limit is None else limit << 20)


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


@contextmanager
def writing(option: str, path: Path, source: Path | None = None) -> Iterator[None]:
    """Surrounds code that writes ``path``, which ``option`` names, from files that it reads in ``source``. Raises
    CommandError if ``path`` cannot be written."""
    try:
        yield
    except OSError as fault:
        if isinstance(fault, Unreachable) or fault.filename == str(source) or not _of_output(fault.filename, path):
            raise  # reading failed, not writing
        raise CommandError(f"{option} {path} cannot be written: {fault.strerror or fault}") from None


def _of_output(name: object, path: Path) -> bool:
    """Returns whether a fault at the file ``name`` prevents ``path`` from being written: ``name`` is ``path`` itself, a
    file in it, the temporary file that becomes it, or a directory above it."""
    if not isinstance(name, str) or not os.path.dirname(name):
        return True  # the system names no file while it writes; a bare name is a file next to the output
    output, faulty = Path(os.path.realpath(path)), Path(os.path.realpath(name))
    if output.parent not in faulty.parents:
        return faulty in output.parents
    return output.name in faulty.relative_to(output.parent).parts[0]
