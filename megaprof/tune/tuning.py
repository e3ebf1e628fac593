"""The loop of a tuning: runs a trial, reads its measurements, and chooses the next one, until no layout is predicted to
gain, or no trial is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from megaprof.tune import trial as runs
from megaprof.tune.command import without_saving
from megaprof.tune.proposals import as_measured, best_proposal, steps_that_tell
from megaprof.tune.state import Trial, Tuning, store

TrialListener: TypeAlias = Callable[[Trial], None]


def resumed(tuning: Tuning, directory: Path) -> Tuning:
    """Returns ``tuning`` with every trial that was not measured, and whose directory was deleted, set to run again."""
    for trial in tuning.trials:
        if trial.outcome is not None and trial.step_ms is None and not (directory / trial.directory).exists():
            fresh_trial = Trial(trial.number, trial.command, trial.directory, trial.proposal)
            tuning = tuning.having(replace(fresh_trial, again=trial.again, more_steps=trial.more_steps))
    return tuning


def upcoming(tuning: Tuning, directory: Path) -> Tuning:
    """Returns ``tuning`` with the next trial to run as its pending one, or stopped, with the reason.

    A pending trial whose directory exists was interrupted: it gets a new directory, and the old one stays.
    Raises `command.Saves`.
    """
    pending_trial = tuning.pending
    if pending_trial is not None:
        return tuning.having(replace(pending_trial, directory=_free_name(directory, pending_trial.number)))
    if not tuning.trials:
        command = tuple(without_saving(tuning.command, tuning.saving_off))
        return tuning.having(Trial(1, command, _free_name(directory, 1)))
    first_trial = tuning.trials[0]
    if first_trial.step_ms is None:
        return replace(tuning, stopped="not_measured", reason=first_trial.why)
    if tuning.memory_limit is not None and first_trial.memory is None:
        reason = "a limit of memory cannot be kept, because the timelines say nothing of memory: no GPU was used"
        return replace(tuning, stopped="not_measured", reason=reason)
    number, last_trial = len(tuning.trials) + 1, tuning.trials[-1]
    may_continue = number <= tuning.most_trials
    if (
        may_continue
        and last_trial.outcome == "measured"
        and last_trial.as_predicted is False
        and not tuning.repeated(last_trial)
    ):
        # One of two runs was disturbed, or the prediction is wrong.
        return tuning.having(_repetition(last_trial, number, directory))
    proposal = best_proposal(tuning)
    if proposal is None:
        best, more_steps = tuning.best, steps_that_tell(tuning)
        if best is not None and more_steps:
            return tuning.having(_repetition(best, number, directory, more_steps))
        return replace(tuning, stopped="nothing_left", reason=None if best is None or best.next else best.says)
    if not may_continue:
        return replace(tuning, stopped="trials_spent")
    plain = without_saving(tuning.command, tuning.saving_off)
    return tuning.having(Trial(number, tuning.changed(plain, proposal), _free_name(directory, number), proposal))


def _repetition(trial: Trial, number: int, directory: Path, more_steps: int = 0) -> Trial:
    trial_directory = _free_name(directory, number)
    return Trial(number, trial.command, trial_directory, trial.proposal, again=trial.number, more_steps=more_steps)


def completed(tuning: Tuning, trial: Trial, directory: Path) -> Tuning:
    """Returns ``tuning`` with the results of its pending ``trial``, read from the files in ``directory``."""
    return tuning.having(as_measured(trial, directory, tuning.memory_limit, tuning.trials[0]))


def run(
    tuning: Tuning,
    directory: Path,
    time_limit: float,
    begun: TrialListener,
    advance: Callable[[int], None],
    over: TrialListener,
) -> Tuning:
    """Runs trials until the tuning stops, each for at most ``time_limit`` seconds. The state in ``directory`` is always
    up to date. Raises `command.Saves` before the first trial, and OSError if the command cannot be started."""
    while True:
        tuning = upcoming(tuning, directory)
        store(directory, tuning)
        trial = tuning.pending
        if trial is None:
            return tuning
        begun(trial)
        trial_directory = directory / trial.directory
        trial_directory.mkdir()
        steps = tuning.steps + trial.more_steps
        ended = runs.run(trial.command, trial_directory.absolute(), steps, time_limit, advance)
        tuning = completed(tuning, trial, trial_directory)
        measured = tuning.trials[trial.number - 1]
        if ended.outcome != "enough" and (measured.steps or 0) < steps:
            tuning = tuning.having(_failed(measured, ended, time_limit))
        over(tuning.trials[trial.number - 1])


def _failed(trial: Trial, ended: runs.Ended, time_limit: float) -> Trial:
    detail = f" after {trial.steps or 0} whole steps" + (f": {ended.last_line}" if ended.last_line else "")
    unmeasured = replace(trial, step_ms=None, next=(), half_as_deep=None)
    if ended.outcome == "out_of_memory":
        return replace(unmeasured, outcome="out_of_memory", why=f"memory ran out{detail}")
    if ended.outcome == "time_limit":
        return replace(unmeasured, outcome="time_limit", why=f"its {time_limit:g} s were over{detail}")
    return replace(unmeasured, outcome="failed", why=f"the command ended with exit code {ended.code}{detail}")


def _free_name(directory: Path, number: int) -> str:
    """Returns the name of a new directory for a trial."""
    names = (f"trial-{number}" + (f".{attempt}" if attempt > 1 else "") for attempt in range(1, 1000))
    return next(name for name in names if not (directory / name).exists())
