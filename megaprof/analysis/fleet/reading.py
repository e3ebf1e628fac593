"""Reads the timelines of a whole job once: what every call took, and how long each rank computed in a step, as medians
over buckets of steps, so that memory does not grow with ranks times steps.

A work item holds the files of the ranks that synchronise gradients with each other (data- and context-parallel peers),
because the quickest of these ranks shows how long a step's synchronisation takes.

Steps in which the whole job stood still say nothing about usual step times, so they do not count in them. Ranks wait in
an exchange or in the gradient reduction, for a rank whose own passes took the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Floats as Floats
from megaprof.analysis.trace.columns import Numbers as Numbers
from megaprof.analysis.trace.reading import Progress, Runs, Timelines, Workers, in_processes, runs_in
from megaprof.analysis.trace.steps import grouped
from megaprof.formats import codes, ranges
from megaprof.formats import timeline as format
from megaprof.formats.job import FIRST_STEP_SECONDS, STUCK_SECONDS, Standing, Standstill, limit
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import parse_artifact_name
from megaprof.parallel.schedules import Pass
from megaprof.parallel.topology import ParallelSizes, RankCoords

#: About the largest number of buckets.
MOST_BUCKETS = 200
#: Compute is counted in bins, each wider than the one before it by this fraction. They begin at one microsecond.
BIN = 0.002
_BINS = int(np.log(2.0**32) / np.log1p(BIN)) + 2
#: About the number of steps, of several ranks, that are in memory at once.
_STEPS_AT_ONCE = 1 << 16
#: Bits that tell the calls of one step apart: a step's number is above them.
CALLS = 16
#: At most this many ranks have their files opened again, to see where they stood still.
_MOST_PLACES = 4
_BYTES = np.dtype((np.void, format.STEP_TYPE.itemsize))


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of many times, in milliseconds."""

    p50: float
    """Median."""
    p95: float
    """95 % of the times are below."""
    p99: float
    """99 % of the times are below."""
    max: float
    """Longest time."""


class Key(NamedTuple):
    """A target, a role and parallel sizes, which are reported together."""

    target: str
    role: str | None
    sizes: ParallelSizes


class RankRow(NamedTuple):
    """One rank over the whole run. Only steps that count are timed: no window was open, none failed, and the rank did
    not stand still in them."""

    coords: RankCoords
    host: str
    files: tuple[Path, ...]
    steps: int
    mean_ms: float
    """Milliseconds of forward, backward and combined passes in an average step; NaN without steps."""
    left_out: int
    """Number of steps that do not count. Does not include those in which the rank stood still."""
    again: int
    """Number of steps that it has twice; the later one counts."""
    first_step: int
    last_step: int
    ended: int
    """End of its last step, in nanoseconds on the wall clock."""
    device_clock: bool


class StoodStill(NamedTuple):
    """A rank in a step in which it stood still, or that an exception ended."""

    step: int
    coords: RankCoords
    seconds: float
    """Seconds by which the step took longer than usual; 0 if the rank did not stand still."""
    computing: bool
    """True if the rank's own passes took more than half of ``seconds``."""
    failed: bool
    """True if an exception ended the step."""


Rows = tuple[int, Floats]
"""Medians over buckets of steps, [row, bucket], NaN for buckets without steps, behind the number of the first bucket
(step // width)."""


@dataclass(frozen=True)
class Calls:
    """What single calls took on several ranks, [call], in order."""

    numbers: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    """As `numbers_of` numbers them."""
    longest: Floats = field(default_factory=lambda: np.empty(0))
    """Milliseconds on the slowest rank."""
    quickest: Floats = field(default_factory=lambda: np.empty(0))
    """Milliseconds of gradient synchronisation on the quickest rank."""
    ranks: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    """Number of ranks that have it."""

    @property
    def steps(self) -> Numbers:
        """The step of each."""
        return self.numbers >> CALLS

    def joined(self, other: Calls) -> Calls:
        """Returns these calls on the ranks of both."""
        numbers, place = np.unique(np.concatenate((self.numbers, other.numbers)), return_inverse=True)
        longest, quickest = np.zeros(len(numbers)), np.full(len(numbers), np.inf)
        np.maximum.at(longest, place, np.concatenate((self.longest, other.longest)))
        np.minimum.at(quickest, place, np.concatenate((self.quickest, other.quickest)))
        ranks = np.bincount(place, np.concatenate((self.ranks, other.ranks)), len(numbers))
        return Calls(numbers, longest, quickest, ranks.astype(np.int64))


@dataclass
class Series:
    """One target over the whole run, on some or all of its ranks."""

    width: int
    """Steps per bucket."""
    ranks: list[RankRow] = field(default_factory=list)
    compute: list[Rows] = field(default_factory=list)
    """Milliseconds of the passes of a step; together one row for each of ``ranks``."""
    synchronising: dict[tuple[int, int], Rows] = field(default_factory=dict)
    """By group (pp and tp), one row: the milliseconds of a step that its quickest rank spent on gradient
    synchronisation. Only steps that all ranks of the group have count."""
    calls: Calls = field(default_factory=Calls)
    times: dict[int, Numbers] = field(default_factory=dict)
    """By stage, how many steps of its ranks computed for how long, [bin] (`BIN`)."""
    metadata: dict[int, Metadata] = field(default_factory=dict)
    """Metadata in the files of one rank, by stage."""
    stood: list[StoodStill] = field(default_factory=list)
    """Ranks with a step in which they stood still, or that an exception ended."""

    def add(self, other: Series) -> None:
        """Adds other ranks of the same target."""
        self.ranks += other.ranks
        self.compute += other.compute
        self.synchronising |= other.synchronising
        self.calls = self.calls.joined(other.calls)
        self.times |= {pp: self.times.get(pp, 0) + counts for pp, counts in other.times.items()}
        self.metadata |= other.metadata
        self.stood += other.stood

    def percentiles(self, pp: int) -> Percentiles | None:
        """Returns the compute per step over all steps of a stage's ranks, to a tenth of a percent; None without any."""
        behind = np.cumsum(self.times[pp])
        if not behind[-1]:
            return None
        bins = np.searchsorted(behind, np.array((0.5, 0.95, 0.99, 1.0)) * behind[-1])
        return Percentiles(*((1 + BIN) ** (bins + 0.5) / 1e3).tolist())


@dataclass
class FleetReading:
    """The timelines of one run."""

    timelines: Timelines = field(default_factory=Timelines)
    """All files, also of other runs."""
    series: dict[Key, Series] = field(default_factory=dict)
    read: list[Path] = field(default_factory=list)
    """All files that hold steps of the run."""
    warnings: list[Note] = field(default_factory=list)

    def files_of(self, key: Key) -> set[Path]:
        """Returns the files of a job's ranks; none if the job has no timelines."""
        return {path for row in self.series[key].ranks for path in row.files} if key in self.series else set()

    def call(self, key: Key, rank: int, step: int, index: int) -> list[Pass]:
        """Returns one call of a rank, as a pass named after its target, followed by everything in it in order; an empty
        list if its files do not have it. If the step ran more than once, the last run counts."""
        files = next(row.files for row in self.series[key].ranks if row.coords.rank == rank)
        latest: list[Pass] = []
        for timeline, rows in self.timelines.steps_of(files, key):
            steps = timeline.steps[rows]
            for row in rows[(steps["step"] == step) & (steps["index"] == index)].tolist():
                fixed, (present, times) = timeline.steps[row], timeline.times([row])
                begin_ns, coords = int(fixed["start_ns"]), timeline.metadata[fixed["metadata"]].coords
                if not len(present) or (latest and latest[0].start >= begin_ns):
                    continue
                end_ns = begin_ns + 1000 * int(fixed["duration"])
                latest = [Pass(key.target, coords.pp, None, None, begin_ns, end_ns, coords.rank)]
                spans_ns = begin_ns + 1000 * times[0]
                for code, (start, end) in zip(timeline.shapes[fixed["shape"]].tolist(), spans_ns.tolist(), strict=True):
                    if (name := codes.name(code)) is not None:
                        chunk, microbatch = name.fields.get("chunk"), name.fields.get("mb")
                        latest.append(Pass(name.label, coords.pp, chunk, microbatch, start, end, coords.rank))
        return latest


def read_fleet(
    timelines: Timelines, workers: Workers = 1, progress: Progress | None = None, runs: Runs | None = None
) -> FleetReading:
    """Reads every file once, and returns the numbers of one run: the chosen one of ``runs``, by default the newest.

    ``workers`` is as for `reading.read_all`. ``progress`` is called with the number of files done, and of all files.
    """
    groups: dict[tuple[str | int | None, ...], dict[int, list[Path]]] = {}
    for path in timelines.paths:
        name = parse_artifact_name(path.name)
        # A renamed file is read on its own: its contents say what it is.
        group = (name.target, name.role, name.coords.pp, name.coords.tp) if name else (str(path),)
        groups.setdefault(group, {}).setdefault(name.coords.rank if name else -1, []).append(path)
    items = [list(by_rank.values()) for by_rank in groups.values()]
    runs = runs or runs_in((), timelines)
    widths = {}
    for of_role, pieces in grouped(runs.pieces, lambda piece: piece.line[:2]).items():
        first, last = min(piece.first_step for piece in pieces), max(piece.last_step for piece in pieces)
        widths[of_role] = -(-(last - first + 1) // MOST_BUCKETS)
    read_item = partial(_read_item, timelines, runs, widths)
    reading, done = FleetReading(timelines), 0
    parts = in_processes(read_item, items, workers, timelines.useful_processes(len(items)))
    for item, part in zip(items, parts, strict=True):
        for key, series in part.series.items():
            reading.series.setdefault(key, Series(series.width)).add(series)
        reading.read += part.read
        reading.warnings += part.warnings
        done += sum(map(len, item))
        if progress is not None:
            progress(done, len(timelines.paths))
    return reading


_Steps = tuple[Path, Metadata, npt.NDArray[Any]]
"""A file, and the steps of one of its metadata records."""


def _read_item(
    timelines: Timelines, runs: Runs, widths: Mapping[tuple[str, str | None], int], item: Sequence[Sequence[Path]]
) -> FleetReading:
    """Reads one work item. ``widths``: the steps per bucket, by target and role."""
    reading = FleetReading()
    groups: dict[tuple[Key, int, int], Calls] = {}
    waiting: dict[tuple[Key, int, int], dict[int, list[_Steps]]] = {}
    steps_waiting = 0
    for number, paths in enumerate(item, 1):
        for part in _steps_in(paths, timelines, runs, reading):
            _, metadata, steps = part
            key, coords = Key(metadata.target, metadata.role, metadata.sizes), metadata.coords
            waiting.setdefault((key, coords.pp, coords.tp), {}).setdefault(coords.rank, []).append(part)
            steps_waiting += len(steps)
        if steps_waiting >= _STEPS_AT_ONCE or number == len(item):
            for group, by_rank in waiting.items():
                series = reading.series.setdefault(group[0], Series(widths.get(group[0][:2], 1)))
                groups[group] = groups.get(group, Calls()).joined(_add_ranks(series, [*by_rank.values()]))
            waiting, steps_waiting = {}, 0
    for (key, pp, tp), calls in groups.items():
        series = reading.series[key]
        series.calls = series.calls.joined(calls)
        # In other steps, the ranks may have waited for a rank that is missing, or there were no gradients.
        complete = (calls.ranks >= key.sizes.dp * key.sizes.cp) & (calls.quickest > 0.0)
        if complete.any():
            rows = bucketed(calls.steps[complete], calls.quickest[None, complete], series.width)
            series.synchronising[pp, tp] = rows
    return reading


def _steps_in(paths: Iterable[Path], timelines: Timelines, runs: Runs, reading: FleetReading) -> Iterator[_Steps]:
    """Yields the steps in the files of the chosen run. Adds the files that were read, and what is wrong with them, to
    ``reading``."""
    for path in paths:
        try:
            timeline = timelines.read(path, events=False)
        except format.UnreadableTimeline as fault:
            reading.warnings.append(Note("skipped", files=(path.name,), said=str(fault)))
            continue
        if len(timeline.steps) and not runs.has(int(timeline.steps["start_ns"][0])):
            continue
        if timeline.damage is not None:
            reading.warnings.append(Note("cut", files=(path.name,), said=timeline.damage))
        if len(timeline.steps):
            reading.read.append(path)
        for metadata, steps in timeline.by_metadata():
            if (reason := (metadata.timeline or {}).get("reason")) is not None:
                said = f"its times, on the host's clock, do not show when the device worked: {reason}"
            elif not (steps["duration"] > 0).any():
                said = "it holds no times: the GPU was not done in time, or used streams out of step"
            else:
                yield path, metadata, steps
                continue
            reading.warnings.append(Note("skipped", files=(path.name,), said=said))


def numbers_of(calls: npt.NDArray[Any]) -> Numbers:
    """Returns the step of each call as a number, with the index of the call in its lowest `CALLS` bits."""
    return np.asarray(calls["step"].astype(np.int64) << CALLS | calls["index"])


def _add_ranks(series: Series, ranks: Sequence[Sequence[_Steps]]) -> Calls:
    """Adds ranks of one stage, each with its steps, to their series. Returns those of their calls that count."""
    read = np.array([sum(len(steps) for *_, steps in parts) for parts in ranks])
    # Joins the steps as bytes; otherwise numpy looks at every field of every file.
    pieces = [np.ascontiguousarray(steps).view(_BYTES) for parts in ranks for *_, steps in parts]
    all_calls = np.concatenate(pieces).view(format.STEP_TYPE)
    numbers, column = np.unique(numbers_of(all_calls), return_inverse=True)
    if len(ranks) * len(numbers) > 2 * len(all_calls) and len(ranks) > 1:  # few calls in common: most would be empty
        return _add_ranks(series, ranks[::2]).joined(_add_ranks(series, ranks[1::2]))
    place = np.full((len(ranks), len(numbers)), -1)
    # If the job continued from a checkpoint, a rank has a call twice. The later one counts, as it is assigned last.
    order = np.argsort(all_calls["start_ns"], kind="stable")
    place[np.repeat(np.arange(len(ranks)), read)[order], column[order]] = order
    calls, there = all_calls[place], place >= 0  # [rank, call]
    duration = calls["duration"].astype(np.int64)
    compute = calls["forward"].astype(np.int64) + calls["backward"] + calls["combined"]
    last = len(numbers) - 1 - np.argmax(there[:, ::-1], axis=1)
    ends = calls[np.arange(len(ranks)), last]
    stood = np.zeros_like(there)
    is_long = there & (np.maximum(duration, compute) > STUCK_SECONDS * 1e6)
    for rank in np.flatnonzero(is_long.any(axis=1) | (ends["flags"] & format.FAILED > 0)).tolist():
        own = there[rank]
        stood[rank, own], found = stood_still(calls[rank, own], compute[rank, own], ranks[rank][-1][1].coords)
        series.stood += found
    # A step that the GPU did not finish in time was written without times.
    counts = there & (calls["flags"] & (format.FAILED | format.DISTURBED) == 0) & (duration > 0) & ~stood
    steps = counts.sum(axis=1)
    with np.errstate(invalid="ignore"):
        mean_ms = np.where(counts, compute, 0).sum(axis=1) / steps / 1e3
    columns = (
        steps,
        mean_ms,
        (there & ~counts & ~stood).sum(axis=1),
        read - there.sum(axis=1),
        numbers[np.argmax(there, axis=1)] >> CALLS,
        numbers[last] >> CALLS,
        ends["start_ns"].astype(np.int64) + 1000 * ends["duration"].astype(np.int64),
        (counts & (calls["flags"] & format.DEVICE_CLOCK > 0)).any(axis=1),
    )
    for parts, *facts in zip(ranks, *(column.tolist() for column in columns), strict=True):
        (_, metadata, _), files = parts[-1], tuple(dict.fromkeys(path for path, *_ in parts))
        series.ranks.append(RankRow(metadata.coords, metadata.host, files, *facts))
    pp = metadata.coords.pp
    bins = np.log(np.maximum(compute[counts], 1)) / np.log1p(BIN)
    times = np.bincount(np.minimum(bins, _BINS - 1).astype(np.int64), minlength=_BINS)
    series.times[pp] = series.times.get(pp, 0) + times
    series.metadata[pp] = metadata
    kept = counts.any(axis=0)
    numbers, counts = numbers[kept], counts[:, kept]
    compute_ms = np.where(counts, compute[:, kept] / 1e3, np.nan)
    first, medians = bucketed(numbers >> CALLS, compute_ms, series.width)
    series.compute.append((first, medians.astype(np.float32)))
    longest = np.where(counts, duration[:, kept], 0).max(axis=0) / 1e3
    quickest = np.where(counts, calls["finalize"][:, kept], np.inf).min(axis=0) / 1e3
    return Calls(numbers, longest, quickest, counts.sum(axis=0))


def bucketed(steps: Numbers, values: Floats, width: int) -> Rows:
    """Returns the medians over buckets of steps of ``values``, [row, call], NaN for none. ``steps``, [call], must
    ascend."""
    if not len(steps):
        return 0, np.empty((len(values), 0))
    first = int(steps[0]) // width
    # Far more buckets than the sampled ranks have; all later steps share the last one.
    buckets = np.minimum(steps // width - first, 4 * MOST_BUCKETS - 1)
    medians = np.full((len(values), int(buckets[-1]) + 1), np.nan)
    bounds = np.searchsorted(buckets, np.arange(medians.shape[1] + 1))
    for bucket, (begin, end) in enumerate(pairwise(bounds.tolist())):
        if end - begin == 1:
            medians[:, bucket] = values[:, begin]
        elif end > begin:
            part = values[:, begin:end].T
            medians[:, bucket] = (low_median(part) - low_median(-part)) / 2
    return first, medians


def low_median(values: Floats) -> Floats:
    """Returns the median along the first axis, ignoring NaN; NaN if there is no value. Of two middle values it returns
    the lower one, so that one slow value of two does not move it."""
    ordered = np.sort(values, axis=0)
    counts = np.isfinite(values).sum(axis=0)
    medians: Floats = np.take_along_axis(ordered, np.maximum((counts - 1) // 2, 0)[None], axis=0)[0]
    return np.where(counts > 0, medians, np.nan)


def stacked(blocks: Iterable[Rows], begin: int, count: int) -> Floats:
    """Returns the rows of all blocks with the same buckets: ``count`` of them, from the bucket ``begin`` on."""
    parts = [np.empty((0, count))]
    for first, rows in blocks:
        part = np.full((len(rows), count), np.nan)
        inside = part[:, first - begin :][:, : rows.shape[1]]
        inside[:] = rows[:, : inside.shape[1]]
        parts.append(part)
    return np.concatenate(parts)


def stood_still(
    calls: npt.NDArray[Any], compute: npt.NDArray[Any], coords: RankCoords
) -> tuple[npt.NDArray[np.bool_], list[StoodStill]]:
    """Returns which of a rank's ``calls``, in order, stood still, by the rule of `job.limit`, and these steps, with the
    last one if an exception ended it.

    ``compute`` has the microseconds that the passes of each call took. A step with an open window never counts, because
    the profiler makes it longer.
    """
    took_us = calls["duration"].astype(np.int64)
    failed, disturbed = (calls["flags"] & flag != 0 for flag in (format.FAILED, format.DISTURBED))
    usual = ~failed & ~disturbed
    least_us = np.full(len(calls), 1e6 * limit(_median(took_us[usual]) / 1e6))
    least_us[0] = max(least_us[0], 1e6 * FIRST_STEP_SECONDS)
    stood: npt.NDArray[np.bool_] = (np.maximum(took_us, compute) > least_us) & ~disturbed
    usual &= ~stood
    longer_us = np.where(stood, took_us - _median(took_us[usual]), 0.0)
    computing = stood & (compute - _median(compute[usual]) > longer_us / 2)
    shown = stood.copy()
    shown[-1] |= failed[-1]
    columns = (each[shown].tolist() for each in (calls["step"], longer_us / 1e6, computing, failed))
    return stood, [StoodStill(step, coords, *facts) for step, *facts in zip(*columns, strict=True)]


def _median(values: npt.NDArray[Any]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def standstills(
    stood: Iterable[StoodStill], last_step: int, call_of: Callable[[int, int, int], Sequence[Pass]]
) -> tuple[Standstill, ...]:
    """Returns the standstills of the job, in order of steps, from those of its ranks. ``call_of(rank, step, index)``
    returns what a rank did in a call."""
    in_order = sorted(stood, key=lambda each: (each.step, each.coords.rank))
    found = []
    for step, ranks in grouped(in_order, lambda each: each.step).items():
        waited_for = []
        for number, coords in enumerate(each.coords for each in ranks if each.computing):
            call = call_of(coords.rank, step, 0) if number < _MOST_PLACES else ()
            passes = (each for each in call if each.kind in ranges.PASSES)
            longest = max(passes, key=lambda each: each.end - each.start, default=None)
            where = () if longest is None else (longest.kind, longest.microbatch, longest.chunk)
            waited_for.append(Standing(coords.rank, coords.pp, *where))
        ended: Literal["unfinished", "last"] = "unfinished" if any(each.failed for each in ranks) else "last"
        found.append(
            Standstill(
                step,
                max(each.seconds for each in ranks),
                tuple(waited_for),
                sum(not each.computing and each.seconds > 0 for each in ranks),
                "went_on" if step < last_step else ended,
            )
        )
    return tuple(found)
