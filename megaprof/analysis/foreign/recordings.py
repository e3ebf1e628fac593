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
from megaprof.analysis.trace.columns import ANNOTATION, COPIES, KERNEL, OPERATOR, Events, Said
from megaprof.analysis.trace.decoding import Document, Event, Undecodable
from megaprof.analysis.trace.gpu import Activities, activities
from megaprof.analysis.trace.groups import COMPUTE, USES, ByName
from megaprof.analysis.trace.intervals import Intervals, intervals
from megaprof.analysis.trace.nsys.files import NsysFile, Process, processes
from megaprof.analysis.trace.reading import Source, path_of
from megaprof.analysis.trace.traces import UnreadableTrace, refusing
from megaprof.analysis.trace.unseen import without_times

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
_OF_ASCEND = {"Ascend Hardware", "Overlap Analysis"}
_ASCEND = (
    "it is a trace of an Ascend NPU by torch_npu, which megaprof does not read: its times are text, and its kernels "
    "have no category"
)
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[._-]?(\d{1,7})(?!\d)", re.I)


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
    events = Events(path, top=("distributedInfo",))
    if not events.has(KERNEL):
        raise Undecodable(_ASCEND if events.processes & _OF_ASCEND else _NO_KERNELS)
    gpu, _, on_gpu = activities(events, None)
    host = events.take(ANNOTATION), events.take(OPERATOR)
    launched = _Launched(events.meant(_launched, *host))
    communication: defaultdict[tuple[str, Group], list[int]] = defaultdict(list)
    by_name = ByName()
    rows = np.flatnonzero(gpu.use != COMPUTE)
    numbers, words, times = on_gpu.name[gpu.row[rows]], on_gpu.said[gpu.row[rows]], gpu.launched[rows]
    for row, number, word, time in zip(rows.tolist(), numbers.tolist(), words.tolist(), times.tolist(), strict=True):
        name, said = events.names[number], events.said[word]
        group = _group(said, by_name[name])
        communication[_operation(name, said.collective or launched.at(time)), group].append(row)
    steps = events.meant(_STEP.fullmatch, *host)
    info = _decoded(events.document, "distributedInfo")
    rank, rank_from = _rank(info.get("rank"), path.name)
    impossible = sum(count for category, count in events.impossible.items() if category not in (KERNEL, *COPIES))
    return Recording(
        path=path,
        rank=rank,
        rank_from=rank_from,
        world=_count(info.get("world_size")),
        gpu=gpu,
        communication=_as_arrays(communication),
        steps=intervals((start, end) for _, start, end in steps),
        unreadable=events.document.unreadable + impossible + gpu.impossible,
        numbers=frozenset(int(match[1]) for match, _, _ in steps),
        cut=events.document.cut,
    )


def _nsys(file: NsysFile) -> Iterator[Recording]:
    gpu_processes: list[Process] = processes(file)
    by_name = ByName()
    for process in gpu_processes:
        communication: defaultdict[tuple[str, Group], list[int]] = defaultdict(list)
        for position in np.flatnonzero(process.gpu.use != COMPUTE).tolist():
            name = process.names[position]
            communication[_operation(name, None), _group(Said(), by_name[name])].append(position)
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


def _launched(name: str) -> str | None:
    return name.removeprefix("nccl:") if name.startswith("nccl:") else None


class _Launched:
    """The collectives that torch says it launches, by time."""

    def __init__(self, launched: Sequence[tuple[str, int, int]]) -> None:
        self._spans = intervals((start, end) for _, start, end in launched)
        self._names = [name for name, _, _ in launched]

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


def _group(said: Said, use: int) -> Group:
    """Returns the group that a kernel names, or that its ``use`` by name implies (`groups.ByName`)."""
    ranks, axis = None, USES[use] if use > COMPUTE else None
    if said.ranks:
        try:
            ranks = tuple(msgspec.json.decode(said.ranks, type=list[int]))[:_MOST_RANKS]
        except (msgspec.MsgspecError, UnicodeError):
            ranks = None
    description = said.description if said.description not in (None, *_UNNAMED) else None
    if description:
        return Group(description, description, ranks, axis)
    if ranks:
        return Group(f"ranks {_short(ranks)}", None, ranks, axis)
    return Group(f"group {said.group}" if said.group else UNKNOWN, axis=axis)


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


def _decoded(document: Document[Event], name: str) -> dict[str, Any]:
    """Returns a top-level dictionary of the file; empty if there is none."""
    try:
        return msgspec.json.decode(document.top.get(name, b"{}"), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
