"""The process pool of the analysis, on this machine or on a Ray cluster.

Decoding holds the interpreter's lock, so threads would not help: two threads read two traces no faster than one does. A
process takes about half a second to start, and imports the main module again. So a script that asks for several
processes needs the usual guard (``if __name__ == "__main__"``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from megaprof.formats import inputs

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""A function that gets the number of files that are done, and the number of all files."""


Workers = int | str
"""The number of processes that read, or a Ray cluster: ``ray`` for the one that this machine belongs to (or that
``RAY_ADDRESS`` names), or its address, ``ray://host:10001``."""


class NoCluster(Exception):
    """There is no Ray cluster to read on; the message says why."""


def in_processes(work: Callable[[Item], Result], items: Sequence[Item], workers: Workers) -> Iterator[Result]:
    """Yields the result of ``work`` for each item, in order, computed in ``workers`` processes. If one of them is
    killed, most likely for its memory, this process does the rest, because one item at a time may still fit. Raises
    NoCluster."""
    done = 0
    for result in _on_ray(work, items, workers) if isinstance(workers, str) else _here(work, items, workers):
        done += 1
        yield result
    yield from map(work, islice(items, done, None))


def at_most(workers: Workers, useful: int) -> Workers:
    """Returns ``workers``, but at most ``useful`` processes. A cluster decides for itself."""
    return workers if isinstance(workers, str) else min(workers, useful)


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
    if not items:
        return
    with _cluster(address) as ray:
        free = int(ray.available_resources().get("CPU", 0))
        if free < 1:
            raise NoCluster("no processor of the Ray cluster is free")
        count = min(free, len(items))
        pool = import_module("ray.util.multiprocessing").Pool(count, inputs.allow, (inputs.allowed(),))
        try:
            for begin in range(0, len(items), 4 * count):
                yield from pool.imap(work, items[begin : begin + 4 * count])
        except ray.exceptions.RayError:
            return
        finally:
            pool.terminate()


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Connects Ray to a running cluster, and closes the connection afterwards if it was made here."""
    try:
        ray = import_module("ray")
    except ImportError as fault:
        raise NoCluster(f"the package ray cannot be imported: {fault}") from None
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address="auto" if address == "ray" else address, log_to_driver=False, logging_level="ERROR")
        except Exception as fault:
            raise NoCluster(f"no Ray cluster can be reached: {' '.join(str(fault).split())[:300]}") from None
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sizes_of(paths: Sequence[Path]) -> dict[Path, int]:
    """Returns the size in bytes of each file that exists."""
    sizes = {}
    for path in paths:
        try:
            sizes[path] = path.stat().st_size
        except OSError:
            continue
    return sizes
