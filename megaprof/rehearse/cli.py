"""``megaprof rehearse --world N -- COMMAND``: the step of a whole job from one device, before the cluster is there."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from megaprof.cli import CommandError, UsageError, print_json
from megaprof.cli.inputs import progress, writing
from megaprof.cli.jobs.run import resolve
from megaprof.formats.files import appearing
from megaprof.rehearse import links, rehearsal
from megaprof.tune import trial
from megaprof.tune.cli import end_what_runs, memory_limit
from megaprof.tune.command import without_saving

DESCRIPTION = """Run the stages of COMMAND one after another on this machine, each as one rank of a job whose other
ranks are not there, and predict the step, the memory and better layouts of the whole job. COMMAND is what one rank runs
(python pretrain_gpt.py ...), not a launcher. What ranks would have exchanged is computed from bytes and links; losses
mean nothing. Checkpoints are not saved."""

EXAMPLES = (
    "megaprof rehearse --world 64 -- python pretrain_gpt.py --num-layers 32 --pipeline-model-parallel-size 8 ...",
    "megaprof rehearse --world 64 --links nvlink=400GB/s,5us ib=all_reduce_perf.txt -- python pretrain_gpt.py ...",
    "megaprof rehearse --out rehearsed --against traces",
)
_STEPS, _PER_HOST, _TIME_LIMIT = 8, 8, 1800.0
_LAUNCHERS = {"torchrun", "srun", "mpirun", "mpiexec", "deepspeed", "accelerate", "ray"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.usage = "megaprof rehearse --world N [--links LINK ...] [--out DIR] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--world", type=int, default=0, metavar="N", help="ranks of the job")
    parser.add_argument(
        "--out", type=Path, default=Path("rehearsed"), help="new directory for the result (default: rehearsed)"
    )
    parser.add_argument(
        "--links",
        nargs="+",
        default=[],
        metavar="LINK",
        help="what connects ranks inside a host (nvlink, or gloo on the CPU) and between hosts (ib): "
        "NAME=BANDWIDTH,LATENCY such as ib=50GB/s,10us, or NAME=FILE with the output of nccl-tests (default: from the "
        "data sheet of the GPU)",
    )
    parser.add_argument("--ranks-per-host", type=int, default=_PER_HOST, metavar="N", help=f"(default: {_PER_HOST})")
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"steps of a stage to measure (default: {_STEPS})")
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help="largest allocation of a rank (default: the memory of the GPU here)"
    )
    parser.add_argument(
        "--time-limit", type=float, default=_TIME_LIMIT, help=f"seconds for a stage (default: {_TIME_LIMIT:g})"
    )
    parser.add_argument(
        "--saving-off", metavar="WORDS", help="words that turn saving in COMMAND off, as for megaprof tune"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="run nothing; compare the rehearsal in --out with a real capture of the job, and keep its links",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def run(args: argparse.Namespace) -> int:
    """Rehearses the command. Raises UsageError and CommandError."""
    if args.against is not None:
        return _compare(args)
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    for name in ("world", "steps", "time_limit", "ranks_per_host"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be more than 0")
    if not command:
        raise UsageError("no command; put it after '--': megaprof rehearse --world 64 -- python pretrain_gpt.py ...")
    if Path(command[0]).name in _LAUNCHERS or "torch.distributed.run" in command:
        raise UsageError(f"{command[0]} starts ranks: give what one rank runs, such as python pretrain_gpt.py ...")
    if args.out.exists() and any(args.out.iterdir()):
        raise UsageError(f"--out {args.out}: must be a new or empty directory")
    try:
        given = links.given(args.links)
        without = without_saving(command, None if args.saving_off is None else shlex.split(args.saving_off))
    except ValueError as fault:
        raise UsageError(str(fault)) from None
    _, run_words = resolve(rehearsal.balanced(without))
    end_what_runs()
    step_count = args.steps + trial.WARM_UP
    try:
        with writing("--out", args.out), progress("steps") as advance:
            args.out.mkdir(parents=True, exist_ok=True)
            result = rehearsal.rehearsed(
                command,
                run_words,
                args.out,
                args.world,
                steps=args.steps,
                time_limit=args.time_limit,
                links=given,
                per_host=args.ranks_per_host,
                memory_limit=memory_limit(args.memory_limit),
                begin=lambda stage, rank: print(f"Stage {stage}: rank {rank}, alone", file=sys.stderr, flush=True),
                advance=lambda made: advance(min(made, step_count), step_count),
            )
    except OSError as fault:
        raise CommandError(f"{command[0]}: {fault.strerror or fault}") from None
    _show(result, args)
    return 0


def _show(result: rehearsal.Rehearsal, args: argparse.Namespace) -> None:
    from megaprof.analysis.report.html import page
    from megaprof.analysis.report.report import analyze
    from megaprof.analysis.report.terminal import show

    report = analyze(args.out / rehearsal.PREDICTED, memory_limit=memory_limit(args.memory_limit))
    with writing("--out", args.out), appearing(args.out / "report.html") as file:
        file.write(page(report, report.steps()).encode())
    if args.json:
        print(result.json.decode())
        return
    from rich.console import Console

    from megaprof.rehearse.words import sentences

    console = Console(highlight=False)
    for line in sentences(result):
        console.print(line, markup=False)
    if result.best_command is not None:
        console.print("  " + shlex.join(result.best_command), markup=False, soft_wrap=True)
    show(report, console)
    print(f"The predicted pipeline as one HTML file: {args.out / 'report.html'}")


def _compare(args: argparse.Namespace) -> int:
    """Prints the rehearsal in ``--out`` beside a real capture, and keeps that capture's links."""
    from rich.console import Console

    from megaprof.analysis.report.terminal import show_diff
    from megaprof.cli.files.diff import comparison
    from megaprof.tune.words import milliseconds

    earlier = rehearsal.load(args.out)
    step, kept = rehearsal.measured_links(earlier, args.against)
    with writing("--out", args.out), appearing(args.out / links.NAME) as file:
        file.write(links.as_json(kept))
    difference = comparison(args.out / rehearsal.PREDICTED, args.against)
    if args.json:
        print_json(difference)
        return 0
    show_diff(difference, Console(highlight=False))
    inside = "inside" if earlier.step_ms.holds(step.mean) else "outside"
    print(f"Predicted: {milliseconds(earlier.step_ms)} ms, measured: {step.mean:.4g} ms, {inside} the interval.")
    print(f"The measured links, for the next rehearsal: --links {args.out / links.NAME}")
    return 0
