"""What the recordings of a job say of every rank, and who comes last to collectives."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megaprof.analysis.foreign.pipeline import StageFacts, stages_of
from megaprof.analysis.foreign.recordings import SEND_RECEIVE, UNKNOWN, Group, Recording
from megaprof.analysis.notes import Note
from megaprof.analysis.trace.attribution import unfed
from megaprof.analysis.trace.groups import axis_of
from megaprof.analysis.trace.intervals import difference, intervals, total, union
from megaprof.parallel.topology import ParallelSizes, WorldLayout

_NAMED = ("tp", "pp", "cp", "dp")


@dataclass(frozen=True)
class Exposed:
    """Communication of one kind while nothing computed."""

    operation: str
    """For example ``allreduce``."""
    group: str
    """Process group; ``?`` if the recording does not say."""
    axis: str | None
    """``tp``, ``pp``, ``cp``, ``ep`` or ``dp``, if the description or the ranks say so."""
    calls: int
    """Number of kernels."""
    ms: float
    """Milliseconds in which nothing computed at the same time."""


@dataclass(frozen=True)
class RankFacts:
    """One rank, from the first activity of its GPU to the last."""

    file: str
    """Name of the file."""
    rank: int | None
    """Global rank; None if not known."""
    rank_from: str
    """Source of the rank, or another name of the process."""
    span_ms: float
    """Milliseconds from the first activity of the GPU to the last."""
    steps: int
    """Number of steps that the profiler marked (``ProfilerStep#n``)."""
    step_ms: float | None
    """Their median on the host; None without any."""
    compute_ms: float
    """Milliseconds in which something other than communication ran."""
    exposed: tuple[Exposed, ...]
    """Communication while nothing computed, the longest first."""
    idle_ms: float
    """Milliseconds in which nothing ran."""
    host_bound_ms: float
    """Part of the idle time that began with nothing launched left to run."""

    @property
    def exposed_ms(self) -> float:
        """Communication of any kind while nothing computed; less than the sum of ``exposed`` where kinds overlap."""
        return self.span_ms - self.compute_ms - self.idle_ms


@dataclass(frozen=True)
class Late:
    """The rank that comes last to the collectives of one group."""

    group: str
    """Process group."""
    operation: str
    """Operation."""
    matched: int
    """Number of collectives that all recorded ranks of the group have."""
    rank: int
    """Rank that came last most often: its kernel was the shortest, since all end together."""
    times: int
    """How often it came last."""
    waited_ms: float
    """How much longer the others' kernels took in these collectives: the median, in milliseconds."""


@dataclass(frozen=True)
class Foreign:
    """What recordings without megaprof's ranges show."""

    ranks: tuple[RankFacts, ...]
    """Ranks, in order."""
    late: tuple[Late, ...]
    """Groups that several recordings share."""
    warnings: tuple[Note, ...]
    """What cannot be told, and why."""
    stages: tuple[StageFacts, ...] = ()
    """Stages of the pipeline, from its exchanges; empty if these do not show any."""


def facts_of(recordings: Sequence[Recording], sizes: dict[str, int] | None = None) -> Foreign:
    """``sizes``: ranks along ``tp``, ``pp``, ``cp`` and ``ep``, as the user says; groups are named by them where their
    ranks fit."""
    axes = _Axes(sizes, max((r.world or 0 for r in recordings), default=0))
    ordered = sorted(recordings, key=lambda r: (r.rank is None, r.rank or 0, str(r.path), r.rank_from))
    warnings = list(axes.warnings)
    kinds = {key for r in recordings for key in r.communication}
    if any(operation == SEND_RECEIVE for operation, _ in kinds):
        warnings.append(Note("sends_not_apart"))
    if any(group.name == UNKNOWN for _, group in kinds):
        warnings.append(Note("group_unnamed"))
    if unreadable := sum(r.unreadable for r in recordings):
        warnings.append(Note("events_left_out", count=unreadable))
    warnings += (Note("cut", files=(r.path.name,), said=r.cut) for r in recordings if r.cut is not None)
    stages, why_none = stages_of(ordered)
    warnings += [why_none] if why_none else []
    return Foreign(tuple(_facts(r, axes) for r in ordered), tuple(_late(ordered)), tuple(warnings), stages)


class _Axes:
    """Which axis a group is of: by its description, or by its ranks where the sizes are given."""

    def __init__(self, sizes: dict[str, int] | None, world: int) -> None:
        self.warnings: list[Note] = []
        self._by_ranks: dict[frozenset[int], str] = {}
        if not sizes:
            return
        try:
            layout = WorldLayout(ParallelSizes.of(world, **sizes))
        except ValueError as mistake:
            self.warnings.append(Note("sizes_do_not_fit", count=world, said=str(mistake)))
            return
        for axis in _NAMED:
            if (size := getattr(layout.sizes, axis)) > 1:
                stride = layout.strides[axis]
                for coords in layout:
                    first = coords.rank - getattr(coords, axis) * stride
                    self._by_ranks[frozenset(first + n * stride for n in range(size))] = axis

    def of(self, group: Group) -> str | None:
        if group.description and (axis := axis_of(group.description)) is not None:
            return axis
        return self._by_ranks.get(frozenset(group.ranks)) if group.ranks else None


def _facts(recording: Recording, axes: _Axes) -> RankFacts:
    gpu = recording.gpu
    computing = union(gpu.spans[recording.computes])
    start, end = int(gpu.spans[:, 0].min()), int(gpu.spans[:, 1].max())
    idle = difference(union(intervals([(start, end)])), union(gpu.spans))
    rows: defaultdict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    for (operation, group), places in recording.communication.items():
        rows[operation, group.name, axes.of(group)] += places.tolist()
    exposed = [
        Exposed(*key, len(places), total(difference(union(gpu.spans[places]), computing)) / 1e6)
        for key, places in rows.items()
    ]
    lengths = (recording.steps[:, 1] - recording.steps[:, 0]).tolist()
    return RankFacts(
        file=recording.path.name,
        rank=recording.rank,
        rank_from=recording.rank_from,
        span_ms=(end - start) / 1e6,
        steps=len(lengths),
        step_ms=statistics.median(lengths) / 1e6 if lengths else None,
        compute_ms=total(computing) / 1e6,
        exposed=tuple(sorted(exposed, key=lambda each: -each.ms)),
        idle_ms=total(idle) / 1e6,
        host_bound_ms=total(unfed(gpu, idle)) / 1e6 if gpu.known.any() else 0.0,
    )


def _holds(group: Group, rank: int) -> bool:
    """Returns whether a group is one and the same in all recordings, this rank's among them: by its ranks, or else by
    the name that torch gave it. Descriptions are of many groups."""
    if group.ranks is None:
        return group.description is None and group.name != UNKNOWN
    return rank in group.ranks


def _late(recordings: Sequence[Recording]) -> list[Late]:
    """Collectives of one group are matched by their number in it, which all of its ranks count alike."""
    lengths: defaultdict[tuple[Group, str], dict[int, list[int]]] = defaultdict(dict)
    for recording in recordings:
        if recording.rank is None:
            continue
        for (operation, group), places in recording.communication.items():
            if _holds(group, recording.rank):
                spans = recording.gpu.spans[places]
                lengths[group, operation][recording.rank] = (spans[:, 1] - spans[:, 0]).tolist()
    found = []
    for (group, operation), by_rank in lengths.items():
        # A recording that begins later lacks the first ones: only equal counts are surely the same collectives.
        if len(by_rank) < 2 or len({len(each) for each in by_rank.values()}) != 1:
            continue
        calls = [dict(zip(by_rank, each, strict=True)) for each in zip(*by_rank.values(), strict=True)]
        last = [min(call, key=lambda rank: call[rank]) for call in calls]
        rank, times = Counter(last).most_common(1)[0]
        late = [call for call, each in zip(calls, last, strict=True) if each == rank]
        waits = [
            (statistics.median(ns for each, ns in call.items() if each != rank) - call[rank]) / 1e6 for call in late
        ]
        found.append(Late(group.name, operation, len(calls), rank, times, statistics.median(waits)))
    return sorted(found, key=lambda each: -each.waited_ms * each.times)
