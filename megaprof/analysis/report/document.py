"""The report as data, which the terminal, HTML, JSON and `diff` all use. The JSON is these classes, field by field.

Times are milliseconds per step, averaged over the captured steps. A number that the traces cannot give is None, and a
warning says why.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.diagnosis.stages import Stage, TargetStages
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.notes import Note
from megaprof.analysis.report.drawn import StepTimeline
from megaprof.analysis.report.tables import Section
from megaprof.analysis.report.text import causes, sentences
from megaprof.analysis.table.iterations import Iterations
from megaprof.analysis.what_if.changeable import Changeable
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.job import Standstill, completed
from megaprof.formats.phrases import json_of, of_several
from megaprof.version import __version__


def plain_number(value: Any) -> Any:
    """Returns a numpy number as a Python number, for msgspec. Raises NotImplementedError for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a report holds {type(value).__name__}")


@dataclass(frozen=True, kw_only=True)
class TargetReport(TargetStages):
    """One target and role: its stages, where they lose time, and what would be faster."""

    diagnosis: Diagnosis | None
    """Why time is lost, the most expensive cause first; None if ``withheld`` says why not."""
    withheld: Note | None
    """Why there is no diagnosis; None if there is one."""
    slowest_stage: int | None
    """Stage that costs the most time because of what it holds or computes; None if no stage costs time that way."""
    what_if: WhatIf
    """Predictions of what would be faster."""
    fleet: Fleet | None
    """The whole run on all ranks; None without timelines."""
    findings: tuple[sentences.Finding, ...]
    """The verdict in sentences, the most expensive cause first."""
    advice: sentences.Finding | None
    """A sentence that says which layout to change to, or why to change nothing; None if nothing was predicted."""
    capture: sentences.Finding | None
    """How to capture enough steps to answer the open questions; None if more steps would not help."""
    ends: tuple[sentences.Finding, ...]
    """In which steps the run stood still, and which ranks' data end early, in sentences; empty without timelines."""
    changes: tuple[sentences.Finding, ...]
    """Sentences that say what became slower during the run, and since when; empty without timelines."""
    iterations: Iterations | None = None
    """Where whole iterations of the host's loop go, the step as one part of them; None if no timeline says."""
    notes: tuple[str, ...]
    """Notes about the numbers of the whole run, in sentences."""

    @property
    def key(self) -> tuple[str, str | None]:
        return self.target, self.role

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Returns the causes that the diagnosis names; empty if there is no diagnosis."""
        return self.diagnosis.causes if self.diagnosis is not None else ()

    def marked(self, row: Stage) -> bool:
        """Returns whether the verdict is about a table row: a slow rank or a stage of the most expensive cause."""
        first = next(iter(self.causes), None)
        if first is None:
            return False
        if any(set(slow_rank.ranks) & set(first.ranks) for slow_rank in self.slow_ranks):
            return row in self.slow_ranks and bool(set(row.ranks) & set(first.ranks))
        return row.pp in (first.stages or first.link or (first.stage,)) and row in self.stages

    def in_brief(self, standstill: Standstill | None = None, surely_in: Diagnosis | None = None) -> sentences.Finding:
        """Returns the verdict in a few words. ``standstill``: the step in which the job stands still or was
        killed; ``surely_in``: the diagnosis that is shown next to this one."""
        return causes.in_brief(self.diagnosis, self.fleet, standstill, surely_in)


@dataclass(frozen=True, kw_only=True)
class Document:
    """The JSON of a report."""

    version: str = __version__
    """Version of megaprof that wrote the report."""
    source: str
    """Directory or file that was read."""
    run: int = 1
    """Number of the reported run; 1 is the oldest. A run that continued from a checkpoint keeps its number."""
    runs: int = 1
    """Number of runs with files in the directory."""
    targets: tuple[TargetReport, ...]
    """One entry per target, role and set of parallel sizes."""
    warnings: tuple[Note, ...]
    """Warnings about single files."""
    standstill: Standstill | None = None
    """The step in which the job stands still, or stood when it was killed, from its status files; None if it runs, if
    it ended normally, if its timelines show the step in which it ended, or if there are no status files."""
    foreign: Any = None
    """Facts from recordings without megaprof's ranges; None if there are ranges."""

    @classmethod
    def from_json(cls, content: bytes) -> Document:
        """Reads the JSON that `Report.json` wrote. Raises ValueError, which says what is wrong with it."""
        try:
            return msgspec.json.decode(content, type=Document)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            raise ValueError(str(fault)) from None

    @property
    def of_several(self) -> str | None:
        """Returns a sentence that says that there are other runs, and how to see one; None if there is only one run."""
        if self.runs == 1:
            return None
        return of_several(self.run, self.runs, f"megaprof report {shlex.quote(self.source)}")


@dataclass(frozen=True, kw_only=True)
class Report(Document):
    """Everything that was found in one directory or file: the document, its files, and what pages need to draw steps
    and to predict changes."""

    path: Path
    traces: tuple[Path, ...]
    timelines: tuple[Path, ...] = ()
    drawn: Mapping[tuple[str, str | None], Callable[[], StepTimeline]] = field(default_factory=dict)
    """Functions that draw one step of each target, by target and role, and what all roles do, by `drawn.ALL_ROLES`."""
    span: tuple[float, float] = (0.0, math.inf)
    """When the first step of the run, and that of the next run there, began, in wall-clock seconds; 0 and infinity if
    there is no other run before or after it."""
    by_hand: tuple[Changeable | None, ...] = ()
    """One entry per target that predicts changes a person chooses; None if the target's ``what_if`` says why not."""
    section: Section | None = None
    """``foreign`` for people."""

    def with_standstill(self, last: Standstill | None, heard: float) -> Report:
        """Returns the report with the standstill that status files show, if they are of its run.

        Where timelines show the step in which the job ended, only the ranks that were waited for in it are added.
        ``heard``: when the job was last heard of, in wall-clock seconds.
        """
        if not self.span[0] <= heard < self.span[1]:
            return self
        targets, shown = [], False
        for target in self.targets:
            if target.fleet is not None:
                fleet = replace(target.fleet, standstills=completed(target.fleet.standstills, last))
                target = replace(target, fleet=fleet, ends=sentences.ends(fleet))
                shown |= any(each.outcome == "unfinished" for each in fleet.standstills)
            targets.append(target)
        return replace(self, targets=tuple(targets), standstill=None if shown else last)

    def steps(self) -> dict[tuple[str, str | None], StepTimeline]:
        """Returns what `drawn` draws, for pages. What has no rows is left out."""
        return {key: step for key, draw in self.drawn.items() if (step := draw()).rows}

    def json(self) -> bytes:
        document = Document(**{entry.name: getattr(self, entry.name) for entry in fields(Document)})
        return json_of(document, plain_number)

    def to_json(self) -> dict[str, Any]:
        """Returns the document as plain data: strings, finite numbers, lists, dicts and None."""
        plain: dict[str, Any] = msgspec.json.decode(self.json())
        return plain
