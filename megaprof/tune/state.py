"""What tuning has found so far: the command, its trials, and why it stopped. The file of it is the result, too.

It is written whole after every change, so an interrupted tuning goes on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from pathlib import Path
from typing import Literal

import msgspec

from megaprof.analysis.what_if.changeable import RERUN
from megaprof.formats.files import appearing
from megaprof.formats.inputs import read_input
from megaprof.tune.command import relaid
from megaprof.version import __version__

NAME = "report.json"
Outcome = Literal["measured", "failed", "out_of_memory", "time_limit", "not_as_asked", "above_limit"]
Why = Literal["nothing_left", "trials_spent", "not_measured"]


class NoState(ValueError):
    """The file is not of megaprof tune; the message completes ``it ...``."""


@dataclass(frozen=True)
class Interval:
    """A number with its 90 % interval."""

    value: float
    """What is likeliest."""
    low: float
    """The lower end."""
    high: float
    """The upper end."""

    def plus(self, more: float) -> Interval:
        """Returns this with so much more."""
        return Interval(self.value + more, self.low + more, self.high + more)

    def over(self, other: Interval) -> Interval:
        """Returns this divided by ``other``, two steps above 0 that were measured in a run each."""
        value = self.value / other.value
        below = hypot(1 - self.low / self.value, other.high / other.value - 1, RERUN)
        above = hypot(self.high / self.value - 1, 1 - other.low / other.value, RERUN)
        return Interval(value, value * max(1 - below, 0.0), value * (1 + above))

    def holds(self, other: Interval) -> bool:
        """Whether both can be the same number."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Proposal:
    """A change that was predicted to gain something."""

    what: str
    """In words."""
    layout: str
    """As Megatron's ``--pipeline-model-parallel-layout`` writes it."""
    flags: tuple[str, ...]
    """Megatron-LM's options for it, in the place of all that place layers."""
    step_ms: Interval
    """The predicted step, in milliseconds."""
    against: int
    """The trial that it was predicted from."""
    stages: int
    """The pipeline's stages, which ``flags`` do not say."""
    memory: tuple[int, ...] | None = None
    """Bytes that each stage is predicted to have allocated at its peak; None where memory was not measured."""
    more_steps: int = 0
    """How many more steps of that trial would tell whether it gains; 0 where that is known, or no number would."""
    microbatches: int | None = None
    """Microbatches of each replica, where that is to be seen in the trial."""
    assumes: tuple[str, ...] = ()
    """What the prediction takes for granted, in clauses."""


@dataclass(frozen=True)
class Trial:
    """The command with one layout. ``outcome`` is None while it runs, or waits to be run."""

    number: int
    """From 1, which is the command as it was given."""
    command: tuple[str, ...]
    """All of its words."""
    directory: str
    """Where its timelines and what it printed are, as seen from the directory of the tuning."""
    proposal: Proposal | None = None
    """Why it was tried; None for the command as it was given."""
    outcome: Outcome | None = None
    """What became of it."""
    why: str | None = None
    """Why it was not measured."""
    layout: str | None = None
    """The layout that it had."""
    stages: int | None = None
    """The pipeline's stages."""
    step_ms: Interval | None = None
    """The measured step, in milliseconds; of another depth than the first trial's with what comes more between steps
    than in that one."""
    between_ms: float | None = None
    """Milliseconds between a step's end and the next one's beginning; None where no two steps were recorded."""
    steps: int | None = None
    """How many steps that is the average of."""
    memory: tuple[int, ...] | None = None
    """Bytes that each stage had allocated at its peak; None where that was not measured."""
    framework: str | None = None
    """The host, as traces name it."""
    role: str | None = None
    """Whose model it is; None without roles."""
    verdict: str | None = None
    """What its report says first."""
    says: str | None = None
    """What its report says of other layouts."""
    next: tuple[Proposal, ...] = ()
    """What was predicted from it, the best lower end first."""
    half_as_deep: Proposal | str | None = None
    """What was predicted from it of half as many stages, or why nothing was; None where nothing at all was."""
    again: int | None = None
    """The trial that it repeats. The quicker one of both counts: other work can make a step only longer."""
    more_steps: int = 0
    """How many steps it measures beyond those of the others, to tell what the one that it repeats left open."""

    @property
    def what(self) -> str:
        """What it tries, in words."""
        return ("as given" if self.proposal is None else self.proposal.what) + ", again" * (self.again is not None)

    @property
    def as_predicted(self) -> bool | None:
        """Whether the measured step can be the predicted one; None where one of them is missing."""
        if self.proposal is None or self.step_ms is None:
            return None
        return self.proposal.step_ms.holds(self.step_ms)


@dataclass(frozen=True)
class Result:
    """What the trials came to."""

    trial: int
    """The quickest one."""
    speedup: Interval
    """How many times as fast it is as the first one."""
    command: tuple[str, ...]
    """Its command as a user runs it: it saves what the given one saves."""
    as_predicted: tuple[int, int]
    """How many predictions held, and of how many."""


@dataclass(frozen=True)
class Tuning:
    """All trials of a command."""

    command: tuple[str, ...]
    """The command as it was given."""
    steps: int
    """Steps that a trial measures."""
    most_trials: int
    """Trials at most, the first one included."""
    saving_off: tuple[str, ...] | None = None
    """Words that turn saving off, where the user gave some."""
    memory_limit: int | None = None
    """Bytes that a stage may have allocated; None: what its device has."""
    depth: bool = False
    """Whether half as many stages may be tried, too."""
    trials: tuple[Trial, ...] = ()
    """In their order."""
    stopped: Why | None = None
    """Why there are no more; None while it goes on."""
    reason: str | None = None
    """The same in words, where ``stopped`` alone does not tell."""
    result: Result | None = None
    """What they came to; None before the first one is measured."""
    version: str = field(default=__version__)
    """Of megaprof."""

    @property
    def measured(self) -> tuple[Trial, ...]:
        """The trials that have a step time; of a trial and its repetition the quicker one."""
        found = dict[int, Trial]()
        for trial in (each for each in self.trials if each.step_ms is not None):
            number = trial.again or trial.number
            found[number] = min(found.get(number, trial), trial, key=_step)
        return tuple(found.values())

    @property
    def best(self) -> Trial | None:
        """The trial with the shortest step, of those that keep the limit of memory; None where there is none."""
        kept = [trial for trial in self.measured if trial.outcome != "above_limit"]
        return min(kept, key=_step, default=None)

    @property
    def pending(self) -> Trial | None:
        """The trial that has begun and has no outcome."""
        return next((trial for trial in self.trials if trial.outcome is None), None)

    def changed(self, command: Sequence[str], proposal: Proposal) -> tuple[str, ...]:
        """Returns the words of ``command``, a way to write the given one, with a change."""
        first = self.trials[0]
        same = proposal.stages == first.stages
        depth = () if same else ("--pipeline-model-parallel-size", str(proposal.stages))
        return tuple(relaid(command, (*depth, *proposal.flags), first.framework, first.role, proposal.stages))

    def repeated(self, trial: Trial) -> bool:
        """Whether a trial was run again, or is a repetition."""
        return trial.again is not None or any(each.again == trial.number for each in self.trials)

    def having(self, trial: Trial) -> Tuning:
        """Returns it with this trial, in the place of the one with its number, and with the result of all."""
        others = [each for each in self.trials if each.number != trial.number]
        found = replace(self, trials=tuple(sorted([*others, trial], key=lambda each: each.number)))
        return replace(found, result=_result(found))


def _step(trial: Trial) -> float:
    return trial.step_ms.value if trial.step_ms else 0.0


def _result(found: Tuning) -> Result | None:
    best, first = found.best, next((each for each in found.measured if each.proposal is None), None)
    if best is None or best.step_ms is None or first is None or first.step_ms is None:
        return None
    told = [each.as_predicted for each in found.measured if each.as_predicted is not None]
    command, speedup = found.command, Interval(1.0, 1.0, 1.0)
    if best.proposal is not None:
        command = found.changed(found.command, best.proposal)
        speedup = first.step_ms.over(best.step_ms)
    return Result(best.number, speedup, command, (sum(told), len(told)))


def load(directory: Path) -> Tuning | None:
    """Returns what was found before; None where nothing was. Raises NoState."""
    file = directory / NAME
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(read_input(file), type=Tuning)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as fault:
        raise NoState(f"is not of megaprof tune: {fault}") from None


def store(directory: Path, tuning: Tuning) -> None:
    """Write it. Raises OSError, and leaves the file of before then."""
    with appearing(directory / NAME) as file:
        file.write(msgspec.json.format(msgspec.json.encode(tuning), indent=1))
