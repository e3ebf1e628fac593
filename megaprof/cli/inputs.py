"""The option of every command that reads files of any origin: how large one may be."""

from __future__ import annotations

import argparse

from megaprof.cli import UsageError
from megaprof.formats import inputs

_OPTION = "--max-input-mib"


def add_input_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--max-input-mib``."""
    parser.add_argument(
        _OPTION,
        metavar="N",
        type=int,
        help="read files of up to N MiB, unpacked too [traces: any size; others: a quarter of the memory that is left, "
        "at least 64]",
    )


def heed_input_option(arguments: argparse.Namespace) -> None:
    """Do what the option says, in this process and in those that it starts. Raises UsageError."""
    most = arguments.max_input_mib
    if most is not None and most < 1:
        raise UsageError(f"{_OPTION} {most} is not a number of MiB from 1 on")
    inputs.allow(None if most is None else most << 20)
