"""Opens the traces and timelines of a job, each of them once for a whole report, in this process, in several, or on a
Ray cluster. Finds out which run each of them belongs to, if a directory holds the files of several runs.

A restart is a new process, whose name is in everything that it recorded. The process continues the run before it if its
timelines go on after the steps of that run (from a checkpoint), with the same sizes and layers. It begins another run
if its timelines begin at a step that the rank has already passed. It also begins another run if it has only traces,
which do not show what they continue. Runs that write at the same time are not distinguished.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.columns import Events, KinetoEvents
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.steps import TracedStep, steps_of
from megaprof.analysis.trace.traces import (
    COPIES,
    NOT_OURS,
    NSYS_SUFFIXES,
    SQLITE,
    TRACE_SUFFIXES,
    Trace,
    events_of,
    read_trace,
    refusing,
    trace_of,
)
from megaprof.formats import inputs
from megaprof.formats import timeline as format
from megaprof.formats.inputs import files_below
from megaprof.formats.metadata import Metadata, ModelChunk
from megaprof.formats.names import parse_artifact_name
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.topology import ParallelSizes

#: For fewer bytes of traces, or of timelines, than this, one process is quicker than several.
_WORTH_IT, _TIMELINES_WORTH_IT = 24 << 20, 512 << 20
#: Bytes of memory that reading takes, for each process, and for each byte of its file, compressed or plain.
_PROCESS, _COMPRESSED, _PLAIN = 64 << 20, 4.0, 0.4
_SHARE = 0.5
#: The most bytes of files that are kept. Of larger jobs, what is read again are the few ranks of which a report shows
#: single passes.
_KEPT = 16 << 20
#: The suffixes of all recordings.
RECORDINGS = (*TRACE_SUFFIXES, *NSYS_SUFFIXES, format.SUFFIX)
#: The extras that read files of Nsight Systems, and recordings by others: files that hold no step of ours.
NSYS, OTHERS = "megaprof.nsys.files", "megaprof.foreign"

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""A function that gets the number of files that are done, and the number of all files."""
Workers = int | str
"""The number of processes that read, or a Ray cluster: ``ray`` for the one that this machine belongs to (or that
``RAY_ADDRESS`` names), or its address, ``ray://host:10001``."""


@dataclass(frozen=True)
class Reading:
    """The result of reading one file."""

    path: Path
    steps: tuple[TracedStep, ...]
    warnings: tuple[Note, ...]
    skipped: Note | None = None
    """Why it has no steps; None if it has some."""
    others: tuple[Any, ...] = ()
    """What the extra `OTHERS` reads in it, if it has no steps."""


def recordings_in(place: Path) -> tuple[list[Path], Timelines]:
    """Returns the traces and the timelines under a directory, which is listed once, by their suffixes, or the single
    file that ``place`` is: a trace, if its name does not say what it is. Leaves out reports of nsys whose export is
    there, too."""
    if place.is_file() and not place.name.endswith(RECORDINGS):
        return [place], Timelines()
    paths = [place] if place.is_file() else sorted(files_below(place, RECORDINGS), key=attrgetter("parts"))
    traces, exports, timelines = (
        [path for path in paths if path.name.endswith(suffixes)]
        for suffixes in (TRACE_SUFFIXES, NSYS_SUFFIXES, format.SUFFIX)
    )
    exported = {path for path in exports if path.suffix == SQLITE}
    once = [path for path in exports if path in exported or path.with_suffix(SQLITE) not in exported]
    return [*traces, *once], Timelines(timelines)


def read(path: Path) -> Reading:
    """Reads one file. Raises nothing, whatever the file holds."""
    reason = "it holds no range of a whole step"
    events: KinetoEvents | Mapping[int, Events] | None = None
    traces = list[Trace]()
    try:
        with refusing():
            if path.suffix in NSYS_SUFFIXES:
                file = import_module(NSYS).NsysFile(path)
                events = file.processes
                traces = file.traces()
            else:
                events = kineto = events_of(path)
                traces = [trace_of(path, kineto)]
    except Undecodable as fault:
        reason = str(fault)
    steps = tuple(step for trace in traces for step in steps_of(trace))
    warnings = tuple(warning for trace in traces for warning in trace.warnings)
    if steps:
        return Reading(path, steps, warnings)
    others, why = [], None
    if events and not traces and reason != COPIES:  # no event was taken
        others, why = import_module(OTHERS).recordings_in(path, events)
    skipped = Note("skipped", files=(path.name,), said=why if why and reason == NOT_OURS else reason)
    return Reading(path, (), warnings, skipped, tuple(others))


def traces_in(path: Path) -> list[Trace]:
    """Returns the traces in a file, which may come from any tool. Raises Undecodable."""
    if path.suffix not in NSYS_SUFFIXES:
        return [read_trace(path)]
    with refusing():
        return list(import_module(NSYS).NsysFile(path).traces())


def read_all(paths: Sequence[Path], workers: Workers = 1, progress: Progress | None = None) -> Iterator[Reading]:
    """Yields the reading of each file, in order. ``workers``: the maximum number of processes, or a Ray cluster
    (`in_processes`). Uses fewer processes if more would not be faster or would not fit into memory."""
    sizes, useful = _sizes_of(paths), 1
    if sum(sizes.values()) >= _WORTH_IT:
        bytes_of = {path: size * (_COMPRESSED if path.suffix == ".gz" else _PLAIN) for path, size in sizes.items()}
        fitting = int(_SHARE * inputs.memory_left() / (_PROCESS + max(bytes_of.values(), default=0)))
        useful = max(1, min(len(sizes), _processors(), fitting))
    for done, reading in enumerate(in_processes(read, paths, workers, useful), 1):
        if progress is not None:
            progress(done, len(paths))
        yield reading


class Timelines:
    """The timelines of a job. A copy in another process keeps none."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self.paths = tuple(paths)
        """The files."""
        self._bytes = sum(_sizes_of(self.paths).values())
        self._keeps = self._bytes <= _KEPT
        self._kept: dict[Path, format.Timeline] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return Timelines, ()

    def read(self, path: Path, *, events: bool = True) -> format.Timeline:
        """Returns a timeline; without ``events`` it may lack them. Raises UnreadableTimeline."""
        if (timeline := self._kept.get(path)) is None:
            timeline = format.read_timeline(path, events=events or self._keeps)
            if self._keeps:
                self._kept[path] = timeline
        return timeline

    def steps_of(
        self, files: Iterable[Path], key: tuple[object, ...]
    ) -> Iterator[tuple[format.Timeline, npt.NDArray[np.intp]]]:
        """Yields the timelines among ``files`` that can be read, each with the positions of the steps of one target,
        role and parallel sizes."""
        for path in files:
            with suppress(format.UnreadableTimeline):
                timeline = self.read(path)
                of_key = [(each.target, each.role, each.sizes) == key for each in timeline.metadata]
                yield timeline, np.flatnonzero(np.array(of_key, dtype=np.bool_)[timeline.steps["metadata"]])

    def useful_processes(self, items: int) -> int:
        """Returns the largest number of processes that is worth it for reading all files in so many ``items``."""
        return 1 if self._bytes < _TIMELINES_WORTH_IT else max(1, min(items, _processors()))


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], workers: Workers, useful: int
) -> Iterator[Result]:
    """Yields the result of ``work`` for each item, in order, computed in ``workers`` processes, but at most ``useful``
    ones; a cluster decides for itself. If one of them is killed, most likely for its memory, this process does the
    rest, because one item at a time may still fit. Raises Unanswerable if there is no cluster.

    Decoding holds the interpreter's lock, so threads would not help: two threads read two traces no faster than one
    does. A process takes about half a second to start, and imports the main module again. So a script that asks for
    several processes needs the usual guard (``if __name__ == "__main__"``).
    """
    done = 0
    of_items = _here(work, items, min(workers, useful)) if isinstance(workers, int) else _on_ray(work, items, workers)
    for result in of_items:
        done += 1
        yield result
    yield from map(work, islice(items, done, None))


def _here(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    if workers <= 1:
        return
    same_limits = partial(inputs.allow, inputs.allowed())
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=same_limits) as pool:
            # Submit no more items than the processes work on, because results wait in memory until their turn.
            for begin in range(0, len(items), 4 * workers):
                yield from pool.map(work, items[begin : begin + 4 * workers])
    except BrokenProcessPool:
        return


def _on_ray(work: Callable[[Item], Result], items: Sequence[Item], address: str) -> Iterator[Result]:
    """Yields results that a running cluster computes. Closes the connection to it afterwards if it was made here."""
    if not items:
        return
    try:
        ray: Any = import_module("ray")
    except ImportError as fault:
        raise Unanswerable(f"--workers {address}: the package ray cannot be imported: {fault}") from None
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address="auto" if address == "ray" else address, log_to_driver=False, logging_level="ERROR")
        except Exception as fault:
            why = " ".join(str(fault).split())[:300]
            raise Unanswerable(f"--workers {address}: no Ray cluster can be reached: {why}") from None
    with ExitStack() as at_end:
        if ours:
            at_end.callback(ray.shutdown)
        count = min(int(ray.available_resources().get("CPU", 0)), len(items))
        if count < 1:
            raise Unanswerable(f"--workers {address}: no processor of the Ray cluster is free")
        pool = import_module("ray.util.multiprocessing").Pool(count, inputs.allow, (inputs.allowed(),))
        at_end.callback(pool.terminate)
        with suppress(ray.exceptions.RayError):
            for begin in range(0, len(items), 4 * count):
                yield from pool.imap(work, items[begin : begin + 4 * count])


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sizes_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Returns the size in bytes of each file that exists."""
    sizes = {}
    for path in paths:
        with suppress(OSError):
            sizes[path] = path.stat().st_size
    return sizes


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
    process: str | None
    """The process that recorded it."""
    sizes: ParallelSizes
    """The run's sizes without virtual stages, which differ by model."""
    chunks: tuple[ModelChunk, ...]
    """The rank's model chunks."""
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

    def index(self, start_ns: int) -> int:
        """Returns the index of the run that a file belongs to whose first step began at ``start_ns``."""
        return max(0, bisect_right(self.begins, start_ns) - 1)

    def has(self, start_ns: int) -> bool:
        """Returns whether a file whose first step began at ``start_ns`` belongs to the chosen run."""
        return self.index(start_ns) == self.chosen


def runs_in(steps: Iterable[TracedStep], timelines: Timelines, run: int | None = None) -> Runs:
    """Returns the runs of the steps in traces and of the timelines. ``run``: the number of the run to choose, from 1;
    None for the newest. Raises NoSuchRun."""
    traced_pieces = [_piece(step.metadata, (step.step, step.step), step.host, timeline=False) for step in steps]
    files: dict[tuple[object, ...], list[Path]] = {}
    for path in timelines.paths:
        name = parse_artifact_name(path.name)
        files.setdefault((name.target, name.role, name.coords.rank) if name else (path,), []).append(path)
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
    with_timeline = {piece.process for piece in all_pieces if piece.timeline}
    begins, first_steps = [0], [0]
    current_run, processes, ended_ns = dict[Line, Piece](), set[str | None](), 0
    for piece in (piece for piece in all_pieces if piece.timeline or piece.process not in with_timeline):
        if piece.process not in processes and _contradicts(piece, current_run):
            # Other ranks may have begun a little earlier than the ranks that were looked at.
            begins.append((min(ended_ns, piece.start_ns) + piece.start_ns) // 2)
            first_steps.append(piece.start_ns)
            current_run = {}
        first_step = min(piece.first_step, current_run.get(piece.line, piece).first_step)
        current_run[piece.line] = piece._replace(first_step=first_step)
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
    if any(each.sizes != piece.sizes for line, each in run.items() if line[:2] == piece.line[:2]):
        return True
    if (before := run.get(piece.line)) is None:
        return False
    return before.chunks != piece.chunks or not piece.timeline or piece.first_step <= before.first_step


def _recorded(timelines: Timelines, paths: Iterable[Path]) -> Iterator[Piece]:
    for path in paths:
        try:
            timeline = timelines.read(path, events=False)
        except format.UnreadableTimeline:
            continue  # the report says so when it reads the file
        for metadata, steps in timeline.by_metadata():
            numbers, last = steps["step"], steps[-1]
            span = int(steps[0]["start_ns"]), int(last["start_ns"]) + 1000 * int(last["duration"])
            yield _piece(metadata, (int(numbers.min()), int(numbers.max())), span, timeline=not metadata.around_windows)


def _piece(metadata: Metadata, steps: tuple[int, int], span: tuple[int, int], *, timeline: bool) -> Piece:
    line = metadata.target, metadata.role, metadata.coords.rank
    sizes = replace(metadata.sizes, vpp=1)
    return Piece(line, *steps, *span, metadata.run, sizes, metadata.chunks, timeline)
