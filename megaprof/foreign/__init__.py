"""Recordings that megaprof did not make: what one GPU did, from a torch profiler trace or an nsys file without
megaprof's ranges, and the report on several of them. It shows only what is in them."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis import words
from megaprof.analysis.notes import OVERLAPPING, UNNAMED_GROUP, Note
from megaprof.analysis.report.tables import Cell, Column, TableView, row
from megaprof.analysis.samples import CERTAIN
from megaprof.analysis.trace.columns import ANNOTATION, COPIES, KERNEL, OPERATOR, Events, KinetoEvents, Said
from megaprof.analysis.trace.gpu import Activities, activities, without_times
from megaprof.analysis.trace.groups import COMPUTE, USES, axis_of, ranks_of, use_by_name
from megaprof.analysis.trace.intervals import Intervals, difference, intervals, owners, total, union
from megaprof.analysis.trace.steps import unfed
from megaprof.analysis.words import number, percent

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
_TIMES = "a\nstep", "recorded", "compute", "exposed", "idle", "host\nbound"
_OF_RANK = Column("from", "text"), Column("steps"), *map(Column, _TIMES)
_OF_EXPOSED = (
    *(Column(name, "text") for name in ("operation", "group")),
    *map(Column, ("kernels", "ms", "of\nrecorded")),
)


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
    return [], next((recording.untimed.text for recording in recordings if recording.untimed), _NO_KERNELS)


def _recording(path: Path, events: Events, step: re.Pattern[str], rank: int | None, rank_from: str) -> Recording:
    """Returns the recording of one process. ``step``: what the names of steps look like."""
    gpu, _ = activities(events, None)
    host = events.take(ANNOTATION), events.take(OPERATOR)
    launched = events.meant(lambda name: name[len("nccl:") :] if name.startswith("nccl:") else None, *host)
    spans = intervals((start, end) for _, start, end in launched)
    communication: defaultdict[tuple[str, Group], list[int]] = defaultdict(list)
    by_name = [*map(use_by_name, events.names)]
    rows = np.flatnonzero(gpu.use != COMPUTE)
    columns = gpu.name[rows], gpu.said[rows], owners(gpu.launched[rows], spans)
    for place, name_row, said_row, owner in zip(rows.tolist(), *(each.tolist() for each in columns), strict=True):
        name, said = events.names[name_row], events.said[said_row]
        named = said.collective or (launched[owner][0] if owner >= 0 else None)
        communication[_operation(name, named), _group(said, by_name[name_row])].append(place)
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
    """Returns the group that a kernel names, or that its ``use`` by name implies (`groups.use_by_name`)."""
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


@dataclass(frozen=True)
class Exposed:
    """Communication of one kind while nothing computed."""

    operation: str
    """For example ``allreduce``."""
    group: str
    """Process group; ``?`` if the recording does not say."""
    axis: str | None
    """``tp``, ``pp``, ``cp``, ``ep`` or ``dp``; None if neither the description nor the kernels say."""
    calls: int
    """Number of kernels."""
    ms: float
    """Milliseconds in which it ran while nothing computed."""


@dataclass(frozen=True)
class RankFacts:
    """One rank, from the first activity of its GPU to the last."""

    file: str
    """File, below the directory that has all of them."""
    window: int
    """Number of its window, from 1: only recordings of one window are compared with each other."""
    rank: int | None
    """Global rank; None if not known."""
    rank_from: str
    """Source of the rank, or another name of the process."""
    span_ms: float
    """Milliseconds from the first activity of the GPU to the last."""
    steps: int
    """Number of steps that the profiler marked (``ProfilerStep#n``)."""
    step_ms: float | None
    """Median duration of these steps on the host, in milliseconds; None without steps."""
    compute_ms: float
    """Milliseconds in which something other than communication ran."""
    exposed: tuple[Exposed, ...]
    """Communication while nothing computed, the longest first."""
    idle_ms: float
    """Milliseconds in which nothing ran."""
    host_bound_ms: float | None
    """Milliseconds of idle time that began when no launched work was left to run; None if the recording does not show
    launches."""
    exposed_ms: float
    """Milliseconds of any communication while nothing computed; less than the sum of ``exposed`` if kinds overlap."""


@dataclass(frozen=True)
class Late:
    """The rank that comes last to the collectives of one group, more often than by chance."""

    folder: str
    """Folder of its recordings, below the one that has all; empty unless each folder is on its own."""
    group: str
    """Process group."""
    operation: str
    """For example ``allreduce``."""
    matched: int
    """Number of collectives that all recorded ranks of the group have, in all windows of the folder."""
    rank: int
    """Rank that came last most often. Its kernel was the shortest, because all kernels end together."""
    times: int
    """Number of times that it came last."""
    waited_ms: float
    """Median time by which the others' kernels took longer in these collectives, in milliseconds."""


@dataclass(frozen=True)
class Foreign:
    """The findings from recordings without megaprof's ranges."""

    ranks: tuple[RankFacts, ...]
    """Ranks of each window, in ascending order; those that are not known are last."""
    late: tuple[Late, ...]
    """Ranks that come last, for groups that several recordings share."""
    warnings: tuple[Note, ...]
    """Notes about what the recordings do not show, and why."""

    #: What it cannot show, and how to record it next time.
    limits = (
        "These recordings hold no ranges of megaprof's, so they show no bubbles, and no layout can be predicted. To "
        "see more, record with --profile-target train_actor --profile-select per-stage"
    )

    @property
    def clauses(self) -> list[str]:
        """Clauses about the ranks that come last."""
        return [
            f"{each.folder}{': ' if each.folder else ''}rank {each.rank} came last to {each.operation} of {each.group} "
            f"{each.times} of {each.matched} times: there the others' kernels took {number(each.waited_ms)} ms longer"
            for each in self.late
        ]

    @property
    def tables(self) -> list[TableView]:
        """The facts of every rank, and its exposed communication, first that of the rank that loses most to it."""
        folders = {rank.window: os.path.dirname(rank.file) for rank in self.ranks}
        several = len(folders) > 1
        ranks, exposed = [], []

        def name(rank: RankFacts) -> list[str | int]:
            return ["?" if rank.rank is None else rank.rank, *([rank.window] if several else [])]

        for rank in self.ranks:
            times = rank.step_ms, rank.span_ms, rank.compute_ms, rank.exposed_ms, rank.idle_ms, rank.host_bound_ms
            ranks.append(row(*name(rank), Cell(rank.rank_from, code=rank.file), rank.steps, *map(number, times)))
        for rank in sorted(self.ranks, key=lambda rank: -rank.exposed_ms):
            for each in rank.exposed:
                group = f"{each.axis}: {each.group}" if each.axis else each.group
                share = percent(each.ms / rank.span_ms if rank.span_ms else None)
                exposed.append(row(*name(rank), each.operation, group, each.calls, number(each.ms), share))
        windows = [row(window, folder) for window, folder in folders.items() if folder]
        named = Column("rank", "name"), *([Column("window")] if several else [])
        views = [
            TableView("per rank, ms", (*named, *_OF_RANK), tuple(ranks), len(named)),
            TableView("windows", (Column("window", "name"), Column("folder", "text")), tuple(windows)),
            TableView("exposed communication", (*named, *_OF_EXPOSED), tuple(exposed), len(named)),
        ]
        return [view for view in views if view.rows]


def report_on(recordings: Sequence[Recording]) -> Foreign:
    """Returns what the recordings of a job show."""
    warnings = [
        Note("skipped", files=(recording.path.name,), said=recording.untimed.text)
        for recording in recordings
        if recording.untimed is not None
    ]
    recordings = [recording for recording in recordings if recording.untimed is None]
    kinds = {key for recording in recordings for key in recording.communication}
    if any(operation == SEND_RECEIVE for operation, _ in kinds):
        warnings.append(Note("groups_unnamed", said="send-receive kernels without annotation may be all-to-all"))
    if any(group.name == UNKNOWN for _, group in kinds):
        warnings.append(UNNAMED_GROUP)
    if unreadable := sum(recording.unreadable for recording in recordings):
        warnings.append(Note("events_left_out", count=unreadable))
    for recording in recordings:
        if recording.cut is not None:
            warnings.append(Note("cut", files=(recording.path.name,), said=recording.cut))
    if any(recording.gpu.shortened for recording in recordings):
        warnings.append(OVERLAPPING)
    folder = os.path.commonpath([recording.path.parent for recording in recordings]) + os.sep
    windows = _windows(recordings)
    in_order = (window for of_folder in windows.values() for window in of_folder)
    ranks = [
        _facts(recording, os.path.normpath(recording.path).removeprefix(folder), place)
        for place, window in enumerate(in_order, 1)
        for recording in window
    ]
    late = [
        each
        for path, of_folder in windows.items()
        for each in _late(f"{path}{os.sep}".removeprefix(folder).rstrip(os.sep), of_folder)
    ]
    late.sort(key=lambda each: -each.waited_ms * each.times)
    return Foreign(tuple(ranks), tuple(late), tuple(dict.fromkeys(warnings)))


def _windows(recordings: Iterable[Recording]) -> dict[str, list[list[Recording]]]:
    """Returns the recordings that belong together, by folder: those that overlap in time and in the numbers of their
    steps. If a folder holds several ranks, or a rank is in several folders, each folder is on its own, as for the roles
    of RL training; otherwise all are one, with an empty name."""
    folders: defaultdict[str, set[int | None]] = defaultdict(set)
    for recording in recordings:
        folders[os.path.normpath(recording.path.parent)].add(recording.rank)
    known = [rank for ranks in folders.values() for rank in ranks if rank is not None]
    apart = len(set(known)) < len(known) or any(len(ranks) > 1 for ranks in folders.values())
    windows: defaultdict[str, list[list[Recording]]] = defaultdict(list)
    for recording in sorted(recordings, key=lambda each: (each.extent[0], str(each.path))):
        of_folder = windows[os.path.normpath(recording.path.parent) if apart else ""]
        window = next((window for window in of_folder if all(_together(recording, other) for other in window)), None)
        if window is None:
            of_folder.append([recording])
        else:
            window.append(recording)
    for of_folder in windows.values():
        for window in of_folder:
            window.sort(key=lambda each: (each.rank is None, each.rank or 0, str(each.path), each.rank_from))
    return windows


def _together(one: Recording, other: Recording) -> bool:
    (start, end), (other_start, other_end) = one.extent, other.extent
    same_steps = not one.numbers or not other.numbers or bool(one.numbers & other.numbers)
    return start <= other_end and other_start <= end and same_steps and (one.rank is None or one.rank != other.rank)


def _facts(recording: Recording, file: str, window: int) -> RankFacts:
    gpu = recording.gpu
    computes = np.ones(len(gpu.spans), dtype=np.bool_)
    for rows in recording.communication.values():
        computes[rows] = False
    computing = union(gpu.spans[computes])
    start, end = recording.extent
    idle = difference(union(intervals([(start, end)])), union(gpu.spans))
    rows_by_kind: defaultdict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    for (operation, group), rows in recording.communication.items():
        axis = group.axis or axis_of(group.description or "")
        rows_by_kind[operation, group.name, axis] += rows.tolist()
    exposed = [
        Exposed(*key, len(rows), total(difference(union(gpu.spans[rows]), computing)) / 1e6)
        for key, rows in rows_by_kind.items()
    ]
    lengths_ns = (recording.steps[:, 1] - recording.steps[:, 0]).tolist()
    return RankFacts(
        file=file,
        window=window,
        rank=recording.rank,
        rank_from=recording.rank_from,
        span_ms=(end - start) / 1e6,
        steps=len(lengths_ns),
        step_ms=statistics.median(lengths_ns) / 1e6 if lengths_ns else None,
        compute_ms=total(computing) / 1e6,
        exposed=tuple(sorted(exposed, key=lambda entry: -entry.ms)),
        idle_ms=total(idle) / 1e6,
        host_bound_ms=total(unfed(gpu, idle)) / 1e6 if gpu.known.any() else None,
        exposed_ms=(end - start - total(computing) - total(idle)) / 1e6,
    )


def _late(folder: str, windows: Iterable[Sequence[Recording]]) -> Iterator[Late]:
    """Yields which rank comes last to the collectives of each group, if it does so more often than by chance. Matches
    collectives by their number in the group, which all of its ranks count alike within a window."""
    calls_ns: defaultdict[tuple[Group, str], list[dict[int, int]]] = defaultdict(list)
    for window in windows:
        lengths_ns: defaultdict[tuple[Group, str], dict[int, list[int]]] = defaultdict(dict)
        for recording in window:
            for (operation, group), rows in recording.communication.items():
                # It is certainly the same group in the other recordings by its ranks, if they contain this rank, or
                # without ranks by the name that torch gave it. Many groups share a description.
                named = group.ranks is None and group.description is None and group.name != UNKNOWN
                if recording.rank is not None and (named or recording.rank in (group.ranks or ())):
                    spans = recording.gpu.spans[rows]
                    lengths_ns[group, operation][recording.rank] = (spans[:, 1] - spans[:, 0]).tolist()
        for key, by_rank in lengths_ns.items():
            # A recording that begins later lacks the first collectives. Only equal counts are surely the same ones.
            if len(by_rank) > 1 and len({len(lengths) for lengths in by_rank.values()}) == 1:
                calls_ns[key] += [
                    dict(zip(by_rank, lengths, strict=True)) for lengths in zip(*by_rank.values(), strict=True)
                ]
    for (group, operation), calls in calls_ns.items():
        last_ranks = [min(call_ns, key=lambda rank: call_ns[rank]) for call_ns in calls]
        rank, times = Counter(last_ranks).most_common(1)[0]
        # If all were equally likely to be last, some rank of some group would be so this often in one of ten jobs.
        chance, every = 1.0 / len(calls[0]), len(calls)
        surely = statistics.NormalDist().inv_cdf(1.0 - (1.0 - CERTAIN) * chance / len(calls_ns))
        if times - 0.5 <= every * chance + surely * math.sqrt(every * chance * (1.0 - chance)):
            continue
        waits_ms = [
            (statistics.median(ns for other, ns in call_ns.items() if other != rank) - call_ns[rank]) / 1e6
            for call_ns, last in zip(calls, last_ranks, strict=True)
            if last == rank
        ]
        if (waited_ms := statistics.median(waits_ms)) > 0:
            yield Late(folder, group.name, operation, every, rank, times, waited_ms)
