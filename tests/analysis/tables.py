"""Tables of passes of everything below a directory, as the report makes them."""

from __future__ import annotations

from pathlib import Path

from megaprof.analysis.fleet.fleet import survey
from megaprof.analysis.fleet.reading import Key, find_timelines, read_fleet
from megaprof.analysis.table.files import tables
from megaprof.analysis.table.table import Table, Unfit
from megaprof.analysis.trace.reading import read_all, sources_in
from megaprof.analysis.trace.runs import runs_in


def tables_in(directory: Path) -> dict[Key, Table | Unfit]:
    """The table of every job of the newest run below ``directory``, or why there is none."""
    calls = [call for reading in read_all(sources_in(directory), 1) for call in reading.calls]
    timelines = find_timelines(directory)
    runs = runs_in(calls, timelines)
    own = (call for call in calls if runs.has(call.start))
    reading = read_fleet(timelines, runs=runs)
    return tables(own, reading, survey(reading))
