"""Finds out which run a trace or a timeline belongs to, if a directory holds the files of several runs.

A restart is a new process, whose name is in everything that it recorded. The process continues the run before it if its
timelines go on after the steps of that run (from a checkpoint), with the same sizes and layers. It begins another run
if its timelines begin at a step that the rank has already passed. It also begins another run if it has only traces,
which do not show what they continue. Runs that write at the same time are not distinguished.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megaprof.analysis.trace.reading import Timelines
from megaprof.analysis.trace.steps import TracedStep
from megaprof.formats.metadata import Metadata, ModelChunk
from megaprof.formats.names import parse_artifact_name
from megaprof.formats.timeline import UnreadableTimeline
from megaprof.parallel.topology import ParallelSizes

#: The number of ranks whose timelines are looked at, and the number of further ones that also have traces.
_SAMPLE = 8


class NoSuchRun(ValueError):
    """The files belong to fewer runs; the message says how many."""


Line = tuple[str, str | None, int]


class Piece(NamedTuple):
    """Steps that follow each other in one file, from begin to end in nanoseconds on the wall clock."""

    line: Line
    """Target, role and rank, for which steps are counted together."""
    first_step: int
    last_step: int
    start_ns: int
    end_ns: int
    process: str | None = None
    """The process that recorded it; None if unknown."""
    sizes: ParallelSizes | None = None
    """The run's sizes without virtual stages, which differ by model; None if unknown."""
    chunks: tuple[ModelChunk, ...] = ()
    """The rank's model chunks; empty if unknown."""
    timeline: bool = True
    """True if it is from a timeline of the whole run, which begins with the first step of its process."""


@dataclass(frozen=True)
class Runs:
    """The runs that have files in a directory, and the run that is reported on."""

    begins: tuple[int, ...] = (0,)
    """The earliest time of each run's first step, in nanoseconds on the wall clock; the oldest run first."""
    first_steps: tuple[int, ...] = (0,)
    """When the first step of each run began on the ranks that were looked at, likewise; 0 for the oldest run."""
    chosen: int = 0
    """The index of the run that is reported on."""
    pieces: tuple[Piece, ...] = ()
    """The chosen run's pieces, from the timelines that were looked at."""

    @property
    def count(self) -> int:
        return len(self.begins)

    @property
    def span(self) -> tuple[float, float]:
        """When the chosen run's first step began, and that of the next run, in seconds; infinity if there is none."""
        following = [*self.first_steps[1:], math.inf][self.chosen]
        return self.first_steps[self.chosen] / 1e9, following / 1e9

    def has(self, start_ns: int) -> bool:
        """Returns whether a file whose first step began at ``start_ns`` belongs to the chosen run."""
        return max(0, bisect_right(self.begins, start_ns) - 1) == self.chosen


def runs_in(steps: Iterable[TracedStep], timelines: Timelines, run: int | None = None) -> Runs:
    """Returns the runs of the steps in traces and of the timelines. ``run``: the number of the run to choose, from 1;
    None for the newest. Raises NoSuchRun."""
    traced_pieces = [_piece(step.metadata, (step.step, step.step), step.host, timeline=False) for step in steps]
    files: dict[tuple[object, ...], list[Path]] = {}
    for path in timelines.paths:
        name = parse_artifact_name(path.name)
        files.setdefault((name.target, name.role, name.place.rank) if name else (path,), []).append(path)
    ranks = {piece.line[2] for piece in traced_pieces}
    with_traces = [line for line in files if line[-1] in ranks][:_SAMPLE]
    sample = dict.fromkeys((*[*files][:: max(1, len(files) // _SAMPLE)][:_SAMPLE], *with_traces))
    recorded_pieces = [*_recorded(timelines, (path for line in sample for path in files[line]))]
    sampled_ranks = {piece.line[2] for piece in recorded_pieces}
    return runs_of(
        (*recorded_pieces, *(piece for piece in traced_pieces if not files or piece.line[2] in sampled_ranks)), run
    )


def runs_of(pieces: Iterable[Piece], run: int | None = None) -> Runs:
    """Returns the runs of some pieces. ``run``: the number of the run to choose, from 1; None for the newest. Raises
    NoSuchRun."""
    all_pieces = sorted(pieces, key=lambda piece: piece.start_ns)
    # If a process has both, its timeline shows which steps it continues.
    with_timeline = {piece.process for piece in all_pieces if piece.timeline} - {None}
    begins, first_steps = [0], [0]
    current_run, processes, ended_ns = dict[Line, Piece](), set[str](), 0
    for piece in (piece for piece in all_pieces if piece.timeline or piece.process not in with_timeline):
        if piece.process not in processes and _contradicts(piece, current_run):
            # Other ranks may have begun a little earlier than the ranks that were looked at.
            begins.append((min(ended_ns, piece.start_ns) + piece.start_ns) // 2)
            first_steps.append(piece.start_ns)
            current_run = {}
        first_step = min(piece.first_step, current_run.get(piece.line, piece).first_step)
        current_run[piece.line] = piece._replace(first_step=first_step)
        if piece.process is not None:
            processes.add(piece.process)
        ended_ns = max(ended_ns, piece.end_ns)
    if run is not None and not 1 <= run <= len(begins):
        which_runs = f"the files are of runs 1 to {len(begins)}" if len(begins) > 1 else "the files are of one run"
        raise NoSuchRun(f"{run}: {which_runs}")
    chosen = len(begins) - 1 if run is None else run - 1
    runs = Runs(tuple(begins), tuple(first_steps), chosen)
    return replace(runs, pieces=tuple(each for each in all_pieces if each.timeline and runs.has(each.start_ns)))


def _contradicts(piece: Piece, run: Mapping[Line, Piece]) -> bool:
    """Returns whether a piece of a new process belongs to another run than the latest piece of each line in ``run``."""
    of_model = (each.sizes for line, each in run.items() if line[:2] == piece.line[:2])
    if any(sizes != piece.sizes and None not in (sizes, piece.sizes) for sizes in of_model):
        return True
    if (before := run.get(piece.line)) is None:
        return False
    if piece.chunks and before.chunks and before.chunks != piece.chunks:
        return True
    if piece.timeline:
        return piece.first_step <= before.first_step
    return None not in (piece.process, before.process) and before.process != piece.process


def _recorded(timelines: Timelines, paths: Iterable[Path]) -> Iterator[Piece]:
    for path in paths:
        try:
            timeline = timelines.read(path, events=False)
        except UnreadableTimeline:
            continue  # the report says so when it reads the file
        for metadata, steps in timeline.by_metadata():
            numbers, last = steps["step"], steps[-1]
            span = int(steps[0]["start_ns"]), int(last["start_ns"]) + 1000 * int(last["duration"])
            yield _piece(metadata, (int(numbers.min()), int(numbers.max())), span, timeline=not metadata.around_windows)


def _piece(metadata: Metadata, steps: tuple[int, int], span: tuple[int, int], *, timeline: bool) -> Piece:
    line = metadata.target, metadata.role, metadata.coords.rank
    sizes = replace(metadata.sizes, vpp=1)
    return Piece(line, *steps, *span, metadata.run, sizes, metadata.chunks, timeline)
