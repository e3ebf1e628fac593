"""What the GPU did, in a file of Nsight Systems: kernels, copies and what launched them, of one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.attribution import owners
from megaprof.analysis.trace.gpu import BY_GROUP, LONGEST, OTHER, PP, USES, Activities, ByName, arranged
from megaprof.analysis.trace.tables import Tables
from megaprof.analysis.trace.traces import TracedRange
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata

#: The bits of a process, in the ids of processes and threads, above those of a thread.
PROCESS = 0xFFFFFF
#: Tables of the file, and the columns that are read of them.
ACTIVITIES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
COLUMNS = ("start", "end", "correlationId", "globalPid")
COLUMNS_OF_LAUNCH = ("start", "end", "correlationId", "globalTid")


def is_time(value: object) -> bool:
    """Whether a value of a file is one, in nanoseconds."""
    return isinstance(value, int) and -LONGEST < value < LONGEST


class ProcessGpu:
    """All GPU activities of one process."""

    def __init__(
        self,
        activities: Activities,
        unnamed: npt.NDArray[np.bool_],
        send: npt.NDArray[np.bool_],
        names: tuple[str, ...],
    ) -> None:
        self.all = activities
        self.names = names
        self._unnamed = unnamed
        self._send = send

    @classmethod
    def read(cls, tables: Tables, base: int, pid: int) -> ProcessGpu:
        """``base``: when the session began, in nanoseconds since the epoch. Raises Undecodable."""
        kernels = [_table(tables, table, pid, named=True) for table in ACTIVITIES]
        copies = [_table(tables, table, pid, named=False) for table in COPIES]
        rows = np.concatenate(kernels + copies)
        kernel = np.arange(len(rows)) < sum(map(len, kernels))
        numbers, which = np.unique(rows[:, 3], return_inverse=True)
        by_name, known = ByName(), _names(tables, numbers)
        names = [known.get(number, "") for number in numbers.tolist()]
        uses = np.array([by_name[name] for name in names], dtype=np.int8)
        nccl = uses == BY_GROUP
        send = nccl & np.array(["SendRecv" in name for name in names], dtype=np.bool_)
        use = np.where(nccl, np.int8(OTHER), uses)[which]
        launches = np.zeros((0, 3), dtype=np.int64)
        if len(rows) and tables.has(LAUNCHES, *COLUMNS_OF_LAUNCH):
            query = f"SELECT start, correlationId, 0 FROM {LAUNCHES} WHERE (globalTid >> 24) & {PROCESS} = ?"
            launches = _array(tables.rows(query, (pid,)), 3)
        found = arranged(base + rows[:, :2], use, kernel, rows[:, 2], launches[:, 1], base + launches[:, 0])
        which = which[np.argsort(rows[:, 0], kind="stable")]
        return cls(found, nccl[which], send[which], tuple(names[number] for number in which.tolist()))

    def between(self, begin: int, end: int, metadata: Metadata, inside: Sequence[TracedRange]) -> Activities | None:
        """What was launched from ``begin`` to ``end``, with its use; None where no kernel was."""
        rows = (self.all.launched >= begin) & (self.all.launched < end)
        if not (rows & self.all.kernel).any():
            return None
        found = Activities(*(column[rows] for column in vars(self.all).values()))
        use = _by_elimination(found, self._unnamed[rows], self._send[rows], metadata, inside)
        return replace(found, use=use)


def _by_elimination(
    gpu: Activities,
    unnamed: npt.NDArray[np.bool_],
    send: npt.NDArray[np.bool_],
    metadata: Metadata,
    inside: Sequence[TracedRange],
) -> npt.NDArray[np.int8]:
    """Whose communication an NCCL kernel is: nsys does not know its group, our ranges say where it was launched.

    In an exchange it is the pipeline's. Elsewhere it is the only group's that there can be: a send and receive outside
    an exchange is an all-to-all, of experts or of context parallelism; the pipeline's group has no other use in a pass.
    """
    use = gpu.use.copy()
    exchanges = [r for r in inside if r.name.is_p2p]
    passes = [r for r in inside if r.name.label in ranges.PASSES]
    in_exchange = owners(gpu.launched, exchanges) >= 0
    in_pass = owners(gpu.launched, passes) >= 0
    use[unnamed & in_exchange] = PP
    if metadata.version is None:  # the sizes are only what the ranges show
        return use
    possible = [
        (unnamed & ~in_exchange & send, ("ep", "cp")),
        (unnamed & ~in_exchange & ~send & in_pass, ("tp", "cp", "ep", "dp")),
        (unnamed & ~in_exchange & ~send & ~in_pass, ("tp", "cp", "ep", "pp", "dp")),
    ]
    for rows, axes in possible:
        there = [axis for axis in axes if getattr(metadata.sizes, axis) > 1]
        if len(there) == 1:
            use[rows] = USES.index(there[0])
    return use


def _table(tables: Tables, table: str, pid: int, *, named: bool) -> npt.NDArray[np.int64]:
    """Start, end, correlation and name of every activity of a process; one whose times are impossible is left out."""
    if not tables.has(table, *COLUMNS):
        return np.zeros((0, 4), dtype=np.int64)
    name = "demangledName" if named and tables.has(table, "demangledName") else "-1"
    query = f"SELECT start, end, correlationId, {name} FROM {table} WHERE (globalPid >> 24) & {PROCESS} = ?"
    found = _array(tables.rows(query, (pid,)), 4)
    return found[found[:, 1] >= found[:, 0]]


def _array(rows: Iterable[tuple[Any, ...]], width: int) -> npt.NDArray[np.int64]:
    """Rows of whole numbers; what is missing counts as 0, and a row with anything else is left out."""
    numbers = chain.from_iterable(
        (0 if value is None else value for value in row)
        for row in rows
        if all(value is None or is_time(value) for value in row)
    )
    return np.fromiter(numbers, dtype=np.int64).reshape(-1, width)


def _names(tables: Tables, numbers: npt.NDArray[np.int64]) -> dict[int, str]:
    """Names by their number, of those that are asked for."""
    wanted = set(numbers.tolist())
    if not wanted or not tables.has("StringIds", "id", "value"):
        return {}
    rows = tables.rows("SELECT id, value FROM StringIds")
    return {number: name for number, name in rows if number in wanted and isinstance(name, str)}
