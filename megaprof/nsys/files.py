"""Reads files of Nsight Systems: fills the columns of `trace.columns` from their tables, for each process, and makes a
`Trace` of every window of ours. Reports (``.nsys-rep``) are exported to SQLite with this machine's ``nsys``, once per
report, next to it.

Times are wall-clock nanoseconds: ``utcEpochNs`` of the session plus an event's own time. They are comparable between
the ranks of one host. The ``.nsys.json`` of a window, which is found by host, process and step, has its metadata.

A SQLite file of any origin is opened in such a way that it can do no harm: read-only and immutable, without extensions.
Only plain tables are read, because a view or a virtual table is a program. A query that takes longer than a healthy
file of this size needs is broken off. The number of rows is limited.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.columns import ANNOTATION, COPIES, KERNEL, LAUNCHES, LONGEST, Events
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.gpu import activities, without_kernels, without_times
from megaprof.analysis.trace.traces import SQLITE, Trace, TracedRange, within
from megaprof.formats import ranges
from megaprof.formats.inputs import RemotePath, local_copy, most_bytes, open_input, read_input
from megaprof.formats.metadata import NSYS_SUFFIX, Metadata, read_metadata
from megaprof.formats.names import is_shard, parse_artifact_name, sanitise, temporary_path
from megaprof.parallel.topology import AXES

_NO_RANGES = "it holds no NVTX ranges: it is no export of Nsight Systems', or nsys did not trace nvtx"
_NO_METADATA = "no .nsys.json of its windows lies beside it: megaprof writes one for each into --profile-dir"
#: What steps are called in recordings by others (GLOB).
_LIKE_STEPS = "*[Ss][Tt][Ee][Pp]*", "*[Ii][Tt][Ee][Rr]*"
#: The least seconds that an export may take, and the bytes for which it may take one second more.
_EXPORT_SECONDS, _EXPORTED_A_SECOND = 600.0, 500_000
_MAGIC = b"SQLite format 3\0"
#: The seconds that reading may take, and the bytes for which it may take one second more. A healthy file is read at
#: 100 MB/s or more.
_SECONDS, _BYTES_A_SECOND = 60.0, 2_000_000
_STEPS = 20_000  # steps of SQLite's virtual machine between two looks at the clock
_LONGEST_VALUE = 8 << 20
#: The most bytes of memory that a row takes.
_ROW_BYTES = 400
#: The values of `hidden` in `pragma table_xinfo` for computed columns.
_COMPUTED = (2, 3)
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
#: The table with the beginning of the session.
_SESSION = "TARGET_INFO_SESSION_START_TIME"
#: The table of ranges, and its columns.
_RANGES = ("NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid")
#: The values of `eventType` for push/pop and start/end ranges.
_RANGE_EVENTS = "(59, 60)"


def exported(path: Path) -> Path:
    """Returns the SQLite export of a report. A file that is an export already is returned as it is.

    Uses an export next to the report if it is not older than the report. Otherwise nsys makes one, which appears whole.
    Raises Undecodable and OSError.
    """
    if path.suffix == SQLITE:
        return path
    if isinstance(path, RemotePath):
        raise Undecodable(
            f"nsys exports no remote file: run 'nsys export --type sqlite' on it, and put the {SQLITE} next to it"
        )
    export_path = path.with_suffix(SQLITE)
    with open_input(path) as file:
        report_stat = os.fstat(file.fileno())
    if export_path.exists() and export_path.stat().st_mtime >= report_stat.st_mtime:
        return export_path
    nsys = shutil.which("nsys")
    if nsys is None:
        raise Undecodable(f"nsys is not on PATH here: run 'nsys export --type sqlite {path.name}' where it is")
    temporary = temporary_path(export_path)
    command = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={temporary}", str(path)]
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_EXPORT_SECONDS + report_stat.st_size / _EXPORTED_A_SECOND,
            check=False,
        )
        if completed.returncode or not temporary.exists():
            lines = (completed.stderr or completed.stdout).decode("utf-8", "replace").split("\n")
            why = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
            raise Undecodable(f"nsys export failed: {why[-200:]}")
        os.replace(temporary, export_path)
    except subprocess.TimeoutExpired:
        raise Undecodable("nsys export did not end") from None
    finally:
        temporary.unlink(missing_ok=True)
    return export_path


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens ``path``. Raises Undecodable, also for a fault of SQLite's in its block, and OSError if it cannot be
    read."""
    local_path = local_copy(path)
    with open_input(local_path) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise Undecodable("it is no SQLite file")
        deadline = time.monotonic() + _SECONDS + file.seek(0, 2) / _BYTES_A_SECOND
    try:
        uri = local_path.absolute().as_uri() + "?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            if hasattr(connection, "setlimit"):  # from Python 3.11
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
                connection.execute(f"PRAGMA {pragma}")
            yield connection
    except MemoryError:
        raise Undecodable("it does not fit into memory") from None
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError) as fault:
        if isinstance(fault, sqlite3.OperationalError) and "interrupted" in str(fault):
            raise Undecodable("reading it takes longer than any healthy file of its size does") from None
        problem = "is damaged" if isinstance(fault, (sqlite3.Error, sqlite3.Warning)) else "holds impossible values"
        raise Undecodable(f"its database {problem}: {' '.join(str(fault).split())[:200]}") from None


def _has(tables: sqlite3.Connection, table: str, *columns: str) -> bool:
    """Returns whether there is such a plain table, with these columns. Raises Undecodable if it computes some."""
    plain = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ? AND sql LIKE 'CREATE TABLE%'"
    if tables.execute(plain, (table,)).fetchone() is None:
        return False
    of_table = tables.execute(f'PRAGMA table_xinfo("{table}")').fetchall()
    if any(row[6] in _COMPUTED for row in of_table):
        raise Undecodable(f"its table {table} has computed columns, as no file of nsys's has")
    return {str(row[1]) for row in of_table}.issuperset(columns)


def _rows(tables: sqlite3.Connection, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of one of our queries. Raises Undecodable if there are more rows than fit into memory."""
    most_rows = most_bytes() // _ROW_BYTES
    for number, row in enumerate(tables.execute(query, values)):
        if number >= most_rows:
            raise Undecodable(f"it has more than {most_rows:,} rows to be read (see --max-input-mib)")
        yield row


def _columns(tables: sqlite3.Connection, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
    """Yields some columns of a table; nothing if there is no plain one with all of them."""
    if _has(tables, table, *columns):
        yield from _rows(tables, f"SELECT {', '.join(columns)} FROM {table}")


def _is_time(value: object) -> bool:
    return isinstance(value, int) and -LONGEST < value < LONGEST


def _events_in(tables: sqlite3.Connection, patterns: Sequence[str]) -> dict[int, Events]:
    """Returns the events of every process, by its number on its host: ranges whose names match one of ``patterns``
    (GLOB), and activities of the GPU with the calls that launched them. Raises Undecodable."""
    (base,) = next(_columns(tables, _SESSION, "utcEpochNs"), (None,))
    if not _is_time(base):
        raise Undecodable(f"it does not say when its session began ({_SESSION})")
    names, threads = defaultdict[str, int](count().__next__), defaultdict[Any, int](count().__next__)
    processes: dict[int, Events] = {}

    def put(pids: npt.NDArray[np.int64], category: str, **columns: npt.NDArray[Any]) -> None:
        for pid in np.unique(pids).tolist():
            events = processes.setdefault(pid, Events(base))
            events.put(category, **{name: column[pids == pid] for name, column in columns.items()})

    rows = []
    for start, end, is_open, thread, name in _ranges(tables, patterns):
        pid = thread >> 24 & _PROCESS if isinstance(thread, int) else 0
        events = processes.setdefault(pid, Events(base))
        if not (_is_time(start) and _is_time(end) and end >= start and isinstance(thread, int)):
            events.impossible[ANNOTATION] += 1
            continue
        rows.append((pid, names[name], threads[pid, thread & _PROCESS], start, end))
        if is_open and name.startswith(ranges.PREFIX):
            events.cut.add(base + end)
    found = np.array(rows, dtype=np.int64).reshape(-1, 5)
    number = found[:, 1:3].astype(np.int32)
    put(found[:, 0], ANNOTATION, name=number[:, 0], thread=number[:, 1], spans=found[:, 3:])
    for table, category, of_name in (*_ACTIVITIES, (_LAUNCHES, "cuda_runtime", "nameId")):
        on_host = table == _LAUNCHES
        identity = "globalTid" if on_host else "globalPid"
        if not _has(tables, table, *_TIMES, identity):
            continue
        where = [f"{identity} & {_PROCESS}"] if on_host else ["streamId", "deviceId", "contextId"]
        found = _array(tables, table, *_TIMES, of_name, f"({identity} >> 24) & {_PROCESS}", *where)
        backwards = found[:, 1] < found[:, 0]
        for pid in found[backwards, 4].tolist():
            processes.setdefault(pid, Events(base)).impossible[category] += 1
        found = found[~backwards]
        kinds, kind = np.unique(found[:, 3], return_inverse=True)
        texts: dict[Any, Any] = {_PEER_TO_PEER: _BETWEEN_DEVICES}
        if of_name != "copyKind":
            wanted, strings = {*kinds.tolist()}, _columns(tables, "StringIds", "id", "value")
            texts = {number: text for number, text in strings if number in wanted and isinstance(text, str)}
        of_kind = [names[texts.get(number, table.rpartition("_")[2])] for number in kinds.tolist()]
        places = defaultdict[tuple[int, ...], int](count().__next__)
        place = [*map(places.__getitem__, zip(*found[:, 4:].T.tolist(), strict=True))]
        of_place = [
            threads[(pid, thread) if on_host else (pid, f"stream {thread}", *device)] for pid, thread, *device in places
        ]
        none = np.zeros(len(found), dtype=np.int64)
        put(
            found[:, 4],
            category,
            name=np.array(of_kind, dtype=np.int32)[kind],
            spans=found[:, :2],
            thread=np.array(of_place, dtype=np.int32)[np.array(place, dtype=np.intp)],
            correlation=found[:, 2],
            external=none,
            node=none,
            said=none.astype(np.int32),
        )
    for events in processes.values():
        events.names, events.threads = [*names], [*threads]
    return processes


def _ranges(tables: sqlite3.Connection, patterns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yields start and end of every range, whether it was open when the recording ended, its thread and its name. An
    open one ends with the last range that has an end."""
    if not _has(tables, *_RANGES):
        return
    last = "SELECT COALESCE(MAX(end), 0) FROM NVTX_EVENTS WHERE typeof(end) = 'integer'"
    name = "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
    registered = " OR ".join("value GLOB ?" for _ in patterns)
    query = (
        f"SELECT start, COALESCE(end, MAX(start, ({last}))), end IS NULL, globalTid, {name} FROM NVTX_EVENTS "
        f"WHERE eventType IN {_RANGE_EVENTS} AND ({registered.replace('value', 'text')} OR text IS NULL AND textId IN "
        f"(SELECT id FROM StringIds WHERE {registered}))"
    )
    yield from (row for row in _rows(tables, query, (*patterns, *patterns)) if isinstance(row[-1], str))


def _array(tables: sqlite3.Connection, table: str, *columns: str) -> npt.NDArray[np.int64]:
    """Returns some columns of a table as an array of integers. A missing number becomes 0, and a missing column -1.
    Leaves out rows with anything else, or with a time that is impossible."""
    wanted = [column if not column.isalpha() or _has(tables, table, column) else "-1" for column in columns]
    values = ", ".join(f"COALESCE({each}, 0)" for each in wanted)
    whole = " AND ".join(f"typeof({each}) IN ('integer', 'null')" for each in wanted)
    rows = chain.from_iterable(_rows(tables, f"SELECT {values} FROM {table} WHERE {whole}"))
    numbers = np.fromiter(rows, dtype=np.int64).reshape(-1, len(columns))
    return numbers[(np.abs(numbers[:, :2]) < LONGEST).all(axis=1)]


class NsysFile:
    """One file. Raises Undecodable, and OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        """``path``: an export, or a report, which is exported first."""
        self._path = exported(path)
        self._read: dict[Path, Metadata] = {}
        self._notes: list[Note] = []
        self._sidecars = [
            (name, each) for each in _sidecars(self._path.parent) if (name := parse_artifact_name(each.name))
        ]
        with _opened(self._path) as tables:
            about = dict(_columns(tables, "TARGET_INFO_SYSTEM_ENV", "name", "value"))
            self._host = host if isinstance(host := about.get("Hostname"), str) and host else None
            self._has_gpu = any(_columns(tables, "TARGET_INFO_GPU", "id"))
            self._has_ranges = _has(tables, *_RANGES)
            if not self._has_ranges and not _has(tables, _SESSION):
                raise Undecodable(_NO_RANGES)
            self.processes = _events_in(tables, (f"{ranges.PREFIX}*", *_LIKE_STEPS))
            """The events of each process."""

    def traces(self) -> list[Trace]:
        """Returns megaprof's windows, in order of process and time, and forgets the events; none if no range is of a
        step of ours, and then keeps them."""
        if not self._has_ranges:
            raise Undecodable(_NO_RANGES)
        names = {name for events in self.processes.values() for name in events.names}
        if not any(parsed is not None and "step" in parsed.fields for parsed in map(ranges.parse, names)):
            return []
        broken = sum(events.impossible[ANNOTATION] for events in self.processes.values())
        traces = [trace for pid in sorted(self.processes) for trace in self._of_process(pid, self.processes.pop(pid))]
        if not traces:
            damaged = (f"{note.files[0]}: {note.said}" for note in self._notes if note.said)
            raise Undecodable("; ".join([_NO_METADATA, *damaged]))
        if broken:
            self._notes.append(Note("events_left_out", files=(self._path.name,), count=broken))
        return [replace(traces[0], warnings=tuple(self._notes)), *traces[1:]]

    def _of_process(self, pid: int, events: Events) -> Iterator[Trace]:
        traced = [TracedRange(*meant) for meant in events.meant(ranges.parse, events.take(ANNOTATION))]
        if not (windows := self._windows(pid, traced)):
            return
        # A process that ended with open ranges: they have no end, or all have the end of the process.
        cut_ends = events.cut | {end for end, count in Counter(each.end for each in traced).items() if count > 1}
        gpu, _ = activities(events, None)
        for number, (metadata, outermost) in enumerate(windows):
            if not metadata.truncated and outermost[-1].end in cut_ends:
                metadata = replace(metadata, truncated=True, truncated_reason="the recording ended inside it")
            begin = windows[number - 1][1][-1].end if number else -LONGEST
            end = windows[number + 1][1][0].start if number + 1 < len(windows) else LONGEST
            window_gpu = gpu.rows((gpu.launched >= begin) & (gpu.launched < end))
            has_kernels = bool(window_gpu.kernel.any())
            unseen = without_kernels(metadata, 0, has_gpu=self._has_gpu, why="nsys records them with --trace=cuda,nvtx")
            yield Trace(
                path=self._path,
                metadata=metadata,
                ranges=tuple(within(traced, outermost[0].start, outermost[-1].end)),
                gpu=window_gpu if has_kernels else None,
                unseen=without_times(window_gpu) if has_kernels else unseen,
                collectives=() if has_kernels else None,
                events=partial(_events_of, self._path, pid, (begin, end), events.base),
                base=events.base,
            )

    def _windows(self, pid: int, traced: Sequence[TracedRange]) -> list[tuple[Metadata, list[TracedRange]]]:
        """Returns the metadata of each window of a process, with its outermost ranges. Notes which steps have none."""
        windows: list[tuple[Metadata, list[TracedRange]]] = []
        reach, bare_steps = -LONGEST, set[int]()
        for outer in traced:
            step = outer.name.fields.get("step")
            if step is None or outer.end <= reach or outer.start < reach:
                continue
            reach = outer.end
            metadata = self._metadata(pid, outer.name, step)
            if metadata is None:
                bare_steps.add(step)
            elif windows and windows[-1][0] is metadata:
                windows[-1][1].append(outer)
            else:
                windows.append((metadata, [outer]))
        if bare_steps:
            steps = tuple(sorted(bare_steps))
            self._notes.append(Note("without_sidecar", files=(self._path.name,), steps=steps, count=pid))
        return windows

    def _metadata(self, pid: int, outer: ranges.RangeName, step: int) -> Metadata | None:
        """Returns the metadata of this host and process for the window with a step's range; None without any."""
        coordinates = [outer.fields.get(axis) for axis in AXES]
        for name, path in self._sidecars:
            if name.target != sanitise(outer.label) or name.step > step:
                continue
            if [getattr(name.coords, axis) for axis in AXES] != coordinates:
                continue
            if path not in self._read:
                try:
                    self._read[path] = _read_sidecar(path)
                except (OSError, ValueError) as fault:
                    if (note := Note("skipped", files=(path.name,), said=str(fault))) not in self._notes:
                        self._notes.append(note)
                    continue
            metadata = self._read[path]
            if metadata.pid != pid or self._host not in (None, metadata.host):
                continue
            if metadata.target == outer.label and metadata.steps[0] <= step <= metadata.steps[1]:
                return metadata
        return None


def _read_sidecar(path: Path) -> Metadata:
    """Reads the metadata in a ``.nsys.json`` of any origin. Raises ValueError and OSError."""
    try:
        document = msgspec.json.decode(read_input(path), type=dict[str, msgspec.Raw])
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return read_metadata(bytes(document.get("megaprof", b"null")))


def _sidecars(directory: Path) -> list[Path]:
    """Returns every ``.nsys.json`` that may belong to a file of nsys in ``directory``: in it, and in its shards."""
    entries = [*directory.iterdir()]
    entries += [path for shard in entries if is_shard(shard.name) and shard.is_dir() for path in shard.iterdir()]
    return sorted(path for path in entries if path.name.endswith(NSYS_SUFFIX) and not path.name.startswith("."))


def _events_of(path: Path, pid: int, window: tuple[int, int], base: int) -> Iterator[dict[str, Any]]:
    """Yields all events of one process from the begin of a window until before its end, in Chrome's format. ``base``:
    when the session began, in nanoseconds since the epoch. Raises Undecodable and OSError."""
    with _opened(path) as tables:
        events = _events_in(tables, ["*"])[pid]
    for category in (ANNOTATION, *LAUNCHES, KERNEL, *COPIES):
        columns = events.take(category)
        start = columns.spans[:, 0] + base
        columns = columns.rows((start >= window[0]) & (start < window[1]))
        for name, thread, (start_ns, end_ns) in zip(
            columns.name.tolist(), columns.thread.tolist(), columns.spans.tolist(), strict=True
        ):
            yield {
                **{"ph": "X", "cat": category, "name": events.names[name], "pid": pid},
                **{"tid": events.threads[thread][1], "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000},
            }
