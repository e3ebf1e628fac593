"""Reads what one GPU did, from a torch profiler trace or an nsys file without megaprof's ranges."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.report.text import words
from megaprof.analysis.report.text.notes import clause
from megaprof.analysis.trace.columns import ANNOTATION, COPIES, KERNEL, OPERATOR, Events, KinetoEvents, Said
from megaprof.analysis.trace.gpu import Activities, activities, without_times
from megaprof.analysis.trace.groups import COMPUTE, USES, ByName, ranks_of
from megaprof.analysis.trace.intervals import Intervals, intervals, owners

_MOST_RANKS = 1 << 20
#: Operations in the names of kernels that communicate, in lower case.
_OPERATIONS = (
    *("allreduce", "allgather", "reducescatter", "broadcast", "alltoall", "reduce", "dispatch", "combine", "memcpy"),
)
SEND_RECEIVE = "send-receive or all-to-all"
#: Name of a group about which nothing is known.
UNKNOWN = "?"
_UNNAMED = ("", "undefined", "default_pg", "default")
#: Steps of torch's profiler, with their numbers, and NVTX ranges that are named like a step.
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_NSYS_STEP = re.compile(
    r"ProfilerStep#(\d{1,18})|(?:ProfilerStep|(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?))[ #:=_-]{0,2}\d+",
    re.A | re.I,
)
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
    rank: int | None
    rank_from: str
    """Source of the rank, or another name of the process."""
    gpu: Activities
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


def recordings_in(path: Path, events: KinetoEvents | Mapping[int, Events]) -> tuple[list[Recording], str | None]:
    """Returns one recording for each process with GPU kernels in a file, or why there is none with possible times.
    ``events``: those of a trace of Kineto's, or those of each process in a file of nsys."""
    if not isinstance(events, KinetoEvents):
        with_kernels = {pid: each for pid, each in sorted(events.items()) if each.has(KERNEL)}
        recordings = []
        for pid, each in with_kernels.items():
            rank, rank_from = _rank(None, path.name if len(with_kernels) == 1 else "")
            rank_from = rank_from if rank is not None else f"process {pid}"
            recordings.append(_recording(path, each, _NSYS_STEP, rank, rank_from))
    elif events.has(KERNEL):
        info: dict[str, Any] = {}
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            info = msgspec.json.decode(events.document.top.get("distributedInfo", b"{}"), type=dict[str, Any])
        recording = _recording(path, events, _STEP, *_rank(info.get("rank"), path.name))
        unreadable = recording.unreadable + events.document.unreadable
        recordings = [replace(recording, unreadable=unreadable, cut=events.document.cut)]
    else:
        return [], _ASCEND if events.processes & _OF_ASCEND else _NO_KERNELS
    recordings = [recording for recording in recordings if recording.gpu.kernel.any() or recording.untimed]
    if any(recording.untimed is None for recording in recordings):
        return recordings, None
    return [], next((clause(recording.untimed) for recording in recordings if recording.untimed), _NO_KERNELS)


def _recording(path: Path, events: Events, step: re.Pattern[str], rank: int | None, rank_from: str) -> Recording:
    """Returns the recording of one process. ``step``: what the names of steps look like."""
    gpu, _, on_gpu = activities(events, None)
    host = events.take(ANNOTATION), events.take(OPERATOR)
    launched = events.meant(lambda name: name[len("nccl:") :] if name.startswith("nccl:") else None, *host)
    spans = intervals((start, end) for _, start, end in launched)
    communication: defaultdict[tuple[str, Group], list[int]] = defaultdict(list)
    by_name = ByName()
    rows = np.flatnonzero(gpu.use != COMPUTE)
    numbers, words, owner = on_gpu.name[gpu.row[rows]], on_gpu.said[gpu.row[rows]], owners(gpu.launched[rows], spans)
    for row, number, word, index in zip(rows.tolist(), numbers.tolist(), words.tolist(), owner.tolist(), strict=True):
        name, said = events.names[number], events.said[word]
        named = said.collective or (launched[index][0] if index >= 0 else None)
        communication[_operation(name, named), _group(said, by_name[name])].append(row)
    steps: list[tuple[re.Match[str], int, int]] = []
    for match, start, end in events.meant(step.fullmatch, *host):
        if not steps or start >= steps[-1][2]:
            steps.append((match, start, end))
    impossible = sum(count for category, count in events.impossible.items() if category not in (KERNEL, *COPIES))
    return Recording(
        path=path,
        rank=rank,
        rank_from=rank_from,
        gpu=gpu,
        communication={key: np.array(places, dtype=np.int64) for key, places in communication.items()},
        steps=intervals((start, end) for _, start, end in steps),
        unreadable=impossible + gpu.impossible,
        numbers=frozenset(int(match[1]) for match, _, _ in steps if match[1] is not None),
    )


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
    axis = USES[use] if use > COMPUTE else None
    ranks = (ranks_of(said.ranks or "") or ())[:_MOST_RANKS] or None
    description = said.description if said.description not in (None, *_UNNAMED) else None
    if description:
        return Group(description, description, ranks, axis)
    if ranks:
        return Group(words.ranks(ranks), None, ranks, axis)
    return Group(f"group {said.group}" if said.group else UNKNOWN, axis=axis)


def _rank(recorded: object, name: str) -> tuple[int | None, str]:
    """Returns the rank of a recording and where that is said: in it, as ``recorded``, or in the name of its file."""
    if isinstance(recorded, int) and not isinstance(recorded, bool) and 0 <= recorded <= _MOST_RANKS:
        return recorded, "the trace"
    if (match := _RANK_IN_NAME.search(name)) is not None and int(match[1]) < _MOST_RANKS:
        return int(match[1]), "file name"
    return None, "nothing"
