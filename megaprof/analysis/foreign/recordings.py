"""Reads what one GPU did, from a torch profiler trace or an nsys file without megaprof's ranges."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.calls import grouped
from megaprof.analysis.trace.decoding import Args, Document, Event, Undecodable, read, whole_number
from megaprof.analysis.trace.gpu import COPIES, KERNEL, LAUNCHES, LONGEST, Activities, GpuEvents, spans_of
from megaprof.analysis.trace.groups import COMMUNICATES, COMPUTE, USES, ByName
from megaprof.analysis.trace.intervals import Intervals
from megaprof.analysis.trace.nsys.files import NsysFile, Process, processes
from megaprof.analysis.trace.reading import Source, path_of
from megaprof.analysis.trace.traces import ROW_BYTES, TOO_MANY, UnreadableTrace, refusing
from megaprof.analysis.trace.unseen import without_times
from megaprof.formats.inputs import fits

_NO_TIMES: Intervals = np.zeros((0, 2), dtype=np.int64)
_MOST_RANKS = 1 << 20
#: Operations in the names of kernels that communicate, in lower case.
_OPERATIONS = (
    *("allreduce", "allgather", "reducescatter", "broadcast", "alltoall", "reduce", "dispatch", "combine", "memcpy"),
)
SEND_RECEIVE = "send-receive or all-to-all"
#: Name of a group about which nothing is known.
UNKNOWN = "?"
_UNNAMED = ("", "undefined", "default_pg", "default")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_NO_KERNELS = "it was not written by megaprof, and holds no kernels of a GPU either"
#: Processes that torch_npu has in its traces.
_ASCEND = ("Ascend Hardware", "Overlap Analysis")
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[._-]?(\d{1,7})(?!\d)", re.I)


class _Args(
    Args,
    gc=False,
    frozen=True,
    rename={"group": "Process Group Name", "ranks": "Process Group Ranks", "label": "name"},
):
    group: str | None = None
    ranks: str | None = None
    label: str | None = None


_NO_ARGS = _Args()


class _Event(Event, gc=False):
    args: _Args = _NO_ARGS


@dataclass(frozen=True)
class Group:
    """A process group, as far as the recording names it."""

    name: str
    """Name of the group, or its ranks if the name says nothing; ``?`` if nothing is known."""
    description: str | None = None
    """Description from the framework; None if there is none."""
    ranks: tuple[int, ...] | None = None
    """Global ranks of the group; None if the recording does not say."""
    axis: str | None = None
    """Axis that alone uses kernels of this name; None if several may."""


@dataclass(frozen=True)
class Recording:
    """The recording of one process with a GPU."""

    path: Path
    """The file."""
    rank: int | None
    """Global rank; None if unknown."""
    rank_from: str
    """Source of the rank, or another name of the process."""
    world: int | None
    """Number of ranks of the job; None if the recording does not say."""
    gpu: Activities
    """Activities of the GPU."""
    communication: Mapping[tuple[str, Group], npt.NDArray[np.int64]]
    """Rows of ``gpu`` that communicate, by operation and group, in order of time. All other rows are computation,
    copies and memsets."""
    steps: Intervals
    """Start and end of each step on the host: ``ProfilerStep#n``, or any nsys range that is named like a step."""
    unreadable: int
    """Events without a possible time or type."""
    numbers: frozenset[int] = frozenset()
    """Numbers of the steps in ``ProfilerStep#n``."""
    cut: str | None = None
    """Reason why the file ends too early; None for a whole file."""

    @property
    def extent(self) -> tuple[int, int]:
        """Returns when the first activity began and the last one ended."""
        return int(self.gpu.spans[:, 0].min()), int(self.gpu.spans[:, 1].max())

    @property
    def untimed(self) -> Note | None:
        """Returns why its times cannot be used; None if they can."""
        return without_times(self.gpu)

    @property
    def computes(self) -> npt.NDArray[np.bool_]:
        """Returns, for each row of ``gpu``, whether it is not communication."""
        computes = np.ones(len(self.gpu.spans), dtype=np.bool_)
        for rows in self.communication.values():
            computes[rows] = False
        return computes


def read_recording(source: Source) -> list[Recording]:
    """Returns one recording for each process with GPU kernels in a file. Raises UnreadableTrace."""
    path = path_of(source)
    with refusing(path):
        recordings = list(_nsys(source)) if isinstance(source, NsysFile) else [_kineto(source)]
    recordings = [recording for recording in recordings if recording.gpu.kernel.any() or recording.untimed]
    if not recordings:
        raise UnreadableTrace(path, _NO_KERNELS)
    return recordings


def _kineto(path: Path) -> Recording:
    document: Document[_Event] = read(path, _Event, top=("baseTimeNanoseconds", "distributedInfo"))
    collected = _Collected()
    for events in document:
        collected.add(events)
        if not fits(collected.gpu.rows * ROW_BYTES):
            raise Undecodable(TOO_MANY)
    if collected.ascend and not collected.gpu.kernels:
        raise Undecodable(
            "it is a trace of an Ascend NPU by torch_npu, which megaprof does not read: its times are text, and its "
            "kernels have no category"
        )
    if not collected.gpu.kernels:
        raise Undecodable(_NO_KERNELS)
    base = whole_number(document, "baseTimeNanoseconds")
    base = base if abs(base) < LONGEST else 0
    gpu, _ = collected.gpu.activities(base, None)
    launched = _Launched(_moved(collected.launched_spans, base), collected.launched_names)
    communication: defaultdict[tuple[str, Group], list[int]] = defaultdict(list)
    for position, row in enumerate(gpu.row.tolist()):
        if row in collected.communication:
            name, args = collected.communication[row]
            # RCCL's kernels have no metadata, nor have copies; the operator with the same external id does.
            if not (args.collective or args.group):
                args = collected.params.get(args.external, args)
            group = _group(args, collected.by_name[name])
            if collected.by_name[name] == COMPUTE and len(group.ranks or ()) < 2:
                continue  # a copy in no collective
            operation = _operation(name, args.collective or launched.at(int(gpu.launched[position])))
            communication[operation, group].append(position)
    info = _decoded(document, "distributedInfo")
    rank, rank_from = _rank(info.get("rank"), path.name)
    return Recording(
        path=path,
        rank=rank,
        rank_from=rank_from,
        world=_count(info.get("world_size")),
        gpu=gpu,
        communication=_as_arrays(communication),
        steps=_moved(collected.steps, base),
        unreadable=document.unreadable + collected.impossible + gpu.impossible,
        numbers=frozenset(collected.numbers),
        cut=document.cut,
    )


class _Collected:
    """Collects what is needed from the events of a file, a piece at a time. Times count from the file's base."""

    def __init__(self) -> None:
        self.gpu = GpuEvents()
        self.by_name = ByName()
        self.ascend = False
        self.impossible = 0
        self.communication: dict[int, tuple[str, _Args]] = {}
        """Names and arguments of the kernels that communicate, by their position among all activities."""
        self.params: dict[int, _Args] = {}
        """Arguments of the operators that communicate, by external id."""
        self.launched_spans: list[Intervals] = []
        self.launched_names: list[str] = []
        """Names of the collectives that torch says it launches; ``launched_spans`` has their times."""
        self.steps: list[Intervals] = []
        self.numbers: set[int] = set()
        self._count = 0

    def add(self, events: Sequence[_Event]) -> None:
        self.ascend |= any(event.ph == "M" and event.args.label in _ASCEND for event in events)
        complete = [event for event in events if event.ph == "X"]
        _, possible = spans_of(0, complete)
        self.impossible += len(complete) - int(possible.sum())
        complete = [event for event, is_possible in zip(complete, possible.tolist(), strict=True) if is_possible]
        by_kind = grouped(complete, lambda event: (event.cat or "").lower())
        kernels = by_kind.get(KERNEL, [])
        copies = [event for kind in COPIES for event in by_kind.get(kind, ())]
        self.gpu.add(kernels, copies, [event for kind in LAUNCHES for event in by_kind.get(kind, ())])
        for position, event in enumerate((*kernels, *copies), self._count):
            if self.by_name[event.name] != COMPUTE or (event.args.external and event.cat in COPIES):
                self.communication[position] = event.name, event.args
        self._count += len(kernels) + len(copies)
        self.params |= {
            event.args.external: event.args for event in complete if event.name == COMMUNICATES and event.args.external
        }
        launched = [event for event in complete if event.name.startswith("nccl:")]
        self.launched_spans.append(spans_of(0, launched)[0])
        self.launched_names += (event.name.removeprefix("nccl:") for event in launched)
        on_host = (
            event
            for kind, events_of_kind in by_kind.items()
            if kind != "gpu_user_annotation"
            for event in events_of_kind
        )
        steps = [(event, match) for event in on_host if (match := _STEP.fullmatch(event.name))]
        self.steps.append(spans_of(0, [event for event, _ in steps])[0])
        self.numbers.update(int(match[1]) for _, match in steps)


def _nsys(file: NsysFile) -> Iterator[Recording]:
    gpu_processes: list[Process] = processes(file)
    by_name = ByName()
    for process in gpu_processes:
        communication: defaultdict[tuple[str, Group], list[int]] = defaultdict(list)
        for position in np.flatnonzero(process.gpu.use != COMPUTE).tolist():
            name = process.names[position]
            communication[_operation(name, None), _group(_NO_ARGS, by_name[name])].append(position)
        rank, rank_from = _rank(None, file.path.name if len(gpu_processes) == 1 else "")
        yield Recording(
            path=file.path,
            rank=rank,
            rank_from=rank_from if rank is not None else f"process {process.pid}",
            world=None,
            gpu=process.gpu,
            communication=_as_arrays(communication),
            steps=process.steps,
            unreadable=process.gpu.impossible,
        )


def _as_arrays(rows: Mapping[tuple[str, Group], Sequence[int]]) -> dict[tuple[str, Group], npt.NDArray[np.int64]]:
    return {key: np.array(places, dtype=np.int64) for key, places in rows.items()}


class _Launched:
    """The collectives that torch says it launches, by time."""

    def __init__(self, spans: Intervals, names: Sequence[str]) -> None:
        order = np.argsort(spans[:, 0], kind="stable")
        self._spans = spans[order]
        self._names = [names[position] for position in order.tolist()]

    def at(self, moment: int) -> str | None:
        position = int(np.searchsorted(self._spans[:, 0], moment, side="right")) - 1
        return self._names[position] if position >= 0 and moment <= self._spans[position, 1] else None


def _operation(kernel: str, named: str | None) -> str:
    """Returns the name of an operation: as torch ``named`` it, or else from the name of the kernel. A send-receive
    kernel may be an exchange or an all-to-all."""
    name = (named or kernel).lower().replace("_", "")
    for operation in _OPERATIONS:
        if operation in name:
            return operation
    if named:
        return "send-receive" if name.startswith(("send", "recv")) else named
    return SEND_RECEIVE if "sendrecv" in name else "communication"


def _group(args: _Args, use: int) -> Group:
    """Returns the group that a kernel's arguments name, or that its ``use`` by name implies (`groups.ByName`)."""
    ranks, axis = None, USES[use] if use > COMPUTE else None
    if args.ranks:
        try:
            ranks = tuple(msgspec.json.decode(args.ranks, type=list[int]))[:_MOST_RANKS]
        except (msgspec.MsgspecError, UnicodeError):
            ranks = None
    description = args.description if args.description not in (None, *_UNNAMED) else None
    if description:
        return Group(description, description, ranks, axis)
    if ranks:
        return Group(f"ranks {_short(ranks)}", None, ranks, axis)
    return Group(f"group {args.group}" if args.group else UNKNOWN, axis=axis)


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")


def _rank(recorded: object, name: str) -> tuple[int | None, str]:
    if (rank := _count(recorded)) is not None:
        return rank, "the trace"
    if (match := _RANK_IN_NAME.search(name)) is not None and int(match[1]) < _MOST_RANKS:
        return int(match[1]), "file name"
    return None, "nothing"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_RANKS else None


def _moved(pieces: Sequence[Intervals], base: int) -> Intervals:
    return np.concatenate((_NO_TIMES, *pieces)) + base


def _decoded(document: Document[_Event], name: str) -> dict[str, Any]:
    """Returns a top-level dictionary of the file; empty if there is none."""
    try:
        return msgspec.json.decode(document.top.get(name, b"{}"), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
