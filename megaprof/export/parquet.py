"""Writes timelines as one Parquet file with one row per rank and step, for any query engine.

The columns are `COLUMNS`, whose names include the units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megaprof.analysis.notes import Note, brief
from megaprof.analysis.trace.reading import recordings_in
from megaprof.formats import timeline as format
from megaprof.formats.inputs import files_below, read_input
from megaprof.formats.job import CONTROL, RUN, RunRecord, decode
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import appearing
from megaprof.formats.phrases import Unanswerable
from megaprof.formats.timeline import UnreadableTimeline, read_timeline

#: The number of rows that wait in memory until they are written together. A row takes about 200 bytes there.
WAITING_ROWS = 500_000
#: How far apart the clocks of a job's hosts may be, in nanoseconds, before a step counts as another run's.
_CLOCKS_APART_NS = 60_000_000_000
_AXES = ("pp", "tp", "cp", "ep", "dp")
_TOTALS = ("duration", "forward", "backward", "combined", "finalize", "p2p", "own")
_FLAGS = {
    "device_clock": format.DEVICE_CLOCK,
    "failed": format.FAILED,
    "captured": format.DISTURBED,
    "incomplete": format.INCOMPLETE,
}
#: ``call_index`` distinguishes the calls of one step. Times that the GPU did not report are null.
COLUMNS = pa.schema(
    [
        ("run", pa.string()),
        *((name, pa.int32()) for name in ("rank", *_AXES)),
        *((name, pa.string()) for name in ("host", "target", "role")),
        ("step", pa.int64()),
        ("call_index", pa.int32()),
        ("start_time", pa.timestamp("us", "UTC")),
        *((f"{name}_us", pa.int64()) for name in _TOTALS),
        *((name, pa.bool_()) for name in _FLAGS),
    ]
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportAnswer:
    """The result of an export, as ``--json`` prints it."""

    version: int
    """The version of this object: 2."""
    out: str
    """The written file, as given on the command line."""
    files: int
    """Number of timelines that were read."""
    rows: int
    """Number of rows that were written, one per rank and step."""
    bytes: int
    """Size of the written file in bytes."""
    cut: int
    """Number of files that end inside a record, as happens if the job is running or was killed."""
    warnings: tuple[str, ...]
    """Warnings about single files, in sentences."""


def export(
    source: Path, out: Path, *, run: str | None = None, progress: Progress = lambda done, total: None
) -> ExportAnswer:
    """Writes the timelines under ``source`` (or one file) into the new file ``out``, which appears whole.

    ``run`` names the run. Without it, ``control/run.json`` names the run for steps from its start on, and earlier steps
    have no name. ``progress(done, files)`` is called after each file. Files that cannot be used become warnings.

    Raises:
        Unanswerable: there is no step to export.
        ValueError: ``out`` exists.
        OSError: ``out`` cannot be written.
    """
    if out.exists():
        raise ValueError(f"{out} exists, and may hold steps that the timelines have lost since: name another file")
    paths = [source] if source.is_file() else sorted(recordings_in(source)[1].paths)
    if not paths:
        raise Unanswerable(f"{source} holds no timeline (*{format.SUFFIX})")
    run_and_start = (run, -(1 << 63)) if run is not None else _named(source if source.is_dir() else source.parent)
    with appearing(out) as file:
        rows, cut, warnings = _written(paths, run_and_start, file, progress)
        if not rows:
            raise Unanswerable(f"{source} holds no step that can be exported: {brief(warnings) or 'nothing is in it'}")
    texts = tuple(warning.text for warning in warnings)
    return ExportAnswer(2, str(out), len(paths), rows, out.stat().st_size, cut, texts)


def _written(
    paths: Sequence[Path], run_and_start: tuple[str | None, int], file: BinaryIO, progress: Progress
) -> tuple[int, int, list[Note]]:
    """Writes the rows. Returns their number, the number of files that end inside a record, and warnings."""
    rows, cut, warnings, waiting_tables = 0, 0, list[Note](), list[Any]()
    with pq.ParquetWriter(file, COLUMNS, compression="zstd") as writer:
        for done, path in enumerate(paths, 1):
            try:
                timeline = read_timeline(path, events=False)
            except UnreadableTimeline as fault:
                warnings.append(Note("skipped", files=(path.name,), said=str(fault)))
            else:
                cut += timeline.is_cut
                if timeline.damage and not timeline.is_cut:
                    warnings.append(Note("cut", files=(path.name,), said=timeline.damage))
                waiting_tables += (_table(*of_target, *run_and_start) for of_target in timeline.by_metadata())
            count = sum(map(len, waiting_tables))
            if waiting_tables and (count >= WAITING_ROWS or done == len(paths)):
                writer.write_table(pa.concat_tables(waiting_tables))
                rows, waiting_tables = rows + count, []
            progress(done, len(paths))
    return rows, cut, warnings


def _named(directory: Path) -> tuple[str | None, int]:
    """Returns the name of the run that writes to ``directory``, and the nanosecond from which on it is that run. The
    name is None if nothing says it. A job whose models all have roles has one file per role, and is still one job."""
    control = directory / CONTROL
    runs = files_below(control, (RUN,)) if control.is_dir() else []
    for path in sorted(runs, key=lambda path: (len(path.parts), path)):
        with contextlib.suppress(OSError, ValueError):
            record = decode(read_input(path), RunRecord)
            return record.run, int(record.started * 1e9) - _CLOCKS_APART_NS
    return None, 0


def _table(metadata: Metadata, steps: npt.NDArray[Any], run: str | None, since_ns: int) -> pa.Table:
    """Returns steps of one target and role as an Arrow table with `COLUMNS`. ``run``: the name of the run for steps
    that began at ``since_ns`` or later."""
    coords = metadata.coords
    without_times = (steps["flags"] & format.INCOMPLETE != 0) & (steps["duration"] == 0)
    constants = {name: getattr(coords, name) for name in ("rank", *_AXES)}
    constants |= {"host": metadata.host, "target": metadata.target, "role": metadata.role}
    columns: dict[str, Any] = {
        "run": pa.array(np.full(len(steps), run, dtype=object), pa.string(), mask=steps["start_ns"] < since_ns),
        **{
            name: pa.repeat(pa.scalar(value, COLUMNS.field(name).type), len(steps)) for name, value in constants.items()
        },
        "step": pa.array(steps["step"]),
        "call_index": pa.array(steps["index"].astype(np.int32)),
        "start_time": pa.array(steps["start_ns"] // 1000).cast(pa.timestamp("us", "UTC")),
    }
    for name in _TOTALS:
        columns[f"{name}_us"] = pa.array(steps[name].astype(np.int64), mask=None if name == "own" else without_times)
    for name, bit in _FLAGS.items():
        columns[name] = pa.array((steps["flags"] & bit) != 0)
    return pa.table(columns, schema=COLUMNS)
