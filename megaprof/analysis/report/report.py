"""Traces and timelines to a report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.diagnosis.files import tables
from megaprof.analysis.diagnosis.table import Table, Unfit
from megaprof.analysis.fleet.fleet import Fleet, survey
from megaprof.analysis.fleet.reading import FleetReading, Key, find_timelines, read_fleet
from megaprof.analysis.fleet.timeline_calls import detail_of
from megaprof.analysis.fleet.trends import LASTING_STEPS, SIGMAS
from megaprof.analysis.foreign.facts import facts_of
from megaprof.analysis.foreign.recordings import read_recording
from megaprof.analysis.report.document import Report, TargetReport
from megaprof.analysis.report.sentences import evidence
from megaprof.analysis.stages.causes import OF_STEP
from megaprof.analysis.stages.loads import Cause
from megaprof.analysis.stages.slow import EXCESS
from megaprof.analysis.stages.stages import TargetStages, measure
from megaprof.analysis.stages.verdict import judge
from megaprof.analysis.trace.calls import Call
from megaprof.analysis.trace.nsys.files import REPORT, SQLITE
from megaprof.analysis.trace.pool import NoCluster as NoCluster
from megaprof.analysis.trace.pool import Progress, Workers
from megaprof.analysis.trace.reading import Source, read_all, sources_in
from megaprof.analysis.trace.runs import NoSuchRun as NoSuchRun
from megaprof.analysis.trace.runs import runs_in
from megaprof.analysis.trace.traces import UnreadableTrace
from megaprof.analysis.what_if.gains import replayed, with_gains
from megaprof.analysis.what_if.what_if import WhatIf, what_if, withheld
from megaprof.formats.checks import listed
from megaprof.formats.remote import place
from megaprof.formats.timeline import SUFFIX

#: A directory without files of ours is searched for renamed ones, up to this many.
_MOST_OTHERS = 64
#: What a person does who has none yet.
_TO_HAVE_ONE = "a training command that `megaprof run` starts writes some, and `megaprof demo` makes some here"
#: Refusals for one reason that each have a line.
_FEW = 3


class NothingToReport(Exception):
    """There is no trace or timeline of ours to report on; the message says what was found instead."""


def analyze(
    source: str | os.PathLike[str],
    *,
    workers: Workers = 1,
    progress: Progress | None = None,
    run: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Report:
    """Report on every trace and timeline under a directory (or on one file), on this machine or where fsspec finds it
    (``s3://bucket/traces``).

    Stages come from traces, and for targets without any from the last steps of their timelines; timelines also tell of
    the whole run. ``workers``: processes that read, each one file at a time (see `reading.read_all`), or the Ray
    cluster that does (``ray``, ``ray://host:10001``), whose machines must find the files under the same names;
    ``progress(done, files)`` is called as they are done; ``run``: which run, where the files of several lie there, from
    1, the newest by default. A file that cannot be used becomes a warning of the report.

    Where no file holds ranges of ours, the report is what `foreign` recordings tell; ``sizes`` (``tp``, ``pp``, ``cp``,
    ``ep``) names their process groups.
    Raises NothingToReport when no file can be, NoSuchRun, and NoCluster.
    """
    path = place(source)
    if isinstance(workers, str):
        path = path.absolute()
    traces, timelines = _files(path)
    every = len(traces) + len(timelines)
    readings = [*read_all(traces, workers, progress and (lambda done, _: progress(done, every)))]
    runs = runs_in((call for reading in readings for call in reading.calls), timelines, run)
    of_run = [reading for reading in readings if not reading.calls or runs.has(reading.calls[0].start)]
    calls = [call for reading in of_run for call in reading.calls]
    read = tuple(reading.path for reading in of_run if reading.calls)
    warnings = [warning for reading in of_run for warning in reading.warnings]
    fleet = read_fleet(timelines, workers, progress and (lambda done, _: progress(len(traces) + done, every)), runs)
    warnings += fleet.warnings_of_files()
    fleets = survey(fleet, (path.parent if path.is_file() else path).absolute())
    of_jobs = tables(calls, fleet, workers)
    calls += _details(fleet, fleets, tuple(calls))
    if not calls and (foreign := _foreign(path, traces, sizes or {})) is not None:
        return foreign
    if not calls:
        raise NothingToReport(f"{path} holds no trace or timeline by megaprof. " + " ".join(_sentences(warnings)))
    targets = tuple(_target(measured, calls, fleets, of_jobs) for measured in measure(calls))
    return Report(
        path,
        read,
        targets,
        together(warnings),
        tuple(fleet.read),
        tuple(_drawn(calls, targets)),
        run=runs.chosen + 1,
        runs=runs.count,
    )


def _files(path: Path) -> tuple[list[Source], list[Path]]:
    """Traces and timelines. Raises NothingToReport."""
    if path.is_file():
        return ([], [path]) if path.name.endswith(SUFFIX) else (sources_in(path), [])
    if not path.is_dir():
        raise NothingToReport(f"{path} does not exist; {_TO_HAVE_ONE}")
    traces, timelines = sources_in(path), find_timelines(path)
    if not traces and not timelines:
        traces = [*_others(path)]
    if not traces and not timelines:
        kinds = f"*.pt.trace.json.gz, *.pt.trace.json, *{SQLITE}, *{REPORT}) and no timeline (*{SUFFIX}"
        raise NothingToReport(f"{path} holds no trace ({kinds}): {_contents(path)}; {_TO_HAVE_ONE}")
    return traces, timelines


def _foreign(path: Path, traces: Sequence[Source], sizes: Mapping[str, int]) -> Report | None:
    """What recordings without ranges of ours tell; None where there are none."""
    recordings, warnings = [], []
    others = _others(path) if path.is_dir() else []
    for source in dict.fromkeys((*traces, *others)):
        try:
            recordings += read_recording(source)
        except UnreadableTrace as fault:
            warnings.append(f"{fault.path.name} was skipped: {fault.reason}")
    if not recordings:
        return None
    files = dict.fromkeys(recording.path for recording in recordings)
    return Report(path, tuple(files), (), together(warnings), foreign=facts_of(recordings, dict(sizes)))


def together(warnings: Iterable[str]) -> tuple[str, ...]:
    """Many refusals of one kind become one line with their number."""
    by_reason: dict[str, list[str]] = {}
    for warning in dict.fromkeys(warnings):
        name, skipped, reason = warning.partition(" was skipped: ")
        by_reason.setdefault(reason if skipped else warning, []).append(name if skipped else "")
    lines = []
    for reason, names in by_reason.items():
        if len(names) > _FEW and all(names):
            lines.append(f"{len(names)} files were skipped ({', '.join(names[:2])}, ...): {reason}")
        else:
            lines += (f"{name} was skipped: {reason}" if name else reason for name in names)
    return tuple(lines)


def _details(fleet: FleetReading, fleets: Sequence[Fleet], traced: Sequence[Call]) -> Iterator[Call]:
    """The last calls of targets that no trace shows."""
    known = {(call.label, call.role) for call in traced}
    for each in fleets:
        if (each.key.target, each.key.role) in known:
            continue
        slow = [s for s in each.stragglers if s.what != "synchronisation" and s.until is None]
        suspects = {rank for s in slow for rank in s.ranks}
        places = [rank.coords for rank in fleet.series[each.key].ranks]
        yield from detail_of(each.key, places, fleet.files[each.key], suspects, each.stood_still)


def _drawn(calls: Iterable[Call], targets: Sequence[TargetReport]) -> Iterator[Call]:
    latest = {target.key: target.measured.steps[-1] for target in targets if target.measured.steps}
    return (call for call in calls if latest.get((call.label, call.role)) == call.step)


def _target(
    measured: TargetStages, calls: list[Call], fleets: Sequence[Fleet], tables: Mapping[Key, Table | Unfit]
) -> TargetReport:
    key = measured.target, measured.role, measured.sizes
    fleet = next((fleet for fleet in fleets if tuple(fleet.key) == key), None)
    verdict = judge(measured)
    causes = verdict.causes
    if fleet is not None:
        kept = tuple(c for c in causes if not _was_waiting(c, measured, fleet))
        causes = _unless_explained((*_slow_ranks(fleet, kept), *kept), measured)
    verdict = replace(verdict, causes=causes)
    found = _advice(measured, calls, tables)
    verdict = replace(verdict, causes=with_gains(measured, causes, found, replayed(measured, calls)))
    return TargetReport(measured, verdict, found, fleet and _with_gains(fleet, verdict.causes))


def _advice(measured: TargetStages, calls: Sequence[Call], tables: Mapping[Key, Table | Unfit]) -> WhatIf:
    if measured.unjudgeable:
        return withheld(measured.unjudgeable)
    job = Key(measured.target, measured.role, measured.sizes)
    table = tables.get(job, Unfit("no step was recorded whole"))
    if isinstance(table, Unfit):
        return withheld(str(table))
    try:
        run = examine(table)
    except Unfit as reason:
        return withheld(str(reason))
    own = [call for call in calls if (call.label, call.role, call.metadata.sizes) == job]
    return what_if(run, diagnose(run), own)


def _with_gains(fleet: Fleet, causes: Sequence[Cause]) -> Fleet:
    """Stragglers that are causes, too, with what these cost."""
    gains = {cause.ranks or (cause.rank,): cause.gain_ms for cause in causes if cause.kind == "slow_rank"}
    lasting = [s.what == "compute" and s.until is None for s in fleet.stragglers]
    told = zip(fleet.stragglers, lasting, strict=True)
    return replace(fleet, stragglers=tuple(replace(s, gain_ms=gains.get(s.ranks)) if lasts else s for s, lasts in told))


def _unless_explained(causes: tuple[Cause, ...], measured: TargetStages) -> tuple[Cause, ...]:
    """Without a slow stage for no known reason whose captured rank is slower than its peers."""
    captured = {rank for stage in measured.stages for rank in stage.ranks}
    explained = {cause.stage for cause in causes if cause.kind == "slow_rank" and cause.rank in captured}
    return tuple(c for c in causes if c.kind != "unexplained" or c.stage not in explained)


def _slow_ranks(fleet: Fleet, known: Sequence[Cause]) -> Iterator[Cause]:
    """Stragglers of the whole run that the last steps of one rank per stage do not show."""
    named = {cause.rank for cause in known if cause.kind == "slow_rank"}
    for each in fleet.stragglers:
        if each.what == "compute" and each.until is None and not named & set(each.ranks):
            yield Cause(
                kind="slow_rank",
                stage=each.stage,
                rank=each.ranks[0] if len(each.ranks) == 1 else None,
                ranks=each.ranks if len(each.ranks) > 1 else (),
                evidence=evidence(fleet, each),
                threshold=f"more than {EXCESS:.0%} and {SIGMAS:.0f} standard errors over its peers, for "
                f"{LASTING_STEPS} steps",
                excess_ms=(each.own_ms - each.peers_ms) * (1.0 if each.share is None else each.share),
                basis="per step, compared with its peers",
            )


def _was_waiting(cause: Cause, measured: TargetStages, fleet: Fleet) -> bool:
    """Whether gradient synchronisation that seems long on the one rank of a stage was waiting for other ranks: it
    takes no longer than on the rank that came last to it, of those that have a timeline."""
    steps = {step - step % fleet.width for step in measured.steps}
    alone = [
        ms for first, ms in zip(fleet.buckets, fleet.synchronisation.at_most_ms, strict=False) if ms and first in steps
    ]
    return (
        cause.kind == "communication"
        and cause.group == "dp"
        and measured.step_time_ms is not None
        and bool(alone)
        and max(alone) <= OF_STEP * measured.step_time_ms.mean
    )


def _others(directory: Path) -> list[Path]:
    """Files that may be traces under another name: names are only a hint."""
    listed = (p for p in sorted(directory.iterdir()) if p.name.endswith((".json", ".json.gz")) and p.is_file())
    return [p for p in listed if not p.name.startswith(".")][:_MOST_OTHERS]


def _contents(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    return f"it holds {listed(names, 5)}" if names else "it is empty"


def _sentences(warnings: list[str]) -> Iterator[str]:
    for warning in warnings[:5]:
        yield warning.rstrip(".") + "."
    if len(warnings) > 5:
        yield f"And {len(warnings) - 5} more like it."
