"""``megaprof merge DIR -o step.json.gz``: all captured ranks of a step on one Perfetto timeline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megaprof.cli import CommandError, UsageError
from megaprof.cli.inputs import add_input_option, heed_input_option
from megaprof.formats.remote import Unreachable, place

EXAMPLES = (
    "megaprof merge traces -o step.json.gz",
    "megaprof merge traces -o step.json.gz --target train_actor --step 20 --ranks dp=0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=place, help="directory of captured traces (of nsys, too), or one")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, required=True, help="the timeline, gzipped where it ends in .gz"
    )
    parser.add_argument("--target", help="which target, of several (default: train_actor, if it is there)")
    parser.add_argument("--role", help="which role, of several")
    parser.add_argument("--step", type=int, help="which step, of several (default: the latest)")
    parser.add_argument(
        "--ranks",
        metavar="SELECTION",
        help="which ranks: all, per-stage, numbers such as 0,8-15, or coordinates such as pp=*,dp=0 (default: all of "
        "up to 64, of more the lowest of each stage)",
    )
    add_input_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Merge, and say what was merged and how far the clocks were off."""
    heed_input_option(arguments)
    from rich.console import Console
    from rich.progress import Progress

    from megaprof.analysis.convert.merge import NothingToMerge, merge
    from megaprof.parallel.selectors import OPTION, parse_selector

    try:
        ranks = None if arguments.ranks is None else parse_selector(arguments.ranks)
    except ValueError as mistake:
        raise UsageError(str(mistake).replace(OPTION, "--ranks")) from None
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("merging", total=None)
            merged = merge(
                arguments.dir,
                arguments.out,
                target=arguments.target,
                role=arguments.role,
                step=arguments.step,
                ranks=ranks,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except NothingToMerge as fault:
        raise CommandError(str(fault)) from None
    except ValueError as mistake:
        raise UsageError(f"-o {mistake}") from None
    except Unreachable:
        raise
    except OSError as fault:
        raise CommandError(f"-o {arguments.out} cannot be written: {fault.strerror or fault}") from None
    size = arguments.out.stat().st_size / 1e6
    _say(
        f"{merged.name}: {_count(len(merged.ranks), 'rank')}, {_count(merged.events, 'event')}, "
        f"{_count(merged.arrows, 'arrow')} from a send to its receive"
    )
    if merged.left_out:
        _say(f"Left out: {_count(merged.left_out, 'rank')} (see --ranks)")
    for line in merged.alignment.sentences():
        _say(line)
    for warning in merged.warnings:
        _say(f"! {warning}")
    if merged.others:
        more = f" and {len(merged.others) - 5} more" if len(merged.others) > 5 else ""
        _say(f"Not merged (see --target, --role, --step): {', '.join(map(str, merged.others[:5]))}{more}")
    _say(f"{arguments.out} ({size:.1f} MB): drag it into https://ui.perfetto.dev")
    return 0


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _say(line: str) -> None:
    """Names come from files: no control characters of theirs reach the terminal."""
    sys.stdout.write("".join(c if c.isprintable() else "\ufffd" for c in line) + "\n")
