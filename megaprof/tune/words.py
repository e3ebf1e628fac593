"""A tuning in words, for the terminal and as HTML: a sentence, a table of the trials, and the command to run."""

from __future__ import annotations

import shlex
import time

from markupsafe import Markup
from rich.console import Console

from megaprof.analysis.diagnosis.policy import RERUN
from megaprof.analysis.report.html import date, environment, static
from megaprof.analysis.report.tables import Column, TableView, table
from megaprof.analysis.report.terminal import heading, show_table, show_warnings, text
from megaprof.analysis.report.text import words
from megaprof.formats.phrases import counted
from megaprof.tune.tuning import Trial, Tuning
from megaprof.version import __version__

#: The outcomes that are not named as in the data.
_OUTCOMES = {None: "not run yet", "time_limit": "out of time", "above_limit": "above the limit of memory"}


def sentence(tuning: Tuning) -> str:
    """Returns the outcome, as text."""
    result = tuning.result
    if result is None and tuning.measured:
        return "No trial keeps the limit of memory."
    if result is None:
        return f"The command could not be measured: {tuning.reason or 'its first trial has not run yet'}"
    inside, compared = result.as_predicted
    agreement = f"; {inside} of {counted(compared, 'prediction')} inside the interval" * (compared > 0)
    if result.command == tuning.command:
        if not compared:
            return "Nothing gained: no other layout was tried."
        tried = counted(len(tuning.measured), "layout")
        return f"Nothing gained: the command as it was given is the quickest of {tried} tried{agreement}."
    return f"{words.speedup(result.speedup)} times as fast: {tuning.trials[result.trial - 1].what}{agreement}."


def stopped(tuning: Tuning) -> str | None:
    """Returns why there are no more trials; None while there are."""
    if tuning.stopped == "trials_spent":
        spent = f"All {counted(tuning.most_trials, 'trial')} are spent"
        return f"{spent}, and another layout is predicted to be faster still."
    if tuning.stopped != "nothing_left":
        return None
    return words.sentence(tuning.reason or "no other layout is surely 2 % faster")


def trials(tuning: Tuning) -> TableView:
    """Returns a row for every trial, without the columns that are empty for all of them."""
    first_step = next((trial.step_ms for trial in tuning.measured if trial.proposal is None), None)
    rows = []
    for trial in tuning.trials:
        proposal, speedup = trial.proposal, words.ABSENT
        if proposal and first_step and trial.step_ms:
            speedup = words.speedup(first_step.over(trial.step_ms, RERUN))
        rows.append(
            {
                Column("trial"): str(trial.number),
                Column("layout", "text"): trial.what,
                Column("step", unit="ms"): words.within(trial.step_ms),
                Column("predicted", unit="ms"): words.within(proposal.step_ms if proposal else None),
                Column("memory", unit="GiB"): most(trial.memory),
                Column("predicted", unit="GiB"): most(proposal.memory if proposal else None),
                Column("times\nas fast"): speedup,
                Column("outcome", "text"): _outcome(trial),
            }
        )
    filled = {column for cells in rows for column, cell in cells.items() if cell != words.ABSENT}
    return table("trials", [{column: cells[column] for column in cells if column in filled} for cells in rows])


def command_line(tuning: Tuning) -> str | None:
    """Returns the best command, for a shell; None if the given one is the best."""
    result = tuning.result
    return None if result is None or result.command == tuning.command else shlex.join(result.command)


def most(memory: tuple[int, ...] | None) -> str:
    """Returns the memory of the largest stage in GiB."""
    return words.ABSENT if memory is None else f"{max(memory) / (1 << 30):.1f}"


def show(tuning: Tuning, console: Console) -> None:
    heading(console, "Tuning")
    show_table(console, trials(tuning))
    show_warnings(console, failures(tuning))
    for line in assumed(tuning):
        console.print(text(line))
    best = tuning.best
    console.print(text(sentence(tuning), "green" if best is not None else "bold red"))
    if (reason := stopped(tuning)) is not None:
        console.print(text(reason))
    if (command := command_line(tuning)) is not None:
        console.print(text("  " + command), soft_wrap=True)


def failures(tuning: Tuning) -> list[str]:
    """Returns a line for each trial that was not measured, with the reason, unless `sentence` says it."""
    failed = [trial for trial in tuning.trials if trial.why and trial.why != tuning.reason]
    return [f"trial {trial.number} ({trial.what}): {trial.why}" for trial in failed]


def assumed(tuning: Tuning) -> list[str]:
    """Returns a line for each assumption of the predictions that were tried, with the trials that it concerns."""
    trials_by_clause: dict[str, list[str]] = {}
    for trial in tuning.trials:
        for clause in trial.proposal.assumes if trial.proposal and trial.again is None else ():
            trials_by_clause.setdefault(clause, []).append(trial.what)
    return [f"{' / '.join(names)}: assumes that {clause}." for clause, names in trials_by_clause.items()]


def page(tuning: Tuning) -> str:
    """Returns a tuning as one HTML file that loads nothing and runs no script."""
    template = environment("megaprof.tune", "megaprof.analysis.report").get_template("tuning.html")
    return template.render(
        tuning=tuning,
        sentence=sentence(tuning),
        stopped=stopped(tuning),
        command=command_line(tuning),
        trials=trials(tuning),
        failures=failures(tuning),
        assumed=assumed(tuning),
        about=[date(time.time()), f"megaprof {__version__}"],
        css=Markup(static("report.css")),
    )


def _outcome(trial: Trial) -> str:
    outcome = _OUTCOMES.get(trial.outcome) or str(trial.outcome).replace("_", " ")
    if trial.as_predicted is None:
        return outcome
    predicted = "as predicted" if trial.as_predicted else "not as predicted"
    return predicted if trial.outcome == "measured" else f"{outcome}, {predicted}"
