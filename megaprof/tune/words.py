"""What tuning found, for people: one sentence, the trials as a table, the command to run. Terminal and HTML."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import compress

from markupsafe import Markup
from rich.console import Console

from megaprof.analysis.report.html import environment, static
from megaprof.analysis.report.printing import heading, table, text
from megaprof.analysis.report.text import words
from megaprof.formats.phrases import counted
from megaprof.tune.state import Interval, Trial, Tuning
from megaprof.version import __version__

_OUTCOMES = {
    None: "not run yet",
    "measured": "measured",
    "failed": "failed",
    "out_of_memory": "out of memory",
    "time_limit": "out of time",
    "not_as_asked": "not as asked",
    "above_limit": "above the limit of memory",
}
COLUMNS = ("trial", "layout", "step, ms", "predicted, ms", "GiB", "predicted, GiB", "times as fast", "outcome")


def sentence(tuning: Tuning) -> str:
    """What came of it."""
    found = tuning.result
    if found is None and tuning.measured:
        return "No trial keeps the limit of memory."
    if found is None:
        return f"The command could not be measured: {tuning.reason or 'its first trial has not run yet'}"
    held, of = found.as_predicted
    inside = f"; {held} of {counted(of, 'prediction')} inside the interval" if of else ""
    if found.command == tuning.command:
        if not of:
            failed = any(each.proposal for each in tuning.trials)
            return f"Nothing gained: no other layout {'could be measured' if failed else 'was tried'}."
        tried = counted(len(tuning.measured), "layout")
        return f"Nothing gained: the command as it was given is the quickest of {tried} tried{inside}."
    return f"{ratio(found.speedup)} times as fast: {tuning.trials[found.trial - 1].what}{inside}."


def stopped(tuning: Tuning) -> str | None:
    """Why there are no more trials; None while there are."""
    if tuning.stopped == "nothing_left":
        more = f" {words.sentence(tuning.reason)}" if tuning.reason else ""
        return f"No other layout is surely 1 % faster.{more}"
    if tuning.stopped == "trials_spent":
        return "No trials are left, and another layout is predicted to be faster still."
    return None


def rows(tuning: Tuning) -> list[tuple[str, ...]]:
    """The heads of a table, and a row for every trial. A column of `COLUMNS` in which no trial has anything is left
    out."""
    known = list(_rows(tuning))
    filled = [any(cell != words.ABSENT for cell in column) for column in zip(*known, strict=True)]
    return [tuple(compress(row, filled)) for row in (COLUMNS, *known)]


def _rows(tuning: Tuning) -> Iterator[tuple[str, ...]]:
    first = next((trial.step_ms for trial in tuning.measured if trial.proposal is None), None)
    for trial in tuning.trials:
        yield (
            str(trial.number),
            trial.what,
            milliseconds(trial.step_ms),
            milliseconds(trial.proposal.step_ms) if trial.proposal else words.ABSENT,
            most(trial.memory),
            most(trial.proposal.memory) if trial.proposal else words.ABSENT,
            ratio(first.over(trial.step_ms)) if trial.proposal and first and trial.step_ms else words.ABSENT,
            _outcome(trial),
        )


def command_line(tuning: Tuning) -> str | None:
    """The best command, for a shell; None where the given one is the best."""
    found = tuning.result
    return None if found is None or found.command == tuning.command else shlex.join(found.command)


def milliseconds(step: Interval | None) -> str:
    """With its interval."""
    return words.ABSENT if step is None else words.within(step.value, (step.low, step.high))


def most(memory: tuple[int, ...] | None) -> str:
    """The most that a stage has, in GiB."""
    return words.ABSENT if memory is None else f"{max(memory) / (1 << 30):.1f}"


def ratio(gained: Interval) -> str:
    """How many times as fast, with the interval."""
    return words.speedup(gained.value, (gained.low, gained.high))


def show(tuning: Tuning, console: Console) -> None:
    """Print it."""
    heading(console, "Tuning")
    heads, *filled = rows(tuning)
    made = table(left=heads)
    for row in filled:
        made.add_row(*(text(cell) for cell in row))
    console.print(made)
    for line in failures(tuning):
        console.print(text(f"! {line}", "yellow"))
    best = tuning.best
    console.print(text(sentence(tuning), "green" if best is not None else "bold red"))
    if (why := stopped(tuning)) is not None:
        console.print(text(why))
    if (command := command_line(tuning)) is not None:
        console.print(text("  " + command), soft_wrap=True)


def failures(tuning: Tuning) -> list[str]:
    """Why trials were not measured, a line each."""
    return [f"trial {trial.number} ({trial.what}): {trial.why}" for trial in tuning.trials if trial.why]


def page(tuning: Tuning) -> str:
    """The same as one HTML file that loads nothing and runs no script."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    css = static("report.css")
    heads, *filled = rows(tuning)
    made = environment("megaprof.tune").get_template("tuning.html")
    this = {"sentence": sentence(tuning), "stopped": stopped(tuning), "command": command_line(tuning)}
    about = [when, f"megaprof {__version__}"]
    return made.render(
        tuning=tuning,
        rows=filled,
        columns=heads,
        failures=failures(tuning),
        about=about,
        css=Markup(css),
        **this,
    )


def _outcome(trial: Trial) -> str:
    told = {True: ", as predicted", False: ", not as predicted", None: ""}[trial.as_predicted]
    return _OUTCOMES[trial.outcome] + told
