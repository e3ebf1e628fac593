"""Fills the columns of `trace.columns` from a file of Nsight Systems, for each process in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.columns import ANNOTATION, KERNEL, LONGEST, Events, Numbered
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.nsys.tables import Tables

#: The bits of the process in the ids of processes and threads; they are above the bits of the thread.
_PROCESS = 0xFFFFFF
#: The tables of activities, with the category of each and the column that has a name or the kind of a copy.
_ACTIVITIES = (
    ("CUPTI_ACTIVITY_KIND_KERNEL", KERNEL, "demangledName"),
    ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", KERNEL, "demangledName"),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy", "copyKind"),
    ("CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset", "copyKind"),
)
_LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
_TIMES = ("start", "end", "correlationId")
#: The ``copyKind`` of a copy between devices (``CUPTI_ACTIVITY_MEMCPY_KIND_PTOP``), and what Kineto calls it.
_PEER_TO_PEER, _BETWEEN_DEVICES = 10, "Memcpy PtoP"
#: The values of `eventType` for push/pop and start/end ranges.
_RANGE_EVENTS = "(59, 60)"


class ProcessEvents(Events):
    """The events of one process."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.base = base
        self.cut: set[int] = set()
        """The ends of ranges that were open when the process or the recording ended."""


def is_time(value: object) -> bool:
    """Returns whether a value in a file is a possible time in nanoseconds."""
    return isinstance(value, int) and -LONGEST < value < LONGEST


def events_in(tables: Tables, patterns: Sequence[str], *, gpu: bool = True) -> dict[int, ProcessEvents]:
    """Returns the events of every process, by its number on its host: ranges whose names match one of ``patterns``
    (GLOB), and, with ``gpu``, activities of the GPU with the calls that launched them. Raises Undecodable."""
    base = _epoch(tables)
    names, threads = Numbered(), Numbered()
    processes: dict[int, ProcessEvents] = {}

    def put(pids: npt.NDArray[np.int64], category: str, **columns: npt.NDArray[Any]) -> None:
        for pid in np.unique(pids).tolist():
            events = processes.setdefault(pid, ProcessEvents(base))
            events.put(category, **{name: column[pids == pid] for name, column in columns.items()})

    rows = []
    for start, end, is_open, thread, name in _ranges(tables, patterns):
        pid = thread >> 24 & _PROCESS if isinstance(thread, int) else 0
        events = processes.setdefault(pid, ProcessEvents(base))
        if not (is_time(start) and is_time(end) and end >= start and isinstance(thread, int)):
            events.impossible[ANNOTATION] += 1
            continue
        rows.append((pid, names[name], threads[pid, thread & _PROCESS], start, end))
        if is_open:
            events.cut.add(base + end)
    found = np.array(rows, dtype=np.int64).reshape(-1, 5)
    number = found[:, 1:3].astype(np.int32)
    put(found[:, 0], ANNOTATION, name=number[:, 0], thread=number[:, 1], spans=found[:, 3:])
    for table, category, of_name in (*_ACTIVITIES, (_LAUNCHES, "cuda_runtime", "nameId")) if gpu else ():
        on_host = table == _LAUNCHES
        identity = "globalTid" if on_host else "globalPid"
        if not tables.has(table, *_TIMES, identity):
            continue
        where = [f"{identity} & {_PROCESS}"] if on_host else ["streamId", "deviceId", "contextId"]
        found = _array(tables, table, *_TIMES, of_name, f"({identity} >> 24) & {_PROCESS}", *where)
        backwards = found[:, 1] < found[:, 0]
        for pid in found[backwards, 4].tolist():
            processes.setdefault(pid, ProcessEvents(base)).impossible[category] += 1
        found = found[~backwards]
        kinds, kind = np.unique(found[:, 3], return_inverse=True)
        texts = {_PEER_TO_PEER: _BETWEEN_DEVICES} if of_name == "copyKind" else _names(tables, kinds)
        of_kind = [names[texts.get(number, table.rpartition("_")[2])] for number in kinds.tolist()]
        first, place = _distinct(found[:, 4:])
        of_place = [
            threads[(pid, thread) if on_host else (pid, f"stream {thread}", *device)]
            for pid, thread, *device in found[first, 4:].tolist()
        ]
        none = np.zeros(len(found), dtype=np.int64)
        put(
            found[:, 4],
            category,
            name=np.array(of_kind, dtype=np.int32)[kind],
            spans=found[:, :2],
            thread=np.array(of_place, dtype=np.int32)[place],
            correlation=found[:, 2],
            external=none,
            node=none,
            said=none.astype(np.int32),
        )
    for events in processes.values():
        events.names, events.threads = [*names], [*threads]
    return processes


def _ranges(tables: Tables, patterns: Sequence[str]) -> Iterator[tuple[Any, Any, bool, Any, str]]:
    """Yields start and end of every range, whether it was open when the recording ended, its thread and its name."""
    if not tables.has("NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid"):
        return
    name = "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
    registered = " OR ".join("value GLOB ?" for _ in patterns)
    query = (
        f"SELECT start, end, globalTid, {name} FROM NVTX_EVENTS WHERE eventType IN {_RANGE_EVENTS} AND "
        f"({registered.replace('value', 'text')} OR text IS NULL AND textId IN "
        f"(SELECT id FROM StringIds WHERE {registered}))"
    )
    last = None
    for start, end, thread, text in tables.rows(query, (*patterns, *patterns)):
        if isinstance(text, str):
            if end is None and last is None:
                query = "SELECT MAX(end) FROM NVTX_EVENTS WHERE typeof(end) = 'integer'"
                last = next((moment for (moment,) in tables.rows(query) if is_time(moment)), 0)
            still = max(last or 0, start) if isinstance(start, int) else None
            yield start, still if end is None else end, end is None, thread, text


def _array(tables: Tables, table: str, *columns: str) -> npt.NDArray[np.int64]:
    """Returns some columns of a table as an array of integers. A missing number becomes 0, and a missing column -1.
    Leaves out rows with anything else, or with a time that is impossible."""
    wanted = [column if not column.isalpha() or tables.has(table, column) else "-1" for column in columns]
    values = ", ".join(f"COALESCE({each}, 0)" for each in wanted)
    whole = " AND ".join(f"typeof({each}) IN ('integer', 'null')" for each in wanted)
    rows = chain.from_iterable(tables.rows(f"SELECT {values} FROM {table} WHERE {whole}"))
    numbers = np.fromiter(rows, dtype=np.int64).reshape(-1, len(columns))
    return numbers[(np.abs(numbers[:, :2]) < LONGEST).all(axis=1)]


def _distinct(rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Returns the index of the first of each kind of equal ``rows``, and the kind of every row."""
    kind = np.zeros(len(rows), dtype=np.intp)
    for column in rows.T:
        kind = kind * (len(rows) + 1) + np.unique(column, return_inverse=True)[1]
        kind = np.unique(kind, return_inverse=True)[1]
    return np.unique(kind, return_index=True)[1], kind


def _names(tables: Tables, numbers: npt.NDArray[np.int64]) -> dict[int, str]:
    """Returns the names with these ``numbers``, by number."""
    wanted_numbers = set(numbers.tolist())
    if not wanted_numbers or not tables.has("StringIds", "id", "value"):
        return {}
    rows = tables.rows("SELECT id, value FROM StringIds")
    return {number: name for number, name in rows if number in wanted_numbers and isinstance(name, str)}


def _epoch(tables: Tables) -> int:
    """Returns when the session began, in nanoseconds since the epoch."""
    if tables.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        for (start,) in tables.rows("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME LIMIT 1"):
            if is_time(start):
                return int(start)
    raise Undecodable("it does not say when its session began (TARGET_INFO_SESSION_START_TIME)")
