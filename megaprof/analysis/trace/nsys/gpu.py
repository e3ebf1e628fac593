"""Reads the GPU activity of one process from a file of Nsight Systems: kernels, copies and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.columns import LONGEST
from megaprof.analysis.trace.gpu import Activities, arranged
from megaprof.analysis.trace.groups import BY_GROUP_PAIRWISE, UNKNOWN, ByName
from megaprof.analysis.trace.nsys.tables import Tables

#: The bits of the process in the ids of processes and threads; they are above the bits of the thread.
PROCESS = 0xFFFFFF
#: The tables of the file, and the columns that are read from them.
ACTIVITIES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
COLUMNS = ("start", "end", "correlationId", "globalPid")
COLUMNS_OF_LAUNCH = ("start", "end", "correlationId", "globalTid")
#: The ``copyKind`` of a copy from one device to another (``CUPTI_ACTIVITY_MEMCPY_KIND_PTOP``).
_PEER_TO_PEER = 10


def is_time(value: object) -> bool:
    """Returns whether a value in a file is a possible time in nanoseconds."""
    return isinstance(value, int) and -LONGEST < value < LONGEST


def read_process(tables: Tables, base: int, pid: int) -> tuple[Activities, list[str]]:
    """Returns all GPU activities of one process, and the name of each activity's kernel, empty for copies and memsets.
    nsys names no process group. ``base``: when the session began, in nanoseconds since the epoch. Raises
    Undecodable."""
    kernels = [_table(tables, table, pid, "demangledName") for table in ACTIVITIES]
    copies = [_table(tables, table, pid, "copyKind") for table in COPIES]
    rows = np.concatenate(kernels + copies)
    kernel = np.arange(len(rows)) < sum(map(len, kernels))
    between_devices = ~kernel & (rows[:, 3] == _PEER_TO_PEER)
    rows[~kernel, 3] = -1
    numbers, number_of_row = np.unique(rows[:, 3], return_inverse=True)
    by_name, name_of_number = ByName(), _names(tables, numbers)
    names = [name_of_number.get(number, "") for number in numbers.tolist()]
    uses = np.array([by_name[name] for name in names], dtype=np.int8)
    use = np.where(uses < 0, np.int8(UNKNOWN), uses)[number_of_row]
    use[between_devices] = UNKNOWN
    launches = np.zeros((0, 3), dtype=np.int64)
    if len(rows) and tables.has(LAUNCHES, *COLUMNS_OF_LAUNCH):
        query = f"SELECT start, end, correlationId FROM {LAUNCHES} WHERE (globalTid >> 24) & {PROCESS} = ?"
        launches = _array(tables.rows(query, (pid,)), 3)
    pairwise = (uses == BY_GROUP_PAIRWISE)[number_of_row]
    untimed: npt.NDArray[np.bool_] = (rows[:, :2] == 0).all(axis=1)
    _, stream = np.unique(rows[:, 4:], axis=0, return_inverse=True)
    gpu = arranged(
        base + rows[:, :2],
        use,
        kernel,
        pairwise,
        rows[:, 2],
        launches[:, 2],
        base + launches[:, :2],
        stream,
        untimed=untimed,
    )
    return gpu, [names[number] for number in number_of_row[gpu.row].tolist()]


def launched_between(gpu: Activities, begin: int, end: int) -> Activities | None:
    """Returns the activities that were launched between ``begin`` and ``end``; None if no kernel was."""
    rows = (gpu.launched >= begin) & (gpu.launched < end)
    if not (rows & gpu.kernel).any():
        return None
    return gpu.rows(rows)


def _table(tables: Tables, table: str, pid: int, column: str) -> npt.NDArray[np.int64]:
    """Returns the start, end, correlation, ``column``, device, context and stream of every activity of a process; -1
    for a column that the table does not have. Leaves out activities whose times are impossible."""
    if not tables.has(table, *COLUMNS):
        return np.zeros((0, 7), dtype=np.int64)
    others = (name if tables.has(table, name) else "-1" for name in (column, "deviceId", "contextId", "streamId"))
    columns = ", ".join(("start", "end", "correlationId", *others))
    query = f"SELECT {columns} FROM {table} WHERE (globalPid >> 24) & {PROCESS} = ?"
    rows = _array(tables.rows(query, (pid,)), 7)
    return rows[rows[:, 1] >= rows[:, 0]]


def _array(rows: Iterable[tuple[Any, ...]], width: int) -> npt.NDArray[np.int64]:
    """Returns the rows as an array of integers. A missing number becomes 0. Leaves out rows with anything else."""
    numbers = chain.from_iterable(
        (0 if value is None else value for value in row)
        for row in rows
        if all(value is None or is_time(value) for value in row)
    )
    return np.fromiter(numbers, dtype=np.int64).reshape(-1, width)


def _names(tables: Tables, numbers: npt.NDArray[np.int64]) -> dict[int, str]:
    """Returns the names with these ``numbers``, by number."""
    wanted_numbers = set(numbers.tolist())
    if not wanted_numbers or not tables.has("StringIds", "id", "value"):
        return {}
    rows = tables.rows("SELECT id, value FROM StringIds")
    return {number: name for number, name in rows if number in wanted_numbers and isinstance(name, str)}
