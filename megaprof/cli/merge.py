"""``megaprof merge DIR -o step.json.gz``: all captured ranks of a step on one Perfetto timeline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.cli import CommandError, UsageError, say
from megaprof.cli.inputs import add_input_option, heed_input_option, progress, writing
from megaprof.formats.remote import place

if TYPE_CHECKING:
    from megaprof.analysis.convert.merge import Merged

EXAMPLES = (
    "megaprof merge traces -o step.json.gz",
    "megaprof merge traces -o step.json.gz --target train_actor --step 20 --ranks dp=0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, "directory of captured traces (of nsys, too), or one")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, required=True, help="the timeline, gzipped where it ends in .gz"
    )


def add_source(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``DIR``, which is ``what``, and the options that choose from it."""
    parser.add_argument("dir", metavar="DIR", type=place, help=what)
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
    say_merged(merged_into(arguments, arguments.out))
    size = arguments.out.stat().st_size / 1e6
    say(f"{arguments.out} ({size:.1f} MB): drag it into https://ui.perfetto.dev, or: megaprof open {arguments.out}")
    return 0


def merged_into(arguments: argparse.Namespace, out: Path) -> Merged:
    """Merge what the arguments choose into ``out``. Raises CommandError."""
    from megaprof.analysis.convert.merge import NothingToMerge, merge
    from megaprof.parallel.selectors import OPTION, parse_selector

    try:
        ranks = None if arguments.ranks is None else parse_selector(arguments.ranks)
    except ValueError as mistake:
        raise UsageError(str(mistake).replace(OPTION, "--ranks")) from None
    chosen = {name: getattr(arguments, name) for name in ("target", "role", "step")}
    try:
        with progress("merging") as advance, writing("-o", out, arguments.dir):
            return merge(arguments.dir, out, **chosen, ranks=ranks, progress=advance)
    except NothingToMerge as fault:
        raise CommandError(str(fault)) from None
    except ValueError as mistake:
        raise UsageError(f"-o {mistake}") from None


def say_merged(merged: Merged) -> None:
    """What was merged, how far clocks were off, and what was not merged."""
    say(
        f"{merged.name}: {_count(len(merged.ranks), 'rank')}, {_count(merged.events, 'event')}, "
        f"{_count(merged.arrows, 'arrow')} from a send to its receive"
    )
    if merged.left_out:
        say(f"Left out: {_count(merged.left_out, 'rank')} (see --ranks)")
    for line in merged.alignment.sentences():
        say(line)
    for warning in merged.warnings:
        say(f"! {warning}")
    if merged.others:
        more = f" and {len(merged.others) - 5} more" if len(merged.others) > 5 else ""
        say(f"Not merged (see --target, --role, --step): {', '.join(map(str, merged.others[:5]))}{more}")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
