"""What one GPU did, from a trace by the torch profiler or a file of nsys's without ranges of ours."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.decoding import Undecodable, read_text
from megaprof.analysis.trace.gpu import COPIES, KERNEL, LAUNCHES, Activities, arranged
from megaprof.analysis.trace.intervals import Intervals, intervals
from megaprof.analysis.trace.nsys import NsysFile, Process, processes
from megaprof.analysis.trace.reading import Source
from megaprof.analysis.trace.traces import UnreadableTrace

_LONGEST = 1 << 61
_MOST_RANKS = 1 << 20
_COMMUNICATION = re.compile(r"^(?:nccl|rccl|mscclpp?|oneccl)|nccl(?:Dev)?Kernel", re.I)
#: Operations in the names of NCCL's and RCCL's kernels, in lower case.
_OPERATIONS = ("allreduce", "allgather", "reducescatter", "broadcast", "alltoall", "reduce")
SEND_RECEIVE = "send-receive or all-to-all"
_UNNAMED = ("", "undefined", "default_pg", "default")
_STEP = re.compile(r"ProfilerStep#\d+")
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[._-]?(\d{1,7})(?!\d)", re.I)


class _Args(
    msgspec.Struct,
    gc=False,
    frozen=True,
    rename={
        "description": "Process Group Description",
        "group": "Process Group Name",
        "ranks": "Process Group Ranks",
        "collective": "Collective name",
        "external": "External id",
    },
):
    correlation: int = 0
    external: int = 0
    description: str | None = None
    group: str | None = None
    ranks: str | None = None
    collective: str | None = None


_NO_ARGS = _Args()


class _Event(msgspec.Struct, gc=False):
    name: str = ""
    ph: str = ""
    cat: str | None = None
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = _NO_ARGS


class _Document(msgspec.Struct):
    traceEvents: list[_Event]
    baseTimeNanoseconds: int = 0
    distributedInfo: Any = None


@dataclass(frozen=True)
class Group:
    """A process group, as far as the recording names it."""

    name: str
    """What it is called, with its ranks where its name says nothing; ``?`` where nothing is known."""
    description: str | None = None
    """As the framework described it."""
    ranks: tuple[int, ...] | None = None
    """Its global ranks."""


@dataclass(frozen=True)
class Recording:
    """One GPU's process."""

    path: Path
    """The file."""
    rank: int | None
    """Global rank; None where nothing says it."""
    rank_from: str
    """What says the rank, or how else the process is called."""
    world: int | None
    """Ranks of the job; None where the recording does not say it."""
    gpu: Activities
    """Its activities; what each is for is in ``operation``."""
    operation: tuple[str | None, ...]
    """Of every activity: the communication that it is; None for computation, copies and memsets."""
    group: tuple[Group | None, ...]
    """Of every activity: whose communication it is."""
    steps: Intervals
    """When each ``ProfilerStep#n`` ran on the host."""
    unreadable: int
    """Events without a possible time or type."""


def read_recording(source: Source) -> list[Recording]:
    """Every GPU process in a file. Raises UnreadableTrace."""
    path = source.path if isinstance(source, NsysFile) else source
    try:
        found = list(_nsys(source)) if isinstance(source, NsysFile) else [_kineto(source)]
    except Undecodable as fault:
        raise UnreadableTrace(path, str(fault)) from None
    except OSError as fault:
        raise UnreadableTrace(path, f"it cannot be read: {fault.strerror or fault}") from None
    found = [each for each in found if each.gpu.kernel.any()]
    if not found:
        raise UnreadableTrace(path, "nothing in it tells a stage, and it holds no GPU kernels either")
    return found


def _kineto(path: Path) -> Recording:
    document, unreadable = _decoded(read_text(path))
    usable = [event for event in document.traceEvents if event.ph == "X" and _possible(event)]
    unreadable += sum(event.ph == "X" for event in document.traceEvents) - len(usable)
    base = document.baseTimeNanoseconds if abs(document.baseTimeNanoseconds) < _LONGEST else 0
    kernels = [event for event in usable if _lower(event) == KERNEL]
    copies = [event for event in usable if _lower(event) in COPIES]
    launches = [event for event in usable if _lower(event) in LAUNCHES]
    rows = kernels + copies
    order = np.argsort([event.ts for event in rows], kind="stable") if rows else np.zeros(0, dtype=np.int64)
    calls = _spans(base, launches)
    gpu = arranged(
        _spans(base, rows),
        np.zeros(len(rows), dtype=np.int8),
        np.arange(len(rows)) < len(kernels),
        _numbers(rows),
        _numbers(launches),
        calls[:, 0],
    )
    # A kernel of RCCL's brings no metadata: the operator of the same external id does.
    params = {e.args.external: e.args for e in usable if e.name == "record_param_comms" and e.args.external}
    notes = _Notes(_spans(base, said := [e for e in usable if e.name.startswith("nccl:")]), said)
    operation: list[str | None] = []
    group: list[Group | None] = []
    for place, launched in zip(order.tolist(), gpu.launched.tolist(), strict=True):
        event = rows[place]
        if place >= len(kernels) or not _COMMUNICATION.search(event.name):
            operation.append(None)
            group.append(None)
            continue
        args = event.args if event.args.collective or event.args.group else params.get(event.args.external, event.args)
        operation.append(_operation(event.name, args.collective or notes.at(launched)))
        group.append(_group(args))
    info = document.distributedInfo if isinstance(document.distributedInfo, dict) else {}
    rank, rank_from = _rank(info.get("rank"), path.name)
    steps = [event for event in usable if _STEP.fullmatch(event.name) and _lower(event) != "gpu_user_annotation"]
    return Recording(
        path=path,
        rank=rank,
        rank_from=rank_from,
        world=_count(info.get("world_size")),
        gpu=gpu,
        operation=tuple(operation),
        group=tuple(group),
        steps=_spans(base, steps),
        unreadable=unreadable,
    )


def _nsys(file: NsysFile) -> Iterator[Recording]:
    found: list[Process] = processes(file)
    for process in found:
        operation = tuple(
            _operation(name, None) if kernel and _COMMUNICATION.search(name) else None
            for name, kernel in zip(process.names, process.gpu.kernel.tolist(), strict=True)
        )
        rank, rank_from = _rank(None, file.path.name if len(found) == 1 else "")
        yield Recording(
            path=file.path,
            rank=rank,
            rank_from=rank_from if rank is not None else f"process {process.pid}",
            world=None,
            gpu=process.gpu,
            operation=operation,
            group=tuple(None if each is None else Group("?") for each in operation),
            steps=intervals(()),
            unreadable=0,
        )


class _Notes:
    """The collective that torch says it launches at a moment."""

    def __init__(self, spans: Intervals, events: Sequence[_Event]) -> None:
        order = np.argsort(spans[:, 0], kind="stable")
        self._spans = spans[order]
        self._names = [events[place].name.removeprefix("nccl:") for place in order.tolist()]

    def at(self, moment: int) -> str | None:
        place = int(np.searchsorted(self._spans[:, 0], moment, side="right")) - 1
        return self._names[place] if place >= 0 and moment <= self._spans[place, 1] else None


def _operation(kernel: str, said: str | None) -> str:
    """The operation: as torch says it, else as the kernel's name does. A send-receive kernel may be either."""
    name = (said or kernel).lower().replace("_", "")
    for known in _OPERATIONS:
        if known in name:
            return known
    if said:
        return "send-receive" if name.startswith(("send", "recv")) else said
    return SEND_RECEIVE if "sendrecv" in name else "communication"


def _group(args: _Args) -> Group:
    ranks = None
    if args.ranks:
        try:
            ranks = tuple(msgspec.json.decode(args.ranks, type=list[int]))[:_MOST_RANKS]
        except (msgspec.MsgspecError, UnicodeError):
            ranks = None
    description = args.description if args.description not in (None, *_UNNAMED) else None
    if description:
        return Group(description, description, ranks)
    if ranks:
        return Group(f"ranks {_short(ranks)}", None, ranks)
    return Group(f"group {args.group}" if args.group else "?")


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")


def _rank(said: object, name: str) -> tuple[int | None, str]:
    if (rank := _count(said)) is not None:
        return rank, "the trace"
    if (found := _RANK_IN_NAME.search(name)) is not None and int(found[1]) < _MOST_RANKS:
        return int(found[1]), "file name"
    return None, "nothing"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_RANKS else None


def _lower(event: _Event) -> str:
    return (event.cat or "").lower()


def _possible(event: _Event) -> bool:
    start, length = event.ts * 1000, event.dur * 1000
    return math.isfinite(start) and abs(start) < _LONGEST and 0 <= length < _LONGEST


def _spans(base: int, events: Sequence[_Event]) -> Intervals:
    starts = (base + round(event.ts * 1000) for event in events)
    return intervals((start, start + round(event.dur * 1000)) for start, event in zip(starts, events, strict=True))


def _numbers(events: Sequence[_Event]) -> npt.NDArray[np.int64]:
    numbers = (event.args.correlation for event in events)
    return np.fromiter((n if abs(n) < _LONGEST else 0 for n in numbers), dtype=np.int64, count=len(events))


def _decoded(text: bytes | bytearray) -> tuple[_Document, int]:
    """The document, and how many events in it cannot be read. A bare list of events is a trace, too."""
    try:
        if bytes(text[:64]).lstrip().startswith(b"["):
            return _Document(msgspec.json.decode(text, type=list[_Event])), 0
        return msgspec.json.decode(text, type=_Document), 0
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        top = json.loads(bytes(text).decode("utf-8", "replace"))
    except RecursionError:
        raise Undecodable("it is nested too deeply to be a trace") from None
    except ValueError as fault:
        raise Undecodable(f"it is not JSON: {fault}") from None
    raw = top.get("traceEvents") if isinstance(top, dict) else top
    if not isinstance(raw, list):
        raise Undecodable("it is JSON, but not a trace: it has no list of `traceEvents`")
    events = [event for each in raw if (event := _lenient(each)) is not None]
    about = top if isinstance(top, dict) else {}
    base = about.get("baseTimeNanoseconds", 0)
    whole = base if isinstance(base, int) and not isinstance(base, bool) else 0
    return _Document(events, whole, about.get("distributedInfo")), len(raw) - len(events)


def _lenient(raw: Any) -> _Event | None:
    for fields in (raw, {k: v for k, v in raw.items() if k != "args"} if isinstance(raw, dict) else raw):
        try:
            return msgspec.convert(fields, _Event)
        except (msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError):
            continue
    return None
