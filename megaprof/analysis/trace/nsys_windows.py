"""Reads the traces in files of Nsight Systems, exported to SQLite.

A file may hold several processes with several windows each. Every window becomes a `Trace`. Times are wall-clock
nanoseconds: ``utcEpochNs`` of the session plus an event's own time. They are comparable between the ranks of one host.
The ``.nsys.json`` of a window, which is found by host, process and step, has its metadata. Without such a file, the
metadata come from the ranges alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.columns import ANNOTATION, COPIES, KERNEL, LAUNCHES, LONGEST, Events
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.gpu import activities, without_kernels, without_times
from megaprof.analysis.trace.nsys_tables import RANGES, SQLITE, events_in, exported, opened
from megaprof.analysis.trace.steps import FORWARD_ONLY
from megaprof.analysis.trace.traces import Part, Trace, TracedRange, names_a_step, refusing, within
from megaprof.formats import ranges
from megaprof.formats.metadata import MOST, MOST_STEPS, Metadata, ModelChunk, read_sidecar, sidecars
from megaprof.formats.names import parse_artifact_name, sanitise
from megaprof.parallel.topology import AXES, ParallelSizes, RankCoords

_NO_RANGES = "it holds no NVTX ranges: it is no export of Nsight Systems', or nsys did not trace nvtx"
#: What steps are called in recordings by others (GLOB).
_LIKE_STEPS = "*[Ss][Tt][Ee][Pp]*", "*[Ii][Tt][Ee][Rr]*"
_IN_NAME = re.compile(r"rank[._-]?(\d{1,7})(?!\d)", re.ASCII)


@dataclass(frozen=True)
class NsysFile:
    """A file to read."""

    path: Path
    """The export, or a report that will be exported first."""
    sizes: ParallelSizes | None = None
    """The least parallel sizes of the job, from the ranges of its files; None if metadata have the sizes."""


def find_nsys(paths: Sequence[Path]) -> list[NsysFile]:
    """Returns the files of nsys to read, without the reports whose export is one of ``paths``, too.

    Opens files without any ``.nsys.json`` next to them, to find the sizes that all of them show together.
    """
    exports = {path for path in paths if path.suffix == SQLITE}
    paths = [path for path in paths if path in exports or path.with_suffix(SQLITE) not in exports]
    bare_folders = {folder for folder in {path.parent for path in paths} if not sidecars(folder)}
    sizes = _shown_sizes([path for path in paths if path.parent in bare_folders])
    return [NsysFile(path, sizes if path.parent in bare_folders else None) for path in paths]


def read_nsys(file: NsysFile) -> list[Trace]:
    """Returns megaprof's windows in a file, in order of process and time. Raises Undecodable, and nothing else."""
    with refusing():
        return NsysWindows(file).traces()


def events_of(path: Path, part: Part, base: int) -> Iterator[dict[str, Any]]:
    """Yields all events of one process in one window, in Chrome's format. ``base``: when the session began, in
    nanoseconds since the epoch. Raises Undecodable and OSError."""
    with opened(path) as tables:
        events = events_in(tables, ["*"])[part.pid]
    for category in (ANNOTATION, *LAUNCHES, KERNEL, *COPIES):
        columns = events.take(category)
        start = columns.spans[:, 0] + base
        columns = columns.rows((start >= part.begin) & (start < part.end))
        for name, thread, (start_ns, end_ns) in zip(
            columns.name.tolist(), columns.thread.tolist(), columns.spans.tolist(), strict=True
        ):
            yield {
                **{"ph": "X", "cat": category, "name": events.names[name], "pid": part.pid},
                **{"tid": events.threads[thread][1], "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000},
            }


class NsysWindows:
    """The windows in a file. Raises Undecodable, and OSError if it cannot be read."""

    def __init__(self, file: NsysFile) -> None:
        self._path, self._sizes = exported(file.path), file.sizes
        self._metadata: dict[Path, Metadata] = {}
        self._notes: list[Note] = []
        self._sidecars = sidecars(self._path.parent)
        with opened(self._path) as tables:
            has_host = tables.has("TARGET_INFO_SYSTEM_ENV", "name", "value")
            hosts = tables.rows("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'") if has_host else ()
            self._host = next((name for (name,) in hosts if isinstance(name, str) and name), None)
            self._has_gpu = tables.has("TARGET_INFO_GPU", "id") and any(tables.rows("SELECT id FROM TARGET_INFO_GPU"))
            self._has_ranges = tables.has(*RANGES)
            if not self._has_ranges and not tables.has("TARGET_INFO_SESSION_START_TIME"):
                raise Undecodable(_NO_RANGES)
            self.processes = events_in(tables, (f"{ranges.PREFIX}*", *_LIKE_STEPS))
            """The events of each process."""

    def traces(self) -> list[Trace]:
        if not self._has_ranges:
            raise Undecodable(_NO_RANGES)
        if not any(map(names_a_step, self.processes.values())):
            return []
        opened = {pid: _ranges(events) for pid, events in sorted(self.processes.items())}
        opened = {pid: traced for pid, traced in opened.items() if traced}
        traces = [trace for pid, traced in opened.items() for trace in self._of_process(pid, traced, len(opened) == 1)]
        if broken := sum(events.impossible[ANNOTATION] for events in self.processes.values()):
            self._notes.append(Note("events_left_out", files=(self._path.name,), count=broken))
        if traces and self._notes:
            traces[0] = replace(traces[0], warnings=(*self._notes, *traces[0].warnings))
        return traces

    def _of_process(self, pid: int, traced: list[TracedRange], only_process: bool) -> Iterator[Trace]:
        events = self.processes[pid]
        if not (windows := list(self._windows(pid, traced, only_process))):
            return
        gpu, *_ = activities(events, None)
        for number, (metadata, outermost, warnings) in enumerate(windows):
            begin = windows[number - 1][1][-1].end if number else -LONGEST
            end = windows[number + 1][1][0].start if number + 1 < len(windows) else LONGEST
            window_gpu = gpu.rows((gpu.launched >= begin) & (gpu.launched < end))
            has_kernels = bool(window_gpu.kernel.any())
            why_none = without_kernels(metadata, 0, has_gpu=self._has_gpu, nsys=True)
            yield Trace(
                path=self._path,
                metadata=metadata,
                ranges=tuple(within(traced, outermost[0].start, outermost[-1].end)),
                gpu=window_gpu if has_kernels else None,
                unseen=without_times(window_gpu) if has_kernels else why_none,
                warnings=warnings,
                knows_collectives=has_kernels,
                part=Part(pid, begin, end),
                base=events.base,
            )

    def _windows(
        self, pid: int, rows: list[TracedRange], only_process: bool
    ) -> Iterator[tuple[Metadata, list[TracedRange], tuple[Note, ...]]]:
        """Yields the metadata of each window, its outermost ranges, and notes about it."""
        reach, last_path = -LONGEST, None
        windows: list[tuple[Path | None, Metadata, list[TracedRange]]] = []
        for row in rows:
            step = row.name.fields.get("step")
            if step is None or step >= MOST_STEPS or row.end <= reach or row.start < reach:
                continue
            reach = row.end
            path = self._sidecar(pid, row, step)
            if path is not None and path == last_path:
                windows[-1][2].append(row)
            elif path is not None:
                windows.append((path, self._metadata[path], [row]))
            elif (derived := self._derived(pid, row, step, rows, only_process)) is not None:
                windows.append((None, derived, [row]))
            last_path = path
        # A process that ended with open ranges: they have no end, or all have the end of the process.
        ends = Counter(row.end for row in rows)
        cut_ends = self.processes[pid].cut | {end for end, count in ends.items() if count > 1}
        bare_steps = sorted({metadata.steps[0] for path, metadata, _ in windows if path is None})
        for path, metadata, outermost in windows:
            if not metadata.truncated and outermost[-1].end in cut_ends:
                metadata = replace(metadata, truncated=True, truncated_reason="the process ended inside it")
            is_first = path is None and metadata.steps[0] == bare_steps[0]
            note = Note("without_sidecar", files=(self._path.name,), steps=tuple(bare_steps), count=pid)
            yield metadata, outermost, (note,) if is_first else ()

    def _sidecar(self, pid: int, row: TracedRange, step: int) -> Path | None:
        """Returns the ``.nsys.json`` of this host and process for the window with a step's range; None if there is
        none."""
        coordinates = [row.name.fields.get(axis) for axis in AXES]
        for path in self._sidecars:
            name = parse_artifact_name(path.name)
            if name is None or name.target != sanitise(row.name.label) or name.step > step:
                continue
            if [getattr(name.place, axis) for axis in AXES] != coordinates:
                continue
            metadata = self._read_sidecar(path)
            if metadata is None or metadata.pid != pid or self._host not in (None, metadata.host):
                continue
            if metadata.target == row.name.label and metadata.steps[0] <= step <= metadata.steps[1]:
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

    def _derived(
        self, pid: int, top: TracedRange, step: int, rows: list[TracedRange], only_process: bool
    ) -> Metadata | None:
        """Returns the metadata that the ranges alone show; None if they have no coordinates."""
        fields = {axis: top.name.fields.get(axis) for axis in AXES}
        inner_rows = within(rows, top.start, top.end)
        passes = [row.name for row in inner_rows if row.name.label in ranges.PASSES]
        chunks = 1 + max((name.fields.get("chunk") or 0 for name in passes), default=0)
        coordinates = {axis: number for axis, number in fields.items() if number is not None and number < MOST}
        if len(coordinates) < len(AXES) or chunks > MOST:
            return None
        beside = map(self._read_sidecar, self._sidecars)
        job_sizes = self._sizes or next((metadata.sizes for metadata in beside if metadata is not None), None)
        least_sizes = {axis: max(number + 1, getattr(job_sizes, axis, 1)) for axis, number in coordinates.items()}
        sizes = ParallelSizes(**least_sizes, vpp=chunks)
        match = _IN_NAME.search(self._path.name) if only_process else None
        # Without a number, a rank gets its place in Megatron's order, if the sizes are right.
        place = coordinates["cp"] + sizes.cp * (coordinates["dp"] + sizes.dp * coordinates["pp"])
        rank = int(match[1]) if match else coordinates["tp"] + sizes.tp * place
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
            pid=pid,
        )


def _ranges(events: Events) -> list[TracedRange]:
    return [TracedRange(*meant) for meant in events.meant(ranges.parse, events.take(ANNOTATION))]


def _chunk(chunk: int, inner_rows: Sequence[TracedRange]) -> ModelChunk:
    """Returns the content of a model chunk, as far as the module ranges in its first forward show it."""
    forwards = (row for row in inner_rows if row.name.label == ranges.FORWARD and row.name.fields.get("chunk") == chunk)
    first_forward = next(forwards, None)
    modules = (
        [row.name for row in within(inner_rows, first_forward.start, first_forward.end) if row.name.module]
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


def _shown_sizes(paths: Sequence[Path]) -> ParallelSizes | None:
    """Returns the smallest sizes that fit the coordinates in the ranges of these files; None without files."""
    sizes = dict.fromkeys(AXES, 1)
    for path in paths:
        try:
            with opened(exported(path)) as tables:
                for events in events_in(tables, [f"{ranges.PREFIX}*"], gpu=False).values():
                    for traced in _ranges(events):
                        shown = {axis: traced.name.fields.get(axis) or 0 for axis in AXES}
                        sizes |= {axis: number + 1 for axis, number in shown.items() if sizes[axis] <= number < MOST}
        except (Undecodable, OSError):  # reported when the file is read
            continue
    return ParallelSizes(**sizes) if paths else None
