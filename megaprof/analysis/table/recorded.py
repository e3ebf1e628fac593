"""Makes tables of passes from the timelines of a run, by reading the events of some ranks and steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.collectives.arrivals import OfStep, of_steps, waited_ms
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.reading import FleetReading, Key, RankSeries, Series, useful
from megaprof.analysis.notes import Note
from megaprof.analysis.table import queueing
from megaprof.analysis.table.combined import forward_share
from megaprof.analysis.table.counted import warming_up
from megaprof.analysis.table.job import place_of, schedule_of, table_of
from megaprof.analysis.table.table import CALLS, GARBAGE, WAIT, RankSteps, Table, Unfit
from megaprof.analysis.trace.gpu import Peak, together
from megaprof.analysis.trace.groups import INSIDE, parallel_of
from megaprof.analysis.trace.intervals import covered, union
from megaprof.analysis.trace.pool import Workers, at_most, in_processes
from megaprof.formats import timeline as format
from megaprof.formats.metadata import Metadata
from megaprof.formats.steps import codes
from megaprof.formats.steps.garbage import unpack_collections
from megaprof.formats.steps.work import unpack_work
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.parallel.topology import ParallelSizes

#: How many steps are read, evenly spread over the run. A report has no time for more.
STEPS = 48
_LEFT_OUT = format.FAILED | format.CAPTURED
_PASSES = {codes.FORWARD: 0, codes.BACKWARD: 1}
#: The most passes in a table, so that it fits into memory and time. Steps are left out first, down to this many, ...
_MOST_PASSES = 500_000
_FEWEST_STEPS = 16
#: ... then replicas; half of those that remain are the slowest.
#: The largest fraction of its passes in which a rank may wait, because it must also compute.
_MOST_WAITING = 0.99


def tables_of_timelines(
    reading: FleetReading, fleets: Iterable[Fleet] = (), workers: Workers = 1
) -> dict[Key, Table | Unfit]:
    """Returns the table of every job of a run, or why there is none. ``fleets``: the survey of the run; the steps on
    both sides of a change of the step time are always read. ``workers``: processes that read files."""
    changes = {fleet.key: [shift.step for shift in fleet.times.step_shifts] for fleet in fleets}
    found: dict[Key, Table | Unfit] = {}
    for key, series in reading.series.items():
        try:
            found[key] = _table(key, series, reading.files.get(key, {}), changes.get(key, ()), workers)
        except Unfit as fault:
            found[key] = fault
    return found


class _Plan(NamedTuple):
    """The plan of what to read from the files of every rank."""

    key: Key
    schedule: PipelineSchedule
    metadata: Metadata
    numbers: npt.NDArray[np.int64]
    """Numbers of the steps, with their calls in the lowest `CALLS` bits."""
    cold: tuple[int, ...]
    """Steps at the beginning that are left out because everything takes longer in them."""
    came: npt.NDArray[np.int64]
    """Steps with known arrivals of a rank at its collectives."""
    origin: int
    """Nanoseconds on the wall clock from which times are counted, so that floats hold them exactly."""


class _Rank(NamedTuple):
    """One rank whose files are read, for itself or for all its peers."""

    files: tuple[Path, ...]
    names: tuple[tuple[int, str | None], ...]
    replica: int
    peer: int


def _table(
    key: Key, series: Series, files: Mapping[int, tuple[Path, ...]], changes: Sequence[int], workers: Workers
) -> Table:
    replicas = _replicas(series.ranks)
    every = max((rank for own in replicas.values() for peers in own for rank in peers), key=lambda r: r.counts.sum())
    plan = _plan(key, files[every.coords.rank], {each.step for each in series.stood})
    own = plan.schedule
    of_rank = own.chunks * len(own.kinds) * own.microbatches
    most = max(1, _MOST_PASSES // (own.stages * of_rank))
    steps = min(STEPS, len(plan.numbers), max(_FEWEST_STEPS, most // len(replicas)))
    told = plan.numbers[np.isin(plan.numbers, plan.came)]
    numbers = told if len(told) >= min(steps, _FEWEST_STEPS) else plan.numbers
    plan = plan._replace(numbers=_spread(numbers, steps, changes))
    chosen = _chosen(replicas, max(1, most // steps))
    groups = [peers for replica in chosen for peers in replicas[replica]]
    # Peers wait for each other in every pass, so one of them shows the passes of all, but not which one enters late.
    alone = steps * sum(map(len, groups)) * of_rank > _MOST_PASSES
    items = [
        _Rank(files[peer.coords.rank], tuple((each.coords.rank, each.host) for each in own), *place_of(peer.coords))
        for peers in groups
        for peer, own in ([(peers[0], peers)] if alone else [(peer, [peer]) for peer in peers])
    ]
    items = [item._replace(peer=0) for item in items] if alone else items
    paths = [path for item in items for path in item.files]
    workers = at_most(workers, useful(paths, len(items)))
    read = [rank for rank in in_processes(partial(_steps, plan), items, workers) if rank is not None]
    if not read:
        raise Unfit(Note("no_timed_passes"))
    table = table_of(key, _without_waiting(read), plan.metadata, own)
    table = replace(table, cold=plan.cold, warnings=tuple(_warnings(table, key.sizes)))
    if len(chosen) == len(replicas):
        return table
    # The reduction may have waited for a replica that is not in the table, so only its shortest time is certain.
    least = np.minimum(table.reduction, table.reduction.min())
    return replace(table, reduction=least, length=table.length - table.reduction + least)


def _warnings(table: Table, sizes: ParallelSizes) -> Iterator[Note]:
    """Yields what a timeline does not show."""
    if sizes.pp > 1:
        yield Note("pp_unknown")
    if others := [axis for axis in parallel_of(INSIDE, sizes) if axis not in table.spent]:
        yield Note("groups_in_compute", names=tuple(others))
    if known := [axis for axis in INSIDE if axis in table.spent]:
        yield Note("groups_with_waiting", names=tuple(known))


def _replicas(ranks: Sequence[RankSeries]) -> dict[int, list[list[RankSeries]]]:
    """Returns the peers of every stage by replica, for the replicas with the most stages. Raises Unfit if there are
    none."""
    found: dict[int, dict[int, list[RankSeries]]] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(ranks, key=lambda rank: rank.coords.rank):
        if len(rank.counts):
            found[place_of(rank.coords)[0]][rank.coords.pp].append(rank)
    if not found:
        raise Unfit(Note("all_disturbed"))
    most = max(map(len, found.values()))
    return {replica: [own[pp] for pp in sorted(own)] for replica, own in sorted(found.items()) if len(own) == most}


def _chosen(replicas: Mapping[int, list[list[RankSeries]]], most: int) -> list[int]:
    """Returns at most this many replicas. Half of them hold the slowest ranks, which make the step as long as it is;
    the others are evenly spread, to show what is usual."""
    if len(replicas) <= most:
        return list(replicas)
    every = list(replicas)
    mean = np.array([[peers[0].mean_ms for peers in own] for own in replicas.values()])
    slow = (mean - np.median(mean, axis=0)).max(axis=1)
    first = [every[n] for n in np.argsort(-slow, kind="stable")[: -(-most // 2)]]
    others = [replica for replica in every if replica not in first]
    places = np.linspace(0, len(others) - 1, most - len(first)).round().astype(int)
    return sorted({*first, *(others[n] for n in places.tolist())})


def _plan(key: Key, files: Sequence[Path], without: AbstractSet[int]) -> _Plan:
    """Returns what most steps of one rank have in common, and which steps these are. Raises Unfit if there are none."""
    alike: dict[tuple[object, ...], list[tuple[Metadata, npt.NDArray[np.void]]]] = defaultdict(list)
    reasons: list[str] = []
    came: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    for path in files:
        with suppress(format.UnreadableTimeline):
            timeline = format.read_timeline(path)
            rows = [row for row in timeline.facts(format.COLLECTIVES) if row < len(timeline.steps)]
            came.append(_numbers(timeline.steps[rows]))
            for number, metadata in enumerate(timeline.metadata):
                if Key(metadata.target, metadata.role, metadata.sizes) != key:
                    continue
                own = timeline.steps[(timeline.steps["metadata"] == number) & _usable(timeline)]
                own = own[~np.isin(own["step"], list(without))]
                if not len(own):
                    reasons += [metadata.ranges.reason] if metadata.ranges.reason else []
                    continue
                alike[_shape(metadata)].append((metadata, own))
    if not alike:
        raise Unfit(Note("no_timed_passes", said=next(iter(reasons), "")))
    most = max(alike.values(), key=lambda parts: sum(len(steps) for _, steps in parts))
    metadata = most[-1][0]
    steps = np.concatenate([part for _, part in most])
    combined = bool((steps["combined"] > 0).any())
    schedule = schedule_of(metadata, metadata.forward_only, combined=combined)
    warm = _warm(steps)
    cold = tuple(number for number in sorted(set(steps["step"].tolist())) if number < warm[0] >> CALLS)
    return _Plan(key, schedule, metadata, warm, cold, np.concatenate(came), int(steps["start_ns"][0]))


def _warm(steps: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Returns the numbers of the steps after the beginning, in which everything takes longer. The first of several
    steps is always left out, because caches are cold."""
    numbers, first = np.unique(_numbers(steps), return_index=True)
    found: npt.NDArray[np.int64] = numbers[warming_up(steps["duration"][first].tolist()) :]
    return found[1:] if len(found) > 3 else found


def _shape(metadata: Metadata) -> tuple[object, ...]:
    """Returns what all steps of a table must have in common."""
    return metadata.schedule, metadata.microbatches, metadata.forward_only, len(metadata.chunks)


def _usable(timeline: format.Timeline) -> npt.NDArray[np.bool_]:
    steps = timeline.steps
    found: npt.NDArray[np.bool_] = (steps["flags"] & (_LEFT_OUT | format.INCOMPLETE) == 0) & (steps["duration"] > 0)
    return found


def _numbers(steps: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = steps["step"].astype(np.int64) << CALLS | steps["index"]
    return found


def _spread(numbers: npt.NDArray[np.int64], count: int, changes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns this many numbers, evenly spread, with those next to a change moved to it, so that a cause is seen from
    its first step."""
    places = np.linspace(0, len(numbers) - 1, min(len(numbers), count)).round().astype(int)
    for change in np.searchsorted(numbers >> CALLS, changes).tolist():
        after = int(np.searchsorted(places, change))
        if 0 < after < len(places):
            places[after - 1 : after + 1] = change - 1, change
    found: npt.NDArray[np.int64] = numbers[np.unique(places)]
    return found


def _steps(plan: _Plan, rank: _Rank) -> RankSteps | None:
    """Returns the steps of one rank, or None if it has none of them. If a step ran again, the last time counts."""
    found: dict[int, tuple[int, format.Timeline, int]] = {}
    for path in rank.files:
        with suppress(format.UnreadableTimeline):
            timeline = format.read_timeline(path)
            own = [
                number
                for number, each in enumerate(timeline.metadata)
                if Key(each.target, each.role, each.sizes) == plan.key and _shape(each) == _shape(plan.metadata)
            ]
            numbers = _numbers(timeline.steps)
            wanted = _usable(timeline) & np.isin(timeline.steps["metadata"], own) & np.isin(numbers, plan.numbers)
            told = np.isin(np.arange(len(wanted)), list(timeline.facts(format.COLLECTIVES)))
            if told.any() and np.isin(plan.numbers, plan.came).all():
                wanted &= told
            for row in np.flatnonzero(wanted).tolist():
                number, start = int(numbers[row]), int(timeline.steps["start_ns"][row])
                if number not in found or found[number][0] <= start:
                    found[number] = start, timeline, row
    return _laid_out(plan, rank, found) if found else None


def _laid_out(plan: _Plan, rank: _Rank, found: Mapping[int, tuple[int, format.Timeline, int]]) -> RankSteps:
    numbers = sorted(found)
    schedule = plan.schedule
    shape = (len(numbers), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end, collected = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape)
    waited = np.zeros(len(numbers))
    enter, reduced = np.zeros(len(numbers)), np.full(len(numbers), np.nan)
    device = False
    microbatches, per_chunk = shape[3], shape[2] * shape[3]
    alike: dict[tuple[int, int], list[int]] = {}  # steps of one file and shape
    work, source = np.full((len(numbers), microbatches, 3), np.nan), None
    told: dict[int, tuple[list[bytes], list[bytes]]] = {}
    memory: list[Peak] = []
    for t, number in enumerate(numbers):
        start_ns, timeline, row = found[number]
        if id(timeline) not in told:
            told[id(timeline)] = timeline.holding(format.WORK), timeline.holding(format.MEMORY)
        works, memories = told[id(timeline)]
        if (allocated := format.Memory.unpack(memories[row])) is not None:
            memory.append(Peak(allocated.allocated, allocated.peak, allocated.capacity or None))
        if (known := unpack_work(works[row])) is not None and len(known[1]) == microbatches:
            source, work[t] = known
        enter[t] = (start_ns - plan.origin) / 1e6
        device |= bool(timeline.steps["flags"][row] & format.DEVICE_CLOCK)
        alike.setdefault((id(timeline), int(timeline.steps["shape"][row])), []).append(t)
    for own in alike.values():
        _, timeline, row = found[numbers[own[0]]]
        there, times = timeline.times([found[numbers[t]][2] for t in own])
        if not len(there):
            continue  # damaged: no step is whole
        which, at, half, finalizing = _places(timeline.shapes[timeline.steps["shape"][row]].tobytes(), schedule)
        places, since = np.array(own)[there, None], enter[own][there, None]
        length = times[:, which, 1] - times[:, which, 0]
        share = np.zeros((len(there), 1))
        if half.any():
            kind = at % per_chunk // microbatches
            alone = [length[:, (half == 0) & (kind == each)] for each in (0, 1)]
            share[:, 0] = [forward_share(*both) for both in zip(*alone, strict=True)]
        begun = times[:, which, 0] + np.where(half > 0, share, 0.0) * length
        ended = times[:, which, 1] - np.where(half < 0, 1.0 - share, 0.0) * length
        start.reshape(len(numbers), -1)[places, at] = since + begun / 1e3
        end.reshape(len(numbers), -1)[places, at] = since + ended / 1e3
        waited[own] = queueing.of_steps(timeline, [found[numbers[t]][2] for t in own])
        garbage = timeline.facts(format.COLLECTIONS)
        for n, t in enumerate(places[:, 0].tolist()):
            if payload := garbage.get(found[numbers[t]][2]):
                spans = np.stack((begun[n], ended[n]), axis=-1).astype(np.int64)
                held = covered(union(unpack_collections(payload)), spans)
                collected.reshape(len(numbers), -1)[t, at] = held / 1e3
        if finalizing.any():
            reduced[places[:, 0]] = since[:, 0] + times[:, finalizing, 1].max(axis=1) / 1e3
    waits = queueing.of_passes(end - start - collected, [([t], ms) for t, ms in enumerate(waited)])
    holds = {kind: each for kind, each in ((GARBAGE, collected), (WAIT, waits)) if each.any()}
    if device and holds:  # the GPU may have had enough work meanwhile
        longer = end - start - np.nanmedian(end - start, axis=0)
        holds = {kind: np.clip(each, 0.0, np.maximum(longer, 0.0)) for kind, each in holds.items()}
    _, timeline, row = found[numbers[-1]]
    metadata = timeline.metadata[int(timeline.steps["metadata"][row])]
    came = {}
    for number, (_, timeline, row) in found.items():
        for _, of_step in of_steps(timeline, [row], *rank.names[0]):
            came[number] = of_step
    # A combined pass computes beside its collectives on purpose.
    axes = () if schedule.combined else INSIDE
    ran = {axis: np.array([came[n].ran_ms(axis) if n in came else np.nan for n in numbers]) for axis in axes}
    ran = {axis: ms for axis, ms in ran.items() if np.isfinite(ms).all()}
    whole = np.nansum(end - start, axis=(1, 2, 3))
    part = np.clip(sum(ran.values(), np.zeros(len(numbers))) / np.maximum(whole, 1e-9), 0.0, 1.0)
    return RankSteps(
        names=rank.names,
        metadata=metadata,
        stage=metadata.coords.pp,
        replica=rank.replica,
        peer=rank.peer,
        steps=np.array(numbers),
        start=start,
        end=end,
        # Peers that wait for each other take equally long. They differ only if it is known which of them waited.
        compute=end - start - sum(each for kind, each in holds.items() if kind != WAIT or came),
        # Not every clock shows in which pass collectives ran, so they are taken evenly from the passes of a step.
        working=(end - start) * (1.0 - part)[:, None, None, None],
        spent=ran,
        idle=np.zeros(shape),
        held=holds,
        waited=waited,
        exposed={},
        enter=enter,
        reduced=reduced,
        opening=np.zeros(len(numbers), dtype=np.bool_),
        work=work,
        lengths_from=source,
        device=device,
        came=came,
        memory=together(memory),
    )


def _without_waiting(ranks: Sequence[RankSteps]) -> list[RankSteps]:
    """Returns the ranks without the time they waited for their peers in collectives. This time is taken evenly from the
    passes of a step, because not every clock shows in which pass a rank waited."""
    by_step: dict[tuple[int, int, int], dict[int, OfStep]] = defaultdict(dict)
    for rank in ranks:
        for number, of_step in rank.came.items():
            by_step[rank.replica, rank.stage, number][rank.peer] = of_step
    waited = {where: waited_ms(list(peers.values())) for where, peers in by_step.items()}
    return [_waiting(rank, waited) for rank in ranks]


def _waiting(rank: RankSteps, waited: Mapping[tuple[int, int, int], Mapping[int, Mapping[str, float]]]) -> RankSteps:
    """Returns the rank with its waiting in ``spent``, and without it in ``compute``."""
    places = {number: (rank.replica, rank.stage, number) for number in rank.steps.tolist()}
    own = {number: waited.get(place, {}).get(rank.names[0][0], {}) for number, place in places.items()}
    left = _left(rank, np.array([sum(each.values()) for each in own.values()]))
    each_axis = {axis: np.array([each.get(axis, np.nan) for each in own.values()]) for axis in INSIDE}
    known = {f"{axis}_waiting": ms for axis, ms in each_axis.items() if np.isfinite(ms).all()}
    return replace(rank, spent={**rank.spent, **known}, compute=rank.compute * left[:, None, None, None])


def _left(rank: RankSteps, own: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the fraction of its passes in which a rank did not wait, [t]. ``own``: how long it waited."""
    found: npt.NDArray[np.float64] = 1.0 - np.clip(
        own / np.maximum(np.nansum(rank.compute, axis=(1, 2, 3)), 1e-9), 0.0, _MOST_WAITING
    )
    return found


class _Places(NamedTuple):
    """The events of a step that are passes; a combined pass counts twice."""

    which: npt.NDArray[np.intp]
    """The event of each pass."""
    at: npt.NDArray[np.intp]
    """Its index in a flattened [c, k, m]."""
    half: npt.NDArray[np.int8]
    """0 if the event is this pass; -1 and 1 if the pass is the forward or the backward of a combined event."""
    finalizing: npt.NDArray[np.bool_]
    """The events that finalise gradients."""


@lru_cache(maxsize=256)
def _places(shape: bytes, schedule: PipelineSchedule) -> _Places:
    code = np.frombuffer(shape, dtype=np.int64)
    kind = code & codes.KIND_MASK
    which, at, half = [], [], []
    for event in np.flatnonzero((kind >= codes.FORWARD) & (kind <= codes.COMBINED)).tolist():
        for chunk, microbatch, pass_kind, part in _passes_in(int(code[event])):
            if chunk is None or microbatch is None or pass_kind >= len(schedule.kinds):
                raise Unfit(Note("place_unknown"))
            if chunk >= schedule.chunks or microbatch >= schedule.microbatches:
                raise Unfit(Note("place_beyond_schedule"))
            which.append(event)
            at.append((chunk * len(schedule.kinds) + pass_kind) * schedule.microbatches + microbatch)
            half.append(part)
    finalizing = kind == codes.FINALIZE
    return _Places(np.array(which, np.intp), np.array(at, np.intp), np.array(half, np.int8), finalizing)


def _passes_in(code: int) -> Iterator[tuple[int | None, int | None, int, int]]:
    """Yields chunk, microbatch, kind and half of the passes in one event."""
    name, kind = codes.name(code), code & codes.KIND_MASK
    fields = {} if name is None else name.fields
    if kind == codes.COMBINED:
        yield fields.get("chunk"), fields.get("mb"), 0, -1
        yield fields.get("bchunk"), fields.get("bmb"), 1, 1
    else:
        yield fields.get("chunk"), fields.get("mb"), _PASSES[kind], 0
