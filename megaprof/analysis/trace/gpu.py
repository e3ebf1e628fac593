"""What the GPU did, as arrays: every kernel, copy and memset with its time, its launch, and whose communication it is;
and how much of its memory was allocated.

Kineto gives a GPU activity and the CUDA call that launched it the same ``correlation``. The launch is what ties an
activity to a range: the range is on the main thread, the launches of a backward come from autograd's own thread, and
both run while the range is open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.decoding import Document, Event
from megaprof.analysis.trace.intervals import Intervals

KERNEL = "kernel"
COPIES = ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
INSTANTS = "cpu_instant_event"
_ALLOCATION = "[memory]"
_MOST_BYTES = 1 << 53

#: What an activity is for: its index here in `Activities.use`. ``other``: communication of a group without a name.
USES = ("compute", "tp", "ep", "cp", "pp", "dp", "other")
_AXES = USES[1:-1]
COMPUTE, PP, OTHER = USES.index("compute"), USES.index("pp"), USES.index("other")

#: Axes of Megatron's process groups by the description it gives them (``megatron.core.parallel_state``, 0.12 to 0.19),
#: by beginning, the longest match first. Of several axes the first with more than one rank counts.
_GROUPS: dict[str, tuple[str, ...]] = {
    "": (),  # another's group
    "TENSOR_MODEL_PARALLEL_GROUP": ("tp",),
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": ("cp", "tp"),
    "TENSOR_AND_DATA_PARALLEL_GROUP": ("dp", "cp", "tp"),
    "EXPERT_MODEL_PARALLEL_GROUP": ("ep",),
    "EXPERT_TENSOR_PARALLEL_GROUP": ("tp",),
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": ("ep", "tp"),
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": ("pp", "ep", "tp"),
    "EXPERT_DATA_PARALLEL_GROUP": ("dp",),
    "CONTEXT_PARALLEL_GROUP": ("cp",),
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP": ("cp",),
    "HYBRID_DP_CP_GROUP": ("cp",),
    "PIPELINE_MODEL_PARALLEL_GROUP": ("pp",),
    "EMBEDDING_GROUP": ("pp",),
    "POSITION_EMBEDDING_GROUP": ("pp",),
    "MODEL_PARALLEL_GROUP": ("pp", "tp"),
    "DATA_PARALLEL_GROUP": ("dp", "cp"),
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP": ("dp", "cp"),
    "INTER_PARTIAL_DATA_PARALLEL_GROUP": ("dp", "cp"),
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": ("dp",),
    "INTER_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": ("dp",),
    "WEIGHT_GRADIENT_COMM_GROUP": ("dp",),
}
#: Communication kernels that bring no metadata: DeepEP's dispatch and combine, Transformer Engine's user buffers.
_NAMES = {"deep_ep::": "ep", "hybrid_ep::": "ep", "userbuffers": "tp"}
BY_GROUP = -1
#: Times beyond these, in nanoseconds, are no times. Base, start and duration each stay below a quarter of int64, so
#: that no sum of them overflows.
LONGEST = 1 << 61
_START, _DURATION = attrgetter("ts"), attrgetter("dur")
_CORRELATION = attrgetter("args.correlation")
_Numbers = npt.NDArray[np.int64]
_NONE = np.zeros(0, dtype=np.int64)
_NO_ACTIVITIES = (_NONE.reshape(-1, 2), _NONE.astype(np.int32), _NONE.astype(np.bool_), _NONE)
_NO_LAUNCHES = (_NONE, _NONE, _NONE.astype(np.bool_))


@dataclass(frozen=True)
class Activities:
    """GPU activities in order of their start; one row each."""

    spans: Intervals
    """Start and end in wall-clock nanoseconds, shape ``[n, 2]``."""
    launched: npt.NDArray[np.int64]
    """When their launch call began, in wall-clock nanoseconds."""
    known: npt.NDArray[np.bool_]
    """Whether the trace holds that call."""
    use: npt.NDArray[np.int8]
    """What each is for, as an index into `USES`."""
    kernel: npt.NDArray[np.bool_]
    """Whether it is a kernel, no copy or memset."""


@dataclass(frozen=True)
class Launches:
    """The calls that launched a kernel or a graph."""

    times: npt.NDArray[np.int64]
    """When each began, in wall-clock nanoseconds, ascending."""
    unanswered: npt.NDArray[np.int64]
    """Those of them to which the trace has no activity."""


class Timed(Protocol):
    """An event with a time, in microseconds."""

    ts: float
    dur: float


def spans_of(base: int, events: Sequence[Timed]) -> tuple[Intervals, npt.NDArray[np.bool_]]:
    """Times in nanoseconds of those events whose times are possible, and which ones these are."""
    with np.errstate(over="ignore", invalid="ignore"):
        start = np.fromiter(map(_START, events), dtype=np.float64, count=len(events)) * 1000
        duration = np.fromiter(map(_DURATION, events), dtype=np.float64, count=len(events)) * 1000
    # A comparison with NaN is false, so this also drops what is not a number.
    usable = (np.abs(start) < LONGEST) & (duration >= 0) & (duration < LONGEST)
    begin = base + np.rint(start[usable]).astype(np.int64)
    return np.column_stack((begin, begin + np.rint(duration[usable]).astype(np.int64))), usable


class Gathered:
    """GPU activities and the calls that launched them, taken up a piece of the trace at a time."""

    def __init__(self) -> None:
        self.rows = 0
        """How many of both there are."""
        self.kernels = False
        """Whether there are kernels, impossible times included."""
        self.launches = 0
        """How many calls launched a kernel or a graph."""
        self._by_name = ByName()
        self._starting = _Starting()
        self._groups: dict[str | None, int] = {}
        self._activities: list[tuple[Intervals, npt.NDArray[np.int32], npt.NDArray[np.bool_], _Numbers]] = []
        self._launches: list[tuple[_Numbers, _Numbers, npt.NDArray[np.bool_]]] = []

    def add(self, kernels: Sequence[Event], copies: Sequence[Event], launches: Sequence[Event]) -> None:
        """Take up some more of the trace."""
        self.kernels |= bool(kernels)
        if events := [*kernels, *copies]:
            spans, usable = spans_of(0, events)
            uses = np.zeros(len(events), dtype=np.int32)
            uses[: len(kernels)] = self._uses(kernels)
            kernel = np.arange(len(events)) < len(kernels)
            correlations = numbers_of(events)
            self._activities.append((spans, uses[usable], kernel[usable], correlations[usable]))
        if launches:
            spans, usable = spans_of(0, launches)
            starting = np.array([self._starting[launch.name] for launch in launches], dtype=np.bool_)[usable]
            self.launches += int(starting.sum())
            self._launches.append((numbers_of(launches)[usable], spans[:, 0].copy(), starting))
        self.rows += len(events) + len(launches)

    def activities(self, base: int, sizes: object) -> tuple[Activities, Launches]:
        """All of them; ``base``: nanoseconds that their times count from; ``sizes`` has the number of ranks of every
        axis. What was gathered is gone then."""
        spans, uses, kernel, correlations = (
            np.concatenate(column) for column in zip(_NO_ACTIVITIES, *self._activities, strict=True)
        )
        self._activities.clear()
        numbers, starts, starting = (
            np.concatenate(column) for column in zip(_NO_LAUNCHES, *self._launches, strict=True)
        )
        self._launches.clear()
        axes = [USES.index(_axis(group, sizes)) for group in self._groups]
        table = np.array([*range(len(USES)), *axes], dtype=np.int8)
        spans += base
        starts += base
        found = arranged(spans, table[uses], kernel, correlations, numbers, starts)
        times, answered = starts[starting], np.isin(numbers[starting], correlations)
        return found, Launches(np.sort(times), np.sort(times[~answered]))

    def _uses(self, kernels: Sequence[Event]) -> list[int]:
        """Of each the index into `USES`, or behind that the number of its group."""
        by_name, groups = self._by_name, self._groups
        uses = [by_name[kernel.name] for kernel in kernels]
        for place, use in enumerate(uses):
            if use == BY_GROUP:
                uses[place] = len(USES) + groups.setdefault(kernels[place].args.description, len(groups))
        return uses


def arranged(
    spans: Intervals,
    use: npt.NDArray[np.int8],
    kernel: npt.NDArray[np.bool_],
    correlations: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
) -> Activities:
    """Activities, a row each in the first four arrays, in order of their start, each with its launch: of the calls with
    these correlation ``numbers`` and ``starts``."""
    launched, known = _launches(correlations, numbers, starts)
    order = np.argsort(spans[:, 0], kind="stable")
    launched = np.where(known, np.minimum(launched, spans[:, 0]), spans[:, 0])
    return Activities(spans[order], launched[order], known[order], use[order], kernel[order])


def _launches(
    wanted: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    order = np.argsort(numbers, kind="stable")
    numbers, starts = numbers[order], starts[order]
    if not len(numbers):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=np.bool_)
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return starts[place], (numbers[place] == wanted) & (wanted > 0)


def numbers_of(events: Iterable[Event]) -> npt.NDArray[np.int64]:
    """The number that each shares with its launch."""
    values = list(map(_CORRELATION, events))
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:  # a hostile file
        return np.array([value if abs(value) < LONGEST else 0 for value in values], dtype=np.int64)


class _Starting(dict[str, bool]):
    """Whether a call of this name starts a kernel or a graph: ``cudaLaunchKernelExC``, ``hipExtModuleLaunchKernel``,
    ``cuGraphLaunch``; no copy, and no function of the host's. Found once for each name."""

    def __missing__(self, name: str) -> bool:
        self[name] = starts = "Launch" in name and ("Kernel" in name or "Graph" in name)
        return starts


class ByName(dict[str, int]):
    """Index into `USES` by a kernel's name, `BY_GROUP` for NCCL's; found once for each name."""

    def __missing__(self, name: str) -> int:
        use = next((use for part, use in _NAMES.items() if part in name), "compute")
        self[name] = index = BY_GROUP if name.startswith("nccl") else USES.index(use)
        return index


def axis_of(description: str) -> str | None:
    """The first axis of the process group that Megatron describes so; None for another's."""
    return next(iter(_axes(description)), None)


def _axes(description: str) -> tuple[str, ...]:
    return _GROUPS[max((name for name in _GROUPS if description.startswith(name)), key=len)]


def _axis(description: str | None, sizes: object) -> str:
    axes = _axes(description or "")
    parallel = [axis for axis in axes or _AXES if (getattr(sizes, axis, 1) or 1) > 1]
    if axes:
        return parallel[0] if parallel else axes[0]
    return parallel[0] if len(parallel) == 1 else "other"  # with one kind of parallelism there is no other


@dataclass(frozen=True)
class Allocations:
    """The memory of one rank's device over time."""

    times: npt.NDArray[np.int64]
    """When memory was allocated or released, in wall-clock nanoseconds, ascending."""
    allocated: npt.NDArray[np.int64]
    """Bytes that were allocated from then on."""
    capacity: int | None
    """Bytes that the device has; None where the trace does not say."""


@dataclass(frozen=True)
class Peak:
    """The memory of one call."""

    least: int
    """Bytes that were allocated at the least: parameters, gradients, states of the optimizer."""
    most: int
    """Bytes that were allocated at the most."""
    capacity: int | None
    """Bytes that the device has; None where that is not known."""


class GatheredMemory:
    """What ``--profile-memory`` adds, taken up a piece of the trace at a time: Kineto writes an instant event for every
    allocation of the caching allocator and every release. Times count from the file's base."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, int]]] = {}

    @property
    def rows(self) -> int:
        """How many were kept."""
        return sum(map(len, self._found.values()))

    def add(self, events: Iterable[Event]) -> None:
        """Keep those of a device; the host's memory is nothing that a layout changes."""
        for event in events:
            device, allocated = event.args.device, event.args.allocated
            if event.name != _ALLOCATION or device is None or device < 0 or allocated is None:
                continue
            if math.isfinite(event.ts) and abs(event.ts) * 1000 < LONGEST and 0 <= allocated < _MOST_BYTES:
                self._found.setdefault(device, []).append((round(event.ts * 1000), allocated))

    def allocations(self, base: int, document: Document[Any]) -> Allocations | None:
        """Of the device that most was allocated on; None where there is none."""
        if not self._found:
            return None
        device = max(self._found, key=lambda each: max(allocated for _, allocated in self._found[each]))
        times, allocated = np.array(sorted(self._found[device]), dtype=np.int64).T
        return Allocations(times + base, allocated, _capacity(document, device))


def memory_of(found: Allocations | None, start: int, end: int) -> Peak | None:
    """What a call from ``start`` to ``end`` had allocated; None where nothing is known of it."""
    if found is None:
        return None
    first, last = np.searchsorted(found.times, (start, end))
    own = found.allocated[max(first - 1, 0) : last]
    return Peak(int(own.min()), int(own.max()), found.capacity) if last > first else None


class _Device(msgspec.Struct):
    id: int = -1
    totalGlobalMem: int = 0


def _capacity(document: Document[Any], device: int) -> int | None:
    try:
        devices = msgspec.json.decode(document.top.get("deviceProperties", b"[]"), type=list[_Device])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((each.totalGlobalMem for each in devices if each.id == device and each.totalGlobalMem > 0), None)
