"""Many traces read at once: each in memory alone, in several processes where that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaprof.analysis.trace.calls import Call, calls_of
from megaprof.analysis.trace.pool import Progress, each, processors, sizes_of
from megaprof.analysis.trace.traces import UnreadableTrace, read_trace
from megaprof.formats.inputs import memory_left

#: Bytes of files below which one process is quicker than several.
_WORTH_IT = 24 << 20
#: Memory that reading takes for each byte of the file, compressed and plain.
_COMPRESSED, _PLAIN = 100, 10
_SHARE = 0.5


@dataclass(frozen=True)
class Reading:
    """What came of one file."""

    path: Path
    """The file."""
    calls: tuple[Call, ...]
    """Its schedule calls."""
    warnings: tuple[str, ...]
    """What must be known about it, and why there are no calls."""


def read(path: Path) -> Reading:
    """Read one file; whatever it holds, nothing is raised."""
    try:
        trace = read_trace(path)
    except UnreadableTrace as fault:
        return Reading(path, (), (f"{path.name} was skipped: {fault.reason}",))
    calls = tuple(calls_of(trace))
    if not calls:
        skipped = f"{path.name} was skipped: it holds no range of a whole step (megaprof/... step=...)"
        return Reading(path, (), (*trace.warnings, skipped))
    return Reading(path, calls, trace.warnings)


def read_all(paths: Sequence[Path], workers: int = 1, progress: Progress | None = None) -> Iterator[Reading]:
    """Read every file, in order. ``workers``: processes at most (`pool.each`); fewer are used where it does not pay or
    would not fit into memory."""
    for done, reading in enumerate(each(read, paths, min(workers, _useful(paths))), 1):
        if progress is not None:
            progress(done, len(paths))
        yield reading


def _useful(paths: Sequence[Path]) -> int:
    sizes = sizes_of(paths)
    if sum(sizes.values()) < _WORTH_IT:
        return 1
    most = max(size * (_COMPRESSED if path.suffix == ".gz" else _PLAIN) for path, size in sizes.items())
    return max(1, min(len(sizes), processors(), int(_SHARE * memory_left() / max(most, 1))))
