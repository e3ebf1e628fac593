"""Makes tables of passes from the timelines of a run, by reading the events of some ranks and steps.

The ranks of a group leave a collective together, so a rank that comes earlier waits longer. If the device times how
long each rank's part ran, no clocks need to be compared: the shortest part belongs to the rank that came last, which
waited for no one. Host times are compared only if all ranks are on one host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.reading import CALLS, FleetReading, Key, RankRow, Series, numbers_of
from megaprof.analysis.notes import PP_UNKNOWN, Note
from megaprof.analysis.table.iterations import LEFT_OUT, Parts, parts_of
from megaprof.analysis.table.table import DATA, GARBAGE, Floats, Group, RankSteps, Table, Unfit
from megaprof.analysis.table.tabulate import (
    WARM_UP,
    cells_of,
    combined_memory,
    forward_share,
    place_of,
    schedule_of,
    tabulate,
    warming_up,
)
from megaprof.analysis.trace.columns import Numbers
from megaprof.analysis.trace.groups import INSIDE, axis_of, parallel_of, ranks_of
from megaprof.analysis.trace.intervals import covered, union
from megaprof.analysis.trace.reading import Timelines, Workers, in_processes
from megaprof.analysis.trace.steps import ModuleKey, grouped, ids_of
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.facts import (
    Arrivals,
    Groups,
    Modules,
    kept,
    unpack_arrivals,
    unpack_collections,
    unpack_data,
    unpack_json,
    unpack_work,
)
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import PipelineSchedule

#: How many steps are read, evenly spread over the run. A report has no time for more.
STEPS = 48
#: The most passes in a table, so that it fits into memory and time.
_MOST_PASSES = 500_000
#: If there are more passes, steps are left out first, down to this many, and then replicas. Half of the replicas that
#: remain are the slowest ones.
_FEWEST_STEPS = 16
#: The largest fraction of its passes in which a rank may wait, because it must also compute.
_MOST_WAITING = 0.99


def tables_of_timelines(
    reading: FleetReading, fleets: Iterable[Fleet] = (), workers: Workers = 1
) -> dict[Key, Table | Unfit]:
    """Returns the table of every job of a run, or why there is none. ``fleets``: the survey of the run; the steps on
    both sides of a change of the step time are always read. ``workers``: processes that read files."""
    changes = {fleet.key: [shift.step for shift in fleet.times.step_shifts] for fleet in fleets}
    tables: dict[Key, Table | Unfit] = {}
    for key, series in reading.series.items():
        try:
            tables[key] = _table(key, series, reading, changes.get(key, ()), workers)
        except Unfit as fault:
            tables[key] = fault
    return tables


class _Plan(NamedTuple):
    """The plan of what to read from the files of every rank."""

    key: Key
    schedule: PipelineSchedule
    metadata: Metadata
    numbers: npt.NDArray[np.int64]
    """Numbers of the steps, with their calls in the lowest `CALLS` bits."""
    cold: tuple[int, ...]
    """Steps at the beginning that are left out because they take longer than the others."""
    arrival_steps: npt.NDArray[np.int64]
    """Steps with known arrivals of a rank at its collectives."""
    origin: int
    """Nanoseconds on the wall clock from which times are counted, so that floats hold them exactly."""
    differ: bool
    """Whether other steps have another number of microbatches."""


def _table(key: Key, series: Series, reading: FleetReading, changes: Sequence[int], workers: Workers) -> Table:
    timelines = reading.timelines
    replicas = _replicas(series.ranks)
    fullest_rank = max((rank for stages in replicas for peers in stages for rank in peers), key=lambda rank: rank.steps)
    plan = _plan(timelines, key, fullest_rank.files, {rank_step.step for rank_step in series.stood})
    schedule = plan.schedule
    passes_per_rank = schedule.chunks * len(schedule.kinds) * schedule.microbatches
    most_replica_steps = max(1, _MOST_PASSES // (schedule.stages * passes_per_rank))
    step_count = min(STEPS, len(plan.numbers), max(_FEWEST_STEPS, most_replica_steps // len(replicas)))
    with_arrivals = plan.numbers[np.isin(plan.numbers, plan.arrival_steps)]
    # Half of the steps tell more if it is known who waited in them: of the last ones it often is not.
    known = 2 * len(with_arrivals) >= min(step_count, _FEWEST_STEPS)
    notes = [Note("first_steps", steps=plan.cold, factor=WARM_UP)] if plan.cold else []
    notes += [*[PP_UNKNOWN] * (key.sizes.pp > 1), *[Note("microbatches_differ")] * plan.differ]
    in_compute = Note("exposed_unknown", count=len(with_arrivals), of=len(plan.numbers))
    plan = plan._replace(numbers=_spread(with_arrivals if known else plan.numbers, step_count, changes))
    chosen_replicas = _chosen(replicas, max(1, most_replica_steps // step_count))
    peer_groups = [peers for stages in chosen_replicas for peers in stages]
    # Peers wait for each other in every pass, so one of them shows the passes of all, but not which one enters late.
    one_peer = step_count * sum(map(len, peer_groups)) * passes_per_rank > _MOST_PASSES
    items = peer_groups if one_peer else [[peer] for peers in peer_groups for peer in peers]
    read = in_processes(partial(_steps, timelines, plan), items, workers, timelines.useful_processes(len(items)))
    rank_steps = [replace(rank, place=(*rank.place[:2], 0)) if one_peer else rank for rank in read if rank is not None]
    if not rank_steps:
        raise Unfit(Note("no_step", said="no rank recorded the times of its microbatches"))
    alone = all(rank.came for rank in rank_steps)
    table = tabulate(key, [*_without_waiting(rank_steps)], schedule, plan.origin, alone=alone)
    if hidden_axes := [axis for axis in parallel_of(INSIDE, key.sizes) if axis not in table.spent]:
        notes.append(msgspec.structs.replace(in_compute, names=tuple(hidden_axes)))
    if shown_axes := [axis for axis in INSIDE if axis in table.spent]:
        notes.append(Note("groups_with_waiting", names=tuple(shown_axes)))
    table = replace(table, warnings=tuple(notes), captured=table.captured * len({rank.coords.dp for rank in items[0]}))
    if len(chosen_replicas) == len(replicas):
        return table
    # The reduction may have waited for a replica that is not in the table, so only its shortest time is certain.
    reduction = np.minimum(table.reduction, table.reduction.min())
    length = table.length - table.reduction + reduction
    return replace(table, reduction=reduction, length=length, captured=len({rank.coords.dp for rank in series.ranks}))


def _replicas(ranks: Sequence[RankRow]) -> list[list[list[RankRow]]]:
    """Returns the peers of every stage of the replicas with the most stages. Raises Unfit if there are none."""
    in_order = sorted((rank for rank in ranks if rank.steps), key=lambda rank: rank.coords.rank)
    if not in_order:
        raise Unfit(Note("no_step", said="every step failed, stood still, or was disturbed by a window"))
    by_replica = grouped(in_order, lambda rank: place_of(rank.coords)[0])
    by_stage = [grouped(by_replica[replica], lambda rank: rank.coords.pp) for replica in sorted(by_replica)]
    most_stages = max(map(len, by_stage))
    return [[stages[pp] for pp in sorted(stages)] for stages in by_stage if len(stages) == most_stages]


def _chosen(replicas: list[list[list[RankRow]]], limit: int) -> list[list[list[RankRow]]]:
    """Returns at most this many replicas. Half of them hold the slowest ranks, which make the step as long as it is;
    the others are evenly spread, to show what is usual."""
    if len(replicas) <= limit:
        return replicas
    mean_ms = np.array([[peers[0].mean_ms for peers in stages] for stages in replicas])
    slowness_ms = (mean_ms - np.median(mean_ms, axis=0)).max(axis=1)
    slowest, others = np.split(np.argsort(-slowness_ms, kind="stable"), [-(-limit // 2)])
    places = np.linspace(0, len(others) - 1, limit - len(slowest)).round().astype(int)
    return [replicas[index] for index in sorted({*slowest.tolist(), *np.sort(others)[places].tolist()})]


def _plan(timelines: Timelines, key: Key, files: Sequence[Path], left_out_steps: AbstractSet[int]) -> _Plan:
    """Returns what most steps of one rank have in common, and which steps these are. Raises Unfit if there are none."""
    parts_by_shape: dict[tuple[object, ...], list[tuple[Metadata, npt.NDArray[np.void]]]] = defaultdict(list)
    reasons: list[str] = []
    arrival_steps: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    for timeline, rows in timelines.steps_of(files, key):
        with_arrivals = [row for row in timeline.facts(format.COLLECTIVES) if row < len(timeline.steps)]
        arrival_steps.append(numbers_of(timeline.steps[with_arrivals]))
        usable = timeline.steps[rows[_usable(timeline)[rows]]]
        usable = usable[~np.isin(usable["step"], list(left_out_steps))]
        for number in np.unique(timeline.steps["metadata"][rows]).tolist():
            metadata, file_steps = timeline.metadata[number], usable[usable["metadata"] == number]
            if len(file_steps):
                parts_by_shape[_shape(metadata)].append((metadata, file_steps))
            elif metadata.ranges.reason:
                reasons.append(metadata.ranges.reason)
    if not parts_by_shape:
        raise Unfit(Note("no_step", said=next(iter(reasons), "no times of microbatches were recorded")))
    largest_group = max(parts_by_shape.values(), key=lambda parts: sum(len(steps) for _, steps in parts))
    metadata = largest_group[-1][0]
    steps = np.concatenate([part for _, part in largest_group])
    combined = bool((steps["combined"] > 0).any())
    schedule = schedule_of(metadata, metadata.forward_only, combined=combined)
    numbers, first = np.unique(numbers_of(steps), return_index=True)
    warm_numbers = numbers[warming_up(steps["duration"][first].tolist()) :]
    cold = tuple(number for number in sorted(set(steps["step"].tolist())) if number < warm_numbers[0] >> CALLS)
    differ, origin = len({parts[0][0].microbatches for parts in parts_by_shape.values()}) > 1, int(steps["start_ns"][0])
    return _Plan(key, schedule, metadata, warm_numbers, cold, np.concatenate(arrival_steps), origin, differ)


def _shape(metadata: Metadata) -> tuple[object, ...]:
    """Returns what all steps of a table must have in common."""
    return metadata.schedule, metadata.microbatches, metadata.forward_only, len(metadata.chunks)


def _usable(timeline: format.Timeline) -> npt.NDArray[np.bool_]:
    return np.asarray((timeline.steps["flags"] & LEFT_OUT == 0) & (timeline.steps["duration"] > 0))


def _spread(numbers: npt.NDArray[np.int64], count: int, changes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns this many numbers, evenly spread, with those next to a change moved to it, so that a cause is seen from
    its first step."""
    places = np.linspace(0, len(numbers) - 1, min(len(numbers), count)).round().astype(int)
    for change in np.searchsorted(numbers >> CALLS, changes).tolist():
        index = int(np.searchsorted(places, change))
        if 0 < index < len(places):
            places[index - 1 : index + 1] = change - 1, change
    return np.asarray(numbers[np.unique(places)])


def _steps(timelines: Timelines, plan: _Plan, ranks: Sequence[RankRow]) -> RankSteps | None:
    """Returns the steps of the first of ``ranks``, which stands for all of them; None if it has none of the plan's. If
    a step ran again, the last time counts."""
    files, found, parts = list[format.Timeline](), list[Numbers](), list[Parts]()
    for timeline, rows in timelines.steps_of(ranks[0].files, plan.key):
        alike = [_shape(metadata) == _shape(plan.metadata) for metadata in timeline.metadata]
        parts.append(parts_of(timeline, rows[~np.isin(timeline.steps["step"][rows], plan.cold)]))
        numbers = numbers_of(timeline.steps)
        is_wanted = _usable(timeline) & np.array(alike)[timeline.steps["metadata"]] & np.isin(numbers, plan.numbers)
        has_arrivals = np.isin(np.arange(len(is_wanted)), list(timeline.facts(format.COLLECTIVES)))
        if has_arrivals.any() and np.isin(plan.numbers, plan.arrival_steps).all():
            is_wanted &= has_arrivals
        rows = rows[is_wanted[rows]]
        of_file = np.full(len(rows), len(files))
        found.append(np.column_stack((numbers[rows], timeline.steps["start_ns"][rows], of_file, rows)))
        files.append(timeline)
    steps = np.concatenate((np.empty((0, 4), np.int64), *found))
    steps = steps[np.lexsort((steps[:, 1], steps[:, 0]))]
    steps = steps[np.append(steps[1:, 0] != steps[:-1, 0], True)[: len(steps)]]
    return replace(_laid_out(plan, ranks, files, *steps[:, (0, 2, 3)].T), parts=parts) if len(steps) else None


def _laid_out(
    plan: _Plan,
    ranks: Sequence[RankRow],
    files: Sequence[format.Timeline],
    numbers: Numbers,
    file_of: Numbers,
    row_of: Numbers,
) -> RankSteps:
    """Returns the steps with these ``numbers``, each with the index of its file and its row there."""
    schedule, names = plan.schedule, tuple((rank.coords.rank, rank.host) for rank in ranks)
    shape = (len(numbers), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end = np.full((2, *shape), np.nan)
    collected_ms, loading_ms = np.zeros((2, *shape))
    host_passes, left, enter, reduced = np.full((4, len(numbers)), np.nan)
    work, core_waits_ms = np.full((len(numbers), shape[3], 3), np.nan), np.zeros(len(numbers))
    loads, device, lengths_from = False, False, None
    memory, came = list[format.Memory](), dict[int, Mapping[Group, Arrivals]]()
    for file, timeline in enumerate(files):
        steps, places_here = timeline.steps, np.flatnonzero(file_of == file)
        rows = row_of[places_here]
        enter[places_here] = (steps["start_ns"][rows] - plan.origin) / 1e6
        before = steps[rows[rows > 0] - 1]
        left[places_here[rows > 0]] = (before["start_ns"] - plan.origin) / 1e6 + before["duration"] / 1e3
        device |= bool((steps["flags"][rows] & format.DEVICE_CLOCK).any())
        core_waits_ms[places_here] = _core_waits(timeline, rows)
        works, memories = timeline.holding(format.WORK), timeline.holding(format.MEMORY)
        groups = {
            name: (axis, name, ranks_of(group.ranks) or ())
            for listed in timeline.facts(format.GROUPS).values()
            for name, group in unpack_json(listed, Groups).items()
            if (axis := axis_of(group.desc)) in INSIDE
        }
        for t, row in zip(places_here.tolist(), rows.tolist(), strict=True):
            if (allocated := format.Memory.unpack(memories[row])) is not None:
                memory.append(allocated)
            if (step_work := unpack_work(works[row])) is not None and len(step_work[1]) == shape[3]:
                lengths_from, work[t] = step_work
            if (host_bound := timeline.host_bound_passes(row)) is not None:
                host_passes[t] = host_bound
            if (data := unpack_data(timeline.facts(format.DATA).get(row, b""))) is not None:
                loads, of_chunks = True, data[: shape[3], : shape[1]].T
                loading_ms[t, : len(of_chunks), 0, : of_chunks.shape[1]] = of_chunks / 1e3
            arrivals = unpack_arrivals(timeline.facts(format.COLLECTIVES).get(row, b""))
            if known := {groups[each.group]: each for each in arrivals if each.group in groups}:
                came[int(numbers[t])] = known
        for number in np.unique(steps["shape"][rows]).tolist():
            alike = places_here[steps["shape"][rows] == number]
            decoded, times = timeline.times(row_of[alike].tolist())
            if not len(decoded):
                continue  # damaged: no step is whole
            events, places, halves, finalizing = _passes(timeline.shapes[number].tobytes(), schedule)
            table_rows, entered_ms = alike[decoded, None], enter[alike[decoded], None]
            length_us = times[:, events, 1] - times[:, events, 0]
            forward_shares = np.zeros((len(decoded), 1))
            if halves.any():
                alone_us = [length_us[:, (halves == 0) & (places[1] == kind)] for kind in (0, 1)]
                forward_shares[:, 0] = [forward_share(*durations) for durations in zip(*alone_us, strict=True)]
            begin_us = times[:, events, 0] + np.where(halves > 0, forward_shares, 0.0) * length_us
            end_us = times[:, events, 1] - np.where(halves < 0, 1.0 - forward_shares, 0.0) * length_us
            start[(table_rows, *places)], end[(table_rows, *places)] = entered_ms + np.stack((begin_us, end_us)) / 1e3
            for index, t in enumerate(table_rows[:, 0].tolist()):
                if payload := timeline.facts(format.COLLECTIONS).get(int(row_of[t])):
                    spans = np.stack((begin_us[index], end_us[index]), axis=-1).astype(np.int64)
                    collected_ms[(t, *places)] = covered(union(unpack_collections(payload)), spans) / 1e3
            if finalizing.any():
                reduced[table_rows[:, 0]] = entered_ms[:, 0] + times[:, finalizing, 1].max(axis=1) / 1e3
    if device and collected_ms.any():  # the GPU may have had enough work meanwhile
        excess_ms = end - start - np.nanmedian(end - start, axis=0)
        collected_ms = np.clip(collected_ms, 0.0, np.maximum(excess_ms, 0.0))
    loading_ms = np.clip(loading_ms, 0.0, np.nan_to_num(end - start))
    timeline = files[file_of[-1]]
    metadata = timeline.metadata[int(timeline.steps["metadata"][row_of[-1]])]
    modules = dict[ModuleKey, tuple[int, ...]]()
    for payload in timeline.facts(format.MODULES).values():
        modules |= {ModuleKey(*module): (ns,) for module, ns in unpack_json(payload, Modules)}
    # A combined pass computes during its collectives on purpose.
    axes = () if schedule.combined else INSIDE
    usual_ms = list(zip(numbers.tolist(), _usual_pass(start, end), strict=True))
    ran_ms = {axis: np.array([ran(came.get(number, {}), axis, ms) for number, ms in usual_ms]) for axis in axes}
    ran_ms = {axis: ms for axis, ms in ran_ms.items() if np.isfinite(ms).all()}
    passes_ms = np.nansum(end - start, axis=(1, 2, 3))
    ran_fraction = np.clip(sum(ran_ms.values(), np.zeros(len(numbers))) / np.maximum(passes_ms, 1e-9), 0.0, 1.0)
    return RankSteps(
        names=names,
        metadata=metadata,
        place=place_of(metadata.coords),
        steps=numbers,
        start=start,
        end=end,
        compute=end - start - collected_ms - loading_ms,
        # Not every clock shows in which pass collectives ran, so they are taken evenly from the passes of a step.
        working=(end - start - loading_ms) * (1.0 - ran_fraction)[:, None, None, None],
        spent={
            **ran_ms,
            **({"host_passes": host_passes} if np.isfinite(host_passes).any() else {}),
            **({DATA: loading_ms.sum(axis=(1, 2, 3))} if loads else {}),
        },
        idle=np.zeros(shape),
        delays={**({GARBAGE: collected_ms} if collected_ms.any() else {}), **({DATA: loading_ms} if loads else {})},
        core_waits=core_waits_ms,
        exposed={},
        left=left,
        enter=enter,
        reduced=reduced,
        work=work,
        lengths_from=lengths_from,
        device=device,
        came=came,
        memory=combined_memory(memory),
        modules=modules,
    )


def _core_waits(timeline: format.Timeline, rows: Numbers) -> Floats:
    """Returns how many milliseconds the thread waited for a processor core in each of these steps of a file and since
    the step before, [row]; 0 if the counter was not read. It is read about once a second, so steps share what it
    counted by the time that they took."""
    end_ms = timeline.steps["start_ns"] / 1e6 + timeline.steps["duration"] / 1e3
    begin_ms = timeline.steps["start_ns"] / 1e6
    begin_ms[1:] = np.minimum(begin_ms[1:], end_ms[:-1])
    begin_ms, end_ms, waits_ms = begin_ms[rows], end_ms[rows], np.zeros(len(rows))
    for row, payload in timeline.facts(format.WAITED).items():
        span = format.Waited.unpack(payload)
        if span is not None and span.length and row < len(timeline.steps):
            since_ms = timeline.steps["start_ns"][row] / 1e6 + span.start / 1e3
            inside_ms = np.minimum(end_ms, since_ms + span.length / 1e3) - np.maximum(begin_ms, since_ms)
            waits_ms += np.maximum(inside_ms, 0.0) * span.waited / span.length
    return waits_ms


def _without_waiting(ranks: Sequence[RankSteps]) -> Iterator[RankSteps]:
    """Yields the ranks with the time that they waited for their peers in collectives in ``spent``, and without it in
    ``compute``: taken evenly from the passes of a step, because not every clock shows in which pass a rank waited.
    Waits that are longer than a usual pass stay there: they are in single passes, and would be taken from all."""
    groups: defaultdict[tuple[int, int, int, Group], list[tuple[Member, float, Floats]]] = defaultdict(list)
    waits = [{axis: np.full((len(rank.steps), 2), np.nan) for axis in INSIDE} for rank in ranks]
    for rank, waits_ms in zip(ranks, waits, strict=True):
        (replica, stage, _), (_, host) = rank.place, rank.names[0]
        usual_ms = _usual_pass(rank.start, rank.end)
        for t, number in enumerate(rank.steps.tolist()):
            for group, arrivals in rank.came.get(number, {}).items():
                member = host, float(rank.enter[t]), arrivals
                groups[replica, stage, number, group].append((member, usual_ms[t], waits_ms[group[0]][t]))
    for (*_, group), members in groups.items():
        in_group = waited_ms(group, [member for member, *_ in members], members[-1][1])
        for (*_, of_axis), ms in zip(members, in_group, strict=False):
            of_axis[:] = np.nan_to_num(of_axis) + ms
    for rank, waits_ms in zip(ranks, waits, strict=True):
        shorter_ms = sum(np.nan_to_num(ms[:, 0] - ms[:, 1]) for ms in waits_ms.values())
        part = np.clip(shorter_ms / np.maximum(np.nansum(rank.compute, axis=(1, 2, 3)), 1e-9), 0.0, _MOST_WAITING)
        # Steps in which a peer recorded nothing are not in the table, so their waiting need not be known.
        known_ms = {f"{axis}_waiting": ms[:, 0] for axis, ms in waits_ms.items() if np.isfinite(ms).any()}
        compute = rank.compute * (1.0 - part)[:, None, None, None]
        yield replace(rank, spent={**rank.spent, **known_ms}, compute=compute)


Member = tuple[str | None, float, Arrivals]
"""A rank in one step: its host, when the step began on its clock, in milliseconds, and when it came to collectives."""


def waited_ms(group: Group, members: Sequence[Member], pass_ms: float = math.inf) -> list[Floats]:
    """Returns how many milliseconds of one step each member waited for the others of its group: all of it, and the part
    in single waits that are longer than a usual pass takes (``pass_ms``); nothing if the ranks of the group cannot be
    compared.

    A rank that comes to a collective early waits until the last one comes; the last one waits for no one. A rank that
    waits for a slow rank in one group, and therefore comes late to another group, still counts as one that waited.
    """
    hosts, lengths = {host for host, *_ in members}, {arrivals.lengths for *_, arrivals in members}
    if len(members) < len(group[2]) or len(lengths) > 1 or (lengths == {False} and len(hosts) > 1):
        return []
    shift = max(arrivals.shift for *_, arrivals in members)
    numbers = [arrivals.numbers[kept(arrivals.numbers, shift)] for *_, arrivals in members]
    common = reduce(partial(np.intersect1d, assume_unique=True), numbers)  # the collectives that all members kept
    came_us = []
    for _, begun_ms, arrivals in members:
        values_us = arrivals.values[np.searchsorted(arrivals.numbers, common)]
        # Who comes last has the shortest part.
        came_us.append(-values_us if arrivals.lengths else (begun_ms - members[0][1]) * 1e3 + values_us)
    last_us = np.max(came_us, axis=0)
    return [_sum_ms(last_us - since_us, shift, pass_ms) for since_us in came_us]


def ran(came: Mapping[Group, Arrivals], axis: str, pass_ms: float) -> float:
    """Returns how many milliseconds the collectives of an axis ran on a rank's device in a step, including waiting; NaN
    if that is not known. ``pass_ms``: what a usual pass takes."""
    of_axis = [arrivals for (of, *_), arrivals in came.items() if of == axis]
    if not of_axis or not all(arrivals.lengths for arrivals in of_axis):
        return math.nan
    return sum(float(_sum_ms(arrivals.values, arrivals.shift, pass_ms)[0]) for arrivals in of_axis)


def _sum_ms(values_us: npt.NDArray[Any], shift: int, pass_ms: float) -> Floats:
    """Returns the sum of values of which one in 2^``shift`` was kept, and the part longer than a pass. Such a value
    counts once: had there been more of them, there would be as many longer passes."""
    longer = values_us > 1e3 * pass_ms
    longer_us = values_us[longer].sum()
    return np.array((values_us[~longer].sum() * 2.0**shift + longer_us, longer_us)) / 1e3


def _usual_pass(start: Floats, end: Floats) -> list[float]:
    """Returns how long the usual passes of each step take, in milliseconds: those of the kind that takes longest."""
    usual_ms: list[float] = np.median(end - start, axis=3).max(axis=(1, 2)).tolist()
    return usual_ms


@lru_cache(maxsize=256)
def _passes(
    shape: bytes, schedule: PipelineSchedule
) -> tuple[npt.NDArray[np.intp], tuple[Numbers, Numbers, Numbers], Numbers, npt.NDArray[np.bool_]]:
    """Returns the events of a step that are passes, with their places and halves (`cells_of`); a combined pass is there
    twice. Also returns which events finalise gradients."""
    code = np.frombuffer(shape, dtype=np.int64)
    kind, events = code & codes.KIND_MASK, np.flatnonzero(codes.are_passes(code))
    names = filter(None, map(codes.name, code[events].tolist()))
    row, places, half = cells_of(kind[events] - codes.FORWARD, ids_of(names, schedule.chunks), schedule)
    if len({*row.tolist()}) < len(events):
        raise Unfit(Note("schedule_unknown", said="nothing says which microbatch or chunk a pass is of"))
    return events[row], places, half, kind == codes.FINALIZE
