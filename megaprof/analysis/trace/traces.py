"""Reads captured traces: the data that megaprof wrote into them, and the times that the report needs.

Times are wall-clock nanoseconds, ``baseTimeNanoseconds + 1000 * ts`` (Kineto writes ``ts`` and ``dur`` in
microseconds). They are comparable between the ranks of one host. A file's name is only a hint; its metadata count.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.columns import ANNOTATION, KERNEL, LAUNCHES, OPERATOR, KinetoEvents, Numbers
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.gpu import (
    MOST_UNSEEN,
    Activities,
    activities,
    is_start,
    without_kernels,
    without_times,
)
from megaprof.analysis.trace.groups import COMMUNICATES
from megaprof.analysis.trace.intervals import Intervals, intervals, leaves, owners, union
from megaprof.formats import ranges
from megaprof.formats.inputs import files_below
from megaprof.formats.metadata import Metadata, read_metadata

TRACE_SUFFIXES = (".pt.trace.json.gz", ".pt.trace.json")
#: Exports and reports of Nsight Systems.
NSYS_SUFFIXES = SQLITE, REPORT = ".sqlite", ".nsys-rep"

_COMMUNICATING = ("c10d::", COMMUNICATES)
#: The key of the object that marks a file as a merged timeline.
MERGED = "megaprofMerge"
#: Top-level values that are read besides the events; the last one only in recordings by others.
_TOP = ("megaprof", MERGED, "deviceProperties", ranges.GRAPHS_KEY, "distributedInfo")
#: Why a trace of another tool is no trace of ours.
NOT_OURS = "it was not written by megaprof (no `megaprof` metadata): nothing in it shows a stage"
COPIES = "it holds copies of several traces, by megaprof merge: name the directory of these traces"


@dataclass(frozen=True)
class TracedRange:
    """One of megaprof's ranges in a trace, in wall-clock nanoseconds."""

    name: ranges.RangeName
    start: int
    end: int
    replayed: bool = False
    """True if it ran in the replay of a CUDA graph, and so took no time on the host."""


@dataclass(frozen=True)
class Trace:
    """One readable file, or one window in it."""

    path: Path
    metadata: Metadata
    ranges: tuple[TracedRange, ...]
    """Its ranges, sorted by start, with an enclosing range before those inside it."""
    collectives: tuple[tuple[str, int, int], ...] | None = ()
    """The operation, start and end of its collectives, sorted by start: not of the pipeline's exchanges, and as the CPU
    saw them. Gloo's events do not name their group. None if it would not show any: Nsight Systems without a GPU."""
    compute: Intervals = field(default_factory=lambda: intervals(()))
    """When the CPU ran operators other than communication, as a disjoint set; empty without collectives to hide."""
    gpu: Activities | None = None
    """The activities of the GPU; None without kernels."""
    launches: Numbers = field(default_factory=lambda: intervals(()))
    """The calls that launch kernels, as `activities` returns them; empty without kernels, and of Nsight Systems."""
    unseen: Note | None = None
    """Why it has no kernels, or none with usable times, although the model ran on a GPU; None if it has some, or if the
    model ran on a CPU."""
    warnings: tuple[Note, ...] = ()
    events: Callable[[], Iterator[dict[str, Any]]] | None = None
    """Reads its events again, in Chrome's format, from a file that holds several windows; None if it is all of it."""
    cut: str | None = None
    """Why its file ends too early, so that sums may be too small; None for a whole file."""
    base: int = 0
    """The moment from which times in the file count, in wall-clock nanoseconds."""


def times_of(traced: Iterable[TracedRange]) -> Intervals:
    """Returns the start and end of each range in nanoseconds, shape ``[n, 2]``."""
    return intervals((each.start, each.end) for each in traced)


def within(traced: Sequence[TracedRange], start: int, end: int) -> list[TracedRange]:
    """Returns the ranges that lie between ``start`` and ``end``. ``traced`` must be in order of their start, and so is
    what this returns."""
    begins = attrgetter("start")
    inside = traced[bisect_left(traced, start, key=begins) : bisect_right(traced, end, key=begins)]
    return [each for each in inside if each.end <= end]


def find_traces(directory: Path) -> list[Path]:
    """Returns the files under ``directory`` with the suffix of a trace, sorted, without hidden (unfinished) ones."""
    return sorted(files_below(directory, TRACE_SUFFIXES))


@contextmanager
def refusing() -> Iterator[None]:
    """Turns every failure to read a file into Undecodable."""
    try:
        yield
    except OSError as fault:
        raise Undecodable(f"it cannot be read: {fault.strerror or fault}") from None
    except MemoryError:
        raise Undecodable("it does not fit into memory") from None


def read_trace(path: Path) -> Trace:
    """Reads one trace of any size, gzipped or plain. Raises Undecodable, and nothing else, for any content."""
    with refusing():
        return trace_of(path, events_of(path))


def events_of(path: Path) -> KinetoEvents:
    """Returns what is read of a trace. Raises Undecodable and OSError."""
    return KinetoEvents(path, top=_TOP, operators=_without_gpu)


def trace_of(path: Path, events: KinetoEvents) -> Trace:
    """Returns the trace of ours that a file holds. Raises Undecodable, and then takes none of the events."""
    document = events.document
    if "megaprof" not in document.top:
        raise Undecodable(COPIES if MERGED in document.top else document.cut or NOT_OURS)
    try:
        metadata = read_metadata(bytes(document.top["megaprof"]))
    except ValueError as fault:
        raise Undecodable(f"its `megaprof` metadata is damaged: {fault}") from None
    warnings: list[Note] = []
    # Kineto repeats every range on the GPU's timeline (``gpu_user_annotation``), which is not read.
    annotations, operators = events.take(ANNOTATION), events.take(OPERATOR)
    traced_ranges = [TracedRange(*meant) for meant in events.meant(ranges.parse, annotations, operators)]
    collectives: list[tuple[str, int, int]] = []
    gpu, launches = None, intervals(())
    if events.has(KERNEL):
        gpu, launches = activities(events, metadata.sizes)
        unseen = without_times(gpu)
    else:
        collectives = events.meant(_collective, annotations, operators)
        launched = int(events.named(events.take(*LAUNCHES), is_start).sum())
        # Kineto lists the GPUs of the machine; the model need not have run on one.
        has_gpu = bytes(document.top.get("deviceProperties", b"")).strip() not in (b"", b"[]")
        unseen = without_kernels(metadata, launched, has_gpu=has_gpu, why=document.cut)
    impossible = 0 if gpu is None or unseen is not None else gpu.impossible
    if unusable := events.impossible[ANNOTATION] + document.unreadable + impossible:
        warnings.append(Note("events_left_out", files=(path.name,), count=unusable))
    if document.cut is not None:
        warnings.append(Note("cut", files=(path.name,), said=document.cut))
    if gpu is not None and ranges.GRAPHS_KEY in document.top:
        try:
            names = ranges.read_graph_names(bytes(document.top[ranges.GRAPHS_KEY]))
        except ValueError as fault:
            said = f"the names of its CUDA graphs are damaged, so replays have no ranges: {fault}"
            warnings.append(Note("cut", files=(path.name,), said=said))
        else:
            passes = union(times_of([traced for traced in traced_ranges if traced.name.label in ranges.PASSES]))
            gpu, replayed, unnamed = _replayed(gpu, names, passes)
            traced_ranges = sorted((*traced_ranges, *replayed), key=lambda traced: (traced.start, -traced.end))
            if unnamed is not None:
                metadata = replace(metadata, ranges=replace(metadata.ranges, reason=unnamed))
    compute = intervals(())
    if collectives:  # when any thread ran another operator; only leaves count, because their parents also wait
        others = operators.rows(~events.named(operators, lambda name: name.startswith(ranges.PREFIX)))
        computes = ~events.named(others, lambda name: name.startswith(_COMMUNICATING))
        compute = union((others.spans + events.base)[leaves(others.thread.astype(np.int64), others.spans) & computes])
    return Trace(
        path=path,
        metadata=metadata,
        ranges=tuple(traced_ranges),
        collectives=tuple(collectives),
        compute=compute,
        gpu=gpu,
        launches=launches,
        unseen=unseen,
        warnings=tuple(warnings),
        cut=document.cut,
        base=events.base,
    )


def _replayed(
    gpu: Activities, names: ranges.GraphNames, passes: Intervals
) -> tuple[Activities, list[TracedRange], str | None]:
    """Returns the ranges in graphs that were launched outside the host's ``passes``, a disjoint set of times. The graph
    of a layer is launched inside a pass, so its pass is known already. Also returns the activities with launch times of
    their own if their range is known, and why the ranges of some replay are unknown, None if all are known.

    A replay is one launch that runs no Python, so all its kernels have the same launch time, and only the names that
    they were captured with say their ranges. Each range gets times of its own, nanoseconds after that launch and in the
    order of the capture, and its kernels count as launched at its time. So the rest of the analysis finds ranges and
    launches as in a step without a replay. The times fit into the launch itself, which takes longer: a few
    microseconds, and a nanosecond or more for each node.
    """
    run_of_row = owners(gpu.node, intervals((first, last) for first, last, _ in names.runs))
    rows = np.flatnonzero((gpu.node > 0) & gpu.known & (owners(gpu.launched, passes) < 0))
    launched, named_ranges, unnamed = gpu.launched.copy(), list[TracedRange](), None
    stacks = [[parsed for name in stack if (parsed := ranges.parse(name)) is not None] for stack in names.stacks]
    rows = rows[np.argsort(gpu.launched[rows], kind="stable")]
    moments, first = np.unique(gpu.launched[rows], return_index=True)
    for moment, replay_rows in zip(moments.tolist(), np.split(rows, first[1:]), strict=bool(len(moments))):
        kernel_runs = run_of_row[replay_rows[gpu.kernel[replay_rows]]]
        if not len(kernel_runs) or (share := float((kernel_runs < 0).mean())) == 1:
            continue  # this graph is the host's own
        if share > MOST_UNSEEN:  # Megatron counts tokens between passes, outside any range
            unnamed = f"{share:.0%} of the kernels of its CUDA graph have no name of a range"
            continue
        replay_rows = replay_rows[run_of_row[replay_rows] >= 0]
        used_runs, run_number = np.unique(run_of_row[replay_rows], return_inverse=True)
        launched[replay_rows] = moment + 1 + run_number  # kernels without a name keep their time, in no range
        named_ranges += _around([stacks[names.runs[run][2]] for run in used_runs.tolist()], moment + 1)
    return replace(gpu, launched=launched), named_ranges, unnamed


def _around(stacks: Sequence[Sequence[ranges.RangeName]], moment: int) -> list[TracedRange]:
    """Returns the ranges in ``stacks``. Kernels of the n-th stack are launched ``n`` nanoseconds after ``moment``."""
    opened: list[tuple[ranges.RangeName, int]] = []
    ends: list[int] = []
    enclosing: list[int] = []  # the indices in `opened` of the ranges around the previous stack
    for number, stack in enumerate(stacks):
        depth = 0
        while depth < min(len(enclosing), len(stack)) and opened[enclosing[depth]][0] == stack[depth]:
            depth += 1
        enclosing = [*enclosing[:depth], *range(len(opened), len(opened) + len(stack) - depth)]
        opened += [(name, moment + number) for name in stack[depth:]]
        ends += [0] * (len(stack) - depth)
        for index in enclosing:
            ends[index] = moment + number
    return [TracedRange(name, begin, end, replayed=True) for (name, begin), end in zip(opened, ends, strict=True)]


def _without_gpu(events: KinetoEvents) -> bool:
    """Returns whether nothing read so far says that the model ran on a GPU. The metadata come before the events."""
    with suppress(KeyError, ValueError):
        return not events.has(KERNEL) and read_metadata(bytes(events.document.top["megaprof"])).device in (None, "cpu")
    return not events.has(KERNEL)


#: Operators that hand a collective to its backend. Their time is communication, too, because the caller waits in them.
_DISPATCHED = re.compile(
    "c10d::_?(allreduce|allgather|alltoall|reduce_scatter|broadcast|reduce|gather|scatter|barrier)"
)
_AS_GLOO = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


def _collective(name: str) -> str | None:
    """Returns the operation of a collective's event, as gloo calls it; None for other events."""
    if name.startswith("gloo:"):
        operation = name.removeprefix("gloo:")
        return None if operation.startswith(("send", "recv")) else operation
    dispatched = _DISPATCHED.match(name)
    return None if dispatched is None else _AS_GLOO.get(dispatched[1], dispatched[1])
