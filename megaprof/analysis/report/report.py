"""Turns traces and timelines into a report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

from megaprof.analysis.diagnosis.diagnose import diagnose, slow_ranks
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.diagnosis.stages import TargetStages, averages, of_series, of_steps, order
from megaprof.analysis.fleet.fleet import Fleet, survey
from megaprof.analysis.fleet.levels import EXCESS
from megaprof.analysis.fleet.reading import Series, read_fleet
from megaprof.analysis.notes import Note, of_files
from megaprof.analysis.report import drawn
from megaprof.analysis.report.document import Report, TargetReport
from megaprof.analysis.report.text import causes, sentences
from megaprof.analysis.report.text import what_if as of_what_if
from megaprof.analysis.report.text.evidence import KINDS
from megaprof.analysis.report.text.notes import with_text, with_texts
from megaprof.analysis.table.iterations import OF_RL
from megaprof.analysis.table.table import QUARTILE, Table, Unfit
from megaprof.analysis.table.tabulate import warming_up
from megaprof.analysis.table.traced import Job, jobs_of, tables
from megaprof.analysis.trace.nsys import REPORT, SQLITE
from megaprof.analysis.trace.reading import (
    OTHERS,
    Progress,
    Reading,
    Timelines,
    Workers,
    read_all,
    recordings_in,
    runs_in,
)
from megaprof.analysis.trace.reading import NoCluster as NoCluster
from megaprof.analysis.trace.reading import NoSuchRun as NoSuchRun
from megaprof.analysis.what_if.changeable import Changeable
from megaprof.analysis.what_if.what_if import WhatIf, what_if
from megaprof.formats.inputs import files_below, place
from megaprof.formats.phrases import Unanswerable, listed
from megaprof.formats.timeline import SUFFIX

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


class NothingToReport(Unanswerable):
    """There is no trace or timeline of ours to report on; the message says what was found instead."""


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
        NothingToReport: No file can be used.
        NoSuchRun: There is no run with that number.
        NoCluster: The Ray cluster cannot be used.
    """
    path = place(source)
    if isinstance(workers, str):
        path = path.absolute()
    traces, timelines = _files(path)
    every = len(traces) + len(timelines.paths)
    readings = [*read_all(traces, workers, progress and (lambda done, _: progress(done, every)))]
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
        others = set(_others(path) if path.is_dir() else ()) - {reading.path for reading in readings}
        more = [*read_all(sorted(others), workers)]
        warnings += of_files(reading.skipped for reading in more if reading.skipped is not None)
        return _of_others(path, [*readings, *more], warnings)
    job = (path.parent if path.is_file() else path).absolute()
    by_key, found = {fleet.key: fleet for fleet in fleets}, []
    # The iterations of ranks that also train are those of their training.
    trains = [key for key, table in tabled.items() if isinstance(table, Table) and "backward" in table.schedule.kinds]
    training = {path for key in trains for path in fleet_reading.files_of(key)}
    # Timelines of steps around windows complete the report on these windows, and are none of their own.
    also = {key[:2] for key in captured}
    alone = [key for key in fleet_reading.series if key[:2] not in also and (key in by_key or not captured)]
    for key in (*captured, *alone):
        table, series, of_key = tabled[key], fleet_reading.series.get(key), captured.get(key)
        if of_key is None:
            otherwise, slower = partial(of_series, fleet_reading.series[key]), None
        else:
            otherwise, slower = partial(of_steps, of_key), _not_recovered(of_key, series)
        report, by_hand = _reported(table, otherwise, slower, by_key.get(key), job, memory_limit)
        draw: Callable[[], drawn.StepTimeline] | None = None
        role: drawn.Role | None = None
        if isinstance(table, Table) and not (of_key is not None and table.profiled):
            call_of = fleet_reading.calls_of(key, [row.ranks[0] for row in report.shown])
            draw = partial(drawn.of_table, table, report, call_of)
        elif of_key is not None:
            draw = partial(drawn.of_steps, of_key.steps, report, table)
        trains_too = report.forward_only and not training.isdisjoint(fleet_reading.files_of(key))
        if isinstance(table, Table) and not trains_too:
            report = replace(report, iterations=table.iterations)
            if series is not None and table.iterations is not None and table.iterations.ms_of(*OF_RL):
                first = next(row for row in series.ranks if row.coords.rank in table.ranks)
                files = partial(fleet_reading.timelines.only(first.files).steps_of, first.files, key)
                role = key.role or key.target, first.coords.rank, first.host, files
        found.append((report, by_hand, draw, role))
    found.sort(key=lambda target: order(target[0]))
    draws = {report.key: draw for report, _, draw, _ in found if draw is not None}
    if roles := [role for *_, role in found if role is not None]:
        draws[drawn.ALL_ROLES] = partial(drawn.of_roles, roles)
    return Report(
        path=path,
        source=str(path),
        traces=read,
        timelines=tuple(fleet_reading.read),
        targets=tuple(report for report, *_ in found),
        warnings=with_texts(dict.fromkeys(warnings)),
        run=runs.chosen + 1,
        runs=runs.count,
        span=runs.span,
        drawn=draws,
        by_hand=tuple(by_hand for _, by_hand, *_ in found),
    )


def _files(path: Path) -> tuple[list[Path], Timelines]:
    """Returns the traces and the timelines under ``path``. Raises NothingToReport."""
    if path.is_file() and path.name.endswith(_OF_ROCPROF):
        raise NothingToReport(f"{path}: {_ROCPROF}")
    if not path.is_file() and not path.is_dir():
        raise NothingToReport(f"{path} does not exist; {_TO_HAVE_ONE}")
    traces, timelines = recordings_in(path)
    if not traces and not timelines.paths:
        traces = [*_others(path)]
    if not traces and not timelines.paths:
        if wrote := [file.name for file in files_below(path, _OF_ROCPROF)]:
            raise NothingToReport(f"{path} holds {listed(sorted(wrote), 5)}: {_ROCPROF}")
        names = sorted(entry.name for entry in path.iterdir())
        what = f"it holds {listed(names, 5)}" if names else "it is empty"
        kinds = f"*.pt.trace.json.gz, *.pt.trace.json, *{SQLITE}, *{REPORT}) and no timeline (*{SUFFIX}"
        raise NothingToReport(f"{path} holds no trace ({kinds}): {what}; {_TO_HAVE_ONE}")
    return traces, timelines


def _of_others(path: Path, readings: Sequence[Reading], warnings: Sequence[Note]) -> Report:
    """Returns a report on recordings without ranges of ours. ``warnings``: why they are no traces of ours. Raises
    NothingToReport."""
    if not any(reading.others for reading in readings):
        said = with_texts(warnings)
        more = [f"And {len(said) - 5} more like it."] * (len(said) > 5)
        why = " ".join([*(f"{note.text.rstrip('.')}." for note in said[:5]), *more])
        raise NothingToReport(f"{path} holds no trace or timeline by megaprof. {why}")
    recordings = [each for reading in readings for each in reading.others]
    facts, section = import_module(OTHERS).report_on(recordings)
    return Report(
        path=path,
        source=str(path),
        traces=tuple(reading.path for reading in readings if reading.others),
        targets=(),
        warnings=with_texts(of_files(note for each in readings if not each.others and (note := each.skipped))),
        foreign=facts,
        section=section,
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
    table: Table | Unfit,
    otherwise: Callable[[Note], TargetStages],
    slower: Note | None,
    fleet: Fleet | None,
    job: Path,
    memory_limit: int | None,
) -> tuple[TargetReport, Changeable | None]:
    """Returns the report on one target, and what predicts changes that a person chooses; None if nothing can.

    ``otherwise``: makes the stages if there is no table; it is given the reason. ``slower``: a note that the job is not
    as quick any more; ``job``: the directory that it writes to.
    """
    try:
        examined = table if isinstance(table, Unfit) else examine(table)
    except Unfit as reason:
        examined = reason
    diagnosis, by_hand, why = None, None, None
    if isinstance(examined, Unfit):
        measured = otherwise(table.note) if isinstance(table, Unfit) else averages(table)
        why = measured.unjudgeable or examined.note
        predicted = WhatIf(warnings=(Note("not_replayed", why=why),))
    else:
        diagnosis = diagnose(examined)
        ranks = slow_ranks(diagnosis.causes), slow_ranks(diagnosis.causes, every=True)
        measured = averages(examined.table, *ranks)
        predicted, by_hand = what_if(examined, diagnosis, memory_limit)
    warnings = with_texts((*measured.warnings, *filter(None, [slower])))
    measured = replace(measured, warnings=warnings, unjudgeable=with_text(measured.unjudgeable))
    predicted, why = replace(predicted, warnings=with_texts(predicted.warnings)), with_text(why)
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


def _others(directory: Path) -> list[Path]:
    """Returns files below a directory that may be traces under another name, because names are only a hint: all that
    are called like one, and at most `_MOST_OTHERS` more."""
    paths = sorted(files_below(directory, (".json", ".json.gz")), key=lambda path: (not _TRACE.search(path.name), path))
    named = sum(_TRACE.search(path.name) is not None for path in paths)
    return paths[: named + _MOST_OTHERS]
