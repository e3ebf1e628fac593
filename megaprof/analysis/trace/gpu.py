"""Reads GPU activity into arrays: each kernel, copy and memset with its time, its launch, and its communication group
(`groups`). Also reads how much GPU memory was allocated.

Kineto gives a GPU activity and the CUDA call that launched it the same ``correlation``. The launch connects an activity
to a range, because it happens while the range is open. That also works for a backward, whose range is on the main
thread, and whose launches come from autograd's own thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.decoding import Document, Event
from megaprof.analysis.trace.groups import (
    BY_GROUP_PAIRWISE,
    COMPUTE,
    UNKNOWN,
    USES,
    ByName,
    is_parallel,
    use_of,
)
from megaprof.analysis.trace.intervals import Intervals

KERNEL = "kernel"
COPIES = ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver")
INSTANTS = "cpu_instant_event"
_ALLOCATION = "[memory]"
_MOST_BYTES = 1 << 53

#: Larger times, in nanoseconds, are impossible. Base, start and duration each stay below a quarter of int64, so no sum
#: of them overflows.
LONGEST = 1 << 61
_START, _DURATION = attrgetter("ts"), attrgetter("dur")
_CORRELATION, _EXTERNAL = attrgetter("args.correlation"), attrgetter("args.external")
_NODE = attrgetter("args.node")
_Numbers = npt.NDArray[np.int64]
_NONE = np.zeros(0, dtype=np.int64)
_NO_ACTIVITIES = (_NONE.reshape(-1, 2), _NONE.astype(np.int32), _NONE.astype(np.bool_), _NONE, _NONE, _NONE, _NONE)
_NO_LAUNCHES = (_NONE.reshape(-1, 2), _NONE, _NONE.astype(np.bool_))
#: Nanoseconds by which activities may certainly lie apart from the rest of a recording, or as long as the rest itself.
_BEYOND = 1_000_000_000


@dataclass(frozen=True)
class Activities:
    """GPU activities in order of their start, with one row for each."""

    spans: Intervals
    """Start and end in wall-clock nanoseconds, shape ``[n, 2]``."""
    launched: npt.NDArray[np.int64]
    """When their launch call began, in wall-clock nanoseconds."""
    known: npt.NDArray[np.bool_]
    """True if the trace has the launch call."""
    use: npt.NDArray[np.int8]
    """The use of each activity, as an index into `USES`."""
    kernel: npt.NDArray[np.bool_]
    """True for kernels, and False for copies and memsets."""
    pairwise: npt.NDArray[np.bool_]
    """True for kernels of NCCL's in which ranks send to and receive from each other, for an all-to-all or for the
    pipeline."""
    node: npt.NDArray[np.int64]
    """The CUDA graph node that each activity ran, as `formats.graphs` counts them; 0 if no graph launched it."""
    row: npt.NDArray[np.int64]
    """The place of each activity in the order of reading."""
    impossible: int = 0
    """The number of activities that were left out because their times are impossible."""
    shortened: int = 0
    """The number of activities that lasted longer than is possible, and so end where the next one of their stream
    begins."""

    def rows(self, chosen: npt.NDArray[Any]) -> Activities:
        """Returns the activities that ``chosen`` selects, in the same order."""
        columns = {name: value[chosen] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **columns)


@dataclass(frozen=True)
class Launches:
    """The calls that launched a kernel or a graph."""

    times: npt.NDArray[np.int64]
    """When each call began, in wall-clock nanoseconds, ascending."""
    unanswered: npt.NDArray[np.int64]
    """When each call began that has no activity in the trace."""
    anonymous: int = 0
    """The number of kernels in the trace that name no call."""


class Timed(Protocol):
    """An event with a time, in microseconds."""

    ts: float
    dur: float


def spans_of(base: int, events: Sequence[Timed]) -> tuple[Intervals, npt.NDArray[np.bool_]]:
    """Returns the times in nanoseconds of the events whose times are possible, and a mask of these events."""
    with np.errstate(over="ignore", invalid="ignore"):
        start = np.fromiter(map(_START, events), dtype=np.float64, count=len(events)) * 1000
        duration = np.fromiter(map(_DURATION, events), dtype=np.float64, count=len(events)) * 1000
    # A comparison with NaN is false, so this also drops times that are not a number.
    possible = (np.abs(start) < LONGEST) & (duration >= 0) & (duration < LONGEST)
    begin = base + np.rint(start[possible]).astype(np.int64)
    return np.column_stack((begin, begin + np.rint(duration[possible]).astype(np.int64))), possible


class GpuEvents:
    """Collects GPU activities and the calls that launched them, one piece of the trace at a time."""

    def __init__(self) -> None:
        self.rows = 0
        """The number of activities and calls together."""
        self.kernels = False
        """True if there are kernels, including those with impossible times."""
        self.launches = 0
        """The number of calls that launched a kernel or a graph."""
        self.impossible = 0
        """The number of activities without a possible time."""
        self._by_name = ByName()
        self._starting = _Starting()
        self._streams: dict[tuple[int | str, int | str], int] = {}
        self._groups: dict[tuple[str | None, bool], int] = {}
        self._operators: dict[int, str] = {}
        self._activities: list[
            tuple[Intervals, npt.NDArray[np.int32], npt.NDArray[np.bool_], _Numbers, _Numbers, _Numbers, _Numbers]
        ] = []
        self._launches: list[tuple[Intervals, _Numbers, npt.NDArray[np.bool_]]] = []

    def add(
        self,
        kernels: Sequence[Event],
        copies: Sequence[Event],
        launches: Sequence[Event],
        communicating: Sequence[Event] = (),
    ) -> None:
        """Adds the next piece of the trace. ``communicating``: the operators `groups.COMMUNICATES` in it."""
        self.kernels |= bool(kernels)
        if events := [*kernels, *copies]:
            spans, possible = spans_of(0, events)
            self.impossible += len(events) - len(spans)
            kernel = np.arange(len(events)) < len(kernels)
            numbers = (_whole(list(map(field, events))) for field in (_CORRELATION, _EXTERNAL, _NODE))
            number_of = self._streams.setdefault
            streams = np.array([number_of((event.pid, event.tid), len(self._streams)) for event in events])
            columns = np.array(self._uses(events), dtype=np.int32), kernel, *numbers, streams
            self._activities.append((spans, *(column[possible] for column in columns)))  # type: ignore[arg-type]
        for operator in communicating:
            if 0 < operator.args.external < LONGEST and operator.args.description is not None:
                self._operators[operator.args.external] = operator.args.description
        if launches:
            spans, possible = spans_of(0, launches)
            starting = np.array([self._starting[launch.name] for launch in launches], dtype=np.bool_)[possible]
            self.launches += int(starting.sum())
            self._launches.append((spans, _whole(list(map(_CORRELATION, launches)))[possible], starting))
        self.rows += len(events) + len(launches) + len(communicating)

    def activities(self, base: int, sizes: object) -> tuple[Activities, Launches]:
        """Returns all activities and launches, and forgets them. ``base``: the moment from which times count, in
        nanoseconds. ``sizes`` has the number of ranks of each axis."""
        spans, uses, kernel, correlations, externals, node, stream = (
            np.concatenate(column) for column in zip(_NO_ACTIVITIES, *self._activities, strict=True)
        )
        self._activities.clear()
        calls, numbers, starting = (
            np.concatenate(column) for column in zip(_NO_LAUNCHES, *self._launches, strict=True)
        )
        self._launches.clear()
        use_of_index = np.array(
            [*range(len(USES)), *(use_of(group, sizes) for group, _ in self._groups)], dtype=np.int8
        )
        pairwise = np.array([False] * len(USES) + [pairwise for _, pairwise in self._groups], dtype=np.bool_)[uses]
        use = self._by_operator(use_of_index[uses], kernel, externals, externals != correlations, sizes)
        untimed: npt.NDArray[np.bool_] = (spans == 0).all(axis=1)  # Kineto writes so what it does not know
        spans += base
        calls += base
        activities = arranged(spans, use, kernel, pairwise, correlations, numbers, calls, stream, node, untimed)
        times, answered = calls[starting, 0], np.isin(numbers[starting], correlations)
        launches = Launches(np.sort(times), np.sort(times[~answered]), int((kernel & (correlations <= 0)).sum()))
        return replace(activities, impossible=activities.impossible + self.impossible), launches

    def _uses(self, events: Sequence[Event]) -> list[int]:
        """Returns an index into `USES` for each event, or a number beyond it for each group."""
        by_name, groups = self._by_name, self._groups
        uses = [by_name[event.name] for event in events]
        for index, use in enumerate(uses):
            if use < 0:
                group = events[index].args.description, use == BY_GROUP_PAIRWISE
                uses[index] = len(USES) + groups.setdefault(group, len(groups))
        return uses

    def _by_operator(
        self,
        use: npt.NDArray[np.int8],
        kernel: npt.NDArray[np.bool_],
        externals: _Numbers,
        linked: npt.NDArray[np.bool_],
        sizes: object,
    ) -> npt.NDArray[np.int8]:
        """Returns the uses. Activities that name no group get the group of the operator that launched them. These are
        RCCL's kernels, and the copies of a collective that a copy engine runs. In a group of one rank, they are only
        local copies.

        ``linked``: an older Kineto writes the correlation as the external id if there was no operator.
        """
        if not self._operators:
            return use
        numbers = np.array(sorted(self._operators), dtype=np.int64)
        descriptions = [self._operators[number] for number in numbers.tolist()]
        operator_index = np.minimum(np.searchsorted(numbers, externals), len(numbers) - 1)
        operator_uses = np.array([use_of(text, sizes) for text in descriptions], dtype=np.int8)[operator_index]
        has_peers = np.array([is_parallel(text, sizes) for text in descriptions], dtype=np.bool_)[operator_index]
        takes_operator = np.where(kernel, use == UNKNOWN, (use == UNKNOWN) | (use == COMPUTE) & linked & has_peers)
        return np.where(takes_operator & (numbers[operator_index] == externals), operator_uses, use)


def arranged(
    spans: Intervals,
    use: npt.NDArray[np.int8],
    kernel: npt.NDArray[np.bool_],
    pairwise: npt.NDArray[np.bool_],
    correlations: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    calls: Intervals,
    stream: npt.NDArray[np.int64],
    node: npt.NDArray[np.int64] | None = None,
    untimed: npt.NDArray[np.bool_] | None = None,
) -> Activities:
    """Returns the activities in order of their start, each with its launch. Leaves out those whose times are
    impossible, and shortens those that last too long.

    The first five arrays, ``stream``, ``node`` and ``untimed`` have one row per activity. ``numbers`` and ``calls`` are
    the correlations and times of the launching calls. ``node``: None if unknown. ``untimed``: True for activities
    without a time; None without any.
    """
    launched, has_launch = _launches(correlations, numbers, calls[:, 0])
    node = np.zeros(len(spans), dtype=np.int64) if node is None else node
    launched = np.where(has_launch, launched, spans[:, 0])
    # The clocks of host and GPU differ by microseconds, but all activities of one graph launch stay together.
    launched = np.where(node > 0, launched, np.minimum(launched, spans[:, 0]))
    order = np.argsort(spans[:, 0], kind="stable")
    activities = Activities(
        spans[order], launched[order], has_launch[order], use[order], kernel[order], pairwise[order], node[order], order
    )
    timed = np.ones(len(spans), dtype=np.bool_) if untimed is None else ~untimed
    timed[timed] = _possible(spans[timed], calls)
    possible = timed[order]
    if not possible.all():
        activities = replace(activities.rows(possible), impossible=int((~possible).sum()))
    # The activities of a graph have one launch, and may run at the same time.
    _, index, times = np.unique(correlations, return_inverse=True, return_counts=True)
    alone = (correlations <= 0) | (times[index] == 1)
    ends = _possible_ends(activities.spans, np.where(alone, stream, -1)[activities.row])
    shortened = int((ends < activities.spans[:, 1]).sum())
    return replace(activities, spans=np.column_stack((activities.spans[:, 0], ends)), shortened=shortened)


def _possible(spans: Intervals, calls: Intervals) -> npt.NDArray[np.bool_]:
    """Returns which activities lie near the calls of the host and the middle half of the activities themselves."""
    if not len(spans):
        return np.ones(0, dtype=np.bool_)
    starts = np.sort(spans[:, 0])
    near = np.concatenate((calls.ravel(), starts[[len(starts) // 4, len(starts) * 3 // 4]]))
    first, last = int(near.min()), int(near.max())
    margin = max(last - first, _BEYOND)
    possible: npt.NDArray[np.bool_] = (spans[:, 0] >= first - margin) & (spans[:, 1] <= last + margin)
    return possible


def _possible_ends(spans: Intervals, stream: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns when activities ended that run one after the other in each stream; a stream of -1: at any time.

    ROCm writes ends that cover later activities of the stream (AMD-AGI/TraceLens#669). Viewers cut such an activity off
    where the next one begins, and so does this. An activity may still begin before the one before it has ended.
    """
    ends = spans[:, 1].copy()
    for number in np.unique(stream[stream >= 0]):
        rows = np.flatnonzero((stream == number) & (spans[:, 1] > spans[:, 0]))
        starts, stream_ends = spans[rows, 0], spans[rows, 1]
        least_later_end = np.minimum.accumulate(stream_ends[::-1])[::-1][1:]
        covers = (stream_ends[:-1] > least_later_end) & (starts[1:] > starts[:-1])
        ends[rows[:-1][covers]] = starts[1:][covers]
    return ends


def _launches(
    correlations: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    order = np.argsort(numbers, kind="stable")
    numbers, starts = numbers[order], starts[order]
    if not len(numbers):
        return np.zeros(len(correlations), dtype=np.int64), np.zeros(len(correlations), dtype=np.bool_)
    index = np.minimum(np.searchsorted(numbers, correlations), len(numbers) - 1)
    return starts[index], (numbers[index] == correlations) & (correlations > 0)


def _whole(values: list[int]) -> npt.NDArray[np.int64]:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:  # the file is hostile
        return np.array([value if abs(value) < LONGEST else 0 for value in values], dtype=np.int64)


class _Starting(dict[str, bool]):
    """Maps a call's name to whether it starts a kernel or a graph (``cudaLaunchKernelExC``,
    ``hipExtModuleLaunchKernel``, ``cuGraphLaunch``), and not a copy or a host function. Computed once per name."""

    def __missing__(self, name: str) -> bool:
        self[name] = starts = "Launch" in name and ("Kernel" in name or "Graph" in name)
        return starts


@dataclass(frozen=True)
class Allocations:
    """The memory of one rank's device over time."""

    times: npt.NDArray[np.int64]
    """When memory was allocated or released, in wall-clock nanoseconds, ascending."""
    allocated: npt.NDArray[np.int64]
    """Bytes allocated from each of these times on."""
    capacity: int | None
    """The device's memory in bytes; None if the trace does not say."""


@dataclass(frozen=True)
class Peak:
    """Memory allocated in one call."""

    least: int
    """The lowest number of bytes allocated: parameters, gradients, optimizer states."""
    most: int
    """The highest number of bytes allocated."""
    capacity: int | None
    """The device's memory in bytes; None if unknown."""


def combined_peak(peaks: Iterable[Peak | None]) -> Peak | None:
    """Returns the least and the most of several peaks, on the smallest device; None if none is known."""
    known_peaks = [peak for peak in peaks if peak is not None]
    if not known_peaks:
        return None
    devices = [peak.capacity for peak in known_peaks if peak.capacity is not None]
    return Peak(
        min(peak.least for peak in known_peaks), max(peak.most for peak in known_peaks), min(devices, default=None)
    )


class MemoryEvents:
    """Collects the events of ``--profile-memory``, a piece of the trace at a time. Kineto writes an instant event for
    each allocation and release of the caching allocator. Times count from the file's base."""

    def __init__(self) -> None:
        self._by_device: dict[int, list[tuple[int, int]]] = {}

    @property
    def rows(self) -> int:
        """Returns how many events were kept."""
        return sum(map(len, self._by_device.values()))

    def add(self, events: Iterable[Event]) -> None:
        """Adds the events of devices. Leaves out the host's memory, which does not depend on the layout."""
        for event in events:
            device, allocated = event.args.device, event.args.allocated
            if event.name != _ALLOCATION or device is None or device < 0 or allocated is None:
                continue
            if math.isfinite(event.ts) and abs(event.ts) * 1000 < LONGEST and 0 <= allocated < _MOST_BYTES:
                self._by_device.setdefault(device, []).append((round(event.ts * 1000), allocated))

    def allocations(self, base: int, document: Document[Any]) -> Allocations | None:
        """Returns the allocations of the device that has the most; None if there are none."""
        if not self._by_device:
            return None
        device = max(
            self._by_device, key=lambda candidate: max(allocated for _, allocated in self._by_device[candidate])
        )
        times, allocated = np.array(sorted(self._by_device[device]), dtype=np.int64).T
        return Allocations(times + base, allocated, _capacity(document, device))


def memory_of(allocations: Allocations | None, start: int, end: int) -> Peak | None:
    """Returns the memory of a call from ``start`` to ``end``; None if it is unknown."""
    if allocations is None:
        return None
    first, last = np.searchsorted(allocations.times, (start, end))
    call_bytes = allocations.allocated[max(first - 1, 0) : last]
    return Peak(int(call_bytes.min()), int(call_bytes.max()), allocations.capacity) if last > first else None


class _Device(msgspec.Struct):
    id: int = -1
    totalGlobalMem: int = 0


def _capacity(document: Document[Any], device: int) -> int | None:
    try:
        devices = msgspec.json.decode(document.top.get("deviceProperties", b"[]"), type=list[_Device])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((entry.totalGlobalMem for entry in devices if entry.id == device and entry.totalGlobalMem > 0), None)
