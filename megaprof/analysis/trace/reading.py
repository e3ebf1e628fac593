"""Reads many traces, in several processes if that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.nsys.files import NsysFile, find_nsys, is_nsys, read_nsys
from megaprof.analysis.trace.pool import Progress, Workers, at_most, in_processes, processors, sizes_of
from megaprof.analysis.trace.steps import TracedStep, steps_of
from megaprof.analysis.trace.traces import Trace, UnreadableTrace, find_traces, read_trace
from megaprof.formats.inputs import memory_left

#: For fewer bytes of files than this, one process is faster than several.
_WORTH_IT = 24 << 20
#: Bytes of memory that reading takes, for each process, and for each byte of its file, compressed or plain.
_PROCESS, _COMPRESSED, _PLAIN = 64 << 20, 4.0, 0.4
_SHARE = 0.5

Source = Path | NsysFile
"""A trace of Kineto, or a file of nsys."""


@dataclass(frozen=True)
class Reading:
    """The result of reading one file."""

    path: Path
    """The file."""
    steps: tuple[TracedStep, ...]
    """Its steps."""
    warnings: tuple[Note, ...]
    """Warnings about it."""
    skipped: Note | None = None
    """Why it has no steps; None if it has some."""


def sources_in(place: Path) -> list[Source]:
    """Returns the traces under a directory, by their suffixes, or the single file that ``place`` is."""
    if place.is_file():
        return [*find_nsys(place)] if is_nsys(place) else [place]
    return [*find_traces(place), *find_nsys(place)]


def path_of(source: Source) -> Path:
    """Returns the file of a source."""
    return source.path if isinstance(source, NsysFile) else source


def read(source: Source) -> Reading:
    """Reads one file. Raises nothing, whatever the file holds."""
    path = path_of(source)
    try:
        traces = traces_in(source)
    except UnreadableTrace as fault:
        return Reading(path, (), (), Note("skipped", files=(path.name,), said=fault.reason))
    steps = tuple(step for trace in traces for step in steps_of(trace))
    warnings = tuple(warning for trace in traces for warning in trace.warnings)
    if not steps:
        skipped = Note("skipped", files=(path.name,), said="it holds no range of a whole step")
        return Reading(path, (), warnings, skipped)
    return Reading(path, steps, warnings)


def traces_in(source: Source) -> list[Trace]:
    """Returns the traces in a file, which may come from any tool. Raises UnreadableTrace."""
    return read_nsys(source) if isinstance(source, NsysFile) else [read_trace(source)]


def read_all(sources: Sequence[Source], workers: Workers = 1, progress: Progress | None = None) -> Iterator[Reading]:
    """Yields the reading of each file, in order. ``workers``: the maximum number of processes, or a Ray cluster
    (`pool.in_processes`). Uses fewer processes if more would not be faster or would not fit into memory. Raises
    NoCluster."""
    paths = list(map(path_of, sources))
    for done, reading in enumerate(in_processes(read, sources, at_most(workers, _useful_processes(paths))), 1):
        if progress is not None:
            progress(done, len(paths))
        yield reading


def _useful_processes(paths: Sequence[Path]) -> int:
    sizes = sizes_of(paths)
    if sum(sizes.values()) < _WORTH_IT:
        return 1
    process_bytes = _PROCESS + max(
        size * (_COMPRESSED if path.suffix == ".gz" else _PLAIN) for path, size in sizes.items()
    )
    return max(1, min(len(sizes), processors(), int(_SHARE * memory_left() / process_bytes)))
