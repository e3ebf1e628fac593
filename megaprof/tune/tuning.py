"""The loop: a trial, what it teaches, the next one; until nothing is predicted to gain, or no trial is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megaprof.tune import trial as runs
from megaprof.tune.command import without_saving
from megaprof.tune.proposals import best_proposal, measured, steps_that_tell
from megaprof.tune.state import Trial, Tuning, store

#: Is told of a trial.
Told = Callable[[Trial], None]


def resumed(tuning: Tuning, directory: Path) -> Tuning:
    """Returns ``tuning`` with each trial to be run again that was not measured, and whose directory was deleted."""
    for each in tuning.trials:
        if each.outcome is not None and each.step_ms is None and not (directory / each.directory).exists():
            waiting = Trial(each.number, each.command, each.directory, each.proposal)
            tuning = tuning.having(replace(waiting, again=each.again, more_steps=each.more_steps))
    return tuning


def upcoming(tuning: Tuning, directory: Path) -> Tuning:
    """Returns ``tuning`` with the trial to run as its pending one, or stopped, with the reason.

    A pending trial whose directory exists was interrupted: it gets another one, and what is in that stays.
    Raises `command.Saves`.
    """
    waiting = tuning.pending
    if waiting is not None:
        return tuning.having(replace(waiting, directory=_free(directory, waiting.number)))
    if not tuning.trials:
        words = tuple(without_saving(tuning.command, tuning.saving_off))
        return tuning.having(Trial(1, words, _free(directory, 1)))
    first = tuning.trials[0]
    if first.step_ms is None:
        return replace(tuning, stopped="not_measured", reason=first.why)
    if tuning.memory_limit is not None and first.memory is None:
        reason = "a limit of memory cannot be kept, because the timelines say nothing of memory: no GPU was used"
        return replace(tuning, stopped="not_measured", reason=reason)
    number, last = len(tuning.trials) + 1, tuning.trials[-1]
    left = number <= tuning.most_trials
    if left and last.outcome == "measured" and last.as_predicted is False and not tuning.repeated(last):
        # One of two runs was disturbed, or the prediction is wrong.
        return tuning.having(_again(last, number, directory))
    proposal = best_proposal(tuning)
    if proposal is None:
        best, more = tuning.best, steps_that_tell(tuning)
        if best is not None and more:
            return tuning.having(_again(best, number, directory, more))
        return replace(tuning, stopped="nothing_left", reason=None if best is None or best.next else best.says)
    if not left:
        return replace(tuning, stopped="trials_spent")
    plain = without_saving(tuning.command, tuning.saving_off)
    return tuning.having(Trial(number, tuning.changed(plain, proposal), _free(directory, number), proposal))


def _again(trial: Trial, number: int, directory: Path, more_steps: int = 0) -> Trial:
    place = _free(directory, number)
    return Trial(number, trial.command, place, trial.proposal, again=trial.number, more_steps=more_steps)


def completed(tuning: Tuning, trial: Trial, directory: Path) -> Tuning:
    """Returns ``tuning`` with what the files in ``directory`` say of its pending ``trial``."""
    return tuning.having(measured(trial, directory, tuning.memory_limit, tuning.trials[0]))


def run(
    tuning: Tuning, directory: Path, time_limit: float, begun: Told, advance: Callable[[int], None], over: Told
) -> Tuning:
    """Run trials until it stops, each at most ``time_limit`` seconds. ``directory`` has the file of what was found at
    any time. Raises `command.Saves` before the first trial, and OSError where the command cannot be started."""
    while True:
        tuning = upcoming(tuning, directory)
        store(directory, tuning)
        trial = tuning.pending
        if trial is None:
            return tuning
        begun(trial)
        place = directory / trial.directory
        place.mkdir()
        steps = tuning.steps + trial.more_steps
        ended = runs.run(trial.command, place.absolute(), steps, time_limit, advance)
        tuning = completed(tuning, trial, place)
        found = tuning.trials[trial.number - 1]
        if ended.outcome != "enough" and (found.steps or 0) < steps:
            tuning = tuning.having(_failed(found, ended, time_limit))
        over(tuning.trials[trial.number - 1])


def _failed(trial: Trial, ended: runs.Ended, time_limit: float) -> Trial:
    said = f" after {trial.steps or 0} whole steps" + (f": {ended.last_line}" if ended.last_line else "")
    lost = replace(trial, step_ms=None, next=(), half_as_deep=None)
    if ended.outcome == "out_of_memory":
        return replace(lost, outcome="out_of_memory", why=f"memory ran out{said}")
    if ended.outcome == "time_limit":
        return replace(lost, outcome="time_limit", why=f"its {time_limit:g} s were over{said}")
    return replace(lost, outcome="failed", why=f"the command ended with exit code {ended.code}{said}")


def _free(directory: Path, number: int) -> str:
    """A name for the directory of a trial that does not exist yet."""
    names = (f"trial-{number}" + (f".{again}" if again > 1 else "") for again in range(1, 1000))
    return next(name for name in names if not (directory / name).exists())
