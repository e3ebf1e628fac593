"""``megaprof demo``: runs a real pipeline on the CPU, captures one rank per stage and reports; or keeps it running, so
that it can be watched and captured from another shell."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.cli import INTERRUPTED, TERMINATED, UsageError, local
from megaprof.cli.report import report_directory
from megaprof.config.values import TRAIN_ACTOR
from megaprof.control.directory import find_job
from megaprof.demo import job
from megaprof.formats.phrases import Unanswerable, counted

if TYPE_CHECKING:
    from megaprof.analysis.report.report import Report
    from megaprof.testing import GPTWorkload

DESCRIPTION = """Train a small but real Megatron-Core GPT on this machine's CPU, with its layers deliberately split
unevenly. Every layer waits for a given time, as a host waits for a GPU, and longer on a busy machine, so that this
changes less. Capture three training steps and log-prob passes on one rank per pipeline stage, with the times of the
steps around them, and report which stage is slow and which layout would be faster. With --live, the job runs until
Ctrl-C, so that you can watch it and make it capture from another shell."""
_STEPS = 12
#: Captured steps, which show what passes consist of, and steps behind them. The others show how long steps take.
_CAPTURED, _BEHIND = 3, 4
#: Milliseconds of a layer's forward and of its backward: many times what a layer of hidden size 64 computes, and what a
#: rank waits on a busy machine before it goes on.
_LAYER_MS = (24.0, 48.0)
#: The most processes on one machine: each rank is a Python process with torch, with 0.4 GB of memory of its own.
_MOST_RANKS = 32
#: Seconds after which a job that captures is ended, and after which a hanging job ends by itself, which is before the
#: first timeout of Megatron-Core's process groups.
_MOST_SECONDS, _HANG_SECONDS = 600.0, 1500.0
#: The most seconds to wait until commands find the live job; after that, the commands are printed anyway.
_ANSWER_SECONDS = 30.0
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
        choices=tuple(job.FAULTS),
        help=f"make something go wrong: {'; '.join(f'{name}: {text}' for name, text in job.FAULTS.items())}. With "
        f"--live, from step {job.FIRST_STEP} on",
    )
    parser.add_argument("--pp", type=int, help="pipeline stages (default: 2; with slow-link, 3; with slow-rank, 1)")
    parser.add_argument("--dp", type=int, help="replicas, a multiple of --ep (default: --ep; with slow-rank, twice it)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (default: 1)")
    parser.add_argument("--vpp", type=int, default=None, help="model chunks per stage, for the interleaved schedule")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size; more than 1 makes the layers MoE")
    parser.add_argument(
        "--layout",
        default=None,
        help="layers of every chunk, e.g. 2,2 (with --vpp: the first chunks of all stages, then the second chunks), or "
        "'balanced', two for each chunk (default: most layers on stage 0, on purpose; with --fault, balanced)",
    )
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per step (default: 8)")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help=f"training steps; up to {_CAPTURED} towards the end are captured (default: {_STEPS}; with --live, no "
        "limit)",
    )
    parser.add_argument("--out", type=local, default=None, help="new directory for traces and report")


def run(args: argparse.Namespace) -> int:
    """Trains, captures and reports. Raises UsageError for arguments that make no sense, and Unanswerable if a rank
    fails."""
    steps = args.steps if args.live else args.steps or _STEPS
    try:
        workload = _workload(args)
        if args.fault is not None:
            job.check(args.fault, workload, live=args.live, steps=steps)
        out = _new_directory(args.out)
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None
    from megaprof.testing import RanksFailed

    layer_counts = "+".join(map(str, workload.chunk_layers))
    print(
        f"{counted(workload.world_size, 'rank')} of a real Megatron-Core GPT on this CPU: "
        f"{counted(workload.pp, 'stage')}, {layer_counts} layers, {counted(workload.microbatches, 'microbatch')}, "
        f"hidden {workload.hidden}"
    )
    print("Each layer waits {:g} ms forward and {:g} ms backward.".format(*_LAYER_MS), flush=True)
    with _signals_received() as received:
        try:
            if args.live:
                _run_live(workload, out, args.fault, steps, received)
            else:
                _capture(workload, out, args.fault, steps, received)
        except RanksFailed as failure:
            print(failure, file=sys.stderr)
            raise Unanswerable(f"a rank failed (see above); the files of the others are in {out}") from None
    report = report_directory(out, json=str(out / "report.json"), html=out / "report.html")
    if not args.live and (more_steps := _steps_needed(report)):
        print(f"To capture enough steps for an answer, add --steps {steps + more_steps} to this command.")
    return 0


def _workload(args: argparse.Namespace) -> GPTWorkload:
    """Returns the workload that the arguments describe. Raises ValueError that names the argument and its value."""
    for name in ("pp", "tp", "vpp", "ep", "dp", "microbatches", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: must be at least 1")
    # A fault gets the sizes that it needs to be visible, with as few ranks as possible.
    pp = args.pp or {job.SLOW_RANK: 1, job.SLOW_LINK: 3}.get(args.fault, 2)
    dp = args.dp or (2 * args.ep if args.fault == job.SLOW_RANK else None)
    ranks = pp * args.tp * (dp or args.ep)
    if ranks > _MOST_RANKS:
        option_sizes = {"pp": pp, "tp": args.tp, "ep": args.ep, "dp": dp}
        sizes = " ".join(f"--{name} {size}" for name, size in option_sizes.items() if size is not None and size > 1)
        raise ValueError(f"{sizes}: {ranks} ranks on one CPU; must be at most {_MOST_RANKS}")
    chunks = pp * (args.vpp or 1)
    if args.layout is None and args.fault is None:
        layout = (chunks + 1, *[1] * (chunks - 1))
    elif args.layout in (None, "balanced"):
        layout = (2,) * chunks
    else:
        numbers = args.layout.replace("+", ",").split(",")
        if not all(number.strip().isdigit() for number in numbers):
            raise ValueError(f"--layout {args.layout}: must be layer counts such as 3,1, or 'balanced'")
        layout = tuple(map(int, numbers))
    from megaprof.testing import GPTWorkload

    return GPTWorkload(
        tp=args.tp,
        pp=pp,
        vpp=args.vpp,
        ep=args.ep,
        dp=dp,
        layers=sum(layout),
        layout=layout,
        microbatches=args.microbatches,
        hidden=64,
        seq_length=32,
        layer_ms=_LAYER_MS,
        patient=not args.live,
    )


def _new_directory(out: Path | None) -> Path:
    directory = out if out is not None else Path("megaprof-demo") / time.strftime("%Y%m%d-%H%M%S")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"--out {directory}: must be a new or an empty directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ValueError(f"--out {directory}: cannot be created: {fault}") from None
    return directory


@contextmanager
def _signals_received() -> Iterator[list[int]]:
    """Yields a list to which Ctrl-C and SIGTERM are added as they arrive.

    The handler raises nothing: an exception between any two instructions of the launcher could leave a lock of a
    thread or of a child process held, or be lost in a destructor."""
    received: list[int] = []
    previous_handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _end(received: list[int]) -> None:
    """Ends the command as the first signal asks for."""
    raise SystemExit(TERMINATED) if received[0] == signal.SIGTERM else KeyboardInterrupt


def _say(line: str) -> None:
    print(f"  {line.rstrip()}\n", end="", file=sys.stderr, flush=True)  # one write: ranks write to the same file


def _capture(workload: GPTWorkload, out: Path, fault: str | None, steps: int, received: list[int]) -> None:
    """Trains some steps and captures the last of them. Raises RanksFailed."""
    from megaprof.testing import run_ranks

    if fault is not None:
        print(f"Fault: {job.described(fault, workload, 0)}.", flush=True)
    _say("starting the ranks")
    run_ranks(
        job.captured,
        workload.world_size,
        workload,
        profile_flags(out, steps, fault),
        fault,
        steps,
        timeout=_MOST_SECONDS,
        env=_ENVIRONMENT,
        on_line=lambda rank, line: _say(line) if rank == 0 else None,
        check=lambda: _end(received) if received else None,
    )


def profile_flags(out: Path, steps: int, fault: str | None) -> list[str]:
    """Returns the options that a user would append to their pretrain command. Most of the steps without a profiler come
    before the captured ones."""
    end = steps - min(_BEHIND, (steps - 1) // 3)
    captured = range(max(end - _CAPTURED, min(1, steps - 1)), end)
    flags = ["--profile-target", "train_actor", "train_log_probs", "--profile-dir", str(out)]
    flags += ["--profile-select", "all" if fault == job.SLOW_RANK else "per-stage"]
    return [*flags, "--profile-steps", ",".join(map(str, captured))]


def _steps_needed(report: Report) -> int:
    """Returns how many more steps would show what the cause is, or which layout is faster; 0 if no number of steps
    would."""
    from megaprof.analysis.report.text.causes import more_steps

    training = [target for target in report.targets if target.target == TRAIN_ACTOR]
    return max((more_steps(each.diagnosis, each.what_if) for each in training if each.diagnosis), default=0)


def _run_live(workload: GPTWorkload, out: Path, fault: str | None, steps: int | None, received: list[int]) -> None:
    """Trains until ``steps``, the first Ctrl-C or SIGTERM, which end the job after its step, or the end of a hang. A
    signal before the job runs, or a second one, kills the ranks. Raises RanksFailed, and KeyboardInterrupt or
    SystemExit if no report is wanted."""
    from megaprof.testing import run_ranks

    flags = ["--profile-target", "train_actor", "--profile-dir", str(out)]
    flags += ["--profile-tool", "timeline", "--profile-on-demand"]
    megaprof = ["megaprof"] if shutil.which("megaprof") else [sys.executable, "-m", "megaprof"]
    seconds = _HANG_SECONDS if fault == job.HANG else math.inf
    is_running = False

    def on_line(rank: int, line: str) -> None:
        nonlocal is_running
        if line.strip() == job.RUNNING:
            is_running = True
            _introduce(out, fault and job.described(fault, workload, job.FIRST_STEP), megaprof)
        elif rank == 0:
            _say(line)

    def check() -> None:
        if received and (not is_running or len(received) > 1):
            _end(received)
        if received and not stop.exists():
            stop.touch()
            print("Ending after this step; press again to end at once.", file=sys.stderr, flush=True)

    _say("starting the ranks")
    with tempfile.TemporaryDirectory(prefix="megaprof-demo-") as scratch:
        stop = Path(scratch, "stop")
        arguments = workload, flags, fault, steps, seconds, str(stop)
        try:
            step_count, *_ = run_ranks(
                job.live,
                workload.world_size,
                *arguments,
                timeout=math.inf,
                env=_ENVIRONMENT,
                on_line=on_line,
                check=check,
            )
            print(f"The demo has ended after {step_count} steps.", flush=True)
            if signal.SIGTERM in received[:1]:
                _end(received)
        except (KeyboardInterrupt, SystemExit):
            if is_running:
                report = shlex.join([*megaprof, "report", str(out)])
                print(f"To see what was recorded: {report}", file=sys.stderr, flush=True)
            raise


def _introduce(out: Path, fault: str | None, megaprof: list[str]) -> None:
    """Prints what a user can do now, as soon as commands find the job: a thread of the job writes its status after the
    first step."""
    directory, deadline = str(out.absolute()), time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        try:
            find_job(out)
            break
        except Unanswerable:
            time.sleep(0.1)
    print(f"The job is running and writes to {directory}")
    if fault is not None:
        print(f"Fault: {fault}.\n`watch` names it within half a minute.")
    print("Try in another shell:")
    for description, line in (
        ("shows the stages while the job runs", ["watch", directory]),
        ("captures two steps, for a report", ["trigger", directory, "--target", "train_actor"]),
        ("shows where every rank is, and which rank the others wait for", ["status", directory]),
    ):
        print(f"  {shlex.join([*megaprof, *line])}\n      {description}")
    print("Ctrl-C ends the job and prints the report.", flush=True)
