"""``megaprof demo``: runs a real pipeline on the CPU, captures one rank per stage and reports; or keeps it running."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.cli import INTERRUPTED, TERMINATED, CommandError, UsageError
from megaprof.cli.report import report_directory
from megaprof.config.values import TRAIN_ACTOR
from megaprof.demo import faults, live
from megaprof.formats.phrases import counted

if TYPE_CHECKING:
    from megaprof.analysis.report.document import Report
    from megaprof.testing import GPTWorkload

DESCRIPTION = """Train a small but real Megatron-Core GPT on this machine's CPU, with its layers deliberately split
unevenly. Every layer waits for a given time, as a host waits for a GPU, and longer on a busy machine, so that this
changes less. Capture three training steps and log-prob passes on one rank per pipeline stage, with the times of the
steps around them, and report which stage is slow and which layout would be faster. With --live, the job runs until
Ctrl-C, so that you can watch it and make it capture from another shell."""
_STEPS = 12
#: Captured steps, which show what passes consist of, and steps behind them. The others show how long steps take.
_CAPTURED, _BEHIND = 3, 4
#: Phases besides the steps: starting the ranks, imports, the model, the evaluation pass, finishing the files.
_OTHER_PHASES = 5
#: Milliseconds of a layer's forward and of its backward: many times what a layer of hidden size 64 computes, and what a
#: rank waits on a busy machine before it goes on.
_LAYER_MS = (24.0, 48.0)
_TIME_LIMIT = 600.0
#: Silences Kineto and a CPU-only megatron-core, whose messages would bury the progress. Nothing is compiled, and
#: without the compiler megatron-core is imported in two thirds of the time.
_ENVIRONMENT = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
EXAMPLES = (
    "megaprof demo",
    "megaprof demo --layout 2,2",
    "megaprof demo --pp 2 --vpp 2",
    "megaprof demo --live",
    "megaprof demo --live --fault slow-rank",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = (
        "Exit code: 0 if the report was printed, also after Ctrl-C in a --live job; 1 if a rank failed; 2 if the "
        f"arguments make no sense; {INTERRUPTED} for Ctrl-C before the job ran, or twice; {TERMINATED} for SIGTERM. No "
        "rank is left running."
    )
    parser.add_argument("--live", action="store_true", help="run until Ctrl-C, with a timeline and captures on demand")
    parser.add_argument(
        "--fault",
        choices=tuple(faults.FAULTS),
        help=f"make something go wrong: {'; '.join(f'{name}: {text}' for name, text in faults.FAULTS.items())}. With "
        f"--live, from step {faults.FIRST_STEP} on",
    )
    parser.add_argument("--pp", type=int, help="pipeline stages (default: 2; with slow-link, 3; with slow-rank, 1)")
    parser.add_argument("--dp", type=int, help="replicas, a multiple of --ep (default: --ep; with slow-rank, twice it)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (default: 1)")
    parser.add_argument("--vpp", type=int, default=None, help="model chunks per stage, for the interleaved schedule")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size; more than 1 makes the layers MoE")
    parser.add_argument("--layers", type=int, help="transformer layers (default: by --layout, or two for each chunk)")
    parser.add_argument(
        "--layout",
        default=None,
        help="layers of every chunk, e.g. 2,2 (with --vpp: the first chunks of all stages, then the second chunks), or "
        "'balanced' (default: most layers on stage 0, on purpose; with --fault, balanced)",
    )
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per step (default: 8)")
    parser.add_argument(
        "--real", action="store_true", help="let the layers take as long as they compute, which other programs disturb"
    )
    parser.add_argument("--hidden", type=int, default=None, help="hidden size (default: 64; with --real, 256)")
    parser.add_argument("--seq-length", type=int, help="tokens per sequence (default: 32; with --real, 128)")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help=f"training steps; up to {_CAPTURED} towards the end are captured (default: {_STEPS}; with --live, no "
        "limit)",
    )
    parser.add_argument("--out", type=Path, default=None, help="new directory for traces and report")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=None,
        help=f"seconds until the ranks are killed (default: {_TIME_LIMIT:g}); with --live, until the job ends "
        "(default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Trains, captures and reports. Raises UsageError for arguments that make no sense, and CommandError if a rank
    fails."""
    try:
        _fill_in_defaults(args)
        _check(args)
        workload = workload_of(args)
        if args.fault is not None:
            faults.check(args.fault, workload, live=args.live, steps=args.steps)
        out = _new_directory(args.out)
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None
    layer_counts = "+".join(map(str, workload.chunk_layers))
    print(
        f"{counted(workload.world_size, 'rank')} of a real Megatron-Core GPT on this CPU: "
        f"{counted(workload.pp, 'stage')}, {layer_counts} layers, {counted(workload.microbatches, 'microbatch')}, "
        f"hidden {workload.hidden}",
        flush=True,
    )
    if workload.layer_ms is not None:
        print("Each layer waits {:g} ms forward and {:g} ms backward (--real: computes).".format(*workload.layer_ms))
    if not args.live:
        _capture(workload, out, args.steps, args.fault, args.time_limit)
    elif not live.run(workload, out, fault=args.fault, steps=args.steps, time_limit=args.time_limit, env=_ENVIRONMENT):
        return TERMINATED
    report = report_directory(out, json_file=out / "report.json", html_file=out / "report.html")
    if not args.live and (more_steps := _steps_needed(report)):
        print(f"To capture enough steps for an answer, add --steps {args.steps + more_steps} to this command.")
    return 0


def _steps_needed(report: Report) -> int:
    """Returns how many more steps would show what the cause is, or which layout is faster; 0 if no number of steps
    would."""
    from megaprof.analysis.report.text.causes import more_steps

    training = [target for target in report.targets if target.target == TRAIN_ACTOR]
    return max((more_steps(each.diagnosis, each.what_if) for each in training if each.diagnosis), default=0)


def _capture(workload: GPTWorkload, out: Path, steps: int, fault: str | None, time_limit: float) -> None:
    """Trains some steps and captures the last of them."""
    from megaprof.testing import RanksFailed, run_ranks

    if fault is not None:
        print(f"Fault: {faults.described(fault, workload, 0)}.", flush=True)
    with _progress(2 * steps + _OTHER_PHASES) as advance:
        try:
            run_ranks(
                run_rank,
                workload.world_size,
                workload,
                profile_flags(out, steps, fault),
                steps,
                fault,
                timeout=time_limit,
                env=_ENVIRONMENT,
                on_line=lambda rank, line: advance(line) if rank == 0 else None,
            )
        except RanksFailed as failure:
            print(failure, file=sys.stderr)
            raise CommandError(f"a rank failed (see above); the captured files are in {out}") from None


def workload_of(args: argparse.Namespace) -> GPTWorkload:
    """Returns the workload that the arguments describe. Raises ValueError that names the argument and its value."""
    from megaprof.testing import GPTWorkload

    layout = _layout(args)
    return GPTWorkload(
        tp=args.tp,
        pp=args.pp,
        vpp=args.vpp,
        ep=args.ep,
        dp=args.dp,
        layers=sum(layout) if args.layers is None else args.layers,
        layout=layout,
        microbatches=args.microbatches,
        hidden=args.hidden,
        seq_length=args.seq_length,
        layer_ms=None if args.real else _LAYER_MS,
        patient=not args.live,
    )


#: The most processes on one machine: each rank is a Python process with torch, with 0.4 GB of memory of its own.
_MOST_RANKS = 32


def _fill_in_defaults(args: argparse.Namespace) -> None:
    """Sets arguments that were not given to the value that the fault needs, or else to the default."""
    sizes = faults.least(args.fault, args.ep)
    args.pp = sizes.get("pp", 2) if args.pp is None else args.pp
    args.dp = sizes.get("dp") if args.dp is None else args.dp
    args.hidden = (256 if args.real else 64) if args.hidden is None else args.hidden
    args.seq_length = (128 if args.real else 32) if args.seq_length is None else args.seq_length
    if not args.live:
        args.steps = _STEPS if args.steps is None else args.steps
        args.time_limit = _TIME_LIMIT if args.time_limit is None else args.time_limit


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments. Raises ValueError that names the options."""
    for name in ("pp", "tp", "vpp", "ep", "dp", "layers", "microbatches", "hidden", "seq_length", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.time_limit is not None and not args.time_limit > 0:
        raise ValueError(f"--time-limit {args.time_limit:g}: must be more than 0 seconds")
    ranks = args.pp * args.tp * (args.dp or args.ep)
    if ranks > _MOST_RANKS:
        option_sizes = {name: getattr(args, name) for name in ("pp", "tp", "ep", "dp")}
        sizes = " ".join(f"--{name} {size}" for name, size in option_sizes.items() if size is not None and size > 1)
        raise ValueError(f"{sizes}: {ranks} ranks on one CPU; must be at most {_MOST_RANKS}")
    pieces = args.pp * (args.vpp or 1)
    if args.layers is not None and args.layers < pieces and args.layout is None:
        chunks = f"--pp {args.pp}" + (f" --vpp {args.vpp}" if args.vpp else "")
        raise ValueError(f"--layers {args.layers}: must be at least {pieces} with {chunks}, one for every chunk")


def _layout(args: argparse.Namespace) -> tuple[int, ...]:
    """Returns the layers of every chunk. Raises ValueError if ``--layout`` says none."""
    text, pieces = args.layout, args.pp * (args.vpp or 1)
    layers = 2 * pieces if args.layers is None else args.layers
    if text == "balanced" or (text is None and args.fault is not None):
        return tuple(layers // pieces + (piece < layers % pieces) for piece in range(pieces))
    if text is None:
        smaller_count = max(1, layers // (2 * pieces))
        return (layers - smaller_count * (pieces - 1), *[smaller_count] * (pieces - 1))
    numbers = text.replace("+", ",").split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise ValueError(f"--layout {text}: must be layer counts such as 3,1, or 'balanced'")
    return tuple(map(int, numbers))


def _new_directory(out: Path | None) -> Path:
    directory = out if out is not None else Path("megaprof-demo") / time.strftime("%Y%m%d-%H%M%S")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"--out {directory}: must be a new or an empty directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ValueError(f"--out {directory}: cannot be created: {fault}") from None
    return directory


def profile_flags(out: Path, steps: int, fault: str | None) -> list[str]:
    """Returns the options that a user would append to their pretrain command."""
    return [
        "--profile-target",
        "train_actor",
        "train_log_probs",
        "--profile-dir",
        str(out),
        "--profile-select",
        "all" if fault == faults.SLOW_RANK else "per-stage",
        "--profile-steps",
        ",".join(map(str, _captured(steps))),
    ]


def _captured(steps: int) -> range:
    """Returns the captured steps. Most of the others come before them."""
    end = steps - min(_BEHIND, (steps - 1) // 3)
    return range(max(end - _CAPTURED, min(1, steps - 1)), end)


def run_rank(workload: GPTWorkload, flags: list[str], steps: int, fault: str | None) -> None:
    """Runs one rank: training, log-probs and an evaluation."""
    with live.hooked_rank(workload, flags, fault) as (gpt, forward_backward):
        for target, run_step in (("train_actor", gpt.train_step), ("train_log_probs", gpt.log_probs_pass)):
            for step in range(steps):
                print(f"{target} step {step} ({step + 1} of {steps})", flush=True)
                run_step(forward_backward)
        print("evaluation pass", flush=True)
        gpt.evaluate(forward_backward)
        print("finishing the files", flush=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar on a terminal, and a line per phase elsewhere. Yields ``advance(text)``, to be called when a
    phase begins."""
    if not sys.stderr.isatty():
        print("  starting the ranks", file=sys.stderr, flush=True)
        # One write for a line: ranks write to the same file.
        yield lambda line: print(f"  {line.rstrip()}\n", end="", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting the ranks", total=total)
        yield lambda line: bar.update(task, advance=1, description=line.rstrip())
