"""The state of a tuning: the command, its trials so far, and why it stopped. Its file, report.json, is also the result.

The file is written whole after every change, so that an interrupted tuning continues from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from megaprof.analysis.diagnosis.policy import RERUN
from megaprof.analysis.samples import Interval
from megaprof.formats.inputs import read_input
from megaprof.formats.names import appearing
from megaprof.formats.phrases import Unanswerable
from megaprof.tune.command import with_layout
from megaprof.version import __version__

NAME = "report.json"
Outcome = Literal["measured", "failed", "out_of_memory", "time_limit", "not_as_asked", "above_limit"]
Why = Literal["nothing_left", "trials_spent", "not_measured"]


@dataclass(frozen=True)
class Proposal:
    """A layout to try, and what it was predicted to take."""

    what: str
    """The layout in words."""
    layout: str
    """The layout as Megatron's ``--pipeline-model-parallel-layout`` writes it."""
    flags: tuple[str, ...]
    """Megatron-LM's options for it; they replace all options that place layers."""
    step_ms: Interval
    """The predicted step, in milliseconds."""
    against: int
    """The number of the trial that it was predicted from."""
    stages: int
    """Pipeline stages; ``flags`` do not contain their number."""
    memory: tuple[int, ...] | None = None
    """Bytes that each stage is predicted to allocate at its peak; None if memory was not measured."""
    more_steps: int = 0
    """The number of further steps of that trial that would show whether the layout gains; 0 if that is known, or if no
    number of steps would show it."""
    microbatches: int | None = None
    """Microbatches that each replica must run in the trial; None if their number stays the same."""
    assumes: tuple[str, ...] = ()
    """The assumptions of the prediction, as clauses."""


@dataclass(frozen=True)
class Trial:
    """One run of the command, with one layout."""

    number: int
    """Its number; 1 is the command as it was given."""
    command: tuple[str, ...]
    """The words that are run."""
    directory: str
    """The directory of its timelines and its output, relative to that of the tuning."""
    proposal: Proposal | None = None
    """The layout that it tries; None for the command as it was given."""
    outcome: Outcome | None = None
    """The way it ended; None while it waits or runs."""
    why: str | None = None
    """The reason for an outcome other than ``measured``."""
    layout: str | None = None
    """The layout that ran."""
    stages: int | None = None
    """Pipeline stages that ran."""
    step_ms: Interval | None = None
    """The measured step, in milliseconds. If the depth differs from that of the first trial, it includes the time by
    which the gap between steps is longer than in the first trial."""
    between_ms: float | None = None
    """Milliseconds from the end of a step to the beginning of the next one; None if no two steps were recorded."""
    steps: int | None = None
    """The number of steps that were averaged."""
    memory: tuple[int, ...] | None = None
    """Bytes that each stage had allocated at its peak; None if that was not measured."""
    framework: str | None = None
    """The host, as traces name it."""
    role: str | None = None
    """The role of its model; None without roles."""
    verdict: str | None = None
    """The first sentence of its report."""
    says: str | None = None
    """The advice of its report on other layouts."""
    next: tuple[Proposal, ...] = ()
    """The layouts predicted from it, the best lower end first."""
    half_as_deep: Proposal | str | None = None
    """The prediction of half as many stages, or the reason that there is none; None if nothing was predicted."""
    again: int | None = None
    """The number of the trial that it repeats. The faster of the two counts: other work can only make a step longer."""
    more_steps: int = 0
    """The number of steps that it measures in addition to those of other trials, to decide what the trial that it
    repeats left open."""

    @property
    def what(self) -> str:
        """The layout that it tries, in words."""
        return ("as given" if self.proposal is None else self.proposal.what) + ", again" * (self.again is not None)

    @property
    def as_predicted(self) -> bool | None:
        """True if the measured step agrees with the predicted one; None if one of them is missing."""
        if self.proposal is None or self.step_ms is None:
            return None
        return self.proposal.step_ms.meets(self.step_ms)


@dataclass(frozen=True)
class Result:
    """The outcome of all trials."""

    trial: int
    """The number of the fastest trial."""
    speedup: Interval
    """The speed of that trial divided by the speed of the first one."""
    command: tuple[str, ...]
    """The command of the fastest trial, for the user. It saves what the given command saves."""
    as_predicted: tuple[int, int]
    """The number of predictions that agreed with the measured step, and the number of those that were compared."""


@dataclass(frozen=True)
class Tuning:
    """All trials of a command."""

    command: tuple[str, ...]
    """The command as it was given."""
    steps: int
    """Steps that each trial measures."""
    most_trials: int
    """The most trials, including the first."""
    saving_off: tuple[str, ...] | None = None
    """Words that turn saving off, if the user gave some."""
    memory_limit: int | None = None
    """Bytes that a stage may allocate; None: the memory of its device."""
    depth: bool = False
    """True if half as many stages may be tried."""
    trials: tuple[Trial, ...] = ()
    """All trials, in order."""
    stopped: Why | None = None
    """Why it stopped; None while it goes on."""
    reason: str | None = None
    """The reason in words, if ``stopped`` alone does not say it."""
    result: Result | None = None
    """The outcome so far; None before the first trial is measured."""
    version: str = field(default=__version__)
    """The version of megaprof."""

    @property
    def measured(self) -> tuple[Trial, ...]:
        """The trials with a step time; for a trial and its repetition, the faster of the two."""
        fastest = dict[int, Trial]()
        for trial in (trial for trial in self.trials if trial.step_ms is not None):
            number = trial.again or trial.number
            fastest[number] = min(fastest.get(number, trial), trial, key=_step)
        return tuple(fastest.values())

    @property
    def best(self) -> Trial | None:
        """The trial with the shortest step among those within the memory limit; None if there is none."""
        within_limit = [trial for trial in self.measured if trial.outcome != "above_limit"]
        return min(within_limit, key=_step, default=None)

    @property
    def pending(self) -> Trial | None:
        """The trial that waits or runs; None if there is none."""
        return next((trial for trial in self.trials if trial.outcome is None), None)

    def changed(self, command: Sequence[str], proposal: Proposal) -> tuple[str, ...]:
        """Returns the words of ``command``, the given one or a variant of it, with the layout of ``proposal``."""
        first_trial = self.trials[0]
        same_depth = proposal.stages == first_trial.stages
        depth = () if same_depth else ("--pipeline-model-parallel-size", str(proposal.stages))
        return tuple(
            with_layout(command, (*depth, *proposal.flags), first_trial.framework, first_trial.role, proposal.stages)
        )

    def repeated(self, trial: Trial) -> bool:
        """Returns whether ``trial`` was run again, or is itself a repetition."""
        return trial.again is not None or any(repetition.again == trial.number for repetition in self.trials)

    def having(self, trial: Trial) -> Tuning:
        """Returns the tuning with ``trial``, which replaces the trial with the same number, and with the new result."""
        unchanged = [previous for previous in self.trials if previous.number != trial.number]
        tuning = replace(self, trials=tuple(sorted([*unchanged, trial], key=lambda item: item.number)))
        return replace(tuning, result=_result(tuning))


def _step(trial: Trial) -> float:
    return trial.step_ms.value if trial.step_ms else 0.0


def _result(tuning: Tuning) -> Result | None:
    best, first_trial = tuning.best, next((trial for trial in tuning.measured if trial.proposal is None), None)
    if best is None or best.step_ms is None or first_trial is None or first_trial.step_ms is None:
        return None
    agreements = [trial.as_predicted for trial in tuning.measured if trial.as_predicted is not None]
    command, speedup = tuning.command, Interval.of(1.0)
    if best.proposal is not None:
        command = tuning.changed(tuning.command, best.proposal)
        speedup = first_trial.step_ms.over(best.step_ms, RERUN)
    return Result(best.number, speedup, command, (sum(agreements), len(agreements)))


def load(directory: Path) -> Tuning | None:
    """Returns the tuning in ``directory``; None if there is none. Raises Unanswerable for a file of another origin."""
    file = directory / NAME
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(read_input(file), type=Tuning)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as fault:
        raise Unanswerable(f"{file} is not of megaprof tune: {fault}") from None


def store(directory: Path, tuning: Tuning) -> None:
    """Writes the tuning. If that fails, raises OSError and leaves the previous file in place."""
    with appearing(directory / NAME) as file:
        file.write(msgspec.json.format(msgspec.json.encode(tuning), indent=1))
