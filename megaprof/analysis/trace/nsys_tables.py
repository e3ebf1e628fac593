"""Reads the tables of a file of Nsight Systems, and fills the columns of `trace.columns` from them, for each process in
it. Reports (``.nsys-rep``) are exported to SQLite with this machine's ``nsys``, once per report, next to it.

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
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.columns import ANNOTATION, KERNEL, LONGEST, Events, Numbered
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.formats import ranges
from megaprof.formats.inputs import RemotePath, local_copy, most_bytes, open_input
from megaprof.formats.names import temporary_path

SQLITE, REPORT = ".sqlite", ".nsys-rep"
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
#: The table of ranges, and its columns.
RANGES = ("NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid")
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


class Tables:
    """The plain tables of one file. Every method raises Undecodable if something cannot be read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        with _as_undecodable():
            table_rows = connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'table' LIMIT 10000"
            ).fetchall()
        self._plain = {
            name for name, sql in table_rows if isinstance(sql, str) and sql[:14].upper().startswith("CREATE TABLE")
        }
        self._columns: dict[str, frozenset[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        """Returns the names of a table's columns; none if there is no such plain table."""
        if table not in self._columns:
            table_columns: list[Any] = []
            if table in self._plain:
                with _as_undecodable():
                    table_columns = self._connection.execute(f'PRAGMA table_xinfo("{table}")').fetchall()
            if any(row[6] in _COMPUTED for row in table_columns):
                raise Undecodable(f"its table {table} has computed columns, as no file of nsys's has")
            self._columns[table] = frozenset(str(row[1]) for row in table_columns)
        return self._columns[table]

    def has(self, table: str, *columns: str) -> bool:
        """Returns whether there is such a plain table, with these columns."""
        return bool(names := self.columns(table)) and names.issuperset(columns)

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of one of our queries. Raises Undecodable if there are more rows than fit into memory."""
        most_rows = most_bytes() // _ROW_BYTES
        with _as_undecodable():
            for number, row in enumerate(self._connection.execute(query, values)):
                if number >= most_rows:
                    raise Undecodable(f"it has more than {most_rows:,} rows to be read (see --max-input-mib)")
                yield row


@contextmanager
def opened(path: Path) -> Iterator[Tables]:
    """Opens ``path``. Raises Undecodable, and OSError if it cannot be read."""
    local_path = local_copy(path)
    with open_input(local_path) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise Undecodable("it is no SQLite file")
        size = file.seek(0, 2)
    with _as_undecodable():
        connection = sqlite3.connect(local_path.absolute().as_uri() + "?mode=ro&immutable=1", uri=True)
    deadline = time.monotonic() + _SECONDS + size / _BYTES_A_SECOND
    with closing(connection):
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        if hasattr(connection, "setlimit"):  # from Python 3.11
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        with _as_undecodable():
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
                connection.execute(f"PRAGMA {pragma}")
        yield Tables(connection)


@contextmanager
def _as_undecodable() -> Iterator[None]:
    """Turns a fault of SQLite's into Undecodable, with a message of one line."""
    try:
        yield
    except sqlite3.OperationalError as fault:
        if "interrupted" in str(fault):
            raise Undecodable("reading it takes longer than any healthy file of its size does") from None
        raise Undecodable(f"its database is damaged: {_line(fault)}") from None
    except (sqlite3.Error, sqlite3.Warning) as fault:
        raise Undecodable(f"its database is damaged: {_line(fault)}") from None
    except (OverflowError, UnicodeError) as fault:
        raise Undecodable(f"its database holds impossible values: {_line(fault)}") from None
    except MemoryError:
        raise Undecodable("it does not fit into memory") from None


def _line(fault: Exception) -> str:
    return " ".join(str(fault).split())[:200]


def is_time(value: object) -> bool:
    """Returns whether a value in a file is a possible time in nanoseconds."""
    return isinstance(value, int) and -LONGEST < value < LONGEST


def events_in(tables: Tables, patterns: Sequence[str], *, gpu: bool = True) -> dict[int, Events]:
    """Returns the events of every process, by its number on its host: ranges whose names match one of ``patterns``
    (GLOB), and, with ``gpu``, activities of the GPU with the calls that launched them. Raises Undecodable."""
    base: Any = None
    session = "TARGET_INFO_SESSION_START_TIME", "utcEpochNs"
    if tables.has(*session):
        base = next((start for (start,) in tables.rows(f"SELECT {session[1]} FROM {session[0]} LIMIT 1")), None)
    if not is_time(base):
        raise Undecodable(f"it does not say when its session began ({session[0]})")
    names, threads = Numbered(), Numbered()
    processes: dict[int, Events] = {}

    def put(pids: npt.NDArray[np.int64], category: str, **columns: npt.NDArray[Any]) -> None:
        for pid in np.unique(pids).tolist():
            events = processes.setdefault(pid, Events(base))
            events.put(category, **{name: column[pids == pid] for name, column in columns.items()})

    rows = []
    for start, end, is_open, thread, name in _ranges(tables, patterns):
        pid = thread >> 24 & _PROCESS if isinstance(thread, int) else 0
        events = processes.setdefault(pid, Events(base))
        if not (is_time(start) and is_time(end) and end >= start and isinstance(thread, int)):
            events.impossible[ANNOTATION] += 1
            continue
        rows.append((pid, names[name], threads[pid, thread & _PROCESS], start, end))
        if is_open and name.startswith(ranges.PREFIX):
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
            processes.setdefault(pid, Events(base)).impossible[category] += 1
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
    if not tables.has(*RANGES):
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
