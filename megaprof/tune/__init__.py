"""``megaprof tune ... -- COMMAND``: tries the layouts that the what-if predicts to be faster, until none is left. Its
outcome is a sentence, a table of the trials and the command to run, on the terminal and as HTML."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup
from rich.console import Console

from megaprof.analysis import words
from megaprof.analysis.diagnosis.policy import RERUN
from megaprof.analysis.report.html import date, environment, static
from megaprof.analysis.report.tables import Column, TableView, table
from megaprof.analysis.report.terminal import heading, show_table, show_warnings, text
from megaprof.cli import FAILED, TERMINATED, UsageError, local, print_json, progress, writing
from megaprof.cli.run import resolve
from megaprof.config.options import flag
from megaprof.config.values import parse_limit
from megaprof.formats.names import appearing
from megaprof.formats.phrases import Unanswerable, counted
from megaprof.tune import trial as runs
from megaprof.tune import tuning
from megaprof.tune.command import without_saving
from megaprof.tune.tuning import Trial, Tuning
from megaprof.version import __version__

DESCRIPTION = """Run COMMAND for some steps, predict from its timelines which layout would be faster, run it again with
that layout, and so on, until no layout is certainly 2 % faster. The layout options of Megatron-LM, or of another
supported host, must be on the command line of COMMAND itself. Checkpoints are not saved. If interrupted, run the same
command line again to continue."""

EXAMPLES = (
    "megaprof tune --out tuned -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...",
    "megaprof tune --next --out tuned -- srun python pretrain_gpt.py --num-layers 32 ...",
    "megaprof tune --next --out tuned",
)
_TRIALS, _STEPS, _TIME_LIMIT = 4, 20, 1800.0
#: The outcomes that are not named as in the data.
_OUTCOMES = {None: "not run yet", "time_limit": "out of time", "above_limit": "above the limit of memory"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.usage = "megaprof tune [--trials N] [--steps N] [--out DIR] [--next [DIR]] -- COMMAND [ARGUMENT ...]"
    parser.add_argument(
        "--trials", type=int, help=f"maximum number of runs of COMMAND, including the first (default: {_TRIALS})"
    )
    parser.add_argument("--steps", type=int, help=f"training steps to measure in each run (default: {_STEPS})")
    parser.add_argument(
        "--out", type=local, default=Path("tuned"), help="directory for the trials and the result (default: tuned)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=_TIME_LIMIT,
        help=f"seconds after which an unfinished run is ended (default: {_TIME_LIMIT:g})",
    )
    parser.add_argument(
        "--saving-off",
        metavar="WORDS",
        help="words to append to COMMAND so that it saves no checkpoints; '' if it saves none",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="largest allocation of a rank on its GPU (60GiB): layouts that should need more are not tried (default: "
        "the GPU's memory)",
    )
    parser.add_argument(
        "--next",
        nargs="?",
        const=Path(),
        type=local,
        metavar="DIR",
        help="run nothing; read what the last printed command wrote (from DIR, if you moved it), and print the next "
        "command to submit",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def run(args: argparse.Namespace) -> int:
    """Tunes the command. Returns 1 if the command could not be measured. Raises UsageError and Unanswerable."""
    current = _earlier_or_new(args)
    if processes := runs.running(args.out):
        numbers = ", ".join(map(str, processes))
        raise Unanswerable(
            f"--out {args.out}: a trial is still running, in processes {numbers}: wait for them, or end them"
        )
    resolve(list(current.command))
    without_saving(current.command, current.saving_off)
    with writing("--out", args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    current = _next(current, args) if args.next is not None else _tuned(current, args)
    with writing("--out", args.out), appearing(args.out / "report.html") as file:
        file.write(page(current).encode())
    if args.json:
        print_json(current)
    elif current.pending is None:
        show(current, Console(highlight=False))
        print(f"Result as one HTML file: {args.out / 'report.html'}")
    return FAILED if current.stopped == "not_measured" else 0


def _earlier_or_new(args: argparse.Namespace) -> Tuning:
    """Returns the earlier tuning of the same command, or a new one. A tuning without a measured trial found nothing to
    keep, so another command may replace it. Raises UsageError and Unanswerable."""
    for name in ("trials", "steps", "time_limit"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be more than 0")
    typed = tuple(args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line)
    earlier = tuning.load(args.out)
    if earlier is None and args.out.exists() and any(args.out.iterdir()):
        raise UsageError(f"--out {args.out}: must be a new or empty directory, or one that megaprof tune wrote")
    other = earlier is not None and typed not in ((), earlier.command)
    starts_anew = earlier is not None and (earlier.stopped == "not_measured" or (other and not earlier.measured))
    if starts_anew and typed:
        earlier = None
    if earlier is None and not typed:
        raise UsageError("no command; put it after '--': megaprof tune --out tuned -- torchrun ... pretrain_gpt.py ...")
    if earlier is not None and other:
        raise UsageError(f"--out {args.out}: contains trials of another command: {shlex.join(earlier.command)}")
    limit = memory_limit(args.memory_limit)
    saving_off = None if args.saving_off is None else tuple(shlex.split(args.saving_off))
    if earlier is None:
        return Tuning(typed, args.steps or _STEPS, args.trials or _TRIALS, saving_off, limit)
    for name, value in (("steps", args.steps), ("saving_off", saving_off), ("memory_limit", limit)):
        if value not in (None, getattr(earlier, name)):
            option = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise UsageError(f"{option}: the trials in --out {args.out} used another value")
    earlier = replace(earlier, trials=(), result=None) if starts_anew else tuning.resumed(earlier, args.out)
    return replace(earlier, most_trials=args.trials or earlier.most_trials, stopped=None, reason=None)


def memory_limit(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size, _ = parse_limit("--memory-limit", text)
    except ValueError:
        size = None
    if size is None:  # also a share: nobody knows what a rank of the job would have
        raise UsageError(f"--memory-limit: {text!r} is not valid; valid: a size such as 60GiB or 500MB")
    return size


def _tuned(current: Tuning, args: argparse.Namespace) -> Tuning:
    """Runs the trials. Raises Unanswerable if the command cannot be started."""
    whole = current.steps + runs.WARM_UP
    end_what_runs()

    def begun(now: Trial) -> None:
        predicted = f", predicted {words.within(now.proposal.step_ms)} ms" if now.proposal else ""
        log = args.out / now.directory / runs.LOG
        print(f"Trial {now.number}: {now.what}{predicted}; it prints to {log}", file=sys.stderr, flush=True)

    try:
        with progress("steps") as advance:
            return tuning.run(
                current, args.out, args.time_limit, begun, lambda made: advance(min(made, whole), whole), _say_over
            )
    except OSError as fault:
        raise Unanswerable(f"{current.command[0]}: {fault.strerror or fault}") from None


def end_what_runs() -> None:
    """Makes signals that end this process end the command that it runs, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda *_: sys.exit(TERMINATED))


def _next(current: Tuning, args: argparse.Namespace) -> Tuning:
    """Reads the results of the last printed command, and prints the next one. Raises Unanswerable."""
    pending = current.pending
    if pending is not None:
        if args.next != Path():
            pending = replace(pending, directory=str(args.next.absolute()))
        trial_directory = args.out / pending.directory
        if not trial_directory.is_dir():
            raise Unanswerable(
                f"{trial_directory}: no such directory; the command of trial {pending.number} has not run yet. If "
                "it failed before it wrote anything, create the directory to count the trial as failed"
            )
        current = tuning.completed(current, pending, trial_directory)
        _say_over(current.trials[pending.number - 1])
    current = tuning.upcoming(current, args.out)
    tuning.store(args.out, current)
    if (trial_now := current.pending) is not None:
        next_command = shlex.join(["megaprof", "tune", "--next", "--out", str(args.out)])
        print(f"Trial {trial_now.number} ({trial_now.what}). When it has ended, run: {next_command}", file=sys.stderr)
        directory = (args.out / trial_now.directory).absolute()
        config = runs.config_of(directory)
        assignments = [f"{name}={value}" for name, value in runs.apart(directory).items()]
        options = [flag("target"), *config.target, flag("tool"), *config.tool, flag("dir"), str(config.dir)]
        print(shlex.join(["env", *assignments, "megaprof", "run", *options, "--", *trial_now.command]))
    return current


def _say_over(trial_now: Trial) -> None:
    if trial_now.step_ms is None:
        print(f"  {trial_now.outcome}: {trial_now.why}", file=sys.stderr, flush=True)
    else:
        steps = counted(trial_now.steps or 0, "step")
        print(f"  {words.within(trial_now.step_ms)} ms per step, over {steps}", file=sys.stderr)
        print(f"  {trial_now.verdict}", file=sys.stderr, flush=True)


def sentence(tuned: Tuning) -> str:
    """Returns the outcome, as text."""
    result = tuned.result
    if result is None and tuned.measured:
        return "No trial keeps the limit of memory."
    if result is None:
        return f"The command could not be measured: {tuned.reason or 'its first trial has not run yet'}"
    inside, compared = result.as_predicted
    agreement = f"; {inside} of {counted(compared, 'prediction')} inside the interval" * (compared > 0)
    if result.command == tuned.command:
        if not compared:
            return f"Nothing gained: no other layout was {'tried' if len(tuned.trials) == 1 else 'measured'}."
        tried = counted(len(tuned.measured), "layout")
        return f"Nothing gained: the command as it was given is the quickest of {tried} tried{agreement}."
    return f"{words.speedup(result.speedup)} times as fast: {tuned.trials[result.trial - 1].what}{agreement}."


def stopped(tuned: Tuning) -> str | None:
    """Returns why there are no more trials; None while there are."""
    if tuned.stopped == "trials_spent":
        spent = f"All {counted(tuned.most_trials, 'trial')} are spent"
        return f"{spent}, and another layout is predicted to be faster still."
    if tuned.stopped is None or not tuned.measured:  # then `sentence` says why
        return None
    return words.sentence(tuned.reason or "no other layout is surely 2 % faster")


def trials(tuned: Tuning) -> TableView:
    """Returns a row for every trial, without the columns that are empty for all of them."""
    first_step = next((trial.step_ms for trial in tuned.measured if trial.proposal is None), None)
    rows = []
    for trial in tuned.trials:
        proposal, speedup = trial.proposal, words.ABSENT
        if proposal and first_step and trial.step_ms:
            speedup = words.speedup(first_step.over(trial.step_ms, RERUN))
        outcomes = [_OUTCOMES.get(trial.outcome) or str(trial.outcome).replace("_", " ")]
        if trial.as_predicted is not None:
            predicted = "as predicted" if trial.as_predicted else "not as predicted"
            outcomes = [predicted] if trial.outcome == "measured" else [*outcomes, predicted]
        rows.append(
            {
                Column("trial"): str(trial.number),
                Column("layout", "text"): trial.what,
                Column("step", unit="ms"): words.within(trial.step_ms),
                Column("predicted", unit="ms"): words.within(proposal.step_ms if proposal else None),
                Column("memory", unit="GiB"): most(trial.memory),
                Column("predicted", unit="GiB"): most(proposal.memory if proposal else None),
                Column("times\nas fast"): speedup,
                Column("outcome", "text"): ", ".join(outcomes),
            }
        )
    filled = {column for cells in rows for column, cell in cells.items() if cell != words.ABSENT}
    return table("trials", [{column: cells[column] for column in cells if column in filled} for cells in rows])


def command_line(tuned: Tuning) -> str | None:
    """Returns the best command, for a shell; None if the given one is the best."""
    result = tuned.result
    return None if result is None or result.command == tuned.command else shlex.join(result.command)


def most(memory: tuple[int, ...] | None) -> str:
    """Returns the memory of the largest stage in GiB."""
    return words.ABSENT if memory is None else f"{max(memory) / (1 << 30):.1f}"


def show(tuned: Tuning, console: Console) -> None:
    heading(console, "Tuning")
    show_table(console, trials(tuned))
    show_warnings(console, failures(tuned))
    for line in assumed(tuned):
        console.print(text(line))
    best = tuned.best
    console.print(text(sentence(tuned), "green" if best is not None else "bold red"))
    if (reason := stopped(tuned)) is not None:
        console.print(text(reason))
    if (command := command_line(tuned)) is not None:
        console.print(text("  " + command), soft_wrap=True)


def failures(tuned: Tuning) -> list[str]:
    """Returns a line for each trial that was not measured, with the reason, unless `sentence` says it."""
    failed = [trial for trial in tuned.trials if trial.why and trial.why != tuned.reason]
    return [f"trial {trial.number} ({trial.what}): {trial.why}" for trial in failed]


def assumed(tuned: Tuning) -> list[str]:
    """Returns a line for each assumption of the predictions that were tried, with the trials that it concerns."""
    trials_by_clause: dict[str, list[str]] = {}
    for trial in tuned.trials:
        for clause in trial.proposal.assumes if trial.proposal and trial.again is None else ():
            trials_by_clause.setdefault(clause, []).append(trial.what)
    return [f"{' / '.join(names)}: assumes that {clause}." for clause, names in trials_by_clause.items()]


def page(tuned: Tuning) -> str:
    """Returns a tuning as one HTML file that loads nothing and runs no script."""
    template = environment("megaprof.tune", "megaprof.analysis.report").get_template("tuning.html")
    return template.render(
        tuning=tuned,
        sentence=sentence(tuned),
        stopped=stopped(tuned),
        command=command_line(tuned),
        trials=trials(tuned),
        failures=failures(tuned),
        assumed=assumed(tuned),
        about=[date(time.time()), f"megaprof {__version__}"],
        css=Markup(static("report.css")),
    )
