"""Opens the traces and timelines of a job, each of them once for a whole report, in this process, in several, or on a
Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.columns import Events, KinetoEvents
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.nsys import SQLITE, SUFFIXES, NsysFile
from megaprof.analysis.trace.steps import TracedStep, steps_of
from megaprof.analysis.trace.traces import (
    NOT_OURS,
    TRACE_SUFFIXES,
    Trace,
    events_of,
    names_a_step,
    read_trace,
    refusing,
    trace_of,
)
from megaprof.formats import inputs
from megaprof.formats import timeline as format
from megaprof.formats.inputs import files_below

#: For fewer bytes of traces, or of timelines, than this, one process is quicker than several.
_WORTH_IT, _TIMELINES_WORTH_IT = 24 << 20, 512 << 20
#: Bytes of memory that reading takes, for each process, and for each byte of its file, compressed or plain.
_PROCESS, _COMPRESSED, _PLAIN = 64 << 20, 4.0, 0.4
_SHARE = 0.5
#: The most bytes of files that are kept. Of larger jobs, what is read again are the few ranks of which a report shows
#: single passes.
_KEPT = 16 << 20
#: The suffixes of all recordings.
RECORDINGS = (*TRACE_SUFFIXES, *SUFFIXES, format.SUFFIX)
#: The extra for recordings by others, which reads files that hold no step of ours.
OTHERS = "megaprof.foreign"

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
        for suffixes in (TRACE_SUFFIXES, SUFFIXES, format.SUFFIX)
    )
    exported = {path for path in exports if path.suffix == SQLITE}
    once = [path for path in exports if path in exported or path.with_suffix(SQLITE) not in exported]
    return [*traces, *once], Timelines(timelines)


def read(path: Path) -> Reading:
    """Reads one file. Raises nothing, whatever the file holds."""
    reason = "it holds no range of a whole step"
    events: KinetoEvents | Mapping[int, Events] | None = None
    traces, warnings = list[Trace](), list[Note]()
    try:
        with refusing():
            if path.suffix in SUFFIXES:
                file = NsysFile(path)
                events = file.processes
                traces = file.traces()
            else:
                events = kineto = events_of(path)
                if "megaprof" not in kineto.document.top or names_a_step(kineto):
                    traces = [trace_of(path, kineto)]
                elif kineto.document.cut is not None:
                    warnings = [Note("cut", files=(path.name,), said=kineto.document.cut)]
    except Undecodable as fault:
        reason = str(fault)
    steps = tuple(step for trace in traces for step in steps_of(trace))
    warnings += (warning for trace in traces for warning in trace.warnings)
    if steps:
        return Reading(path, steps, tuple(warnings))
    others, why = [], None
    if events and not traces:  # no event was taken
        others, why = import_module(OTHERS).recordings_in(path, events)
    skipped = Note("skipped", files=(path.name,), said=why if why and reason == NOT_OURS else reason)
    return Reading(path, (), tuple(warnings), skipped, tuple(others))


def traces_in(path: Path) -> list[Trace]:
    """Returns the traces in a file, which may come from any tool. Raises Undecodable."""
    if path.suffix not in SUFFIXES:
        return [read_trace(path)]
    with refusing():
        return NsysFile(path).traces()


def read_all(paths: Sequence[Path], workers: Workers = 1, progress: Progress | None = None) -> Iterator[Reading]:
    """Yields the reading of each file, in order. ``workers``: the maximum number of processes, or a Ray cluster
    (`in_processes`). Uses fewer processes if more would not be faster or would not fit into memory. Raises
    NoCluster."""
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

    def __init__(self, paths: Iterable[Path] = (), *, keep: bool = True) -> None:
        self.paths = tuple(paths)
        """The files."""
        self._bytes = sum(_sizes_of(self.paths).values())
        self._keeps = keep and self._bytes <= _KEPT
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

    def only(self, files: Iterable[Path]) -> Timelines:
        """Returns some of them, so that the others need not be kept any longer."""
        chosen = Timelines(keep=self._keeps)
        chosen.paths = tuple(files)
        chosen._kept = {path: self._kept[path] for path in chosen.paths if path in self._kept}
        return chosen

    def useful_processes(self, items: int) -> int:
        """Returns the largest number of processes that is worth it for reading all files in so many ``items``."""
        return 1 if self._bytes < _TIMELINES_WORTH_IT else max(1, min(items, _processors()))


def find_timelines(directory: Path) -> Timelines:
    """Returns every timeline under ``directory``, sorted. Ignores hidden files, which are not megaprof's."""
    return Timelines(sorted(files_below(directory, (format.SUFFIX,)), key=attrgetter("parts")))


class NoCluster(Exception):
    """There is no Ray cluster to read on; the message says why."""


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], workers: Workers, useful: int
) -> Iterator[Result]:
    """Yields the result of ``work`` for each item, in order, computed in ``workers`` processes, but at most ``useful``
    ones; a cluster decides for itself. If one of them is killed, most likely for its memory, this process does the
    rest, because one item at a time may still fit. Raises NoCluster.

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
        raise NoCluster(f"the package ray cannot be imported: {fault}") from None
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address="auto" if address == "ray" else address, log_to_driver=False, logging_level="ERROR")
        except Exception as fault:
            raise NoCluster(f"no Ray cluster can be reached: {' '.join(str(fault).split())[:300]}") from None
    with ExitStack() as at_end:
        if ours:
            at_end.callback(ray.shutdown)
        count = min(int(ray.available_resources().get("CPU", 0)), len(items))
        if count < 1:
            raise NoCluster("no processor of the Ray cluster is free")
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
