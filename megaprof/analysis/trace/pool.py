"""Several processes at once, where that pays: the one process pool of the analysis.

Decoding holds the interpreter's lock, so threads would not help: two of them read two traces in the time that one
takes. A process costs about half a second to start, and imports the main module anew, so a script that asks for several
needs the usual guard (``if __name__ == "__main__"``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from megaprof.formats import inputs

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""Called with the number of files that are done, and of all."""


def each(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    """``work`` of every item, in order, in ``workers`` processes. Where one of them is killed, most likely for its
    memory, the rest is done here: one item at a time may still fit."""
    done = 0
    if workers > 1:
        alike = partial(inputs.allow, inputs.allowed())
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=alike) as pool:
                # Not more at a time than are worked on: results wait in memory until their turn comes.
                for begin in range(0, len(items), 4 * workers):
                    for result in pool.map(work, items[begin : begin + 4 * workers]):
                        done += 1
                        yield result
        except BrokenProcessPool:
            pass
    yield from map(work, islice(items, done, None))


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sizes_of(paths: Sequence[Path]) -> dict[Path, int]:
    """Bytes of every file that is there."""
    found = {}
    for path in paths:
        try:
            found[path] = path.stat().st_size
        except OSError:
            continue
    return found
