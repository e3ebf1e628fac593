"""Tables of passes from all files of a directory: each is opened once."""

from __future__ import annotations

from pathlib import Path

from megaprof.analysis.diagnosis.job import Job
from megaprof.analysis.diagnosis.recorded import tables_of_timelines
from megaprof.analysis.diagnosis.table import Table, Unfit
from megaprof.analysis.diagnosis.traced import tables_of_calls
from megaprof.analysis.trace.pool import Workers
from megaprof.analysis.trace.reading import read_all, sources_in
from megaprof.analysis.trace.runs import runs_in, timelines_of
from megaprof.formats.remote import files_below
from megaprof.formats.timeline import SUFFIX


def tables_in(directory: Path, workers: Workers = 1) -> dict[Job, Table | Unfit]:
    """The table of every job of the newest run below ``directory``, or why there is none; of a job with traces from
    these."""
    calls = [call for reading in read_all(sources_in(directory), workers) for call in reading.calls]
    timelines = sorted(files_below(directory, (SUFFIX,)))
    runs = runs_in(calls, timelines)
    own = timelines_of(runs, timelines) if runs.count > 1 else timelines
    return tables_of_timelines(own) | tables_of_calls(call for call in calls if runs.has(call.start))
