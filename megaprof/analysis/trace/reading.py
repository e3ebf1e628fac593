"""Many traces read at once: each in memory alone, in several processes where that pays.

Decoding holds the interpreter's lock, so threads would not help: two of them read two traces in the time that one
takes. A process costs about half a second to start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from megaprof.analysis.trace.calls import Call, calls_of
from megaprof.analysis.trace.traces import UnreadableTrace, read_trace
from megaprof.parallel.machine import find_bounds

#: Bytes of files below which one process is quicker than several.
_WORTH_IT = 24 << 20
#: Memory that reading takes for each byte of the file, compressed and plain.
_COMPRESSED, _PLAIN = 100, 10
_SHARE = 0.5

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""Called with the number of files that are done, and of all."""


@dataclass(frozen=True)
class Reading:
    """What came of one file: its schedule calls, or in ``warnings`` why there are none."""

    path: Path
    calls: tuple[Call, ...]
    warnings: tuple[str, ...]


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
    """Read every file, in order. ``workers``: processes at most; fewer are used where it does not pay or would not fit
    into memory. They import the main module anew, so a script that asks for several needs the usual guard
    (``if __name__ == "__main__"``)."""
    for done, reading in enumerate(in_processes(read, paths, min(workers, _useful(paths))), 1):
        if progress is not None:
            progress(done, len(paths))
        yield reading


def in_processes(function: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    """``function`` of every item, in order, in ``workers`` processes; in this one where there is one, or one of several
    was killed."""
    done = 0
    if workers > 1:
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                # Not more at a time than are worked on: results wait in memory until their turn comes.
                for begin in range(0, len(items), 4 * workers):
                    for result in pool.map(function, items[begin : begin + 4 * workers]):
                        done += 1
                        yield result
        except BrokenProcessPool:
            pass  # a process was killed, most likely for its memory: one item at a time may still fit
    yield from map(function, islice(items, done, None))


def _useful(paths: Sequence[Path]) -> int:
    sizes = []
    for path in paths:
        try:
            sizes.append((path.stat().st_size, _COMPRESSED if path.suffix == ".gz" else _PLAIN))
        except OSError:
            continue
    if sum(size for size, _ in sizes) < _WORTH_IT:
        return 1
    try:
        left = min(there_is - used for used, there_is in (bound.read() for bound in find_bounds()))
    except (OSError, ValueError, KeyError):
        left = 4 << 30
    fitting = int(_SHARE * left / max(size * each for size, each in sizes))
    return max(1, min(len(sizes), processors(), fitting))


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
