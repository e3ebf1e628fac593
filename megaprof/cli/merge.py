"""``megaprof merge DIR -o step.json.gz``: all captured ranks of a step on one Perfetto timeline."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from megaprof.analysis.merge import MergeAnswer, merge
from megaprof.analysis.trace.reading import NoSuchRun
from megaprof.cli import UsageError, add_input_option, local, print_json, progress, say, writing
from megaprof.formats.inputs import path_of
from megaprof.formats.phrases import counted, of_several
from megaprof.parallel.selectors import OPTION, parse_selector

EXAMPLES = (
    "megaprof merge traces -o step.json.gz",
    "megaprof merge traces -o step.json.gz --target train_actor --step 20 --ranks dp=0",
    "megaprof merge traces -o step.json.gz --json | jq -r .warnings[]",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, "directory of captured traces or files of nsys, or a single one")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=local, required=True, help="file to write, gzipped if its name ends in .gz"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_source(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Adds ``DIR``, with ``help_text``, and the options that choose from it."""
    parser.add_argument("dir", metavar="DIR", type=path_of, help=help_text)
    parser.add_argument("--target", help="target, if several were captured (default: train_actor, if it was)")
    parser.add_argument("--role", help="role, if several were captured")
    parser.add_argument("--step", type=int, help="step, if several were captured (default: the latest)")
    parser.add_argument(
        "--ranks",
        metavar="SELECTION",
        help="ranks: all, per-stage, numbers such as 0,8-15, or coordinates such as pp=*,dp=0 (default: all; if there "
        "are more than 64, the lowest of each stage)",
    )
    add_input_option(parser, runs=True)


def run(arguments: argparse.Namespace) -> int:
    merged = merged_into(arguments, arguments.out)
    out: Path = arguments.out
    if arguments.json:
        print_json(merged)
        return 0
    say_merged(merged, f"megaprof merge {shlex.quote(str(arguments.dir))} -o {shlex.quote(str(out))}")
    say(f"{out} ({merged.bytes / 1e6:.1f} MB): drag it into https://ui.perfetto.dev, or: megaprof open {out}")
    return 0


def merged_into(arguments: argparse.Namespace, out: Path) -> MergeAnswer:
    """Merges the step and ranks that the arguments choose into ``out``. Raises Unanswerable."""
    try:
        ranks = None if arguments.ranks is None else parse_selector(arguments.ranks)
    except ValueError as mistake:
        raise UsageError(str(mistake).replace(OPTION, "--ranks")) from None
    chosen = {name: getattr(arguments, name) for name in ("target", "role", "step", "run")}
    try:
        with progress("merging") as advance, writing("-o", out, arguments.dir):
            return merge(arguments.dir, out, **chosen, ranks=ranks, progress=advance)
    except NoSuchRun as fault:
        raise UsageError(f"--run {fault}") from None
    except ValueError as mistake:
        raise UsageError(f"-o {mistake}") from None


def say_merged(merged: MergeAnswer, command: str) -> None:
    """Says what was merged, how far apart the clocks were, and what was not merged. ``command``: the command as the
    user gave it, without the option for the run."""
    if merged.runs > 1:
        say(of_several(merged.run, merged.runs, command))
    say(
        f"{merged.name}: {counted(len(merged.ranks), 'rank')}, {merged.events:,} events, "
        f"{counted(merged.arrows, 'arrow')} from sends to receives"
    )
    if merged.left_out:
        say(f"Left out: {counted(merged.left_out, 'rank')} (see --ranks)")
    for line in merged.clocks:
        say(line)
    for warning in merged.warnings:
        say(f"! {warning}")
    if merged.others:
        more_steps = f" and {len(merged.others) - 5} more" if len(merged.others) > 5 else ""
        say(f"Not merged (see --target, --role, --step): {', '.join(merged.others[:5])}{more_steps}")
