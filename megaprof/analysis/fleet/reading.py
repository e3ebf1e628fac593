"""Timelines of a whole fleet read once, each to a few numbers per bucket of steps: memory does not grow with steps.

A work item is the files of the ranks that synchronise gradients with each other (data- and context-parallel peers),
read one rank after the other: what all of them spent on a step's synchronisation needs them together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.fleet.runs import Piece, Runs, runs_of
from megaprof.analysis.fleet.trends import Floats, Integers
from megaprof.formats import timeline as format
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import parse_artifact_name
from megaprof.parallel.topology import ParallelSizes, RankCoords

#: Buckets of steps at most, about.
MOST_BUCKETS = 200
#: Percentiles come from a histogram whose bins are this wide, as a fraction, from a microsecond on.
BIN = 0.005
_BINS = int(np.log(2.0**32) / np.log1p(BIN)) + 2
#: Bytes of files below which one process is quicker than several.
_WORTH_IT = 512 << 20
_SAMPLE = 8
_MOST_TOLD = 5
INDEX_BITS = 16

Progress = Callable[[int, int], None]


class Key(NamedTuple):
    """What is reported together."""

    target: str
    role: str | None
    sizes: ParallelSizes


@dataclass(frozen=True)
class RankSeries:
    """One rank: ``compute`` and ``finalize`` (its gradient synchronisation with waiting), the medians of buckets from
    ``first`` on in milliseconds (NaN where it has no steps), and how many steps each holds.

    ``last_step``, ``ended``: of its last step, the latter in wall-clock nanoseconds. ``own``: the recorder's median
    microseconds per step, and that as a fraction of the step. ``again``: steps that it has twice.
    """

    coords: RankCoords
    host: str | None
    first: int
    compute: npt.NDArray[np.float32]
    finalize: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    steps: int
    left_out: int
    again: int
    first_step: int
    last_step: int
    ended: int
    own: tuple[float, float]
    device_clock: bool


@dataclass
class Series:
    """Everything about one key, of some ranks or of all.

    ``steps`` and ``longest``: every call (step << 16 | index) and its longest duration on any rank, in milliseconds;
    ``synchronising``: by pp and tp, first bucket and medians of what the quickest rank of that group spent on a
    step's gradient synchronisation, of steps that all of them have; ``histograms``: of compute, by stage; ``most``: the
    longest compute of each.
    """

    ranks: list[RankSeries] = field(default_factory=list)
    steps: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    longest: Floats = field(default_factory=lambda: np.empty(0))
    synchronising: dict[tuple[int, int], tuple[int, Floats]] = field(default_factory=dict)
    histograms: dict[int, Integers] = field(default_factory=dict)
    most: dict[int, float] = field(default_factory=dict)

    def add(self, other: Series) -> None:
        self.ranks += other.ranks
        self.steps, self.longest = _merge(self.steps, self.longest, other.steps, other.longest, np.maximum)
        self.synchronising.update(other.synchronising)
        for pp, histogram in other.histograms.items():
            self.histograms[pp] = self.histograms[pp] + histogram if pp in self.histograms else histogram
            self.most[pp] = max(self.most.get(pp, 0.0), other.most[pp])


@dataclass
class FleetReading:
    """``runs``: those that lie there, of which one was read; ``width``: steps per bucket, by key; ``cut``: files that
    end inside a record; ``files``: by key and rank."""

    runs: Runs = field(default_factory=Runs)
    series: dict[Key, Series] = field(default_factory=dict)
    width: dict[Key, int] = field(default_factory=dict)
    files: dict[Key, dict[int, tuple[Path, ...]]] = field(default_factory=dict)
    read: list[Path] = field(default_factory=list)
    cut: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def warnings_of_files(self) -> list[str]:
        """About single files, and one about all that end in the middle of a record."""
        told = [runs] if (runs := self.runs.told()) else []
        told += self.warnings[:_MOST_TOLD]
        if len(self.warnings) > _MOST_TOLD:
            told.append(f"{len(self.warnings) - _MOST_TOLD} more timelines could not be read to their end")
        if self.cut:
            which = f"{len(self.cut)} timelines end" if len(self.cut) > 1 else f"{self.cut[0].name} ends"
            told.append(
                f"{which} in the middle of a step, as when a process is killed or still writes: "
                "everything before it was read"
            )
        return told


def find_timelines(directory: Path) -> list[Path]:
    """Every timeline under ``directory``, sorted. Hidden files are none of ours."""
    return sorted(
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if name.endswith(format.SUFFIX) and not name.startswith(".")
    )


def read_fleet(
    paths: Sequence[Path], workers: int = 1, progress: Progress | None = None, run: int | None = None
) -> FleetReading:
    """Read every file once. ``workers``: processes at most, as for `reading.read_all`; ``progress``: files done;
    ``run``: which of several that lie there, from 1, the newest by default. Raises NoSuchRun."""
    items = _items(paths)
    runs, width = _sampled(items, run)
    found = FleetReading(runs=runs, width=width)
    done = 0
    for item, (series, files, read, cut, warnings) in zip(
        items, _read_items(items, runs, width, min(workers, _useful(paths, len(items)))), strict=True
    ):
        for key, part in series.items():
            found.series.setdefault(key, Series()).add(part)
        for key, by_rank in files.items():
            found.files.setdefault(key, {}).update(by_rank)
        found.read += read
        found.cut += cut
        found.warnings += warnings
        done += sum(map(len, item))
        if progress is not None:
            progress(done, len(paths))
    return found


_Item = list[list[Path]]  # of every rank of a group its files
_Part = tuple[dict[Key, Series], dict[Key, dict[int, tuple[Path, ...]]], list[Path], list[Path], list[str]]


def _items(paths: Sequence[Path]) -> list[_Item]:
    groups: dict[tuple[str | int | None, ...], dict[int, list[Path]]] = {}
    for path in paths:
        name = parse_artifact_name(path.name)
        # A renamed file is read on its own: what it is stands inside.
        group = (name.target, name.role, name.place.pp, name.place.tp) if name else (str(path),)
        groups.setdefault(group, {}).setdefault(name.place.rank if name else -1, []).append(path)
    return [list(by_rank.values()) for by_rank in groups.values()]


def _sampled(items: Sequence[_Item], run: int | None) -> tuple[Runs, dict[Key, int]]:
    """The runs, and steps per bucket of the chosen one, from the files of a few ranks."""
    ranks = [files for item in items for files in item]
    sample = ranks[:: max(1, len(ranks) // _SAMPLE)][:_SAMPLE]
    pieces: list[tuple[Key, Piece, int]] = []
    for files in sample:
        for part in _of_files(files, None, [], [], []):
            first, last = part.steps[0], part.steps[-1]
            piece = Piece(
                (part.key.target, part.key.role, part.metadata.coords.rank),
                int(part.steps["step"].min()),
                int(first["start_ns"]),
                int(last["start_ns"]) + 1000 * int(last["duration"]),
            )
            pieces.append((part.key, piece, int(part.steps["step"].max())))
    runs = runs_of((piece for _, piece, _ in pieces), run)
    bounds: dict[Key, tuple[int, int]] = {}
    for key, piece, high in pieces:
        if runs.has(piece.start_ns):
            old = bounds.get(key, (piece.first_step, high))
            bounds[key] = min(piece.first_step, old[0]), max(high, old[1])
    return runs, {key: max(1, -(-(high - low + 1) // MOST_BUCKETS)) for key, (low, high) in bounds.items()}


def _read_items(items: Sequence[_Item], runs: Runs, width: dict[Key, int], workers: int) -> Iterator[_Part]:
    done = 0
    if workers > 1:
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                for begin in range(0, len(items), 4 * workers):
                    batch = items[begin : begin + 4 * workers]
                    for part in pool.map(_read_item, batch, [runs] * len(batch), [width] * len(batch)):
                        done += 1
                        yield part
        except BrokenProcessPool:
            pass
    for item in islice(items, done, None):
        yield _read_item(item, runs, width)


def _read_item(item: _Item, runs: Runs, width: dict[Key, int]) -> _Part:
    series: dict[Key, Series] = {}
    files: dict[Key, dict[int, tuple[Path, ...]]] = {}
    empty = np.empty(0, dtype=np.int64), np.empty(0)
    least: dict[tuple[Key, int, int], tuple[Integers, Floats]] = {}
    present: dict[tuple[Key, int, int], tuple[Integers, Floats]] = {}
    read: list[Path] = []
    cut: list[Path] = []
    warnings: list[str] = []
    for paths in item:
        by_key: dict[tuple[Key, int], list[_Steps]] = {}
        for part in _of_files(paths, runs, read, cut, warnings):
            by_key.setdefault((part.key, part.metadata.coords.rank), []).append(part)
        for (key, rank), parts in by_key.items():
            calls, again = _latest(np.concatenate([part.steps for part in parts]))
            metadata = parts[-1].metadata
            files.setdefault(key, {})[rank] = tuple(dict.fromkeys(part.path for part in parts))
            usable = calls[(calls["flags"] & (format.FAILED | format.CAPTURED)) == 0]
            own = series.setdefault(key, Series())
            own.ranks.append(_rank(metadata, calls, usable, again, width.get(key, 1)))
            _count(own, metadata.coords.pp, usable)
            numbers = usable["step"] << INDEX_BITS | usable["index"]
            own.steps, own.longest = _merge(own.steps, own.longest, numbers, usable["duration"] / 1e3, np.maximum)
            group = key, metadata.coords.pp, metadata.coords.tp
            present[group] = _merge(*present.get(group, empty), numbers, np.ones(len(numbers)), np.add)
            least[group] = _merge(*least.get(group, empty), numbers, usable["finalize"] / 1e3, np.minimum)
    for (key, pp, tp), (numbers, times) in least.items():
        # Where a rank is missing, it may be the one that the others waited for.
        whole = present[key, pp, tp][1] == key.sizes.dp * key.sizes.cp
        numbers, times = numbers[whole], times[whole]
        if not len(numbers):
            continue
        first, medians, _ = bucketed(numbers >> INDEX_BITS, times, width.get(key, 1))
        series[key].synchronising[pp, tp] = first, medians
    return series, files, read, cut, warnings


class _Steps(NamedTuple):
    """The steps of one metadata record of a file."""

    path: Path
    key: Key
    metadata: Metadata
    steps: npt.NDArray[Any]


def _of_files(
    paths: Iterable[Path], runs: Runs | None, read: list[Path], cut: list[Path], warnings: list[str]
) -> Iterator[_Steps]:
    """The steps in files of the chosen run, of all without ``runs``; what is wrong with a file goes to the lists."""
    for path in paths:
        try:
            timeline = format.read_timeline(path, events=False)
        except format.UnreadableTimeline as fault:
            warnings.append(f"{path.name} was skipped: {fault.reason}")
            continue
        if runs is not None and len(timeline.steps) and not runs.has(int(timeline.steps["start_ns"][0])):
            continue
        if timeline.damage is not None:
            if timeline.is_cut and len(timeline.steps):
                cut.append(path)
            else:
                warnings.append(f"{path.name}: {timeline.damage}; {len(timeline.steps)} steps before that were read")
        if len(timeline.steps):
            read.append(path)
        for number, metadata in enumerate(timeline.metadata):
            steps = (
                timeline.steps[timeline.steps["metadata"] == number] if len(timeline.metadata) > 1 else timeline.steps
            )
            if not len(steps):
                continue
            yield _Steps(path, Key(metadata.target, metadata.role, metadata.sizes), metadata, steps)


def _latest(every: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """Calls in order, and how many were dropped because a later one is the same call of the same step again (a job
    that went on from a checkpoint)."""
    numbers = every["step"] << INDEX_BITS | every["index"]
    if (np.diff(numbers) > 0).all():
        return every, 0
    order = np.lexsort((every["start_ns"], numbers))
    last = np.append(np.diff(numbers[order]) != 0, True)
    kept = every[order[last]]
    return kept, len(every) - len(kept)


def _rank(metadata: Metadata, calls: npt.NDArray[Any], usable: npt.NDArray[Any], again: int, width: int) -> RankSeries:
    first, medians, counts = bucketed(usable["step"], _compute(usable) / 1e3, width)
    _, finalize, _ = bucketed(usable["step"], usable["finalize"] / 1e3, width)
    shares = usable["own"] / np.maximum(usable["duration"], 1)
    last = calls[-1]
    return RankSeries(
        coords=metadata.coords,
        host=metadata.host,
        first=first,
        compute=medians.astype(np.float32),
        finalize=finalize.astype(np.float32),
        counts=counts.astype(np.int32),
        steps=len(usable),
        left_out=len(calls) - len(usable),
        again=again,
        first_step=int(calls[0]["step"]),
        last_step=int(last["step"]),
        ended=int(last["start_ns"]) + 1000 * int(last["duration"]),
        own=(float(np.median(usable["own"])), float(np.median(shares))) if len(usable) else (0.0, 0.0),
        device_clock=bool((usable["flags"] & format.DEVICE_CLOCK).any()),
    )


def _compute(calls: npt.NDArray[Any]) -> Integers:
    total: Integers = calls["forward"].astype(np.int64) + calls["backward"] + calls["combined"]
    return total


def _count(series: Series, pp: int, calls: npt.NDArray[Any]) -> None:
    compute = _compute(calls)
    bins = np.minimum(np.log(np.maximum(compute, 1)) / np.log1p(BIN), _BINS - 1).astype(np.int64)
    counted = np.bincount(bins, minlength=_BINS)
    series.histograms[pp] = series.histograms[pp] + counted if pp in series.histograms else counted
    series.most[pp] = max(series.most.get(pp, 0.0), float(compute.max(initial=0)) / 1e3)


def percentile(histogram: Integers, fraction: float) -> float:
    """Milliseconds below which this fraction of the counted times lies, to half a bin."""
    place = int(np.searchsorted(np.cumsum(histogram), fraction * int(histogram.sum())))
    return float((1 + BIN) ** (place + 0.5)) / 1e3


def bucketed(steps: Integers, values: Floats, width: int) -> tuple[int, Floats, Integers]:
    """Number of the first bucket (step // width), and the median and the number of the steps of each; steps ascend."""
    if not len(steps):
        return 0, np.empty(0), np.empty(0, dtype=np.int64)
    bucket = steps // width
    first = int(bucket[0])
    size = int(bucket[-1]) - first + 1
    if size > 4 * MOST_BUCKETS:  # far more than the sampled ranks have: what is beyond is one bucket
        bucket, size = np.minimum(bucket, first + 4 * MOST_BUCKETS - 1), 4 * MOST_BUCKETS
    counts = np.bincount(bucket - first, minlength=size)
    medians = np.full(size, np.nan)
    there = counts > 0
    ends = np.cumsum(counts)[there]
    begins = ends - counts[there]
    ordered = values[np.lexsort((values, bucket))]
    medians[there] = (ordered[(begins + ends - 1) // 2] + ordered[(begins + ends) // 2]) / 2
    return first, medians, counts


def _merge(
    numbers: Integers, values: Floats, others: Integers, other_values: Floats, combine: np.ufunc
) -> tuple[Integers, Floats]:
    """Both series by number, combined where both have one."""
    if not len(numbers):
        return others.astype(np.int64), other_values.astype(np.float64)
    if np.array_equal(numbers, others):
        return numbers, combine(values, other_values)
    every = np.union1d(numbers, others)
    merged = np.full(len(every), np.nan)
    merged[np.searchsorted(every, numbers)] = values
    place = np.searchsorted(every, others)
    old = merged[place]
    merged[place] = np.where(np.isnan(old), other_values, combine(old, other_values))
    return every, merged


def _useful(paths: Sequence[Path], items: int) -> int:
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except OSError:
            continue
    if total < _WORTH_IT:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(items, cores))
