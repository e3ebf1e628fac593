"""Many traces read at once, in several processes where that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.calls import Call, calls_of
from megaprof.analysis.trace.nsys.files import NsysFile, find_nsys, is_nsys, read_nsys
from megaprof.analysis.trace.pool import Progress, Workers, at_most, each, processors, sizes_of
from megaprof.analysis.trace.traces import Trace, UnreadableTrace, find_traces, read_trace
from megaprof.formats.inputs import memory_left

#: Bytes of files below which one process is quicker than several.
_WORTH_IT = 24 << 20
#: Memory that reading takes: of every process, and for each byte of the file, compressed and plain.
_PROCESS, _COMPRESSED, _PLAIN = 64 << 20, 4.0, 0.4
_SHARE = 0.5

Source = Path | NsysFile
"""A trace of Kineto's, or a file of nsys's."""


@dataclass(frozen=True)
class Reading:
    """What came of one file."""

    path: Path
    """The file."""
    calls: tuple[Call, ...]
    """Its schedule calls."""
    warnings: tuple[Note, ...]
    """What must be known about it."""
    skipped: Note | None = None
    """Why there are no calls; None where there are."""


def sources_in(place: Path) -> list[Source]:
    """Every file under a directory whose name ends like a trace's, or the one file that this is."""
    if place.is_file():
        return [*find_nsys(place)] if is_nsys(place) else [place]
    return [*find_traces(place), *find_nsys(place)]


def path_of(source: Source) -> Path:
    """Its file."""
    return source.path if isinstance(source, NsysFile) else source


def read(source: Source) -> Reading:
    """Read one file; whatever it holds, nothing is raised."""
    path = path_of(source)
    try:
        traces = traces_in(source)
    except UnreadableTrace as fault:
        return Reading(path, (), (), Note("skipped", files=(path.name,), said=fault.reason))
    calls = tuple(call for trace in traces for call in calls_of(trace))
    warnings = tuple(warning for trace in traces for warning in trace.warnings)
    if not calls:
        return Reading(path, (), warnings, Note("without_steps", files=(path.name,)))
    return Reading(path, calls, warnings)


def traces_in(source: Source) -> list[Trace]:
    """What a file holds, whatever wrote it. Raises UnreadableTrace."""
    return read_nsys(source) if isinstance(source, NsysFile) else [read_trace(source)]


def read_all(sources: Sequence[Source], workers: Workers = 1, progress: Progress | None = None) -> Iterator[Reading]:
    """Read every file, in order. ``workers``: processes at most, or a Ray cluster (`pool.each`); fewer processes are
    used where it does not pay or would not fit into memory. Raises NoCluster."""
    paths = list(map(path_of, sources))
    for done, reading in enumerate(each(read, sources, at_most(workers, _useful(paths))), 1):
        if progress is not None:
            progress(done, len(paths))
        yield reading


def _useful(paths: Sequence[Path]) -> int:
    sizes = sizes_of(paths)
    if sum(sizes.values()) < _WORTH_IT:
        return 1
    most = _PROCESS + max(size * (_COMPRESSED if path.suffix == ".gz" else _PLAIN) for path, size in sizes.items())
    return max(1, min(len(sizes), processors(), int(_SHARE * memory_left() / most)))
