"""Traces and timelines to a report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

from megaprof.analysis.diagnosis.averages import averages, known_groups
from megaprof.analysis.diagnosis.diagnose import Diagnosis, diagnose
from megaprof.analysis.diagnosis.examine import Examined, examine
from megaprof.analysis.fleet.fleet import Fleet, survey
from megaprof.analysis.fleet.reading import FleetReading, Key, find_timelines, read_fleet
from megaprof.analysis.fleet.timeline_calls import detail_of
from megaprof.analysis.foreign.facts import facts_of
from megaprof.analysis.foreign.recordings import read_recording
from megaprof.analysis.report.document import Report, TargetReport
from megaprof.analysis.report.text import sentences
from megaprof.analysis.stages.stages import TargetStages, measure
from megaprof.analysis.table.files import tables
from megaprof.analysis.table.table import Table, Unfit
from megaprof.analysis.trace.calls import Call
from megaprof.analysis.trace.nsys.files import REPORT, SQLITE
from megaprof.analysis.trace.pool import NoCluster as NoCluster
from megaprof.analysis.trace.pool import Progress, Workers
from megaprof.analysis.trace.reading import Source, read_all, sources_in
from megaprof.analysis.trace.runs import NoSuchRun as NoSuchRun
from megaprof.analysis.trace.runs import runs_in
from megaprof.analysis.trace.traces import Skipped, UnreadableTrace
from megaprof.analysis.what_if.by_hand import ByHand
from megaprof.analysis.what_if.what_if import what_if, withheld
from megaprof.formats.phrases import listed
from megaprof.formats.remote import place
from megaprof.formats.timeline import SUFFIX

#: A directory without files of ours is searched for renamed ones, up to this many.
_MOST_OTHERS = 64
#: What a person does who has none yet.
_TO_HAVE_ONE = "a training command that `megaprof run` starts writes some, and `megaprof demo` makes some here"
#: Steps of a timeline that are read for what its stages hold, and of which the last one is drawn.
_DRAWN = 2


class NothingToReport(Exception):
    """There is no trace or timeline of ours to report on; the message says what was found instead."""


def analyze(
    source: str | os.PathLike[str],
    *,
    workers: Workers = 1,
    progress: Progress | None = None,
    run: int | None = None,
    sizes: Mapping[str, int] | None = None,
    memory_limit: int | None = None,
) -> Report:
    """Report on every trace and timeline under a directory (or on one file), on this machine or where fsspec finds it
    (``s3://bucket/traces``).

    Stages come from traces, and for targets without any from the last steps of their timelines; timelines also tell of
    the whole run. ``workers``: processes that read, each one file at a time (see `reading.read_all`), or the Ray
    cluster that does (``ray``, ``ray://host:10001``), whose machines must find the files under the same names;
    ``progress(done, files)`` is called as they are done; ``run``: which run, where the files of several lie there, from
    1, the newest by default; ``memory_limit``: bytes that a stage may have allocated in a layout that is advised, where
    that is less than its device has. A file that cannot be used becomes a warning of the report.

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
    skipped = [reading.skipped for reading in readings if reading.skipped is not None]
    fleet = read_fleet(timelines, workers, progress and (lambda done, _: progress(len(traces) + done, every)), runs)
    warnings = [*sentences.of_skipped([*skipped, *fleet.skipped]), *warnings, *fleet.warnings_of_files()]
    fleets = survey(fleet)
    found = {key: _diagnosed(table) for key, table in tables(calls, fleet, workers).items()}
    traced = {_key(call) for call in calls}
    calls += _details(fleet, fleets, tuple(calls), found)
    if not calls and (foreign := _foreign(path, traces, sizes or {})) is not None:
        return foreign
    if not calls:
        raise NothingToReport(f"{path} holds no trace or timeline by megaprof. " + " ".join(_sentences(warnings)))
    job = (path.parent if path.is_file() else path).absolute()
    told = [_target(measured, calls, traced, fleets, found, job, memory_limit) for measured in measure(calls)]
    targets = tuple(target for target, _ in told)
    return Report(
        path=path,
        source=str(path),
        traces=read,
        timelines=tuple(fleet.read),
        targets=targets,
        warnings=tuple(dict.fromkeys(warnings)),
        run=runs.chosen + 1,
        runs=runs.count,
        drawn=tuple(_drawn(calls, targets)),
        by_hand=tuple(by_hand for _, by_hand in told),
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
    recordings, skipped = [], []
    others = _others(path) if path.is_dir() else []
    for source in dict.fromkeys((*traces, *others)):
        try:
            recordings += read_recording(source)
        except UnreadableTrace as fault:
            skipped.append(Skipped(fault.path.name, fault.reason))
    if not recordings:
        return None
    files = dict.fromkeys(recording.path for recording in recordings)
    return Report(
        path=path,
        source=str(path),
        traces=tuple(files),
        targets=(),
        warnings=tuple(sentences.of_skipped(skipped)),
        foreign=facts_of(recordings, dict(sizes)),
    )


_Diagnosed = tuple[Examined, Diagnosis] | Unfit


def _diagnosed(table: Table | Unfit) -> _Diagnosed:
    if isinstance(table, Unfit):
        return table
    try:
        examined = examine(table)
    except Unfit as reason:
        return reason
    return examined, diagnose(examined)


def _key(call: Call) -> Key:
    return Key(call.label, call.role, call.metadata.sizes)


def _details(
    fleet: FleetReading, fleets: Sequence[Fleet], traced: Sequence[Call], diagnosed: Mapping[Key, _Diagnosed]
) -> Iterator[Call]:
    """The last calls of targets that no trace shows, where possible of a pipeline that no rank holds back: of those
    that are diagnosed a few, which say what the stages hold and can be drawn."""
    known = {(call.label, call.role) for call in traced}
    for each in fleets:
        if (each.key.target, each.key.role) in known:
            continue
        found = diagnosed.get(each.key)
        places = [rank.coords for rank in fleet.series[each.key].ranks]
        suspects, steps = set[int](), list[int]()
        if isinstance(found, tuple):
            table, causes = found[0].table, found[1].causes
            suspects = {rank for cause in causes for rank in cause.ranks}
            within = set(table.ranks.ravel().tolist())
            places, steps = [place for place in places if place.rank in within], table.steps[-_DRAWN:].tolist()
        yield from detail_of(each.key, places, fleet.files[each.key], suspects, each.stood_still, steps)


def _drawn(calls: Iterable[Call], targets: Sequence[TargetReport]) -> Iterator[Call]:
    latest = {target.key: target.steps[-1] for target in targets if target.steps}
    return (call for call in calls if latest.get((call.label, call.role)) == call.step)


def _target(
    measured: TargetStages,
    calls: Sequence[Call],
    traced: AbstractSet[Key],
    fleets: Sequence[Fleet],
    diagnosed: Mapping[Key, _Diagnosed],
    job: Path,
    memory_limit: int | None,
) -> tuple[TargetReport, ByHand | None]:
    """The report on a target, and what answers for changes of it by hand. ``traced``: what traces tell of; ``job``: the
    directory that the job writes to."""
    key = Key(measured.target, measured.role, measured.sizes)
    fleet = next((fleet for fleet in fleets if fleet.key == key), None)
    found = diagnosed.get(key, Unfit("no step was recorded whole"))
    if key not in traced:
        known = () if isinstance(found, Unfit) else known_groups(found[0].table)
        measured = replace(measured, warnings=(*measured.warnings, *sentences.of_timelines(measured.sizes, known)))
    if isinstance(found, Unfit):
        why = measured.unjudgeable or str(found)
        return TargetReport.of(measured, None, withheld(why), job, withheld=why, fleet=fleet), None
    examined, diagnosis = found
    own = [call for call in calls if _key(call) == key]
    if key not in traced:
        slow = {rank for cause in diagnosis.causes if cause.kind == "slow_rank" for rank in cause.ranks}
        measured = averages(measured, examined.table, slow)
    captured = key in traced and set(examined.table.steps.tolist()) <= set(measured.steps)
    predicted, by_hand = what_if(examined, diagnosis, own, memory_limit)
    return TargetReport.of(measured, diagnosis, predicted, job, fleet=fleet, captured=captured), by_hand


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
