"""``megaprof rehearse --world N -- COMMAND``: the step of a whole job from one device, before the cluster is there."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path

import msgspec

from megaprof.analysis import words
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import Report
from megaprof.cli import UsageError, local, writing
from megaprof.cli.run import resolve
from megaprof.formats.names import appearing
from megaprof.rehearse import links, rehearsal
from megaprof.tune import end_what_runs, memory_limit
from megaprof.tune.command import without_saving

DESCRIPTION = """Run the stages of COMMAND one after another on this machine, each as one rank of a job whose other
ranks are not there, and predict the step, the memory and better layouts of the whole job. COMMAND is what one rank runs
(python pretrain_gpt.py ...), not a launcher. Losses mean nothing. Checkpoints are not saved."""

EXAMPLES = (
    "megaprof rehearse --world 64 -- python pretrain_gpt.py --num-layers 32 --pipeline-model-parallel-size 8 ...",
    "megaprof rehearse --world 64 --links nvlink=400GB/s,5us ib=all_reduce_perf.txt -- python pretrain_gpt.py ...",
    "megaprof rehearse --out rehearsed --against traces",
)
_STEPS, _PER_HOST, _GIB = 8, 8, 1 << 30
#: Programs and modules that start ranks.
_LAUNCHERS = {"torchrun", "srun", "mpirun", "mpiexec", "deepspeed", "accelerate", "ray", "megatron", "swift"}
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "verl.trainer.main_", "skyrl.train.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.usage = "megaprof rehearse --world N [--links LINK ...] [--out DIR] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--world", type=int, default=0, metavar="N", help="ranks of the job")
    parser.add_argument("--out", type=local, default=Path("rehearsed"), help="new directory (default: rehearsed)")
    parser.add_argument(
        "--links",
        nargs="+",
        default=[],
        metavar="LINK",
        help="what connects ranks inside a host (nvlink; on the CPU gloo) and between hosts (ib): ib=50GB/s,10us, or "
        "ib=FILE with the output of nccl-tests (default: the GPU's data sheet)",
    )
    parser.add_argument("--memory-limit", metavar="SIZE", help="what a rank may allocate (default: the GPU's memory)")
    parser.add_argument("--ranks-per-host", type=int, default=_PER_HOST, metavar="N", help=f"(default: {_PER_HOST})")
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"steps of a stage to measure (default: {_STEPS})")
    parser.add_argument("--saving-off", metavar="WORDS", help="words that turn saving off, as for megaprof tune")
    parser.add_argument("--against", type=local, metavar="DIR", help="compare --out with a capture, and keep its links")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def run(args: argparse.Namespace) -> int:
    """Rehearses the command. Raises UsageError and Unanswerable, and OSError if it cannot be started."""
    if args.against is not None:
        if args.json:
            raise UsageError("--json: not with --against; valid: megaprof diff A B --json")
        return _compare(args)
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    for name in ("world", "steps", "ranks_per_host"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be more than 0")
    if not command:
        raise UsageError("no command; put it after '--': megaprof rehearse --world 64 -- python pretrain_gpt.py ...")
    if Path(command[0]).name in _LAUNCHERS or any(word.startswith(_MODULES) for word in command):
        raise UsageError(f"{shlex.join(command[:3])} starts ranks: give what one rank runs: python pretrain_gpt.py ...")
    if args.out.exists() and any(args.out.iterdir()):
        raise UsageError(f"--out {args.out}: must be a new or empty directory")
    try:
        given, limit = links.given(args.links), memory_limit(args.memory_limit)
        without = without_saving(command, None if args.saving_off is None else shlex.split(args.saving_off))
    except ValueError as fault:
        raise UsageError(str(fault)) from None
    _, run_words = resolve(rehearsal.balanced(without))
    end_what_runs()
    with writing("--out", args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        result, report = rehearsal.rehearsed(
            command, run_words, args.out, args.world, args.steps, given, args.ranks_per_host, limit
        )
        with appearing(args.out / "report.html") as file:
            file.write(page(report, report.steps()).encode())
    if args.json:
        print((args.out / rehearsal.NAME).read_text())
    else:
        _show(result, report, args.out)
    return 0


def _show(result: rehearsal.Rehearsal, report: Report, out: Path) -> None:
    """Prints what was predicted, what it rests on, and the report of the predicted pipeline."""
    from rich.console import Console

    from megaprof.analysis.report.terminal import show
    from megaprof.analysis.report.text import what_if

    console = Console(highlight=False)
    say, ranks = partial(console.print, markup=False), words.counted(result.sizes.world, "rank")
    computed = max(1.0 - result.measured_ms / result.step_ms.value, 0.0)
    say(
        f"A step on {ranks} ({result.sizes}) should take {words.within(result.step_ms)} ms. {words.percent(computed)} "
        "of it was computed from bytes and links, and the rest was measured here."
    )
    allocated, allowed = result.what_if.allocated, result.what_if.allowed
    if allocated is None:
        say("Whether it fits is not known: no memory of a device was recorded.")
    elif allowed is not None and result.too_large:
        needed = (f"stage {at}: {allocated[at] / _GIB:.3g} of {allowed[at] / _GIB:.3g} GiB" for at in result.too_large)
        say(f"It does not fit on {', '.join(needed)}. " + ("" if result.best else "Nothing is known to fit."))
    else:
        say(f"It fits: the largest stage allocates {max(allocated) / _GIB:.3g} GiB.")
    if result.assumes:
        say(f"This assumes that {'; '.join(result.assumes)}.")
    say("The losses of a rehearsal mean nothing: its ranks had no others.")
    if result.best is not None and result.best_command is not None:
        best = what_if.name_of(result.best, result.what_if) + (", which fits" if result.too_large else "")
        say(f"With {best}, a step should take {words.within(result.best.step_ms)} ms:")
        say("  " + shlex.join(result.best_command), soft_wrap=True)
    show(report, console)
    print(f"The predicted pipeline as one HTML file: {out / 'report.html'}")


def _compare(args: argparse.Namespace) -> int:
    """Prints whether the step of a real capture is inside the interval of ``--out``, and keeps its links."""
    predicted, step, kept = rehearsal.compared(args.out, args.against)
    with writing("--out", args.out), appearing(args.out / links.NAME) as file:
        file.write(msgspec.json.format(msgspec.json.encode(kept), indent=1))
    inside = "inside" if predicted.holds(step.mean) else "outside"
    print(f"Predicted: {words.within(predicted)} ms, measured: {step.mean:.4g} ms, {inside} the interval.")
    print(f"Stage by stage: megaprof diff {args.out / rehearsal.PREDICTED} {args.against}")
    print(f"The measured links, for the next rehearsal: --links {args.out / links.NAME}")
    return 0
