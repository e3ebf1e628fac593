"""Tables of passes, and stages, as the report makes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megaprof.analysis.diagnosis import averages
from megaprof.analysis.diagnosis.stages import TargetStages, order
from megaprof.analysis.fleet.fleet import survey
from megaprof.analysis.fleet.reading import Key, find_timelines, read_fleet
from megaprof.analysis.table.counted import counted
from megaprof.analysis.table.files import tables
from megaprof.analysis.table.table import Table, Unfit
from megaprof.analysis.table.traced import table_of_calls
from megaprof.analysis.trace.calls import Call
from megaprof.analysis.trace.reading import read_all, sources_in
from megaprof.analysis.trace.runs import runs_in


def tables_in(directory: Path) -> dict[Key, Table | Unfit]:
    """The table of every job of the newest run below ``directory``, or why there is none."""
    calls = [call for reading in read_all(sources_in(directory), 1) for call in reading.calls]
    timelines = find_timelines(directory)
    runs = runs_in(calls, timelines)
    own = (call for call in calls if runs.has(call.start))
    reading = read_fleet(timelines, runs=runs)
    return tables(tables_of_calls(own), reading, survey(reading))


def tables_of_calls(calls: Iterable[Call]) -> dict[Key, Table | Unfit]:
    """The table of every job that these calls are of, or why there is none."""
    return {Key(*each.target): table_of_calls(each) for each in counted(calls)}


def stages_of(calls: Iterable[Call]) -> list[TargetStages]:
    """The stages of every job that these calls are of."""
    found = []
    for each in counted(calls):
        table = table_of_calls(each)
        found.append(averages.of_calls(each, table.note) if isinstance(table, Unfit) else averages.averages(table))
    return sorted(found, key=order)
