"""Makes the kernel summary from a finished raw trace: exactly how long each kernel ran by itself.

The self time of an event is the time during which it is the innermost event on its stream or thread, which is the one
that started last. For nested events that is the event's interval without its children. Every instant of a stream
belongs to one event, so nothing is counted twice, and the self times of a stream add up to the time that it was busy.
A kernel that runs on two streams at once does run twice, so its self times add up; ``union_us`` is the time during
which at least one of them ran.

Times are kept as whole nanoseconds, as Kineto writes them, so sums are exact. This uses only the standard library. It
runs in a child process, because parsing a trace would hold the interpreter lock of the training thread.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any, TextIO

VERSION = 1
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
#: Categories that nest on a thread. Python functions are left out, so self times are the same with and without stacks.
HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})
_LISTED_HOST_CATEGORY = "cpu_op"
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_CHUNK = 1 << 20


def read_events(file: TextIO) -> Iterator[dict[str, Any]]:
    """Yields the events of a Chrome trace one by one, in bounded memory. Numbers with a fraction are strings, so they
    stay exact.

    Raises ValueError for a file that ends in the middle or is not a trace.
    """
    decoder = json.JSONDecoder(parse_float=str)
    text, match = "", None
    while match is None:
        chunk = file.read(_CHUNK)
        if not chunk:
            raise ValueError("no traceEvents in this file")
        text += chunk
        match = _EVENTS.search(text)
    position = match.end()
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position < len(text) and text[position] == "]":
            return
        try:
            event, position = decoder.raw_decode(text, position)
            yield event
        except json.JSONDecodeError:
            chunk = file.read(_CHUNK)
            if not chunk:
                raise ValueError("the trace ends in the middle of its events") from None
            text, position = text[position:] + chunk, 0


def nanoseconds(value: Any) -> int:
    """Returns a trace time, which is in microseconds with up to three decimals, as whole nanoseconds."""
    if isinstance(value, int):
        return value * 1000
    microseconds, _, fraction = str(value).partition(".")
    if microseconds.isdigit() and (not fraction or fraction.isdigit()):
        return int(microseconds) * 1000 + int((fraction + "000")[:3])
    return int(Decimal(str(value)) * 1000)


class Lane:
    """The events of one stream or thread, with three numbers for each."""

    def __init__(self) -> None:
        self.starts, self.ends, self.names = array("q"), array("q"), array("q")

    def add(self, start: int, end: int, name: int) -> None:
        self.starts.append(start)
        self.ends.append(end)
        self.names.append(name)

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Yields ``(start, end, name)`` in order of start. An enclosing event comes before the events inside it."""
        starts, ends, names = self.starts, self.ends, self.names
        for i in sorted(range(len(starts)), key=lambda i: (starts[i], -ends[i])):
            yield starts[i], ends[i], names[i]


Enter = Callable[[int | None, int, int], int]
"""``enter(key of the enclosing event, start, name)`` returns the key under which an event's time is counted."""


def by_name(_around: int | None, _start: int, name: int) -> int:
    return name


def self_times(spans: Iterable[tuple[int, int, int]], enter: Enter = by_name) -> dict[int, int]:
    """Returns, for each key, the nanoseconds during which an event with that key was the innermost one.

    ``spans`` must be in the order of `Lane.in_order`.
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

    for start, end, name in spans:
        advance(start)
        now = max(now, start)
        key = enter(open_events[-1][1] if open_events else None, start, name)
        totals.setdefault(key, 0)
        open_events.append((end, key))
    advance(math.inf)
    return totals


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """Returns the length of the union of ``(start, end)`` intervals."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


class KernelSummary:
    """Collects events, and returns the summary from ``result()``. Lists CPU operators if there are no device events."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str, str], int] = {}  # (name, category, device) -> number
        self._lanes: dict[bool, dict[tuple[Any, ...], Lane]] = {False: {}, True: {}}  # whether on a device -> lanes

    def add(self, event: dict[str, Any]) -> None:
        category = event.get("cat")
        if event.get("ph") != "X" or (category not in DEVICE_CATEGORIES and category not in HOST_CATEGORIES):
            return
        args = event.get("args") or {}
        on_device = category in DEVICE_CATEGORIES
        device, lane = "cpu", (event.get("pid"), event.get("tid"))
        if on_device:
            self._lanes[False].clear()  # host events count only if there are no device events
            device = f"cuda:{args.get('device', event.get('pid'))}"
            lane = (device, args.get("stream", event.get("tid")))
        elif self._lanes[True]:
            return
        start = nanoseconds(event["ts"])
        key = (str(event.get("name")), str(category), device)
        number = self._names.setdefault(key, len(self._names))
        self._lanes[on_device].setdefault(lane, Lane()).add(start, start + nanoseconds(event.get("dur", 0)), number)

    def result(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Returns ``identity``, ``devices`` and ``kernels`` (most self time first) as plain data. Times are in us."""
        on_device = bool(self._lanes[True])
        lanes = self._lanes[on_device]
        self_ns: dict[int, int] = defaultdict(int)
        intervals: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for lane in lanes.values():
            for number, time in self_times(lane.in_order()).items():
                self_ns[number] += time
            for start, end, number in zip(lane.starts, lane.ends, lane.names, strict=True):
                intervals[number].append((start, end))
        kernels: list[dict[str, Any]] = []
        devices: dict[str, list[int]] = defaultdict(list)
        for (name, category, device), number in self._names.items():
            if number not in self_ns:
                continue
            devices[device].append(number)
            if on_device or category == _LISTED_HOST_CATEGORY:
                kernels.append(
                    {
                        "name": name,
                        "category": category,
                        "device": device,
                        "count": len(intervals[number]),
                        "self_us": self_ns[number] / 1000,
                        "union_us": union(intervals[number]) / 1000,
                    }
                )
        kernels.sort(key=lambda kernel: (-kernel["self_us"], kernel["device"], kernel["name"]))
        return {
            "version": VERSION,
            **identity,
            "activity": "cuda" if on_device else "cpu",
            "devices": [
                {
                    "device": device,
                    "count": sum(len(intervals[number]) for number in numbers),
                    "self_us": sum(self_ns[number] for number in numbers) / 1000,
                    "busy_us": union(span for number in numbers for span in intervals[number]) / 1000,
                }
                for device, numbers in sorted(devices.items())
            ],
            "kernels": kernels,
        }
