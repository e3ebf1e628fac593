"""Captured traces read back: what megaprof wrote into them and the times that the stage metrics need, nothing else.

Times are wall-clock nanoseconds, ``baseTimeNanoseconds + 1000 * ts`` (Kineto writes ``ts`` and ``dur`` in
microseconds), comparable between the ranks of one host. A file's name is only a hint; its metadata decide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaprof.analysis.trace.decoding import Document, Event, Undecodable, load
from megaprof.analysis.trace.gpu import COPIES, KERNEL, LAUNCHES, Activities, activities_of, spans_of
from megaprof.analysis.trace.intervals import Intervals, intervals, leaves, union
from megaprof.formats import ranges
from megaprof.formats.inputs import files_below
from megaprof.formats.metadata import Metadata, read_metadata
from megaprof.formats.names import parse_artifact_name
from megaprof.parallel.topology import RankCoords

TRACE_SUFFIXES = (".pt.trace.json.gz", ".pt.trace.json")

# Base, start and duration each stay below a quarter of int64, so that no sum of them overflows.
_LONGEST = 1 << 61


class UnreadableTrace(Exception):
    """A file that holds no usable trace of ours; ``path`` names it, ``reason`` completes "<path>: ..."."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class TracedRange:
    """One of megaprof's ranges, as a trace holds it."""

    name: ranges.RangeName
    """What it is."""
    start: int
    """When it began, in wall-clock nanoseconds."""
    end: int
    """When it ended, likewise."""


@dataclass(frozen=True)
class Collective:
    """One collective (not a pipeline exchange) as the CPU saw it. Gloo's events do not name their group."""

    operation: str
    """As gloo names it, for instance ``all_reduce``."""
    start: int
    """When it began, in wall-clock nanoseconds."""
    end: int
    """When it ended, likewise."""


@dataclass(frozen=True)
class Part:
    """Where a trace stands in a file of several processes and windows."""

    pid: int
    """Its process."""
    begin: int
    """What was launched from then on belongs to it, in wall-clock nanoseconds, ..."""
    end: int
    """... until then."""


@dataclass(frozen=True)
class Trace:
    """One readable file, or one window in it."""

    path: Path
    """The file."""
    metadata: Metadata
    """What it says of its rank."""
    ranges: tuple[TracedRange, ...]
    """Sorted by start, an enclosing one before what it encloses."""
    collectives: tuple[Collective, ...] = ()
    """Sorted by start."""
    compute: Intervals = field(default_factory=lambda: intervals(()))
    """When the CPU ran an operator that is not communication, a disjoint set; only filled in when there are collectives
    to hide."""
    has_kernels: bool = False
    """Whether GPU kernels ran, so that the ranges are host time; ``gpu`` is what the GPU did."""
    gpu: Activities | None = None
    """None without kernels."""
    warnings: tuple[str, ...] = ()
    """What must be known about the file."""
    timeline: str | None = None
    """For one that was made of a timeline, whose times they are: the ``host``'s or the ``device``'s."""
    knows_collectives: bool = True
    """Whether collectives would be in it; False for the host's side of Nsight Systems."""
    after_opening: bool = False
    """Whether its first step is the first that its tool recorded after it was opened, which ranks do not do at once."""
    part: Part | None = None
    """Where it stands in its file; None: it is the whole."""


def find_traces(directory: Path) -> list[Path]:
    """Every file under ``directory`` whose name ends like a trace of ours, sorted. Hidden files are unfinished ones."""
    return sorted(files_below(directory, TRACE_SUFFIXES))


def read_trace(path: Path) -> Trace:
    """Read one trace, gzipped or plain. Raises UnreadableTrace, whatever the file holds."""
    try:
        document = load(path)
        metadata = _metadata(document)
        if not -_LONGEST < document.baseTimeNanoseconds < _LONGEST:
            raise Undecodable("its `baseTimeNanoseconds` is out of range")
    except Undecodable as fault:
        raise UnreadableTrace(path, str(fault)) from None
    except OSError as fault:
        raise UnreadableTrace(path, f"it cannot be read: {fault.strerror or fault}") from None
    return _trace(path, metadata, document)


def _metadata(document: Document) -> Metadata:
    if not bytes(document.megaprof):
        raise Undecodable("it was not written by megaprof (no `megaprof` metadata): nothing in it tells a stage")
    try:
        return read_metadata(bytes(document.megaprof))
    except ValueError as fault:
        raise Undecodable(f"its `megaprof` metadata is damaged: {fault}") from None


def _trace(path: Path, metadata: Metadata, document: Document) -> Trace:
    base = document.baseTimeNanoseconds
    by_category: defaultdict[str | None, list[Event]] = defaultdict(list)
    for event in document.traceEvents:
        by_category[event.cat].append(event)
    document.traceEvents.clear()
    has_kernels = bool(by_category[KERNEL])
    found, collectives, broken = _ranges_and_collectives(
        # Kineto repeats every range on the GPU's timeline (`gpu_user_annotation`); the host's own is wanted here.
        base,
        by_category["user_annotation"] + ([] if has_kernels else by_category["cpu_op"]),
    )
    warnings = list(_name_warnings(path, metadata.coords))
    if unusable := broken + document.unreadable_events:
        warnings.append(f"{path.name}: {unusable} events with impossible times or types were left out")
    copies = [event for category in COPIES for event in by_category[category]]
    launches = [event for category in LAUNCHES for event in by_category[category]]
    return Trace(
        path=path,
        metadata=metadata,
        ranges=tuple(found),
        collectives=tuple(collectives),
        compute=_compute(base, by_category["cpu_op"]) if collectives and not has_kernels else intervals(()),
        has_kernels=has_kernels,
        gpu=activities_of(base, by_category[KERNEL], copies, launches, metadata.sizes) if has_kernels else None,
        warnings=tuple(warnings),
    )


def _ranges_and_collectives(base: int, events: list[Event]) -> tuple[list[TracedRange], list[Collective], int]:
    """Both in order of time, and how many had impossible times."""
    names, broken = _Names(), 0
    found: list[TracedRange] = []
    collectives: list[Collective] = []
    for event in events:
        meaning = names[event.name]
        if meaning is None or event.ph != "X":
            continue
        if (span := _span(base, event)) is None:
            broken += 1
        elif isinstance(meaning, ranges.RangeName):
            found.append(TracedRange(meaning, *span))
        else:
            collectives.append(Collective(meaning, *span))
    found.sort(key=lambda r: (r.start, -r.end))
    collectives.sort(key=lambda c: c.start)
    return found, collectives, broken


class _Names(dict[str, "ranges.RangeName | str | None"]):
    """What an event's name means to the metrics, found once per name: a range, a collective's operation, or nothing."""

    def __missing__(self, name: str) -> ranges.RangeName | str | None:
        meaning: ranges.RangeName | str | None = None
        if name.startswith(ranges.PREFIX):
            meaning = ranges.parse(name)
        elif name.startswith("gloo:"):
            operation = name[len("gloo:") :]
            meaning = None if operation.startswith(("send", "recv")) else operation
        elif name.startswith("c10d::"):
            meaning = _DISPATCHED.get(name[len("c10d::") :].rstrip("_"))
        self[name] = meaning
        return meaning


#: Operators that hand a collective to its backend. Their time is communication too: the caller waits in them.
_DISPATCHED = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}


def _span(base: int, event: Event) -> tuple[int, int] | None:
    start, duration = event.ts * 1000, event.dur * 1000
    if not (math.isfinite(start) and abs(start) < _LONGEST and 0 <= duration < _LONGEST):
        return None
    begin = base + round(start)
    return begin, begin + round(duration)


def _compute(base: int, operators: list[Event]) -> Intervals:
    """When any thread ran an operator that is no communication: leaf operators, since their parents also wait."""
    operators = [op for op in operators if op.ph == "X" and not op.name.startswith(ranges.PREFIX)]
    numbers = {tid: number for number, tid in enumerate({op.tid for op in operators})}
    communicating = {
        name for name in {op.name for op in operators} if name.startswith(("c10d::", "record_param_comms"))
    }
    threads = np.array([numbers[op.tid] for op in operators], dtype=np.int64)
    own = np.array([op.name not in communicating for op in operators], dtype=np.bool_)
    spans, usable = spans_of(base, operators)
    return union(spans[leaves(threads[usable], spans) & own[usable]])


def _name_warnings(path: Path, coords: RankCoords) -> Iterable[str]:
    name = parse_artifact_name(path.name)
    axes = ("pp", "tp", "cp", "ep", "dp", "rank")
    if name is not None and any(getattr(name.place, axis) != getattr(coords, axis) for axis in axes):
        written = " ".join(f"{axis}={getattr(coords, axis)}" for axis in axes)
        yield f"{path.name}: its name and its metadata disagree; the metadata ({written}) count"
