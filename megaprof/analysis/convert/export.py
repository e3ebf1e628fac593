"""Timelines as a Parquet dataset: one row per rank and step, for the query engine that a fleet already has.

``OUT/run={run}/pp={stage}/hour={YYYYMMDDHH, UTC}/steps.parquet``, which DuckDB, Spark and others read as partitions.
The columns are `COLUMNS`; units stand in their names. A stage is read rank by rank while its rows wait in memory, at
most `WAITING_ROWS` of them; then the hour that has the most is written as a row group.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megaprof.analysis.fleet.reading import find_timelines
from megaprof.formats import timeline as format
from megaprof.formats.inputs import UnusableInput, open_input, read_input
from megaprof.formats.job.records import BadRecord, decode
from megaprof.formats.job.run import RunRecord
from megaprof.formats.names import host, is_leftover, parse_artifact_name, sanitise
from megaprof.formats.timeline import Timeline, UnreadableTimeline, read_timeline
from megaprof.parallel.topology import RankCoords
from megaprof.version import __version__

#: In every dataset of ours. Engines pass over names that begin with an underscore.
MARK = "_megaprof.json"
_FORMAT = 1
#: 51 bytes each.
WAITING_ROWS = 2_000_000
_LARGEST = (1 << 31) - 1
_HOUR_NS = 3_600_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
#: How far the clocks of a job's hosts may lie apart without a step counting as another run's.
_CLOCKS_APART_NS = 60_000_000_000

_WHO = pa.schema(
    [
        ("rank", pa.int32()),
        *((axis, pa.int32()) for axis in ("tp", "cp", "ep", "dp")),
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in ("host", "target", "role")),
    ]
)
_TOTALS = ("duration", "forward", "backward", "combined", "finalize", "p2p", "own")
_FLAGS = {
    "device_clock": format.DEVICE_CLOCK,
    "failed": format.FAILED,
    "captured": format.CAPTURED,
    "incomplete": format.INCOMPLETE,
}
#: ``call_index`` tells the calls of one step apart; times are null where the GPU did not say them.
COLUMNS = pa.schema(
    [
        *_WHO,
        ("step", pa.int64()),
        ("call_index", pa.int32()),
        ("start_time", pa.timestamp("us", "UTC")),
        *((f"{name}_us", pa.int64()) for name in _TOTALS),
        *((name, pa.bool_()) for name in _FLAGS),
    ]
)

Progress = Callable[[int, int], None]


class NothingToExport(Exception):
    """There is no timeline here; the message says so."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    runs: tuple[str, ...]
    """Names of the runs in it, sorted."""
    files: int
    """Timelines that were read."""
    rows: int
    """Rows that were written."""
    partitions: int
    """Partitions that were written."""
    kept: int
    """Partitions of an earlier export that hold more than the timelines still do, and stay."""
    bytes: int
    """Bytes that were written."""
    cut: int
    """Files that end inside a record, as those of a job do that runs or was killed."""
    warnings: tuple[str, ...]
    """What must be known about single files."""


def export(
    source: Path, out: Path, *, run: str | None = None, progress: Progress = lambda done, total: None
) -> Exported:
    """Write the timelines under ``source`` (or one file) into the dataset ``out``.

    ``run`` names the run; without it, ``control/run.json`` does from the moment on that it says, and what is older, or
    all without that file, gets a name made of the first timeline's host, process and first step.

    ``out`` appears whole. Where it is a dataset of ours, partitions are added to it and replaced one by one, each
    atomically, and never by one with fewer rows: timelines are rotated, so an older export may be all that is left.
    ``progress(done, files)`` is called after each file. Files that cannot be used become warnings.

    Raises:
        NothingToExport: there is no step to export.
        ValueError: ``out`` is something else than a dataset of ours, or ``run`` is empty.
        OSError: ``out`` cannot be written; what it was, it still is.
    """
    if run is not None and not run.strip():
        raise ValueError(f"run={run!r} is no name")
    out = Path(os.path.realpath(out))
    _refuse_to_lose(out)
    # Stage by stage, as names say, so that one stage is open at a time.
    paths = [source] if source.is_file() else sorted(find_timelines(source), key=lambda path: (_stage(path.name), path))
    if not paths:
        raise NothingToExport(f"{source} holds no timeline (*{format.SUFFIX})")
    runs = _Runs(source if source.is_dir() else source.parent, run)
    building = out.parent / f".{out.name}.{host()}.{os.getpid()}.tmp"
    _remove_leftovers(out)
    try:
        building.mkdir(parents=True)
        dataset = _Dataset(building)
        cut, warnings = _fill(dataset, paths, runs, whole_name=not source.is_file(), progress=progress)
        if not dataset.rows:
            raise NothingToExport(f"{source} holds no step that can be exported: {'; '.join(warnings[:5]) or 'none'}")
        size = sum(path.stat().st_size for path in dataset.rows)
        (building / MARK).write_text(json.dumps({"megaprofExport": _FORMAT, "version": __version__}))
        kept = _publish(building, out, dataset.rows)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Exported(
        runs=tuple(sorted(runs.seen)),
        files=len(paths),
        rows=sum(dataset.rows.values()),
        partitions=len(dataset.rows),
        kept=kept,
        bytes=size,
        cut=cut,
        warnings=tuple(warnings),
    )


def _fill(
    dataset: _Dataset, paths: Sequence[Path], runs: _Runs, *, whole_name: bool, progress: Progress
) -> tuple[int, list[str]]:
    """Add every file's steps; returns how many files end inside a record, and what has to be said. ``whole_name``: the
    stage in a file's name must be right."""
    cut, warnings = 0, []
    for done, path in enumerate(paths, 1):
        try:
            timeline = read_timeline(path, events=False)
        except UnreadableTimeline as fault:
            warnings.append(f"{path.name} was skipped: {fault.reason}")
        else:
            cut += timeline.is_cut
            warnings += _add(timeline, _stage(path.name) if whole_name else None, runs, dataset)
        progress(done, len(paths))
    dataset.close()
    return cut, warnings


def _stage(name: str) -> int:
    """The stage that a file's name says; -1 for a renamed one."""
    parsed = parse_artifact_name(name)
    return parsed.place.pp if parsed else -1


class _Runs:
    """Whose run a step was, see `export`."""

    def __init__(self, directory: Path, given: str | None) -> None:
        self._named = None if given is None else _partition_value(given)
        self._from = -(1 << 63)
        self._derived: str | None = None
        self.seen: set[str] = set()
        if given is not None:
            return
        # A job whose models all have roles has one such file for each: it is one job all the same.
        for path in (directory / "control" / "run.json", *sorted(directory.glob("control/role-*/run.json"))):
            with contextlib.suppress(OSError, ValueError, BadRecord):
                record = decode(read_input(path), RunRecord)
                self._named = _partition_value(record.run)
                self._from = int(record.started * 1e9) - _CLOCKS_APART_NS
                return

    def of(self, timeline: Timeline) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        """The runs in a file, each with which steps are its."""
        start = timeline.steps["start_ns"]
        if self._derived is None:
            first = timeline.metadata[0]
            digest = hashlib.sha256(repr((first.host, first.pid, int(start[0]))).encode()).hexdigest()
            self._derived = f"run-{digest[:12]}"
        named = start >= self._from if self._named else np.zeros(start.size, dtype=bool)
        for run, its in ((self._named, named), (self._derived, ~named)):
            if run is not None and its.any():
                self.seen.add(run)
                yield run, its


def _partition_value(run: str) -> str:
    """A directory's name that no engine takes for a number or a date."""
    clean = sanitise(run)
    return clean if clean[:1].isalpha() else f"run-{clean}"


@dataclass
class _Hour:
    """Rows of one partition that are not written yet, and its open file."""

    path: Path
    waiting: list[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]] = field(default_factory=list)
    rows: int = 0
    writer: Any = None


class _Dataset:
    """Writes partitions below ``root``, one stage at a time; ``rows``: of every file that is complete."""

    def __init__(self, root: Path) -> None:
        self.rows: dict[Path, int] = {}
        self._root = root
        self._stage: int | None = None
        self._hours: dict[tuple[str, int, int], _Hour] = {}
        self._waiting = 0
        self._who: list[tuple[Any, ...]] = []

    def add(self, run: str, coords: RankCoords, who: tuple[Any, ...], steps: npt.NDArray[Any]) -> None:
        """``steps`` (of `STEP_TYPE`) of one rank, target and role; ``who`` as in `_WHO`."""
        if self._stage != coords.pp:
            self.close()
            self._stage = coords.pp
        number = len(self._who)
        self._who.append(who)
        hours = steps["start_ns"] // _HOUR_NS
        for hour in np.unique(hours).tolist():
            its = steps[hours == hour]
            key = (run, coords.pp, hour)
            place = self._hours.setdefault(key, _Hour(self._path(*key)))
            place.waiting.append((its, np.full(its.size, number, dtype=np.int32)))
            place.rows += its.size
            self._waiting += its.size
        while self._waiting >= WAITING_ROWS:
            self._write(max(self._hours.values(), key=lambda place: place.rows))

    def close(self) -> None:
        """Everything that waits is written and every file complete."""
        for place in self._hours.values():
            self._write(place)
            place.writer.close()
        self._hours.clear()
        self._who.clear()

    def _path(self, run: str, stage: int, hour: int) -> Path:
        named = (_EPOCH + timedelta(hours=hour)).strftime("%Y%m%d%H")
        return self._root / f"run={run}" / f"pp={stage}" / f"hour={named}" / "steps.parquet"

    def _write(self, place: _Hour) -> None:
        if not place.rows:
            return
        steps = np.concatenate([its for its, _ in place.waiting])
        who = np.concatenate([numbers for _, numbers in place.waiting])
        if place.writer is None:
            place.path.parent.mkdir(parents=True, exist_ok=True)
            place.writer = pq.ParquetWriter(place.path, COLUMNS, compression="zstd")
        place.writer.write_table(_table(steps, who, self._who), row_group_size=WAITING_ROWS)
        self.rows[place.path] = self.rows.get(place.path, 0) + place.rows
        self._waiting -= place.rows
        place.waiting, place.rows = [], 0


def _table(steps: npt.NDArray[Any], who: npt.NDArray[np.int32], everybody: list[tuple[Any, ...]]) -> pa.Table:
    numbers, places = np.unique(who, return_inverse=True)
    columns: list[Any] = []
    for column, values in zip(_WHO, zip(*(everybody[n] for n in numbers), strict=True), strict=True):
        if pa.types.is_dictionary(column.type):
            encoded = pa.array(values, pa.string()).dictionary_encode()
            columns.append(pa.DictionaryArray.from_arrays(encoded.indices.take(pa.array(places)), encoded.dictionary))
        else:
            columns.append(pa.array(values, column.type).take(pa.array(places)))
    columns += [pa.array(steps["step"]), pa.array(steps["index"].astype(np.int32))]
    columns.append(pa.array(steps["start_ns"] // 1000).cast(pa.timestamp("us", "UTC")))
    unknown = (steps["flags"] & format.INCOMPLETE != 0) & (steps["duration"] == 0)
    for name in _TOTALS:
        columns.append(pa.array(steps[name].astype(np.int64), mask=None if name == "own" else unknown))
    columns += [pa.array((steps["flags"] & bit) != 0) for bit in _FLAGS.values()]
    return pa.Table.from_arrays(columns, schema=COLUMNS)


def _add(timeline: Timeline, stage: int | None, runs: _Runs, dataset: _Dataset) -> list[str]:
    """Add one file's steps, which must be of ``stage``; returns what has to be said about it."""
    name = timeline.path.name
    said = [f"{name} ends early: {timeline.damage}"] if timeline.damage and not timeline.is_cut else []
    for run, its in runs.of(timeline) if timeline.steps.size else ():
        for number in np.unique(timeline.steps["metadata"][its]).tolist():
            metadata = timeline.metadata[number]
            coords, host = metadata.coords, metadata.host
            if stage in (None, coords.pp):
                who = coords.rank, coords.tp, coords.cp, coords.ep, coords.dp, host, metadata.target, metadata.role
                dataset.add(run, coords, who, timeline.steps[its & (timeline.steps["metadata"] == number)])
            else:
                said.append(f"{name}: steps were left out: they are of stage {coords.pp}, which its name does not say")
    return said


def _publish(building: Path, out: Path, rows: dict[Path, int]) -> int:
    """Move what was built to ``out``; returns the number of partitions that stay as they were."""
    if not out.exists() or not any(out.iterdir()):
        os.replace(building, out)
        return 0
    kept = 0
    for path, count in rows.items():
        final = out / path.relative_to(building)
        if final.exists() and _rows(final) > count:
            kept += 1
            continue
        final.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, final)
    return kept


def _rows(path: Path) -> int:
    """Rows of a Parquet file; 0 for one that is damaged, or for what is no file."""
    try:
        with open_input(path) as file:
            return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowInvalid, UnusableInput):
        return 0


def _refuse_to_lose(out: Path) -> None:
    """What is there may be added to when it is ours, and is not touched otherwise."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise ValueError(f"{out} exists and is no directory: it is not overwritten")
    if not any(out.iterdir()):
        return
    try:
        mark = json.loads(read_input(out / MARK))
    except (OSError, ValueError, RecursionError):
        mark = None
    found = mark.get("megaprofExport") if isinstance(mark, dict) else None
    if found is None:
        raise ValueError(f"{out} is not empty and no export of megaprof's: nothing is written into it")
    if found != _FORMAT:
        raise ValueError(f"{out} was exported in format {found}, this is format {_FORMAT}: export to another directory")


def _remove_leftovers(out: Path) -> None:
    """What an export to ``out`` left unfinished when it was killed."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(out.parent):
            if entry.name.startswith(f".{out.name}.") and is_leftover(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)
