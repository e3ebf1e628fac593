"""Makes the kernel summary and collapsed stacks from a finished raw trace. Runs in a child process of the training.

The self time of an event is the time during which it is the innermost event on its stream or thread, which is the one
that started last. For nested events that is the event's interval without its children. Every instant of a stream
belongs to one event, so nothing is counted twice, and the self times of a stream add up to the time that it was busy.
A kernel that runs on two streams at once does run twice, so its self times add up; ``union_us`` is the time during
which at least one of them ran.

A collapsed stack is one line, ``frame;frame;...;operator nanoseconds``, as flamegraph.pl, speedscope and others read
it. Host times and device times cannot be added, so there are two files: the self time on the host, and the device time
of kernels, under the stacks that launched them. ``torch.profiler.profile.export_stacks`` writes an empty file for the
same profile (torch 2.13), and would build its Python events on the training thread.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.columns import (
    ANNOTATION,
    COPIES,
    KERNEL,
    LAUNCHES,
    OPERATOR,
    Columns,
    Events,
    KinetoEvents,
)
from megaprof.analysis.trace.intervals import busy
from megaprof.formats.names import DEVICE_STACKS_SUFFIX, KERNELS_SUFFIX, STACKS_SUFFIX

VERSION = 1
_ON_DEVICE, _ON_HOST, _PYTHON = (KERNEL, *COPIES), (OPERATOR, ANNOTATION, *LAUNCHES), "python_function"
_ROOT = -1

Enter = Callable[[int | None, int], int]
"""``enter(key of the enclosing event, number)`` returns the key under which an event's time is counted."""


def read_events(path: Path, *, python: bool) -> KinetoEvents:
    """Returns the events of a trace with their threads, without operators of the CPU if there are events of a device.
    ``python``: with all operators and functions of Python; self times leave the latter out, so that they are the same
    with and without stacks. Raises ValueError for a file that is no whole trace."""
    wanted = (*_ON_DEVICE, *_ON_HOST, *([_PYTHON] if python else []))
    events = KinetoEvents(
        path,
        columns=dict.fromkeys(wanted, ("thread", "correlation")),
        operators=lambda events: python or not events.has(KERNEL),
    )
    if events.document.cut is not None:
        raise ValueError(events.document.cut)
    return events


def self_times(spans: Iterable[tuple[int, int, int]], enter: Enter = lambda around, number: number) -> dict[int, int]:
    """Returns, for each key, the nanoseconds during which an event with that key was the innermost one.

    ``spans``: start, end and number of each event, in order of start, an enclosing event before those inside it.
    """
    totals: dict[int, int] = {}
    open_events: list[tuple[int, int]] = []  # (end, key), the innermost one last
    now = 0

    def advance(until: float) -> None:
        nonlocal now
        while open_events:
            end, key = open_events[-1]
            reached = end if end < until else int(until)
            if reached > now:
                totals[key] += reached - now
                now = reached
            if end > until:
                return
            open_events.pop()

    for start, end, number in spans:
        advance(start)
        now = max(now, start)
        key = enter(open_events[-1][1] if open_events else None, number)
        totals.setdefault(key, 0)
        open_events.append((end, key))
    advance(math.inf)
    return totals


def _by_thread(columns: Columns, numbers: npt.NDArray[np.int64]) -> Iterator[Iterator[tuple[int, int, int]]]:
    """Yields the start, end and number of the events of each thread or stream, as `self_times` wants them."""
    order = np.lexsort((-columns.spans[:, 1], columns.spans[:, 0], columns.thread))
    borders = np.flatnonzero(np.diff(columns.thread[order])) + 1
    for rows in np.split(order, borders) if len(order) else ():
        yield zip(*columns.spans[rows].T.tolist(), numbers[rows].tolist(), strict=True)


def kernel_summary(events: Events, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``identity``, ``devices`` and ``kernels`` (most self time first) as plain data. Times are in us. Lists
    operators of the CPU if there are no events of a device."""
    on_device = any(map(events.has, _ON_DEVICE))
    categories = _ON_DEVICE if on_device else _ON_HOST
    pieces = [events.take(category) for category in categories]
    columns = Columns.joined(pieces)
    device_of = [f"cuda:{process}" if on_device else "cpu" for process, _ in events.threads]
    devices = sorted(set(device_of))
    device = np.array([devices.index(name) for name in device_of], dtype=np.int64)[columns.thread]
    category = np.repeat(np.arange(len(pieces)), [*map(len, pieces)])
    keys, number, counts = np.unique(
        np.column_stack((columns.name, category, device)), axis=0, return_inverse=True, return_counts=True
    )
    number = number.reshape(-1)
    self_ns: defaultdict[int, int] = defaultdict(int)
    for spans in _by_thread(columns, number):
        for key, time in self_times(spans).items():
            self_ns[key] += time
    union_ns, busy_ns = (
        busy(owners, columns.spans, count).tolist() for owners, count in ((number, len(keys)), (device, len(devices)))
    )
    kernels = [
        {
            "name": events.names[name],
            "category": categories[kind],
            "device": devices[place],
            "count": count,
            "self_us": self_ns[key] / 1000,
            "union_us": union_ns[key] / 1000,
        }
        for key, ((name, kind, place), count) in enumerate(zip(keys.tolist(), counts.tolist(), strict=True))
        if on_device or categories[kind] == OPERATOR
    ]
    kernels.sort(key=lambda kernel: (-kernel["self_us"], kernel["device"], kernel["name"]))
    return {
        "version": VERSION,
        **identity,
        "activity": "cuda" if on_device else "cpu",
        "devices": [
            {
                "device": devices[place],
                "count": int((device == place).sum()),
                "self_us": sum(self_ns[key] for key in np.flatnonzero(keys[:, 2] == place).tolist()) / 1000,
                "busy_us": busy_ns[place] / 1000,
            }
            for place in np.unique(device).tolist()
        ],
        "kernels": kernels,
    }


def collapsed_stacks(events: Events) -> tuple[list[str], list[str]]:
    """Returns the lines of stacks with their self time on the host, and with the time of the kernels and copies that
    they launched."""
    columns = Columns.joined([events.take(category) for category in (*_ON_HOST, _PYTHON)])
    on_gpu = Columns.joined([events.take(category) for category in _ON_DEVICE])
    frames: dict[str, int] = {}
    frame_of = [
        frames.setdefault(name.replace(";", ":").replace("\n", " ") or "?", len(frames)) for name in events.names
    ]
    nodes: dict[tuple[int, int], int] = {}  # (parent node, frame) -> node
    launched_under: dict[int, int] = {}  # correlation -> node
    names, correlations = columns.name.tolist(), columns.correlation.tolist()

    def enter(around: int | None, row: int) -> int:
        node = nodes.setdefault((_ROOT if around is None else around, frame_of[names[row]]), len(nodes))
        if correlations[row]:
            launched_under[correlations[row]] = node
        return node

    host: defaultdict[int, int] = defaultdict(int)
    for spans in _by_thread(columns, np.arange(len(columns))):
        for node, time in self_times(spans, enter).items():
            host[node] += time
    device: defaultdict[int, int] = defaultdict(int)
    lengths = (on_gpu.spans[:, 1] - on_gpu.spans[:, 0]).tolist()
    for name, correlation, length in zip(on_gpu.name.tolist(), on_gpu.correlation.tolist(), lengths, strict=True):
        parent = launched_under.get(correlation, _ROOT)  # launched before the window: no stack
        device[nodes.setdefault((parent, frame_of[name]), len(nodes))] += length

    places, words = list(nodes), list(frames)

    def lines(totals: Mapping[int, int]) -> Iterator[str]:
        for node, total in sorted(totals.items()):
            path = []
            while total and node != _ROOT:
                node, frame = places[node]
                path.append(words[frame])
            if total:
                yield f"{';'.join(reversed(path))} {total}\n"

    return [*lines(host)], [*lines(device)]


def main(order: Mapping[str, Any]) -> None:
    """Reads a raw trace from standard input and writes the files that ``order`` names. Runs in the child."""
    os.nice(5)
    files, trace = order["files"], Path("/dev/stdin")
    if KERNELS_SUFFIX in files:
        summary = kernel_summary(read_events(trace, python=False), order["identity"])
        Path(files[KERNELS_SUFFIX]).write_text(json.dumps(summary), encoding="utf-8")
    if STACKS_SUFFIX in files:
        host, device = collapsed_stacks(read_events(trace, python=True))
        for suffix, lines in ((STACKS_SUFFIX, host), (DEVICE_STACKS_SUFFIX, device)):
            if suffix in files and (lines or suffix == STACKS_SUFFIX):
                Path(files[suffix]).write_text("".join(lines), encoding="utf-8")
