"""Reads captured traces: the data that megaprof wrote into them, and the times that the report needs.

Times are wall-clock nanoseconds, ``baseTimeNanoseconds + 1000 * ts`` (Kineto writes ``ts`` and ``dur`` in
microseconds). They are comparable between the ranks of one host. A file's name is only a hint; its metadata count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.decoding import Document, Event, Undecodable, read, whole_number
from megaprof.analysis.trace.gpu import (
    COPIES,
    INSTANTS,
    KERNEL,
    LAUNCHES,
    LONGEST,
    Activities,
    Allocations,
    GpuEvents,
    Launches,
    MemoryEvents,
    spans_of,
)
from megaprof.analysis.trace.groups import COMMUNICATES
from megaprof.analysis.trace.intervals import Intervals, intervals, leaves, union
from megaprof.analysis.trace.replays import replayed
from megaprof.analysis.trace.unseen import without_kernels, without_times
from megaprof.formats import graphs, ranges
from megaprof.formats.inputs import fits
from megaprof.formats.metadata import Metadata, read_metadata
from megaprof.formats.names import parse_artifact_name
from megaprof.formats.remote import files_below
from megaprof.parallel.topology import RankCoords

TRACE_SUFFIXES = (".pt.trace.json.gz", ".pt.trace.json")

#: The most bytes of memory that one event takes while a report is made.
ROW_BYTES = 200
TOO_MANY = "it has more events than fit into memory (see --max-input-mib)"
_COMMUNICATING = ("c10d::", COMMUNICATES)
#: Top-level values that are read besides the events.
_TOP = ("megaprof", "baseTimeNanoseconds", "deviceProperties", graphs.KEY)
_ON_GPU = frozenset({"user_annotation", KERNEL, INSTANTS, *COPIES, *LAUNCHES})


#: Why a trace of another tool is no trace of ours.
NOT_OURS = "it was not written by megaprof (no `megaprof` metadata): nothing in it shows a stage"


class UnreadableTrace(Exception):
    """A file holds no usable trace of megaprof's. ``path`` is the file, and ``reason`` completes "<path>: ..."."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class TracedRange:
    """One of megaprof's ranges in a trace."""

    name: ranges.RangeName
    """Its name, parsed."""
    start: int
    """When it began, in wall-clock nanoseconds."""
    end: int
    """When it ended, in wall-clock nanoseconds."""
    replayed: bool = False
    """True if it ran in the replay of a CUDA graph, and so took no time on the host."""


@dataclass(frozen=True)
class Collective:
    """One collective (not a pipeline exchange) as the CPU saw it. Gloo's events do not name their group."""

    operation: str
    """Gloo's name, for instance ``all_reduce``."""
    start: int
    """When it began, in wall-clock nanoseconds."""
    end: int
    """When it ended, in wall-clock nanoseconds."""


@dataclass(frozen=True)
class Part:
    """One window of one process, in a file that holds several."""

    pid: int
    """The number of the process."""
    begin: int
    """The moment from which launches belong to it, in wall-clock nanoseconds."""
    end: int
    """The moment from which launches no longer belong to it, in wall-clock nanoseconds."""


@dataclass(frozen=True)
class Trace:
    """One readable file, or one window in it."""

    path: Path
    """The file."""
    metadata: Metadata
    """The rank's metadata in it."""
    ranges: tuple[TracedRange, ...]
    """Its ranges, sorted by start, with an enclosing range before those inside it."""
    collectives: tuple[Collective, ...] = ()
    """Its collectives, sorted by start."""
    compute: Intervals = field(default_factory=lambda: intervals(()))
    """When the CPU ran operators other than communication, as a disjoint set; empty without collectives to hide."""
    gpu: Activities | None = None
    """The activities of the GPU; None without kernels."""
    launches: Launches | None = None
    """The calls that launched kernels; None without kernels, or if the tool does not record them."""
    unseen: Note | None = None
    """Why it has no kernels, or none with usable times, although the model ran on a GPU; None if it has some, or if the
    model ran on a CPU."""
    warnings: tuple[Note, ...] = ()
    """Warnings about the file."""
    knows_collectives: bool = True
    """True if it would show collectives; False for Nsight Systems without GPU activity."""
    after_opening: bool = False
    """True if its first step is the first that its tool recorded. Ranks do not open the tool at the same moment."""
    part: Part | None = None
    """Its part of the file; None if it is all of it."""
    cut: str | None = None
    """Why its file ends too early, so that sums may be too small; None for a whole file."""
    base: int = 0
    """The moment from which times in the file count, in wall-clock nanoseconds."""
    memory: Allocations | None = None
    """Memory allocated on its device; None if that was not recorded."""

    @property
    def has_kernels(self) -> bool:
        """True if GPU kernels ran, so that the ranges are only host time."""
        return self.gpu is not None


def times_of(things: Sequence[TracedRange | Collective]) -> Intervals:
    """Returns the start and end of each thing in nanoseconds, shape ``[n, 2]``."""
    return intervals((thing.start, thing.end) for thing in things)


def find_traces(directory: Path) -> list[Path]:
    """Returns the files under ``directory`` with the suffix of a trace, sorted. Leaves out hidden files, which are
    unfinished."""
    return sorted(files_below(directory, TRACE_SUFFIXES))


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turns every failure to read a file into UnreadableTrace."""
    try:
        yield
    except Undecodable as fault:
        raise UnreadableTrace(path, str(fault)) from None
    except OSError as fault:
        raise UnreadableTrace(path, f"it cannot be read: {fault.strerror or fault}") from None
    except MemoryError:
        raise UnreadableTrace(path, "it does not fit into memory") from None


def read_trace(path: Path) -> Trace:
    """Reads one trace of any size, gzipped or plain. Raises UnreadableTrace, and nothing else, for any content."""
    with refusing(path):
        return _File(path).trace()


class _File:
    """A file that is read a piece at a time. Times count from the file's base, which may be at its end.

    CPU operators matter only if the model ran on the CPU. The metadata come before the events, so the operators are
    skipped if the metadata name another device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gpu = GpuEvents()
        self._memory = MemoryEvents()
        self._operators = _Operators()
        self._names = _Names()
        self._ranges: list[TracedRange] = []
        self._collectives: list[Collective] = []
        self._broken = 0
        self._device: str | None = None
        self._document: Document[Event] = read(path, Event, top=_TOP)
        for events in self._document:
            on_gpu = self._says_gpu()
            categories = _ON_GPU if on_gpu else _ON_GPU | {"cpu_op"}
            by_category: defaultdict[str | None, list[Event]] = defaultdict(list)
            for event in [event for event in events if event.cat in categories or event.name == COMMUNICATES]:
                by_category[event.cat].append(event)
            copies = [event for category in COPIES for event in by_category[category]]
            launches = [event for category in LAUNCHES for event in by_category[category]]
            communicating = [event for event in by_category["cpu_op"] if event.name == COMMUNICATES]
            self.gpu.add(by_category[KERNEL], copies, launches, communicating)
            self._memory.add(by_category[INSTANTS])
            # Kineto repeats every range on the GPU's timeline (`gpu_user_annotation`). We want the host's range.
            self._add_ranges(by_category["user_annotation"])
            if not on_gpu:
                self._add_ranges(by_category["cpu_op"])
                self._operators.add(by_category["cpu_op"])
            self._refuse_too_many()

    def trace(self) -> Trace:
        """Returns the trace. Raises Undecodable."""
        document, path = self._document, self.path
        base = whole_number(document, "baseTimeNanoseconds")
        metadata = _metadata(document)
        if not -LONGEST < base < LONGEST:
            raise Undecodable("its `baseTimeNanoseconds` is out of range")
        warnings = list(_name_warnings(path, metadata.coords))
        if document.cut is not None:
            warnings.append(Note("cut", files=(path.name,), said=document.cut))
        traced_ranges = [TracedRange(traced.name, traced.start + base, traced.end + base) for traced in self._ranges]
        traced_ranges.sort(key=lambda traced: (traced.start, -traced.end))
        has_kernels = self.gpu.kernels
        cpu_collectives = [] if has_kernels else self._collectives
        collectives = [
            Collective(collective.operation, collective.start + base, collective.end + base)
            for collective in cpu_collectives
        ]
        collectives.sort(key=lambda collective: collective.start)
        gpu, launches = self.gpu.activities(base, metadata.sizes) if has_kernels else (None, None)
        unseen = (
            without_times(gpu)
            if has_kernels
            else without_kernels(metadata, self.gpu.launches, has_gpu=_has_gpu(document))
        )
        if (
            unusable := self._broken
            + document.unreadable
            + (0 if gpu is None or unseen is not None else gpu.impossible)
        ):
            warnings.append(Note("events_left_out", files=(path.name,), count=unusable))
        if gpu is not None and graphs.KEY in document.top:
            try:
                names = graphs.read_names(bytes(document.top[graphs.KEY]))
            except ValueError as fault:
                warnings.append(Note("graph_names_damaged", files=(path.name,), said=str(fault)))
            else:
                passes = union(times_of([traced for traced in traced_ranges if traced.name.label in ranges.PASSES]))
                replays = replayed(gpu, names, passes)
                gpu = replays.gpu
                traced_ranges += (TracedRange(*named, replayed=True) for named in replays.ranges)
                traced_ranges.sort(key=lambda traced: (traced.start, -traced.end))
                if replays.unnamed is not None:
                    metadata = replace(metadata, ranges=replace(metadata.ranges, reason=replays.unnamed))
        return Trace(
            path=path,
            metadata=metadata,
            ranges=tuple(traced_ranges),
            collectives=tuple(collectives),
            compute=self._operators.compute(base) if collectives else intervals(()),
            gpu=gpu,
            launches=launches,
            unseen=unseen,
            warnings=tuple(warnings),
            cut=document.cut,
            base=base,
            memory=self._memory.allocations(base, document),
        )

    def _says_gpu(self) -> bool:
        """Returns whether the metadata read so far say that the model ran on a GPU."""
        metadata = self._document.top.get("megaprof")
        if self._device is None and metadata is not None:
            with suppress(ValueError):
                self._device = read_metadata(bytes(metadata)).device or "cpu"
        return self._device not in (None, "cpu")

    def _add_ranges(self, events: Iterable[Event]) -> None:
        for event in events:
            meaning = self._names[event.name]
            if meaning is None or event.ph != "X":
                continue
            if (span := _span(event)) is None:
                self._broken += 1
            elif isinstance(meaning, ranges.RangeName):
                self._ranges.append(TracedRange(meaning, *span))
            else:
                self._collectives.append(Collective(meaning, *span))

    def _refuse_too_many(self) -> None:
        rows = (
            self.gpu.rows + self._memory.rows + self._operators.rows + 4 * (len(self._ranges) + len(self._collectives))
        )
        if not fits(rows * ROW_BYTES):
            raise Undecodable(TOO_MANY)


def _metadata(document: Document[Event]) -> Metadata:
    if "megaprof" not in document.top:
        raise Undecodable(document.cut or NOT_OURS)
    try:
        return read_metadata(bytes(document.top["megaprof"]))
    except ValueError as fault:
        raise Undecodable(f"its `megaprof` metadata is damaged: {fault}") from None


def _has_gpu(document: Document[Event]) -> bool:
    """Returns whether Kineto lists a GPU. The model need not have run on it."""
    return bytes(document.top.get("deviceProperties", b"")).strip() not in (b"", b"[]")


class _Names(dict[str, "ranges.RangeName | str | None"]):
    """Maps an event's name to a range, a collective's operation, or None. Computed once per name."""

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


#: Operators that hand a collective to its backend. Their time is communication, too, because the caller waits in them.
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


def _span(event: Event) -> tuple[int, int] | None:
    start, duration = event.ts * 1000, event.dur * 1000
    if not (math.isfinite(start) and abs(start) < LONGEST and 0 <= duration < LONGEST):
        return None
    begin = round(start)
    return begin, begin + round(duration)


class _Operators:
    """Collects the CPU's operators, one piece of the trace at a time."""

    def __init__(self) -> None:
        self.rows = 0
        self._threads: dict[int | str, int] = {}
        self._pieces: list[tuple[Intervals, npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = []

    def add(self, events: Iterable[Event]) -> None:
        operators = [
            operator for operator in events if operator.ph == "X" and not operator.name.startswith(ranges.PREFIX)
        ]
        if not operators:
            return
        number_of = self._threads.setdefault
        threads = np.array([number_of(operator.tid, len(self._threads)) for operator in operators], dtype=np.int64)
        computes = np.array([not operator.name.startswith(_COMMUNICATING) for operator in operators], dtype=np.bool_)
        spans, possible = spans_of(0, operators)
        self._pieces.append((spans, threads[possible], computes[possible]))
        self.rows += len(operators)

    def compute(self, base: int) -> Intervals:
        """Returns when any thread ran an operator other than communication. Only leaf operators count, because their
        parents also wait."""
        if not self._pieces:
            return intervals(())
        spans, threads, computes = (np.concatenate(column) for column in zip(*self._pieces, strict=True))
        self._pieces.clear()
        spans += base
        return union(spans[leaves(threads, spans) & computes])


def _name_warnings(path: Path, coords: RankCoords) -> Iterable[Note]:
    name = parse_artifact_name(path.name)
    axes = ("pp", "tp", "cp", "ep", "dp", "rank")
    if name is not None and any(getattr(name.place, axis) != getattr(coords, axis) for axis in axes):
        written = " ".join(f"{axis}={getattr(coords, axis)}" for axis in axes)
        yield Note("name_disagrees", files=(path.name,), said=written)
