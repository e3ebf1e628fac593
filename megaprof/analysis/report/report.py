"""Turns traces and timelines into a report, which the terminal, HTML, JSON and `diff` all use. The JSON is `Document`,
field by field.

Times are milliseconds per step, averaged over the captured steps. A number that the traces cannot give is None, and a
warning says why.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis, diagnose, slow_ranks
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.diagnosis.stages import Stage, TargetStages, averages, of_series, of_steps, order
from megaprof.analysis.fleet.fleet import EXCESS, Fleet, survey
from megaprof.analysis.fleet.reading import Key, RankRow, Series, read_fleet
from megaprof.analysis.notes import Note, of_files
from megaprof.analysis.report import drawn
from megaprof.analysis.report.drawn import StepTimeline
from megaprof.analysis.report.text import causes, sentences
from megaprof.analysis.report.text import what_if as of_what_if
from megaprof.analysis.report.text.evidence import KINDS
from megaprof.analysis.table.iterations import OF_RL, Iterations
from megaprof.analysis.table.table import QUARTILE, Table, Unfit
from megaprof.analysis.table.tabulate import warming_up
from megaprof.analysis.table.traced import Job, jobs_of, tables
from megaprof.analysis.trace.reading import (
    OTHERS,
    Progress,
    Reading,
    Workers,
    read_all,
    recordings_in,
    runs_in,
)
from megaprof.analysis.trace.traces import REPORT, SQLITE
from megaprof.analysis.what_if.changeable import Changeable
from megaprof.analysis.what_if.what_if import WhatIf, what_if
from megaprof.formats.inputs import files_below, path_of
from megaprof.formats.job import Standstill, completed
from megaprof.formats.phrases import Unanswerable, json_of, listed, of_several
from megaprof.formats.timeline import SUFFIX
from megaprof.version import __version__

#: If a directory holds no files with names of ours, at most this many others are tried, in case they were renamed.
_MOST_OTHERS = 64
#: What tools call traces of the torch profiler; verl: ``prof_rank-0_031904.json.gz``.
_TRACE = re.compile(r"trace|prof|rank", re.IGNORECASE)
_OF_ROCPROF = (".pftrace", ".otf2", "_results.db", "_trace.csv", "_stats.csv")
_ROCPROF = "rocprofv3 writes such files, which megaprof does not read. It reads traces of the torch profiler"
#: The fewest steps on each side of the windows from which the report says whether the job has recovered.
_FEWEST_STEPS = 3
#: How to get a trace, for a person who has none yet.
_TO_HAVE_ONE = "`megaprof run` records a training command, and `megaprof demo` a small one on this machine"


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
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError) as fault:
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
    drawn: Mapping[int, Callable[[], StepTimeline]] = field(default_factory=dict)
    """Functions that draw one step of each target, by its place in ``targets``, and under the next number what all
    roles do."""
    span: tuple[float, float] = (0.0, math.inf)
    """When the first step of the run, and that of the next run there, began, in wall-clock seconds; 0 and infinity if
    there is no other run before or after it."""
    by_hand: tuple[Changeable | None, ...] = ()
    """One entry per target that predicts changes a person chooses; None if the target's ``what_if`` says why not."""

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

    def steps(self) -> dict[int, StepTimeline]:
        """Returns what `drawn` draws, for pages. What has no rows is left out."""
        return {place: step for place, draw in self.drawn.items() if (step := draw()).rows}

    def json(self) -> bytes:
        return json_of(Document(**{entry.name: getattr(self, entry.name) for entry in fields(Document)}))

    def to_json(self) -> dict[str, Any]:
        """Returns the document as plain data: strings, finite numbers, lists, dicts and None."""
        plain: dict[str, Any] = msgspec.json.decode(self.json())
        return plain


def analyze(
    source: str | os.PathLike[str],
    *,
    workers: Workers = 1,
    progress: Progress | None = None,
    run: int | None = None,
    memory_limit: int | None = None,
) -> Report:
    """Reports on every trace and timeline under a directory, or on a single file.

    Stages come from traces or, for targets without traces, from timelines. Timelines also show the whole run. A file
    that cannot be used becomes a warning of the report. If no file contains megaprof's ranges, the report shows what
    these recordings do contain (`Document.foreign`).

    Example: ``analyze("traces").targets[0].findings[0].text`` is the verdict on the first target.

    Args:
        source: A directory or file, local or at an address that fsspec supports (``s3://bucket/traces``).
        workers: The number of processes that read files (see `reading.read_all`), or a Ray cluster (``ray``,
            ``ray://host:10001``) whose machines find the files under the same names.
        progress: Called as ``progress(done, files)``.
        run: The number of the run, if there are several; 1 is the oldest, and the newest is the default.
        memory_limit: Bytes that a stage may allocate in an advised layout, if that is less than its device has.

    Raises:
        NoSuchRun: There is no run with that number.
        Unanswerable: No file can be used, or the Ray cluster cannot.
    """
    path = path_of(source)
    if isinstance(workers, str):
        path = path.absolute()
    if path.is_file() and path.name.endswith(_OF_ROCPROF):
        raise Unanswerable(f"{path}: {_ROCPROF}")
    if not path.is_file() and not path.is_dir():
        raise Unanswerable(f"{path} does not exist; {_TO_HAVE_ONE}")
    traces, timelines = recordings_in(path)
    every = len(traces) + len(timelines.paths)
    readings = [*read_all(traces, workers, progress and (lambda done, _: progress(done, every)))]
    if path.is_dir() and not timelines.paths and not any(reading.steps for reading in readings):
        readings += read_all(_others(path, traces), workers)
    if not readings and not timelines.paths:
        raise Unanswerable(_nothing_in(path))
    runs = runs_in((step for reading in readings for step in reading.steps), timelines, run)
    of_run = [reading for reading in readings if not reading.steps or runs.has(reading.steps[0].host[0])]
    read = tuple(reading.path for reading in of_run if reading.steps)
    warnings = [warning for reading in of_run for warning in reading.warnings]
    skipped = [reading.skipped for reading in readings if reading.skipped is not None]
    fleet_reading = read_fleet(
        timelines, workers, progress and (lambda done, _: progress(len(traces) + done, every)), runs
    )
    warnings = [*of_files([*skipped, *fleet_reading.warnings]), *warnings]
    fleets = survey(fleet_reading)
    captured = {job.key: job for job in jobs_of(step for reading in of_run for step in reading.steps)}
    tabled = tables(captured.values(), fleet_reading, fleets, workers)
    if not captured and not fleet_reading.series:
        return _of_others(path, readings, warnings)
    job = (path.parent if path.is_file() else path).absolute()
    by_key = {fleet.key: fleet for fleet in fleets}
    # The iterations of ranks that also train are those of their training.
    trains = [key for key, table in tabled.items() if isinstance(table, Table) and "backward" in table.schedule.kinds]
    training = {path for key in trains for path in fleet_reading.files_of(key)}
    also = {key[:2] for key in captured}
    alone = [key for key in fleet_reading.series if key[:2] not in also]
    targets, by_hand, roles = list[TargetReport](), list[Changeable | None](), list[tuple[Key, RankRow]]()
    draws: dict[int, Callable[[], StepTimeline]] = {}
    for key in sorted((*captured, *alone), key=order):
        table, series, of_key = tabled[key], fleet_reading.series.get(key), captured.get(key)
        report, changeable = _reported(table, of_key or fleet_reading.series[key], by_key.get(key), job, memory_limit)
        if of_key is not None and (slower := _not_recovered(of_key, series)) is not None:
            report = replace(report, warnings=(*report.warnings, slower))
        if isinstance(table, Table) and not (of_key is not None and table.profiled):
            draws[len(targets)] = partial(drawn.of_table, table, report, fleet_reading)
        elif of_key is not None:
            draws[len(targets)] = partial(drawn.of_steps, of_key.steps, report, table)
        trains_too = report.forward_only and not training.isdisjoint(fleet_reading.files_of(key))
        if isinstance(table, Table) and not trains_too:
            report = replace(report, iterations=table.iterations)
            if series is not None and table.iterations is not None and table.iterations.ms_of(*OF_RL):
                roles.append((key, next(row for row in series.ranks if row.coords.rank in table.ranks)))
        targets.append(report)
        by_hand.append(changeable)
    if roles:
        draws[len(targets)] = partial(drawn.of_roles, fleet_reading, roles)
    return Report(
        path=path,
        source=str(path),
        traces=read,
        timelines=tuple(fleet_reading.read),
        targets=tuple(targets),
        warnings=tuple(dict.fromkeys(warnings)),
        run=runs.chosen + 1,
        runs=runs.count,
        span=runs.span,
        drawn=draws,
        by_hand=tuple(by_hand),
    )


def _nothing_in(directory: Path) -> str:
    """Returns what a directory holds instead of traces and timelines."""
    if wrote := [file.name for file in files_below(directory, _OF_ROCPROF)]:
        return f"{directory} holds {listed(sorted(wrote), 5)}: {_ROCPROF}"
    names = sorted(entry.name for entry in directory.iterdir())
    what = f"it holds {listed(names, 5)}" if names else "it is empty"
    kinds = f"*.pt.trace.json.gz, *.pt.trace.json, *{SQLITE}, *{REPORT}) and no timeline (*{SUFFIX}"
    return f"{directory} holds no trace ({kinds}): {what}; {_TO_HAVE_ONE}"


def _of_others(path: Path, readings: Sequence[Reading], warnings: Sequence[Note]) -> Report:
    """Returns a report on recordings without ranges of ours. ``warnings``: why they are no traces of ours. Raises
    Unanswerable."""
    if not any(reading.others for reading in readings):
        more = [f"And {len(warnings) - 5} more like it."] * (len(warnings) > 5)
        why = " ".join([*(f"{note.text.rstrip('.')}." for note in warnings[:5]), *more])
        raise Unanswerable(f"{path} holds no trace or timeline by megaprof. {why}")
    return Report(
        path=path,
        source=str(path),
        traces=tuple(reading.path for reading in readings if reading.others),
        targets=(),
        warnings=tuple(of_files(note for each in readings if not each.others and (note := each.skipped))),
        foreign=import_module(OTHERS).report_on([each for reading in readings for each in reading.others]),
    )


def _not_recovered(captured: Job, series: Series | None) -> Note | None:
    """Returns that steps behind the last window take longer than those before the first, None if they do not. CUPTI,
    which stays attached to a process with a GPU, slows down launches."""
    profiler = captured.steps[-1].metadata.profiler
    if series is None or profiler is None or "cuda" not in profiler.recorded:
        return None
    calls, numbers = series.calls, [step.step for step in captured.steps]
    before_ms, behind_ms = calls.longest[calls.steps < min(numbers)], calls.longest[calls.steps > max(numbers)]
    before_ms = before_ms[warming_up(before_ms.tolist()) :] if len(before_ms) else before_ms
    if min(len(before_ms), len(behind_ms)) < _FEWEST_STEPS:
        return None
    if np.quantile(behind_ms, QUARTILE) <= (1 + EXCESS) * np.quantile(before_ms, 1 - QUARTILE):
        return None
    cupti = [step.metadata.profiler.cupti for step in captured.steps if step.metadata.profiler is not None]
    said = next((state for state in reversed(cupti) if state is not None), "")
    return Note("not_recovered", ms=(float(np.median(before_ms)), float(np.median(behind_ms))), said=said)


def _reported(
    table: Table | Unfit, recorded: Job | Series, fleet: Fleet | None, job: Path, memory_limit: int | None
) -> tuple[TargetReport, Changeable | None]:
    """Returns the report on one target, and what predicts changes that a person chooses; None if nothing can.

    ``recorded``: what the stages are made of if there is no table; ``job``: the directory that the job writes to.
    """
    try:
        examined = table if isinstance(table, Unfit) else examine(table)
    except Unfit as reason:
        examined = reason
    diagnosis, by_hand, why = None, None, None
    if isinstance(examined, Unfit):
        if isinstance(table, Table):
            measured = averages(table)
        elif isinstance(recorded, Job):
            measured = of_steps(recorded, table.note)
        else:
            measured = of_series(recorded, table.note)
        why = measured.unjudgeable or examined.note
        predicted = WhatIf(warnings=(Note("not_replayed", why=why),))
    else:
        diagnosis = diagnose(examined)
        ranks = slow_ranks(diagnosis.causes), slow_ranks(diagnosis.causes, every=True)
        measured = averages(examined.table, *ranks)
        predicted, by_hand = what_if(examined, diagnosis, memory_limit)
    named = () if diagnosis is None else diagnosis.causes
    packing = of_what_if.packing_advice(predicted, measured.framework, measured.sizes.cp)
    running_job = None if fleet is None else job
    report = TargetReport(
        **vars(measured),
        diagnosis=diagnosis,
        withheld=why,
        slowest_stage=next((cause.stage for cause in named if KINDS[cause.kind].about == "stage"), None),
        what_if=predicted,
        fleet=fleet,
        findings=(*causes.findings(measured, diagnosis, why, running_job), *filter(None, [packing])),
        advice=of_what_if.layout_advice(predicted, measured.framework),
        capture=causes.capture_advice(measured, diagnosis, predicted, running_job) if measured.profiled else None,
        ends=() if fleet is None else sentences.ends(fleet),
        changes=() if fleet is None else sentences.changes(fleet, job),
        notes=() if fleet is None else tuple(sentences.run_notes(fleet)),
    )
    return report, by_hand


def _others(directory: Path, read: Collection[Path]) -> list[Path]:
    """Returns files below a directory that may be traces under another name, because names are only a hint: all that
    are called like one, and at most `_MOST_OTHERS` more. ``read``: those that are known."""
    found = set(files_below(directory, (".json", ".json.gz"))).difference(read)
    paths = sorted(found, key=lambda path: (not _TRACE.search(path.name), path))
    named = sum(_TRACE.search(path.name) is not None for path in paths)
    return paths[: named + _MOST_OTHERS]
