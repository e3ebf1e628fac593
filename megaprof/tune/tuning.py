"""A tuning: the command, its trials so far, and why it stopped; and its loop, which runs a trial, reads what it
measured, and chooses the next one, until no layout is predicted to gain, or no trial is left.

Its file, report.json, is also the result. It is written whole after every change, so that an interrupted tuning
continues from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import ge
from pathlib import Path
from typing import Literal

import msgspec

from megaprof.analysis.diagnosis.policy import LEAST, RERUN
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text.what_if import assumptions, name_of
from megaprof.analysis.samples import Interval
from megaprof.formats.inputs import read_input
from megaprof.formats.names import appearing
from megaprof.formats.phrases import Unanswerable
from megaprof.tune import trial as runs
from megaprof.tune.command import with_layout, without_saving
from megaprof.version import __version__

_GIB = 1 << 30
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
    memory: tuple[int, ...] | None = None
    """Bytes that each stage is predicted to allocate at its peak; None if memory was not measured."""
    more_steps: int = 0
    """The number of further steps of that trial that would show whether the layout gains; 0 if that is known, or if no
    number of steps would show it."""
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
    """The measured step, in milliseconds."""
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
        return next((trial for trial in self.trials if trial.outcome is None), None)

    def changed(self, command: Sequence[str], proposal: Proposal) -> tuple[str, ...]:
        """Returns the words of ``command``, the given one or a variant of it, with the layout of ``proposal``."""
        first = self.trials[0]
        return tuple(with_layout(command, proposal.flags, first.framework, first.role, first.stages or 1))

    def repeated(self, trial: Trial) -> bool:
        """Returns whether ``trial`` was run again, or is itself a repetition."""
        return trial.again is not None or any(repetition.again == trial.number for repetition in self.trials)

    def having(self, trial: Trial) -> Tuning:
        """Returns the tuning with ``trial``, which replaces the trial with the same number, and with the new result."""
        unchanged = [previous for previous in self.trials if previous.number != trial.number]
        tuning = replace(self, trials=tuple(sorted([*unchanged, trial], key=lambda item: item.number)), result=None)
        best, first_trial = tuning.best, next((trial for trial in tuning.measured if trial.proposal is None), None)
        if best is None or best.step_ms is None or first_trial is None or first_trial.step_ms is None:
            return tuning
        agreements = [trial.as_predicted for trial in tuning.measured if trial.as_predicted is not None]
        command, speedup = tuning.command, Interval.of(1.0)
        if best.proposal is not None:
            command = tuning.changed(tuning.command, best.proposal)
            speedup = first_trial.step_ms.over(best.step_ms, RERUN)
        return replace(tuning, result=Result(best.number, speedup, command, (sum(agreements), len(agreements))))


def _step(trial: Trial) -> float:
    return trial.step_ms.value if trial.step_ms else 0.0


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


def resumed(tuning: Tuning, directory: Path) -> Tuning:
    """Returns ``tuning`` with every trial that was not measured, and whose directory was deleted, set to run again."""
    for trial in tuning.trials:
        if trial.outcome is not None and trial.step_ms is None and not (directory / trial.directory).exists():
            kept = {name: getattr(trial, name) for name in ("proposal", "again", "more_steps")}
            tuning = tuning.having(Trial(trial.number, trial.command, trial.directory, **kept))
    return tuning


def upcoming(tuning: Tuning, directory: Path) -> Tuning:
    """Returns ``tuning`` with the next trial to run as its pending one, or stopped, with the reason.

    A pending trial whose directory exists was interrupted: it gets a new directory, and the old one stays.
    Raises UsageError, as `without_saving` does.
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
    contradicts = last_trial.outcome == "measured" and last_trial.as_predicted is False
    if may_continue and contradicts and not tuning.repeated(last_trial):
        # One of two runs was disturbed, or the prediction is wrong.
        return tuning.having(_repetition(last_trial, number, directory))
    proposal = best_proposal(tuning)
    if proposal is None:
        best = tuning.best
        if best is not None and not tuning.repeated(best):
            # No layout certainly gains. More steps may show that one does; all remaining trials together are the most.
            most_steps = (tuning.most_trials - len(tuning.trials) - 1) * tuning.steps
            telling = (each.more_steps for each in _untried(tuning, best.next) if each.more_steps <= most_steps)
            if more_steps := max(telling, default=0):
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
    return tuning.having(as_measured(trial, directory, tuning.memory_limit))


def run(
    tuning: Tuning,
    directory: Path,
    time_limit: float,
    begun: Callable[[Trial], None],
    advance: Callable[[int], None],
    over: Callable[[Trial], None],
) -> Tuning:
    """Runs trials until the tuning stops, each for at most ``time_limit`` seconds. The state in ``directory`` is always
    up to date. Raises UsageError before the first trial, as `without_saving` does, and OSError if the command cannot be
    started."""
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
            outcomes: dict[str, tuple[Outcome, str]] = {
                "exited": ("failed", f"the command ended with exit code {ended.code}"),
                "out_of_memory": ("out_of_memory", "memory ran out"),
                "time_limit": ("time_limit", f"its {time_limit:g} s were over"),
            }
            outcome, why = outcomes[ended.outcome]
            why += f" after {measured.steps or 0} whole steps" + (f": {ended.last_line}" if ended.last_line else "")
            tuning = tuning.having(replace(measured, step_ms=None, next=(), outcome=outcome, why=why))
        over(tuning.trials[trial.number - 1])


def _free_name(directory: Path, number: int) -> str:
    names = (f"trial-{number}" + (f".{attempt}" if attempt > 1 else "") for attempt in range(1, 1000))
    return next(name for name in names if not (directory / name).exists())


def as_measured(trial: Trial, directory: Path, memory_limit: int | None = None) -> Trial:
    """Returns ``trial`` with the results from its timelines in ``directory``. ``memory_limit``: bytes that a stage may
    allocate, if that is less than its device has."""
    try:
        report = analyze(directory, memory_limit=memory_limit)
    except Unanswerable as fault:
        return replace(trial, outcome="failed", why=str(fault))
    target = next((each for each in report.targets if each.target == runs.TARGET), None)
    if target is None:
        return replace(trial, outcome="failed", why="no training step was recorded whole")
    spread, what_if = target.step_time_ms, target.what_if
    if spread is None:
        return replace(trial, outcome="failed", why=target.withheld.text if target.withheld else "it has no step time")
    measured = replace(
        trial,
        layout=what_if.layout,
        stages=target.sizes.pp,
        step_ms=Interval.of(spread.mean, spread.error).clipped(1e-9),
        steps=spread.count,
        memory=what_if.allocated,
        framework=target.framework,
        role=target.role,
        verdict=target.findings[0].text,
        says=target.advice.text if target.advice else "; ".join(note.text for note in what_if.warnings) or None,
    )
    asked = trial.proposal and trial.proposal.layout
    if asked and what_if.layout not in (None, asked):
        why = f"it ran with layout {what_if.layout} and not {asked}: the command does not take the options"
        return replace(measured, outcome="not_as_asked", why=why, step_ms=None)
    fitting = [each for each in what_if.candidates if each.flags and each.layout and each.fits is not False]
    proposals = tuple(
        Proposal(
            what=name_of(prediction, what_if),
            layout=prediction.layout or "",
            flags=prediction.flags,
            # The measured step that trials are compared by, divided by the predicted speedup.
            step_ms=Interval.of(spread.mean).over(prediction.speedup),
            against=trial.number,
            memory=prediction.needed,
            more_steps=prediction.more_steps,
            assumes=tuple(assumptions(prediction)),
        )
        for prediction in sorted(fitting, key=lambda prediction: -prediction.speedup.low)
    )
    measured = replace(measured, outcome="measured", next=proposals)
    if memory_limit is None or measured.memory is None or max(measured.memory) <= memory_limit:
        return measured
    reason = f"a stage had more than {memory_limit / _GIB:.4g} GiB allocated"
    return replace(measured, outcome="above_limit", why=reason)


def best_proposal(tuning: Tuning) -> Proposal | None:
    """Returns what to try next: of all layouts that were predicted and not tried, the one with the best lower end, or
    None if it does not gain `policy.LEAST` over the best trial at that end. If a layout was predicted twice, the more
    certain prediction counts. If no trial keeps the memory limit, any layout that is predicted to keep it counts as a
    gain."""
    best, surest = tuning.best, dict[str, Proposal]()
    proposals = _untried(tuning, [proposal for trial in tuning.measured for proposal in trial.next])
    for proposal in sorted(proposals, key=lambda each: each.step_ms.high - each.step_ms.low):
        surest.setdefault(proposal.layout, proposal)
    quickest = min(surest.values(), key=lambda proposal: proposal.step_ms.high, default=None)
    if quickest is None or best is None or best.step_ms is None:
        return quickest
    return quickest if quickest.step_ms.high * (1 + LEAST) < best.step_ms.value else None


def _untried(tuning: Tuning, proposals: Iterable[Proposal]) -> list[Proposal]:
    """Returns the proposals that may still be tried. Leaves out layouts that have been tried, and proposals that need
    at least as much memory on every stage as one that ran out of memory."""
    tried = {trial.layout for trial in tuning.trials}
    too_large = []
    for trial in tuning.trials:
        if trial.proposal is not None:
            tried.add(trial.proposal.layout)
            if trial.outcome == "out_of_memory" and trial.proposal.memory:
                too_large.append(trial.proposal.memory)
    return [
        each
        for each in proposals
        if each.layout not in tried
        and not any(all(map(ge, each.memory, memory)) for memory in too_large if each.memory is not None)
    ]
