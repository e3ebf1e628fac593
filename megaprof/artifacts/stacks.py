"""Makes collapsed stacks for flame graphs, from a finished raw trace that was recorded with Python stacks.

Each stack is one line, ``frame;frame;...;operator nanoseconds``, as flamegraph.pl, speedscope and others read it. There
are two files, because host times and device times cannot be added. One has the self time on the host. The other has the
device time of kernels, under the stacks that launched them. ``torch.profiler.profile.export_stacks`` writes an empty
file for the same profile (torch 2.13), and would build its Python events on the training thread. Like `kernels`, this
uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from megaprof.artifacts.kernels import DEVICE_CATEGORIES, HOST_CATEGORIES, Lane, nanoseconds, self_times

_FRAMES = HOST_CATEGORIES | {"python_function"}
_ROOT = -1


class CollapsedStacks:
    """Collects events, and yields the lines of the two files from ``host()`` and ``device()``."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[Any, Any], Lane] = {}
        self._launches: dict[tuple[tuple[Any, Any], int, int], int] = {}  # (thread, start, name) -> correlation
        self._kernels: list[tuple[int, int, int]] = []  # correlation, name, nanoseconds
        self._nodes: dict[tuple[int, int], int] = {}  # (parent node, name) -> node
        self._launched_under: dict[int, int] = {}  # correlation -> node

    def add(self, event: dict[str, Any]) -> None:
        category = event.get("cat")
        if event.get("ph") != "X" or (category not in _FRAMES and category not in DEVICE_CATEGORIES):
            return
        name = self._names.setdefault(_frame(str(event.get("name"))), len(self._names))
        duration = nanoseconds(event.get("dur", 0))
        correlation = (event.get("args") or {}).get("correlation")
        if category in DEVICE_CATEGORIES:
            if correlation is not None:
                self._kernels.append((int(correlation), name, duration))
            return
        thread = (event.get("pid"), event.get("tid"))
        start = nanoseconds(event["ts"])
        if correlation is not None:
            self._launches[thread, start, name] = int(correlation)
        self._lanes.setdefault(thread, Lane()).add(start, start + duration, name)

    def host(self) -> Iterator[str]:
        """Yields one line per stack, with its self time on the host."""
        totals: dict[int, int] = {}
        for thread, lane in self._lanes.items():
            for node, time in self_times(lane.in_order(), partial(self._enter, thread)).items():
                totals[node] = totals.get(node, 0) + time
        yield from self._lines(totals)

    def device(self) -> Iterator[str]:
        """Yields one line per stack, with the time of the kernels and copies that it launched. Call ``host()`` first,
        which finds out what each stack launched."""
        totals: dict[int, int] = {}
        for correlation, name, duration in self._kernels:
            parent = self._launched_under.get(correlation, _ROOT)  # launched before the window: no stack
            node = self._node(parent, name)
            totals[node] = totals.get(node, 0) + duration
        yield from self._lines(totals)

    def _enter(self, thread: tuple[Any, Any], parent: int | None, start: int, name: int) -> int:
        node = self._node(_ROOT if parent is None else parent, name)
        correlation = self._launches.get((thread, start, name))
        if correlation is not None:
            self._launched_under[correlation] = node
        return node

    def _node(self, parent: int, name: int) -> int:
        return self._nodes.setdefault((parent, name), len(self._nodes))

    def _lines(self, totals: dict[int, int]) -> Iterator[str]:
        names, nodes = list(self._names), list(self._nodes)
        for node, total in sorted(totals.items()):
            if total:
                frames = []
                while node != _ROOT:
                    node, name = nodes[node]
                    frames.append(names[name])
                yield f"{';'.join(reversed(frames))} {total}\n"


def _frame(name: str) -> str:
    return name.replace(";", ":").replace("\n", " ") or "?"
