"""Makes the report on recordings without megaprof's ranges: what they show about every rank, and which rank comes last
to collectives, as data, and as tables and sentences."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megaprof.analysis.notes import OVERLAPPING, UNNAMED_GROUP, Note
from megaprof.analysis.report.tables import Cell, Column, Section, TableView, row
from megaprof.analysis.report.text.notes import clause, with_texts
from megaprof.analysis.report.text.words import number, percent
from megaprof.analysis.samples import CERTAIN
from megaprof.analysis.trace.groups import axis_of
from megaprof.analysis.trace.intervals import difference, intervals, total, union
from megaprof.analysis.trace.steps import unfed
from megaprof.foreign.recordings import SEND_RECEIVE, UNKNOWN, Group, Recording

#: What recordings without our ranges lack, and how to record it next time.
_LIMITS = (
    "These recordings hold no ranges of megaprof's, so they show no bubbles, and no layout can be predicted. To see "
    "more, record with --profile-target train_actor --profile-select per-stage"
)
_TIMES = "a\nstep", "recorded", "compute", "exposed", "idle", "host\nbound"
_OF_RANK = Column("from", "text"), Column("steps"), *map(Column, _TIMES)
_OF_EXPOSED = (
    *(Column(name, "text") for name in ("operation", "group")),
    *map(Column, ("kernels", "ms", "of\nrecorded")),
)


@dataclass(frozen=True)
class Exposed:
    """Communication of one kind while nothing computed."""

    operation: str
    """For example ``allreduce``."""
    group: str
    """Process group; ``?`` if the recording does not say."""
    axis: str | None
    """``tp``, ``pp``, ``cp``, ``ep`` or ``dp``; None if neither the description nor the kernels say."""
    calls: int
    """Number of kernels."""
    ms: float
    """Milliseconds in which it ran while nothing computed."""


@dataclass(frozen=True)
class RankFacts:
    """One rank, from the first activity of its GPU to the last."""

    file: str
    """File, below the directory that has all of them."""
    window: int
    """Number of its window, from 1: only recordings of one window are compared with each other."""
    rank: int | None
    """Global rank; None if not known."""
    rank_from: str
    """Source of the rank, or another name of the process."""
    span_ms: float
    """Milliseconds from the first activity of the GPU to the last."""
    steps: int
    """Number of steps that the profiler marked (``ProfilerStep#n``)."""
    step_ms: float | None
    """Median duration of these steps on the host, in milliseconds; None without steps."""
    compute_ms: float
    """Milliseconds in which something other than communication ran."""
    exposed: tuple[Exposed, ...]
    """Communication while nothing computed, the longest first."""
    idle_ms: float
    """Milliseconds in which nothing ran."""
    host_bound_ms: float | None
    """Milliseconds of idle time that began when no launched work was left to run; None if the recording does not show
    launches."""
    exposed_ms: float
    """Milliseconds of any communication while nothing computed; less than the sum of ``exposed`` if kinds overlap."""


@dataclass(frozen=True)
class Late:
    """The rank that comes last to the collectives of one group, more often than by chance."""

    folder: str
    """Folder of its recordings, below the one that has all; empty unless each folder is on its own."""
    group: str
    """Process group."""
    operation: str
    """For example ``allreduce``."""
    matched: int
    """Number of collectives that all recorded ranks of the group have, in all windows of the folder."""
    rank: int
    """Rank that came last most often. Its kernel was the shortest, because all kernels end together."""
    times: int
    """Number of times that it came last."""
    waited_ms: float
    """Median time by which the others' kernels took longer in these collectives, in milliseconds."""


@dataclass(frozen=True)
class Foreign:
    """The findings from recordings without megaprof's ranges."""

    ranks: tuple[RankFacts, ...]
    """Ranks of each window, in ascending order; those that are not known are last."""
    late: tuple[Late, ...]
    """Ranks that come last, for groups that several recordings share."""
    warnings: tuple[Note, ...]
    """Notes about what the recordings do not show, and why."""


def facts_of(recordings: Sequence[Recording]) -> Foreign:
    """Returns what the recordings of a job show."""
    windows, warnings = _windows(recordings), list[Note]()
    kinds = {key for recording in recordings for key in recording.communication}
    if any(operation == SEND_RECEIVE for operation, _ in kinds):
        warnings.append(Note("groups_unnamed", said="send-receive kernels without annotation may be all-to-all"))
    if any(group.name == UNKNOWN for _, group in kinds):
        warnings.append(UNNAMED_GROUP)
    if unreadable := sum(recording.unreadable for recording in recordings):
        warnings.append(Note("events_left_out", count=unreadable))
    warnings += (
        Note("cut", files=(recording.path.name,), said=recording.cut)
        for recording in recordings
        if recording.cut is not None
    )
    folder = os.path.commonpath([str(recording.path.parent) for recording in recordings]) + os.sep
    late: list[Late] = []
    for path, of_folder in windows.items():
        late += _late(f"{path}{os.sep}".removeprefix(folder).rstrip(os.sep), of_folder)
    in_order = (window for of_folder in windows.values() for window in of_folder)
    ranks = tuple(
        _facts(recording, str(recording.path).removeprefix(folder), place)
        for place, window in enumerate(in_order, 1)
        for recording in window
    )
    if any(recording.gpu.shortened for recording in recordings):
        warnings.append(OVERLAPPING)
    late.sort(key=lambda each: -each.waited_ms * each.times)
    return Foreign(ranks, tuple(late), tuple(dict.fromkeys(warnings)))


def _windows(recordings: Iterable[Recording]) -> dict[str, list[list[Recording]]]:
    """Returns the recordings that belong together, by folder: those that overlap in time and in the numbers of their
    steps. If a folder holds several ranks, or a rank is in several folders, each folder is on its own, as for the roles
    of RL training; otherwise all are one, with an empty name."""
    folders: defaultdict[str, set[int | None]] = defaultdict(set)
    for recording in recordings:
        folders[str(recording.path.parent)].add(recording.rank)
    known = [rank for ranks in folders.values() for rank in ranks if rank is not None]
    apart = len(set(known)) < len(known) or any(len(ranks) > 1 for ranks in folders.values())
    windows: defaultdict[str, list[list[Recording]]] = defaultdict(list)
    for recording in sorted(recordings, key=lambda each: (each.extent[0], str(each.path))):
        of_folder = windows[str(recording.path.parent) if apart else ""]
        window = next((window for window in of_folder if all(_together(recording, other) for other in window)), None)
        if window is None:
            of_folder.append([recording])
        else:
            window.append(recording)
    for of_folder in windows.values():
        for window in of_folder:
            window.sort(key=lambda each: (each.rank is None, each.rank or 0, str(each.path), each.rank_from))
    return windows


def _together(one: Recording, other: Recording) -> bool:
    (start, end), (other_start, other_end) = one.extent, other.extent
    same_steps = not one.numbers or not other.numbers or bool(one.numbers & other.numbers)
    return start <= other_end and other_start <= end and same_steps and (one.rank is None or one.rank != other.rank)


def _facts(recording: Recording, file: str, window: int) -> RankFacts:
    gpu = recording.gpu
    computes = np.ones(len(gpu.spans), dtype=np.bool_)
    for rows in recording.communication.values():
        computes[rows] = False
    computing = union(gpu.spans[computes])
    start, end = recording.extent
    idle = difference(union(intervals([(start, end)])), union(gpu.spans))
    rows_by_kind: defaultdict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    for (operation, group), rows in recording.communication.items():
        axis = group.axis or axis_of(group.description or "")
        rows_by_kind[operation, group.name, axis] += rows.tolist()
    exposed = [
        Exposed(*key, len(rows), total(difference(union(gpu.spans[rows]), computing)) / 1e6)
        for key, rows in rows_by_kind.items()
    ]
    lengths_ns = (recording.steps[:, 1] - recording.steps[:, 0]).tolist()
    return RankFacts(
        file=file,
        window=window,
        rank=recording.rank,
        rank_from=recording.rank_from,
        span_ms=(end - start) / 1e6,
        steps=len(lengths_ns),
        step_ms=statistics.median(lengths_ns) / 1e6 if lengths_ns else None,
        compute_ms=total(computing) / 1e6,
        exposed=tuple(sorted(exposed, key=lambda entry: -entry.ms)),
        idle_ms=total(idle) / 1e6,
        host_bound_ms=total(unfed(gpu, idle)) / 1e6 if gpu.known.any() else None,
        exposed_ms=(end - start - total(computing) - total(idle)) / 1e6,
    )


def _late(folder: str, windows: Iterable[Sequence[Recording]]) -> Iterator[Late]:
    """Yields which rank comes last to the collectives of each group, if it does so more often than by chance. Matches
    collectives by their number in the group, which all of its ranks count alike within a window."""
    calls_ns: defaultdict[tuple[Group, str], list[dict[int, int]]] = defaultdict(list)
    for window in windows:
        lengths_ns: defaultdict[tuple[Group, str], dict[int, list[int]]] = defaultdict(dict)
        for recording in window:
            for (operation, group), rows in recording.communication.items():
                # It is certainly the same group in the other recordings by its ranks, if they contain this rank, or
                # without ranks by the name that torch gave it. Many groups share a description.
                named = group.ranks is None and group.description is None and group.name != UNKNOWN
                if recording.rank is not None and (named or recording.rank in (group.ranks or ())):
                    spans = recording.gpu.spans[rows]
                    lengths_ns[group, operation][recording.rank] = (spans[:, 1] - spans[:, 0]).tolist()
        for key, by_rank in lengths_ns.items():
            # A recording that begins later lacks the first collectives. Only equal counts are surely the same ones.
            if len(by_rank) > 1 and len({len(lengths) for lengths in by_rank.values()}) == 1:
                calls_ns[key] += [
                    dict(zip(by_rank, lengths, strict=True)) for lengths in zip(*by_rank.values(), strict=True)
                ]
    for (group, operation), calls in calls_ns.items():
        last_ranks = [min(call_ns, key=lambda rank: call_ns[rank]) for call_ns in calls]
        rank, times = Counter(last_ranks).most_common(1)[0]
        # If all were equally likely to be last, some rank of some group would be so this often in one of ten jobs.
        chance, every = 1.0 / len(calls[0]), len(calls)
        surely = statistics.NormalDist().inv_cdf(1.0 - (1.0 - CERTAIN) * chance / len(calls_ns))
        if times - 0.5 <= every * chance + surely * math.sqrt(every * chance * (1.0 - chance)):
            continue
        waits_ms = [
            (statistics.median(ns for other, ns in call_ns.items() if other != rank) - call_ns[rank]) / 1e6
            for call_ns, last in zip(calls, last_ranks, strict=True)
            if last == rank
        ]
        if (waited_ms := statistics.median(waits_ms)) > 0:
            yield Late(folder, group.name, operation, every, rank, times, waited_ms)


def report_on(recordings: Sequence[Recording]) -> tuple[Foreign, Section]:
    """Returns what the recordings of a job show, as data and for people."""
    facts = facts_of([recording for recording in recordings if recording.untimed is None])
    untimed = (
        Note("skipped", files=(recording.path.name,), said=clause(recording.untimed))
        for recording in recordings
        if recording.untimed is not None
    )
    facts = replace(facts, warnings=with_texts((*untimed, *facts.warnings)))
    late = (
        f"{each.folder}{': ' if each.folder else ''}rank {each.rank} came last to {each.operation} of {each.group} "
        f"{each.times} of {each.matched} times: there the others' kernels took {number(each.waited_ms)} ms longer"
        for each in facts.late
    )
    tables = tuple(_tables(facts))
    return facts, Section("Recordings without ranges of megaprof's", _LIMITS, tables, tuple(late), facts.warnings)


def _tables(foreign: Foreign) -> list[TableView]:
    """Returns the facts of every rank, and its exposed communication, first that of the rank that loses most to it."""
    folders = {rank.window: os.path.dirname(rank.file) for rank in foreign.ranks}
    several = len(folders) > 1
    ranks, exposed = [], []

    def name(rank: RankFacts) -> list[str | int]:
        return ["?" if rank.rank is None else rank.rank, *([rank.window] if several else [])]

    for rank in foreign.ranks:
        times = rank.step_ms, rank.span_ms, rank.compute_ms, rank.exposed_ms, rank.idle_ms, rank.host_bound_ms
        ranks.append(row(*name(rank), Cell(rank.rank_from, code=rank.file), rank.steps, *map(number, times)))
    for rank in sorted(foreign.ranks, key=lambda rank: -rank.exposed_ms):
        for each in rank.exposed:
            group = f"{each.axis}: {each.group}" if each.axis else each.group
            share = percent(each.ms / rank.span_ms if rank.span_ms else None)
            exposed.append(row(*name(rank), each.operation, group, each.calls, number(each.ms), share))
    windows = [row(window, folder) for window, folder in folders.items() if folder]
    named = Column("rank", "name"), *([Column("window")] if several else [])
    views = [
        TableView("per rank, ms", (*named, *_OF_RANK), tuple(ranks), len(named)),
        TableView("windows", (Column("window", "name"), Column("folder", "text")), tuple(windows)),
        TableView("exposed communication", (*named, *_OF_EXPOSED), tuple(exposed), len(named)),
    ]
    return [view for view in views if view.rows]
