"""Tables of passes, and stages, as the report makes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megaprof.analysis.diagnosis.stages import TargetStages, averages, of_steps, order
from megaprof.analysis.fleet.fleet import survey
from megaprof.analysis.fleet.reading import FleetReading, Key, read_fleet
from megaprof.analysis.table.table import Table, Unfit
from megaprof.analysis.table.traced import jobs_of, tables
from megaprof.analysis.trace.reading import read_all, recordings_in, runs_in
from megaprof.analysis.trace.steps import TracedStep


def tables_in(directory: Path) -> dict[Key, Table | Unfit]:
    """The table of every job of the newest run below ``directory``, or why there is none."""
    sources, timelines = recordings_in(directory)
    steps = [step for reading in read_all(sources, 1) for step in reading.steps]
    runs = runs_in(steps, timelines)
    own = (step for step in steps if runs.has(step.host[0]))
    reading = read_fleet(timelines, runs=runs)
    return tables(jobs_of(own), reading, survey(reading))


def tables_of_steps(steps: Iterable[TracedStep]) -> dict[Key, Table | Unfit]:
    """The table of every job that these steps are of, or why there is none."""
    return tables(jobs_of(steps), FleetReading())


def stages_of(steps: Iterable[TracedStep]) -> list[TargetStages]:
    """The stages of every job that these steps are of."""
    found = []
    for job in jobs_of(steps):
        (table,) = tables([job], FleetReading()).values()
        found.append(of_steps(job, table.note) if isinstance(table, Unfit) else averages(table))
    return sorted(found, key=order)
