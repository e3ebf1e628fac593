"""``megaprof completion SHELL``: a script that completes commands and options, generated from the parsers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megaprof.cli import COMMANDS, parser_of

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = (
    "megaprof completion bash > ~/.local/share/bash-completion/completions/megaprof",
    "megaprof completion zsh > ~/.zfunc/_megaprof   # a directory of your fpath",
    "megaprof completion fish > ~/.config/fish/completions/megaprof.fish",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    import shtab

    parser = argparse.ArgumentParser(prog="megaprof")
    parser.add_argument("--version", action="version", version="")
    commands = parser.add_subparsers()
    for name, (_, text) in COMMANDS.items():
        command_parser = parser_of(name)
        for action in command_parser._actions:
            if action.type is Path or action.metavar == "FILE":
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
        command_parser.epilog = None
        commands.add_parser(name, help=text, parents=[command_parser], add_help=False)
    sys.stdout.write(shtab.complete(parser, arguments.shell) + "\n")
    return 0
