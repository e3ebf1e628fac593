"""Reads the timelines of a whole job once. Each becomes a few numbers per bucket of steps, so that memory does not grow
with the number of steps.

A work item holds the files of the ranks that synchronise gradients with each other (data- and context-parallel peers),
because the quickest of these ranks shows how long a step's synchronisation takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.fleet.standstills import StoodStill, stood_or_failed, stood_still
from megaprof.analysis.fleet.trends import Floats, Integers
from megaprof.analysis.notes import Note
from megaprof.analysis.trace.pool import Progress, Workers, at_most, in_processes
from megaprof.analysis.trace.reading import Timelines
from megaprof.analysis.trace.runs import Runs, runs_in
from megaprof.formats import timeline as format
from megaprof.formats.job import STUCK_SECONDS
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import parse_artifact_name
from megaprof.parallel.topology import ParallelSizes, RankCoords

#: About the largest number of buckets.
MOST_BUCKETS = 200
#: Width of a histogram bin, as a fraction of its time. Bins begin at one microsecond.
BIN = 0.005
_BINS = int(np.log(2.0**32) / np.log1p(BIN)) + 2
#: About the number of steps, of several ranks, that are in memory at once.
_STEPS_AT_ONCE = 1 << 16
_MOST_NOTES = 5
#: Bits that tell the calls of one step apart: a step's number is above them.
CALLS = 16
_BYTES = np.dtype((np.void, format.STEP_TYPE.itemsize))


class Key(NamedTuple):
    """A target, a role and parallel sizes, which are reported together."""

    target: str
    role: str | None
    sizes: ParallelSizes


Widths = dict[tuple[str, str | None], int]


@dataclass(frozen=True)
class RankSeries:
    """One rank, with medians over buckets of steps in milliseconds, NaN for buckets without steps."""

    coords: RankCoords
    """Coordinates of the rank."""
    host: str | None
    """Host of the rank; None if it is not known."""
    first: int
    """Number of the rank's first bucket."""
    compute: npt.NDArray[np.float32]
    """Milliseconds of forward, backward and combined passes per step, by bucket."""
    counts: npt.NDArray[np.int32]
    """Number of steps, by bucket."""
    mean_ms: float
    """Milliseconds of its passes in an average step; NaN without steps."""
    left_out: int
    """Number of steps that do not count, because a window was open or they failed. Does not include those in which the
    rank stood still."""
    again: int
    """Number of steps that it has twice; the later one counts."""
    first_step: int
    """First step of the rank."""
    last_step: int
    """Last step of the rank."""
    ended: int
    """End of its last step, in nanoseconds on the wall clock."""
    device_clock: bool
    """True if its times are the GPU's."""


@dataclass(frozen=True)
class Histogram:
    """Many times, counted in bins of `BIN`."""

    counts: Integers
    """[bin]"""
    longest_us: Integers
    """[bin]: the longest of these times in microseconds."""

    @classmethod
    def of(cls, times_us: Integers) -> Histogram:
        """Counts times in microseconds."""
        bins = np.minimum(np.log(np.maximum(times_us, 1)) / np.log1p(BIN), _BINS - 1).astype(np.int64)
        longest_us = np.zeros(_BINS, dtype=np.int64)
        np.maximum.at(longest_us, bins, times_us)
        return cls(np.bincount(bins, minlength=_BINS), longest_us)

    def joined(self, other: Histogram) -> Histogram:
        """Returns both together."""
        return Histogram(self.counts + other.counts, np.maximum(self.longest_us, other.longest_us))

    def percentile_ms(self, fraction: float) -> float:
        """Returns the milliseconds that this fraction of the times does not exceed. It is one of the times: the longest
        in its bin."""
        at = int(np.searchsorted(np.cumsum(self.counts), fraction * int(self.counts.sum())))
        return float(self.longest_us[at]) / 1e3


@dataclass
class Series:
    """The numbers of one key, for some or all of its ranks."""

    ranks: list[RankSeries] = field(default_factory=list)
    """The ranks, in the order in which they were read."""
    steps: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """All calls, as `numbers_of` numbers them, ascending."""
    longest: Floats = field(default_factory=lambda: np.empty(0))
    """Milliseconds of each call on its slowest rank."""
    synchronising: dict[tuple[int, int], tuple[int, Floats]] = field(default_factory=dict)
    """For each group (pp and tp): the number of its first bucket, and by bucket the milliseconds per step that its
    quickest rank spent on gradient synchronisation. Only steps that all ranks of the group have count."""
    histograms: dict[int, Histogram] = field(default_factory=dict)
    """The compute per step, by stage."""
    metadata: dict[int, Metadata] = field(default_factory=dict)
    """Metadata in the files of one rank, by stage."""
    stood: list[StoodStill] = field(default_factory=list)
    """Ranks with a step in which they stood still, or that an exception ended."""

    def add(self, other: Series) -> None:
        """Adds other ranks of the same key."""
        self.ranks += other.ranks
        self.stood += other.stood
        self.metadata.update(other.metadata)
        self.steps, self.longest = _merge(self.steps, self.longest, other.steps, other.longest, np.maximum)
        self.synchronising.update(other.synchronising)
        for pp, histogram in other.histograms.items():
            self.count(pp, histogram)

    def count(self, pp: int, compute: Histogram) -> None:
        """Adds the compute of steps on stage ``pp``."""
        self.histograms[pp] = self.histograms[pp].joined(compute) if pp in self.histograms else compute


@dataclass
class FleetReading:
    """The numbers in many timelines."""

    timelines: Timelines = field(default_factory=Timelines)
    """All files."""
    runs: Runs = field(default_factory=Runs)
    """All runs that were found; only the chosen one was read."""
    width: Widths = field(default_factory=dict)
    """Steps per bucket, by target and role."""
    series: dict[Key, Series] = field(default_factory=dict)
    """Numbers, by key."""
    files: dict[Key, dict[int, tuple[Path, ...]]] = field(default_factory=dict)
    """Files of every rank, by key and rank."""
    read: list[Path] = field(default_factory=list)
    """All files that hold steps."""
    warnings: list[Note] = field(default_factory=list)
    """Notes about single files."""

    def only(self, key: Key, ranks: Iterable[int]) -> FleetReading:
        """Returns only what opens the timelines of some ranks, so that the others need not be kept any longer."""
        files = {rank: self.files[key][rank] for rank in ranks}
        timelines = self.timelines.only(path for paths in files.values() for path in paths)
        return FleetReading(timelines, files={key: files})

    def add(self, other: FleetReading) -> None:
        """Adds another reading of the same runs."""
        for key, part in other.series.items():
            self.series.setdefault(key, Series()).add(part)
        for key, by_rank in other.files.items():
            self.files.setdefault(key, {}).update(by_rank)
        self.read += other.read
        self.warnings += (note for note in other.warnings if note not in self.warnings)


def read_fleet(
    timelines: Timelines, workers: Workers = 1, progress: Progress | None = None, runs: Runs | None = None
) -> FleetReading:
    """Reads every file once, and returns the numbers of one run.

    ``workers`` is as for `reading.read_all`. ``progress`` is called with the number of files done, and of all files.
    Reads the chosen run of ``runs``, by default the newest.
    """
    items = _items(timelines.paths)
    runs = runs or runs_in((), timelines)
    reading = FleetReading(timelines, runs, _width(runs))
    done = 0
    workers = at_most(workers, timelines.useful_processes(len(items)))
    read_item = partial(_read_item, timelines, runs, reading.width)
    for item, item_reading in zip(items, in_processes(read_item, items, workers), strict=True):
        reading.add(item_reading)
        done += sum(map(len, item))
        if progress is not None:
            progress(done, len(timelines.paths))
    return reading


_Item = list[list[Path]]  # the files of every rank of a group


def _items(paths: Sequence[Path]) -> list[_Item]:
    groups: dict[tuple[str | int | None, ...], dict[int, list[Path]]] = {}
    for path in paths:
        name = parse_artifact_name(path.name)
        # A renamed file is read on its own: its contents say what it is.
        group = (name.target, name.role, name.place.pp, name.place.tp) if name else (str(path),)
        groups.setdefault(group, {}).setdefault(name.place.rank if name else -1, []).append(path)
    return [list(by_rank.values()) for by_rank in groups.values()]


def _width(runs: Runs) -> Widths:
    """Returns the steps per bucket, by target and role, from the timelines that were sampled for ``runs``."""
    bounds: dict[tuple[str, str | None], tuple[int, int]] = {}
    for piece in runs.pieces:
        low, high = bounds.get(piece.line[:2], (piece.first_step, piece.last_step))
        bounds[piece.line[:2]] = min(piece.first_step, low), max(piece.last_step, high)
    return {key: max(1, -(-(high - low + 1) // MOST_BUCKETS)) for key, (low, high) in bounds.items()}


def _read_item(timelines: Timelines, runs: Runs, width: Widths, item: _Item) -> FleetReading:
    reading = FleetReading(timelines, runs, width)
    groups: dict[tuple[Key, int, int], _Group] = {}
    waiting_ranks: dict[tuple[Key, int, int], list[list[_Steps]]] = {}
    steps_waiting = 0
    for number, paths in enumerate(item, 1):
        by_rank: dict[tuple[Key, int], list[_Steps]] = {}
        for part in _steps_in(paths, reading):
            by_rank.setdefault((part.key, part.metadata.coords.rank), []).append(part)
        for (key, rank), parts in by_rank.items():
            coords = parts[-1].metadata.coords
            reading.files.setdefault(key, {})[rank] = tuple(dict.fromkeys(part.path for part in parts))
            waiting_ranks.setdefault((key, coords.pp, coords.tp), []).append(parts)
            steps_waiting += sum(len(part.steps) for part in parts)
        if steps_waiting >= _STEPS_AT_ONCE or number == len(item):
            for group_key, ranks in waiting_ranks.items():
                series = reading.series.setdefault(group_key[0], Series())
                counted_calls = _add_ranks(series, ranks, width.get(group_key[0][:2], 1))
                groups.setdefault(group_key, _Group()).add(counted_calls)
            waiting_ranks, steps_waiting = {}, 0
    for (key, pp, tp), group in groups.items():
        size, series = key.sizes.dp * key.sizes.cp, reading.series[key]
        steps, times = group.of(size)
        if len(steps):
            first, medians, _ = bucketed(steps, times, width.get(key[:2], 1))
            series.synchronising[pp, tp] = first, medians
    return reading


class _Group:
    """The gradient synchronisation of ranks that take part in it together."""

    def __init__(self) -> None:
        self._ranks = np.empty(0, dtype=np.int64), np.empty(0)
        self._quickest = self._ranks

    def add(self, calls: npt.NDArray[Any]) -> None:
        numbers = numbers_of(calls)
        self._ranks = _merge(*self._ranks, numbers, np.ones(len(numbers)), np.add)
        self._quickest = _merge(*self._quickest, numbers, calls["finalize"] / 1e3, np.minimum)

    def of(self, size: int) -> tuple[Integers, Floats]:
        """Returns the steps that at least ``size`` ranks have, and the milliseconds of the quickest rank. Other steps
        do not count, because the ranks may have waited for a rank that is missing."""
        complete = self._ranks[1] >= size
        return self._quickest[0][complete] >> CALLS, self._quickest[1][complete]


def numbers_of(calls: npt.NDArray[Any]) -> Integers:
    """Returns the step of each call as a number, with the index of the call in its lowest `CALLS` bits."""
    numbers: Integers = calls["step"].astype(np.int64) << CALLS | calls["index"]
    return numbers


class _Steps(NamedTuple):
    """The steps of one metadata record of a file."""

    path: Path
    key: Key
    metadata: Metadata
    steps: npt.NDArray[Any]


def _steps_in(paths: Iterable[Path], reading: FleetReading) -> Iterator[_Steps]:
    """Yields the steps in the files of the chosen run. Adds the files that were read, and what is wrong with them, to
    ``reading``."""
    for path in paths:
        try:
            timeline = reading.timelines.read(path, events=False)
        except format.UnreadableTimeline as fault:
            reading.warnings.append(Note("skipped", files=(path.name,), said=fault.reason))
            continue
        if len(timeline.steps) and not reading.runs.has(int(timeline.steps["start_ns"][0])):
            continue
        if timeline.damage is not None:
            reading.warnings.append(Note("cut", files=(path.name,), said=timeline.damage))
        if len(timeline.steps):
            reading.read.append(path)
        for metadata, steps in timeline.by_metadata():
            unusable = _unusable(path, metadata, steps)
            if unusable is None:
                yield _Steps(path, Key(metadata.target, metadata.role, metadata.sizes), metadata, steps)
            elif unusable not in reading.warnings:
                reading.warnings.append(unusable)


def _unusable(path: Path, metadata: Metadata, steps: npt.NDArray[Any]) -> Note | None:
    """Returns why the times of these steps cannot be used; None if they can."""
    if (reason := (metadata.timeline or {}).get("reason")) is not None:
        said = f"its times, on the host's clock, do not show when the device worked: {reason}"
        return Note("skipped", files=(path.name,), said=said)
    if not (steps["duration"] > 0).any():
        said = "it holds no times: the GPU was not done in time, or used streams out of step"
        return Note("skipped", files=(path.name,), said=said)
    return None


def _latest(calls: npt.NDArray[Any], rank_of_call: Integers) -> tuple[npt.NDArray[Any], Integers]:
    """Returns the calls of all ranks in order, and the rank of each call. If a rank has the same call of a step twice
    (the job continued from a checkpoint), the later one counts."""
    numbers = numbers_of(calls)
    if ((np.diff(numbers) > 0) | (np.diff(rank_of_call) > 0)).all():
        return calls, rank_of_call
    order = np.lexsort((calls["start_ns"], numbers, rank_of_call))
    numbers, rank_of_call = numbers[order], rank_of_call[order]
    is_last = np.append((np.diff(numbers) != 0) | (np.diff(rank_of_call) != 0), True)
    return calls[order[is_last]], rank_of_call[is_last]


def _add_ranks(series: Series, ranks: Sequence[Sequence[_Steps]], width: int) -> npt.NDArray[Any]:
    """Adds ranks of one stage to their series. Returns those of their calls that count."""
    read_counts = np.array([sum(len(part.steps) for part in parts) for parts in ranks])
    # Joins the steps as bytes; otherwise numpy looks at every field of every file.
    pieces = [np.ascontiguousarray(part.steps).view(_BYTES) for parts in ranks for part in parts]
    all_calls = np.concatenate(pieces).view(format.STEP_TYPE)
    calls, rank_of_call = _latest(all_calls, np.repeat(np.arange(len(ranks)), read_counts))
    metadata = [parts[-1].metadata for parts in ranks]
    call_counts = np.bincount(rank_of_call)
    ends = np.cumsum(call_counts)
    first_calls, last_calls = calls[ends - call_counts], calls[ends - 1]
    compute = _compute(calls)
    stood = np.zeros(len(calls), dtype=np.bool_)
    is_long = np.maximum(calls["duration"], compute) > STUCK_SECONDS * 1e6
    for rank in sorted(
        {*rank_of_call[is_long].tolist(), *np.flatnonzero(last_calls["flags"] & format.FAILED).tolist()}
    ):
        rank_rows = slice(ends[rank] - call_counts[rank], ends[rank])
        stood[rank_rows] = stood_still(calls[rank_rows], compute[rank_rows])
        series.stood += stood_or_failed(calls[rank_rows], compute[rank_rows], stood[rank_rows], metadata[rank].coords)
    # A step that the GPU did not finish in time was written without times.
    is_timed = (calls["flags"] & (format.FAILED | format.DISTURBED) == 0) & (calls["duration"] > 0) & ~stood
    counted_calls: npt.NDArray[Any] = calls[is_timed]
    compute, rank_of_call = compute[is_timed], rank_of_call[is_timed]

    def sum_by_rank(weights: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        return np.bincount(rank_of_call, weights, minlength=len(ranks))

    with np.errstate(invalid="ignore"):
        mean_ms = (sum_by_rank(compute) / sum_by_rank() / 1e3).tolist()
    left_out = (call_counts - sum_by_rank() - np.add.reduceat(stood, ends - call_counts, dtype=np.int64)).tolist()
    again, first_step, last_step = (
        (read_counts - call_counts).tolist(),
        first_calls["step"].tolist(),
        last_calls["step"].tolist(),
    )
    ended = (last_calls["start_ns"] + 1000 * last_calls["duration"].astype(np.int64)).tolist()
    on_device = sum_by_rank(counted_calls["flags"] & format.DEVICE_CLOCK > 0).tolist()
    begins, bounds, medians, counts = _bucketed(rank_of_call, counted_calls["step"], compute / 1e3, width, len(ranks))
    for rank, rank_metadata in enumerate(metadata):
        buckets = slice(bounds[rank], bounds[rank + 1])
        series.ranks.append(
            RankSeries(
                coords=rank_metadata.coords,
                host=rank_metadata.host,
                first=begins[rank],
                compute=medians[buckets].astype(np.float32),
                counts=counts[buckets].astype(np.int32),
                mean_ms=mean_ms[rank],
                left_out=left_out[rank],
                again=again[rank],
                first_step=first_step[rank],
                last_step=last_step[rank],
                ended=ended[rank],
                device_clock=on_device[rank] > 0,
            )
        )
    series.count(metadata[0].coords.pp, Histogram.of(compute))
    series.metadata[metadata[0].coords.pp] = metadata[0]
    longest = counted_calls["duration"] / 1e3
    series.steps, series.longest = _merge(series.steps, series.longest, numbers_of(counted_calls), longest, np.maximum)
    return counted_calls


def _compute(calls: npt.NDArray[Any]) -> Integers:
    compute_us: Integers = calls["forward"].astype(np.int64) + calls["backward"] + calls["combined"]
    return compute_us


def bucketed(steps: Integers, values: Floats, width: int) -> tuple[int, Floats, Integers]:
    """Returns the number of the first bucket (step // width), and the median and number of steps of each bucket.
    ``steps`` must ascend."""
    begins, _, medians, counts = _bucketed(np.zeros(len(steps), dtype=np.int64), steps, values, width, 1)
    return begins[0], medians, counts


def _bucketed(
    rows: Integers, steps: Integers, values: Floats, width: int, count: int
) -> tuple[list[int], list[int], Floats, Integers]:
    """Returns, for rows of ascending steps: the number of each row's first bucket; the bounds of each row's buckets
    among the buckets of all rows; and the median and number of steps of each bucket."""
    row_counts = np.bincount(rows, minlength=count)
    ends = np.cumsum(row_counts)
    buckets = steps // width
    first, sizes = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    nonempty_rows = row_counts > 0
    first[nonempty_rows] = buckets[(ends - row_counts)[nonempty_rows]]
    # Far more buckets than the sampled ranks have; all later steps share the last one.
    positions = np.minimum(buckets - first[rows], 4 * MOST_BUCKETS - 1)
    sizes[nonempty_rows] = positions[(ends - 1)[nonempty_rows]] + 1
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    positions += bounds[rows]
    counts = np.bincount(positions, minlength=bounds[-1])
    medians = np.full(len(counts), np.nan)
    nonempty = counts > 0
    ends = np.cumsum(counts)[nonempty]
    begins = ends - counts[nonempty]
    ordered = values[np.lexsort((values, positions))]
    medians[nonempty] = (ordered[(begins + ends - 1) // 2] + ordered[(begins + ends) // 2]) / 2
    return first.tolist(), bounds.tolist(), medians, counts


def _merge(
    numbers: Integers, values: Floats, other_numbers: Integers, other_values: Floats, combine: np.ufunc
) -> tuple[Integers, Floats]:
    """Returns both sets of values by ascending number, and combines values that have the same number. ``numbers`` and
    ``other_numbers`` may be in any order."""
    all_numbers = np.concatenate((numbers, other_numbers))
    order = np.argsort(all_numbers, kind="stable")
    all_numbers = all_numbers[order]
    begins = np.flatnonzero(np.append(True, np.diff(all_numbers) > 0)) if len(all_numbers) else order
    return all_numbers[begins], combine.reduceat(np.concatenate((values, other_values))[order], begins)
