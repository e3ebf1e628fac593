"""Reads the traces in files of Nsight Systems, exported to SQLite.

A file may hold several processes with several windows each. Every window becomes a `Trace`. Times are wall-clock
nanoseconds: ``utcEpochNs`` of the session plus an event's own time. They are comparable between the ranks of one host.
The ``.nsys.json`` of a window, which is found by host, process and step, has its metadata. Without such a file, the
metadata come from the ranges alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.columns import LONGEST
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.gpu import Activities
from megaprof.analysis.trace.intervals import Intervals, intervals
from megaprof.analysis.trace.nsys.export import exported
from megaprof.analysis.trace.nsys.gpu import (
    ACTIVITIES,
    COLUMNS,
    COLUMNS_OF_LAUNCH,
    COPIES,
    LAUNCHES,
    PROCESS,
    is_time,
    launched_between,
    read_process,
)
from megaprof.analysis.trace.nsys.tables import Tables, opened
from megaprof.analysis.trace.steps import FORWARD_ONLY, grouped
from megaprof.analysis.trace.traces import Part, Trace, TracedRange, refusing
from megaprof.analysis.trace.unseen import without_kernels, without_times
from megaprof.formats import ranges
from megaprof.formats.metadata import MOST, MOST_STEPS, Metadata, ModelChunk
from megaprof.formats.names import parse_artifact_name, sanitise
from megaprof.formats.nsys import read_sidecar, sidecars
from megaprof.formats.remote import files_below
from megaprof.parallel.topology import AXES, ParallelSizes, RankCoords

SQLITE, REPORT = ".sqlite", ".nsys-rep"

#: The values of `eventType` for push/pop and start/end ranges.
_RANGE_EVENTS = "(59, 60)"
_OURS = f"{ranges.PREFIX}*"
_NAME = "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
_STEP = re.compile(r"(?:ProfilerStep|(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?))[ #:=_-]{0,2}\d+", re.ASCII | re.I)
_IN_NAME = re.compile(r"rank[._-]?(\d{1,7})(?!\d)", re.ASCII)


@dataclass(frozen=True)
class NsysFile:
    """A file to read."""

    path: Path
    """The export, or a report that will be exported first."""
    sizes: ParallelSizes | None = None
    """The least parallel sizes of the job, from the ranges of its files; None if metadata have the sizes."""


def is_nsys(path: Path) -> bool:
    """Returns whether a file has a suffix of nsys."""
    return path.name.endswith((SQLITE, REPORT))


def find_nsys(source: Path) -> list[NsysFile]:
    """Returns the files of nsys under a directory, or one file. Leaves out reports whose export is next to them.

    Opens files without any ``.nsys.json`` next to them, to find the sizes that all of them show together.
    """
    files = [source] if source.is_file() else files_below(source, (SQLITE, REPORT))
    present = set(files)
    paths = sorted(
        path for path in files if path.suffix == SQLITE or path.with_suffix(SQLITE) not in present or source.is_file()
    )
    bare_folders = {folder for folder in {path.parent for path in paths} if next(sidecars(folder), None) is None}
    sizes = _shown_sizes([path for path in paths if path.parent in bare_folders])
    return [NsysFile(path, sizes if path.parent in bare_folders else None) for path in paths]


def read_nsys(file: NsysFile) -> list[Trace]:
    """Returns megaprof's windows in a file, in order of process and time. Raises UnreadableTrace, and nothing else."""
    path = file.path
    with refusing(path), opened(exported(path)) as tables:
        return _Reader(replace(file, path=exported(path)), tables).traces()


@dataclass(frozen=True)
class Process:
    """The GPU activity of one process, with or without ranges of megaprof's."""

    pid: int
    """The process's number on its host."""
    gpu: Activities
    """Its activities in order of their start."""
    names: list[str]
    """The name of each activity's kernel; empty for copies and memsets."""
    steps: Intervals
    """When the host was in ranges that are named like a step (``ProfilerStep#7``, ``iteration 7``), outermost ones
    only."""


def processes(file: NsysFile) -> list[Process]:
    """Returns every process with GPU activities. Raises Undecodable and OSError."""
    with opened(exported(file.path)) as tables:
        base, gpu_processes = _epoch(tables), []
        pids: set[int] = set()
        for table in ACTIVITIES:
            if tables.has(table, *COLUMNS):
                query = f"SELECT DISTINCT (globalPid >> 24) & {PROCESS} FROM {table} LIMIT 1024"
                pids |= {pid for (pid,) in tables.rows(query) if isinstance(pid, int)}
        steps = _steps(tables, base)
        for pid in sorted(pids):
            gpu_processes.append(Process(pid, *read_process(tables, base, pid), intervals(steps.get(pid, ()))))
        return gpu_processes


def _steps(tables: Tables, base: int) -> dict[int, list[tuple[int, int]]]:
    """Returns the steps of each process, in order of time."""
    steps_by_process: dict[int, list[tuple[int, int]]] = {}
    if not tables.has("NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid"):
        return steps_by_process
    query = (
        f"SELECT start, end, globalTid, {_NAME} AS name FROM NVTX_EVENTS WHERE eventType IN {_RANGE_EVENTS} AND "
        "(name LIKE '%step%' OR name LIKE '%iter%') ORDER BY start, end DESC"
    )
    for start, end, thread, name in tables.rows(query):
        if not (is_time(start) and is_time(end) and end >= start and isinstance(thread, int) and isinstance(name, str)):
            continue
        process_steps = steps_by_process.setdefault(thread >> 24 & PROCESS, [])
        if _STEP.fullmatch(name) and (not process_steps or base + start >= process_steps[-1][1]):
            process_steps.append((base + start, base + end))
    return steps_by_process


def events_of(path: Path, part: Part, base: int) -> Iterator[dict[str, Any]]:
    """Yields all events of one process in one window, in Chrome's format. ``base``: when the session began, in
    nanoseconds since the epoch. Raises Undecodable and OSError."""
    with opened(path) as tables:
        bounds = part.begin - base, part.end - base
        queries = [("user_annotation", f"SELECT start, end, globalTid, {_NAME} FROM NVTX_EVENTS", "globalTid")]
        if tables.has(LAUNCHES, *COLUMNS_OF_LAUNCH, "nameId"):
            queries.append(
                ("cuda_runtime", f"SELECT start, end, globalTid, {_text_of('nameId')} FROM {LAUNCHES}", "globalTid")
            )
        for table in (*ACTIVITIES, *COPIES):
            if tables.has(table, *COLUMNS, "streamId"):
                name = (
                    _text_of("demangledName") if tables.has(table, "demangledName") else f"'{table.rpartition('_')[2]}'"
                )
                kind = "kernel" if table in ACTIVITIES else "gpu_memcpy"
                queries.append((kind, f"SELECT start, end, streamId, {name} FROM {table}", "globalPid"))
        for kind, query, process in queries:
            where = f" WHERE start >= ? AND start < ? AND ({process} >> 24) & {PROCESS} = ? AND end >= start"
            for start, end, thread, name in tables.rows(query + where, (*bounds, part.pid)):
                if not (is_time(start) and is_time(end) and isinstance(thread, int) and isinstance(name, str)):
                    continue
                tid = thread & PROCESS if process == "globalTid" else f"stream {thread}"
                yield {
                    **{"ph": "X", "cat": kind, "name": name, "pid": part.pid, "tid": tid},
                    **{"ts": start / 1000, "dur": (end - start) / 1000},
                }


def _text_of(column: str) -> str:
    return f"(SELECT value FROM StringIds WHERE id = {column})"


@dataclass(frozen=True)
class _Row:
    """One of megaprof's ranges in the file, in wall-clock nanoseconds."""

    name: ranges.RangeName
    start: int
    end: int
    pid: int
    open: bool


_start = attrgetter("start")


class _Reader:
    """One open file."""

    def __init__(self, file: NsysFile, tables: Tables) -> None:
        self._file = file
        self._tables = tables
        if not tables.has("NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid"):
            raise Undecodable("it holds no NVTX ranges: it is no export of Nsight Systems', or nsys did not trace nvtx")
        self._base = _epoch(tables)
        self._host = _host(tables)
        self._broken = 0
        self._metadata: dict[Path, Metadata] = {}
        self._notes: list[Note] = []

    def traces(self) -> list[Trace]:
        by_process = grouped(self.rows(), attrgetter("pid"))
        traces = [
            trace for pid, rows in sorted(by_process.items()) for trace in self._of_process(rows, len(by_process) == 1)
        ]
        if self._broken:
            self._notes.append(Note("events_left_out", files=(self._file.path.name,), count=self._broken))
        if traces and self._notes:
            traces[0] = replace(traces[0], warnings=(*self._notes, *traces[0].warnings))
        return traces

    def rows(self) -> Iterator[_Row]:
        """Yields megaprof's ranges in the order of the file."""
        query = (
            f"SELECT start, end, globalTid, {_NAME} FROM NVTX_EVENTS WHERE eventType IN {_RANGE_EVENTS} AND "
            "(text GLOB ? OR text IS NULL AND textId IN (SELECT id FROM StringIds WHERE value GLOB ?))"
        )
        last_end = None
        for start, end, thread, text in self._tables.rows(query, (_OURS, _OURS)):
            name = ranges.parse(text) if isinstance(text, str) else None
            if name is None:
                continue
            is_open = end is None
            if is_open:
                last_end = self._last() if last_end is None else last_end
                end = max(last_end, start) if isinstance(start, int) else None
            if not (is_time(start) and is_time(end) and end >= start and isinstance(thread, int)):
                self._broken += 1
                continue
            yield _Row(name, self._base + start, self._base + end, thread >> 24 & PROCESS, is_open)

    def _last(self) -> int:
        """Returns when the last range ended."""
        query = "SELECT MAX(end) FROM NVTX_EVENTS WHERE typeof(end) = 'integer'"
        return next((last for (last,) in self._tables.rows(query) if is_time(last)), 0)

    def _of_process(self, rows: list[_Row], only_process: bool) -> Iterator[Trace]:
        rows.sort(key=lambda row: (row.start, -row.end))
        windows = list(self._windows(rows, only_process))
        gpu: Activities | None = None
        has_gpu = self._tables.has("TARGET_INFO_GPU", "id") and any(self._tables.rows("SELECT id FROM TARGET_INFO_GPU"))
        for number, (metadata, outermost, warnings) in enumerate(windows):
            pid = outermost[0].pid
            gpu = gpu or read_process(self._tables, self._base, pid)[0]
            begin = windows[number - 1][1][-1].end if number else -LONGEST
            end = windows[number + 1][1][0].start if number + 1 < len(windows) else LONGEST
            inner_ranges = tuple(
                TracedRange(row.name, row.start, row.end)
                for row in _within(rows, outermost[0].start, outermost[-1].end)
            )
            activities = launched_between(gpu, begin, end)
            yield Trace(
                path=self._file.path,
                metadata=metadata,
                ranges=inner_ranges,
                gpu=activities,
                unseen=without_times(activities)
                if activities is not None
                else without_kernels(metadata, 0, has_gpu=has_gpu, nsys=True),
                warnings=warnings,
                knows_collectives=activities is not None,
                part=Part(pid, begin, end),
                base=self._base,
            )

    def _windows(self, rows: list[_Row], only_process: bool) -> Iterator[tuple[Metadata, list[_Row], tuple[Note, ...]]]:
        """Yields the metadata of each window, its outermost ranges, and notes about it."""
        reach, last_path = -LONGEST, None
        windows: list[tuple[Path | None, Metadata, list[_Row]]] = []
        for row in rows:
            step = row.name.fields.get("step")
            if step is None or step >= MOST_STEPS or row.end <= reach or row.start < reach:
                continue
            reach = row.end
            path = self._sidecar(row, step)
            if path is not None and path == last_path:
                windows[-1][2].append(row)
            elif path is not None:
                windows.append((path, self._metadata[path], [row]))
            elif (derived := self._derived(row, step, rows, only_process)) is not None:
                windows.append((None, derived, [row]))
            last_path = path
        cut_ends = _cut_ends(rows)
        bare_steps = sorted({metadata.steps[0] for path, metadata, _ in windows if path is None})
        for path, metadata, outermost in windows:
            if not metadata.truncated and outermost[-1].end in cut_ends:
                metadata = replace(metadata, truncated=True, truncated_reason="the process ended inside it")
            is_first = path is None and metadata.steps[0] == bare_steps[0]
            note = Note(
                "without_sidecar", files=(self._file.path.name,), steps=tuple(bare_steps), count=outermost[0].pid
            )
            yield metadata, outermost, (note,) if is_first else ()

    def _sidecar(self, row: _Row, step: int) -> Path | None:
        """Returns the ``.nsys.json`` of this host and process for the window with a step's range; None if there is
        none."""
        coordinates = tuple(row.name.fields.get(axis) for axis in AXES)
        for path in sidecars(self._file.path.parent):
            name = parse_artifact_name(path.name)
            if name is None or name.target != sanitise(row.name.label) or name.step > step:
                continue
            if tuple(getattr(name.place, axis) for axis in AXES) != coordinates:
                continue
            metadata = self._read_sidecar(path)
            if (
                metadata is None
                or metadata.target != row.name.label
                or not metadata.steps[0] <= step <= metadata.steps[1]
            ):
                continue
            if metadata.pid == row.pid and self._host in (None, metadata.host):
                return path
        return None

    def _read_sidecar(self, path: Path) -> Metadata | None:
        if path not in self._metadata:
            try:
                self._metadata[path] = read_sidecar(path)
            except (OSError, ValueError) as fault:
                if (note := Note("skipped", files=(path.name,), said=str(fault))) not in self._notes:
                    self._notes.append(note)
        return self._metadata.get(path)

    def _neighbours(self) -> ParallelSizes | None:
        """Returns the sizes in other metadata next to the file; None if there are none."""
        for path in sidecars(self._file.path.parent):
            if (metadata := self._read_sidecar(path)) is not None:
                return metadata.sizes
        return None

    def _derived(self, top: _Row, step: int, rows: list[_Row], only_process: bool) -> Metadata | None:
        """Returns the metadata that the ranges alone show; None if they have no coordinates."""
        fields = {axis: top.name.fields.get(axis) for axis in AXES}
        inner_rows = _within(rows, top.start, top.end)
        passes = [row.name for row in inner_rows if row.name.label in ranges.PASSES]
        chunks = 1 + max((name.fields.get("chunk") or 0 for name in passes), default=0)
        coordinates = {axis: number for axis, number in fields.items() if number is not None and number < MOST}
        if len(coordinates) < len(AXES) or chunks > MOST:
            return None
        job_sizes = self._file.sizes or self._neighbours()
        least_sizes = {axis: max(number + 1, getattr(job_sizes, axis, 1)) for axis, number in coordinates.items()}
        sizes = ParallelSizes(**least_sizes, vpp=chunks)
        match = _IN_NAME.search(self._file.path.name) if only_process else None
        rank = int(match[1]) if match else _rank(coordinates, sizes)
        if rank >= MOST:
            return None
        microbatches = [number for name in passes if (number := name.fields.get("mb")) is not None]
        count = max(microbatches) + 1 if microbatches else None
        return Metadata(
            target=top.name.label,
            coords=RankCoords(rank=rank, sizes=sizes, **coordinates),
            steps=(step, step),
            schedule="no_pipelining" if sizes.pp == 1 else "interleaved" if chunks > 1 else "1f1b",
            forward_only=top.name.label in FORWARD_ONLY,
            microbatches=None if count is None or count > MOST else count,
            chunks=tuple(_chunk(chunk, inner_rows) for chunk in range(chunks)) if chunks <= 64 else (),
            host=self._host,
            pid=top.pid,
        )


def _within(rows: Sequence[_Row], start: int, end: int) -> list[_Row]:
    """Returns the rows that lie between ``start`` and ``end``, in order of their start."""
    first_index, end_index = bisect_left(rows, start, key=_start), bisect_right(rows, end, key=_start)
    return [row for row in rows[first_index:end_index] if row.end <= end]


def _chunk(chunk: int, inner_rows: Sequence[_Row]) -> ModelChunk:
    """Returns the content of a model chunk, as far as the module ranges in its first forward show it."""
    forwards = (row for row in inner_rows if row.name.label == ranges.FORWARD and row.name.fields.get("chunk") == chunk)
    first_forward = next(forwards, None)
    modules = (
        [row.name for row in _within(inner_rows, first_forward.start, first_forward.end) if row.name.module]
        if first_forward
        else []
    )
    if not modules:
        return ModelChunk()
    labels = [name.label for name in modules]
    numbers = [name.fields.get("n") for name in modules if name.label == ranges.LAYER and "mtp" not in name.fields]
    return ModelChunk(
        embedding=ranges.EMBEDDING in labels,
        layers=len(numbers),
        layer_numbers=tuple(number if number is None or number < MOST else None for number in numbers),
        mtp=labels.count(ranges.MTP_LAYER),
        loss=ranges.OUTPUT_LAYER in labels,
    )


def _rank(place: dict[str, int], sizes: ParallelSizes) -> int:
    """Returns a number for a rank whose number is unknown: its place in Megatron's order, if the sizes are right."""
    inner = place["dp"] + sizes.dp * place["pp"]
    return place["tp"] + sizes.tp * (place["cp"] + sizes.cp * inner)


def _cut_ends(rows: Sequence[_Row]) -> set[int]:
    """Returns the moments at which a process ended with open ranges. Such ranges have no end, or all have the end of
    the process."""
    ends = Counter(row.end for row in rows)
    return {row.end for row in rows if row.open or ends[row.end] > 1}


def _epoch(tables: Tables) -> int:
    """Returns when the session began, in nanoseconds since the epoch."""
    if tables.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        for (start,) in tables.rows("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME LIMIT 1"):
            if is_time(start):
                return int(start)
    raise Undecodable("it does not say when its session began (TARGET_INFO_SESSION_START_TIME)")


def _host(tables: Tables) -> str | None:
    if tables.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
        rows = tables.rows("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname' LIMIT 1")
        return next((name for (name,) in rows if isinstance(name, str) and name), None)
    return None


def _shown_sizes(paths: Sequence[Path]) -> ParallelSizes | None:
    """Returns the smallest sizes that fit the coordinates in the ranges of these files; None without files."""
    sizes = dict.fromkeys(AXES, 1)
    for path in paths:
        try:
            with opened(exported(path)) as tables:
                for row in _Reader(NsysFile(path), tables).rows():
                    for axis in AXES:
                        if (number := row.name.fields.get(axis)) is not None and number < MOST:
                            sizes[axis] = max(sizes[axis], number + 1)
        except (Undecodable, OSError):  # reported when the file is read
            continue
    return ParallelSizes(**sizes) if paths else None
