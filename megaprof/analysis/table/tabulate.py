"""Puts the recordings of ranks into one table of passes: which of them, in which steps, on which clock.

Ranks of different hosts come onto one clock by the passes that wait for each other. No pass begins before its input was
made: forwards bound the difference of two neighbours' clocks from one side, and backwards from the other, as in NTP
(RFC 5905, section 8, without its assumption about single packets). The tables, what is drawn beside them, the parts of
exchanges and merged timelines are all on this clock.

Also reads a job from the metadata of its ranks.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from megaprof.analysis.fleet.reading import CALLS, Key
from megaprof.analysis.notes import BEYOND_SCHEDULE, Note
from megaprof.analysis.table.iterations import iterations_of
from megaprof.analysis.table.table import DATA, QUARTILE, WAIT, Floats, RankSteps, Table, Unfit
from megaprof.analysis.trace.columns import Numbers
from megaprof.analysis.trace.steps import ModuleKey, TracedStep, grouped
from megaprof.formats.facts import SOURCES
from megaprof.formats.metadata import Metadata
from megaprof.formats.timeline import Memory
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.parallel.topology import RankCoords

#: First steps are left out as long as they take this many times as long as the median step.
WARM_UP = 1.25
#: Milliseconds by which times on one clock may contradict each other.
TOLERANCE_MS = 0.1
#: The part of the messages of a direction that counts as its quickest ones.
_QUICK = 0.25


def tabulate(
    key: Key, ranks: Sequence[RankSteps], schedule: PipelineSchedule, origin: int, *, alone: bool = True
) -> Table:
    """Puts the ranks of one job into a table. ``origin``: nanoseconds on the wall clock from which their times are
    counted. ``alone``: False if their compute may contain waiting for peers. Raises Unfit if a stage is missing, or if
    no step is whole."""
    by_place, common_steps, shape = _places(ranks, schedule.stages)
    steps, table_ranks = np.array(common_steps), [*by_place.values()]

    def of_ranks(arrays: Iterable[Floats | None], missing: float = np.nan) -> Floats:
        """Returns one array, [t, d, s, p, ...], from those of every rank; without one, its values are ``missing``."""
        known = {place: each for place, each in zip(by_place, arrays, strict=True) if each is not None}
        values = np.full((len(steps), *shape, *next(iter(known.values())).shape[1:]), missing)
        for place, each in known.items():
            values[(slice(None), *place)] = each[np.searchsorted(by_place[place].steps, steps)]
        return values

    def stacked(name: str) -> Floats:
        return of_ranks(getattr(rank, name) for rank in table_ranks)

    def parts(name: str, missing: float) -> dict[str, Floats]:
        names = sorted({part for rank in table_ranks for part in getattr(rank, name)})
        return {part: of_ranks((getattr(rank, name).get(part) for rank in table_ranks), missing) for part in names}

    lengths = (stacked("end") - stacked("start"))[(slice(None), *np.array([*by_place]).T)]
    steps = steps[np.isfinite(lengths).reshape(len(steps), -1).all(axis=1)]
    if not len(steps):
        raise Unfit(Note("no_step", said="no step was recorded whole"))
    start, end, enter, reduced = map(stacked, ("start", "end", "enter", "reduced"))
    device, hosts = any(rank.device for rank in table_ranks), np.full(shape, "", dtype=object)
    for place, rank in by_place.items():
        hosts[place] = rank.names[0][1]
    shift, clocks, aligned_ms = one_clock(hosts.astype(str), schedule, start, end, enter, reduced, device=device)
    pass_shift = shift[..., None, None, None]
    start, end, enter, reduced = start + pass_shift, end + pass_shift, enter + shift, reduced + shift
    # Replicas that reduce no gradients do not wait for each other, so the step of each begins with its own entry.
    axes = (1, 2, 3) if "backward" in schedule.kinds else (2, 3)
    first_pass = np.fmin.reduce(start, axis=(*axes, 4, 5, 6), keepdims=True)[..., 0, 0, 0]
    # A rank whose step before was longer is not late. A GPU may have been busy with it until the first pass.
    left = stacked("left") + shift
    last_left = first_pass if device else np.fmax.reduce(left, axis=axes, keepdims=True)
    since = np.fmax(np.fmin.reduce(enter, axis=axes, keepdims=True), np.minimum(last_left, first_pass))
    start, end = start - since[..., None, None, None], end - since[..., None, None, None]
    enter, reduced = np.maximum(enter - since, 0.0), reduced - since
    left = np.zeros_like(left) if device else np.fmin(np.fmax(left - since, 0.0), enter)
    offset_ns = np.nan_to_num((shift - since) * 1e6).round().astype(np.int64) - origin
    last_pass_end = np.fmax.reduce(end.reshape(len(steps), -1), axis=1)
    step_end = np.fmax(last_pass_end, np.fmax.reduce(reduced.reshape(len(steps), -1), axis=1))

    delays_ms = {kind: np.nan_to_num(delay_ms) for kind, delay_ms in parts("delays", 0.0).items()}
    # All peers wait for the one that is held up most.
    delays = {kind: delay_ms.max(axis=3) for kind, delay_ms in delays_ms.items()}
    idle, compute = stacked("idle").min(axis=3), stacked("compute")
    if DATA in delays_ms and not alone:
        # Its peers get their data from it, so they wait for it as long.
        compute = np.maximum(compute - (delays[DATA][:, :, :, None] - delays_ms[DATA]), 0.0)
    core_waits = of_ranks((rank.core_waits for rank in table_ranks), 0.0)
    if core_waits.any():
        passes_ms = (end.max(axis=3) - start.min(axis=3)) - sum(delays.values())
        # Nothing records in which passes a rank waited, but waiting makes them longer: it is the same part of what each
        # took beyond the lower quartile of all replicas, and never more than that. A GPU waits for its host only while
        # it is idle. A stage that was not recorded has NaN.
        took = np.nan_to_num(idle if idle.any() else passes_ms)
        excess = np.maximum(took - np.quantile(took, QUARTILE, axis=(0, 1, 5), keepdims=True), 0.0)
        part = np.minimum(core_waits.sum(axis=0) / np.maximum(excess.sum(axis=(0, 3, 4, 5)), 1e-9)[..., None], 1.0)
        waits_ms = excess[:, :, :, None] * part[..., None, None, None]  # [t, d, s, p, c, k, m]
        delays[WAIT] = waits_ms.max(axis=3)
        if idle.any():
            idle = idle - delays[WAIT]
        elif alone:
            compute = compute - waits_ms
    # Peers may have different data, and all wait for the one with the most. The first stage that knows its data counts:
    # later stages get an input that they do not read, in SkyRL with padding that the first stage does not have.
    by_stage = np.fmax.reduce(stacked("work"), axis=3)
    work = np.take_along_axis(by_stage, np.isfinite(by_stage).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
    # The ranks of every replica and stage, equally many for each.
    counts = {len(rank.names) for rank in table_ranks}
    numbers = np.full((*shape, 1 if len(counts) > 1 else counts.pop()), -1)
    experts = np.full(shape, np.nan)
    sequences: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for place, rank in by_place.items():
        numbers[place] = [number for number, _ in rank.names[: numbers.shape[3]]]
        experts[place] = rank.experts
        for (t, microbatch), recorded_lengths in rank.sequences.items():
            for index in np.flatnonzero(steps == rank.steps[t]).tolist():  # the first rank that recorded them counts
                sequences.setdefault((index, place[0], microbatch), recorded_lengths)
    laid = {
        t: [[sequences.get((t, d, m), ()) for m in range(schedule.microbatches)] for d in range(shape[0])]
        for t in sorted({t for t, _, _ in sequences})
    }
    of_stages = [[by_place[place] for place in by_place if place[1] == stage] for stage in range(schedule.stages)]
    entry = enter.max(axis=3) if clocks else np.full(enter.shape[:3], np.nan)
    return Table(
        target=key.target,
        role=key.role,
        schedule=schedule,
        steps=steps >> CALLS,
        calls=steps & (1 << CALLS) - 1,
        offset_ns=offset_ns,
        ranks=numbers.reshape(*shape[:2], -1),
        hosts={number: host for rank in table_ranks for number, host in rank.names},
        metadata=tuple(of_stage[0].metadata if of_stage else None for of_stage in of_stages),
        start=start.min(axis=3),
        end=end.max(axis=3),
        compute=compute,
        working=stacked("working"),
        spent=parts("spent", np.nan),
        # The last peer to arrive waits for no one, so the smallest time is communication alone.
        exposed={group: exposed_ms.min(axis=3) for group, exposed_ms in parts("exposed", 0.0).items()},
        idle=idle,
        delays=delays,
        core_waits=core_waits,
        entry=entry,
        left=left.max(axis=3),
        reduction=(step_end - last_pass_end),
        length=step_end,
        profiled_length=np.empty(0),
        captured=len({rank.metadata.coords.dp for rank in table_ranks}),
        clocks=clocks,
        aligned_ms=aligned_ms,
        device=device,
        memory=tuple(combined_memory(rank.memory for rank in of_stage) for of_stage in of_stages),
        modules=tuple(modules_of(of_stage) for of_stage in of_stages),
        work=work if np.isfinite(work).any() else None,
        lengths_from=max(
            (rank.lengths_from for rank in table_ranks if rank.lengths_from), key=SOURCES.index, default=None
        ),
        experts=experts if np.isfinite(experts).all() else None,
        sequences=tuple((work[t], of_step) for t, of_step in laid.items() if all(map(all, of_step))),
        iterations=iterations_of({rank.names[0][0]: rank.parts for rank in table_ranks}),
    )


def modules_of(recorded: Sequence[RankSteps | TracedStep]) -> dict[ModuleKey, tuple[int, ...]]:
    """Returns the nanoseconds of every pass through a module, of all these ranks or steps."""
    keys = dict.fromkeys(key for each in recorded for key in each.modules)
    return {key: tuple(ns for each in recorded for ns in each.modules.get(key, ())) for key in keys}


def combined_memory(memories: Iterable[Memory | None]) -> Memory | None:
    """Returns the least and the most that was allocated, on the smallest device; None if nothing is known."""
    known = [memory for memory in memories if memory is not None]
    if not known:
        return None
    allocated, peak, capacity = zip(*known, strict=True)
    return Memory(min(allocated), max(peak), min(filter(None, capacity), default=0))


def _places(
    ranks: Sequence[RankSteps], stages: int
) -> tuple[dict[tuple[int, int, int], RankSteps], list[int], tuple[int, int, int]]:
    """Returns the ranks of whole replicas by replica, stage and peer, in order; the steps that all of them have; and
    how many replicas, stages and peers there are. If no replica is whole, the one with most stages is used. Raises
    Unfit if there is no common step."""
    in_order = sorted({rank.place: rank for rank in ranks}.values(), key=lambda rank: rank.place)
    replicas, peers = grouped(in_order, lambda rank: rank.place[0]).values(), len({rank.place[2] for rank in ranks})
    whole_replicas = [of_replica for of_replica in replicas if len(of_replica) == stages * peers]
    if not whole_replicas:
        # One peer of each stage is enough for a pipeline.
        peers, by_stage = 1, [grouped(of_replica, lambda rank: rank.place[1]) for of_replica in replicas]
        most_stages = max(map(len, by_stage))
        whole_replicas = [[of_stage[0] for of_stage in each.values()] for each in by_stage if len(each) == most_stages]
        if most_stages < stages:
            del whole_replicas[1:]
    # The replicas with the largest number of common steps times replicas. So a rank that ended early or began late does
    # not take away the steps of all others.
    steps_of = [
        set[int].intersection(*(set(rank.steps.tolist()) for rank in of_replica)) for of_replica in whole_replicas
    ]
    by_steps = sorted(range(len(steps_of)), key=lambda index: -len(steps_of[index]))
    common: list[set[int]] = [*accumulate((steps_of[index] for index in by_steps), set.intersection)]
    best = max(range(len(common)), key=lambda count: (count + 1) * len(common[count]))
    if not common[best]:
        raise Unfit(Note("no_step", said="no step was recorded by all ranks of a pipeline"))
    kept = sorted(by_steps[: best + 1])
    by_place = {
        (replica, rank.place[1], number % peers): rank
        for replica, index in enumerate(kept)
        for number, rank in enumerate(whole_replicas[index])
    }
    return by_place, sorted(common[best]), (len(kept), stages, peers)


def warming_up(lengths: Sequence[float]) -> int:
    """Returns how many of the first steps take longer than the rest."""
    longest = WARM_UP * statistics.median(lengths)
    return next(number for number, length in enumerate(lengths) if length <= longest) if len(lengths) > 2 else 0


def place_of(coords: RankCoords) -> tuple[int, int, int]:
    """Returns replica, stage and peer. Peers wait for each other inside a pass. They are tensor- and context-parallel
    ranks, and those that exchange tokens for experts, which are spread over several data-parallel ranks."""
    sizes = coords.sizes
    tp_cp_ranks = sizes.tp * sizes.cp
    spread = max(1, sizes.etp * sizes.ep // math.gcd(sizes.etp * sizes.ep, tp_cp_ranks))
    return coords.dp // spread, coords.pp, (coords.dp % spread * sizes.cp + coords.cp) * sizes.tp + coords.tp


def schedule_of(metadata: Metadata, forward_only: bool, *, combined: bool = False) -> PipelineSchedule:
    """Returns the schedule. ``combined``: whether forwards and backwards ran as one. Raises Unfit if the metadata do
    not say enough, or if Megatron refuses the schedule."""
    if metadata.schedule is None or not metadata.chunks or not metadata.microbatches:
        raise Unfit(Note("schedule_unknown", said="the files name no schedule, or not its microbatches"))
    p2p, version = metadata.p2p or {}, re.match(r"(\d+)\.(\d+)", metadata.megatron_core or "")
    since_0_18 = version is not None and (int(version[1]), int(version[2])) >= (0, 18)
    overlap = "all" if p2p.get("overlap_p2p_comm_warmup_flush") else "steady"
    try:
        return PipelineSchedule.checked(
            metadata.sizes.pp,
            len(metadata.chunks),
            metadata.microbatches,
            name=metadata.schedule,
            group_size=metadata.microbatch_group_size,
            forward_only=forward_only,
            combined=combined,
            frees=bool(p2p.get("deallocate_pipeline_outputs")) and since_0_18,
            overlap="none" if p2p.get("overlap_p2p_comm") is False else overlap,
        )
    except ValueError as fault:
        raise Unfit(Note("schedule_unknown", said=f"it cannot be rebuilt: {fault}")) from None


def cells_of(
    kind: Numbers, ids: Numbers, schedule: PipelineSchedule
) -> tuple[Numbers, tuple[Numbers, Numbers, Numbers], Numbers]:
    """Returns the passes in the columns of a step (see `Passes`) that it is known where to lay out: the row of each,
    its places on the axes [c, k, m], and its half: -1 and 1 for the forward and the backward in a row that is both,
    otherwise 0. Raises Unfit if the schedule has no such pass."""
    alone, combined = np.flatnonzero(kind < 2), np.flatnonzero((kind == 2) & (ids[:, 2] >= 0))
    row = np.concatenate((alone, combined, combined))
    half = np.repeat((0, -1, 1), (len(alone), len(combined), len(combined)))
    kind = np.where(half == 0, kind[row], half > 0)
    chunk, microbatch = np.where((half > 0)[:, None], ids[row, 2:], ids[row, :2]).T
    known = (kind < len(schedule.kinds)) & (chunk >= 0) & (microbatch >= 0)
    if (chunk[known] >= schedule.chunks).any() or (microbatch[known] >= schedule.microbatches).any():
        raise Unfit(BEYOND_SCHEDULE)
    return row[known], (chunk[known], kind[known], microbatch[known]), half[known]


def forward_share(forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """Returns the fraction of a combined pass (a forward and a backward that run as one) that counts as its forward.
    With ``overlap_moe_expert_parallel_comm``, Megatron alternates between their layers, so neither has a time of its
    own, but a table has them separately. Where they are divided changes neither their sum nor a replay, in which they
    run as one. It follows from the forwards that ran alone
    at the beginning of the step and the backwards that ran alone at its end; without any, it is a half."""
    if not len(forwards) or not len(backwards):
        return 0.5
    forward, backward = float(np.median(forwards)), float(np.median(backwards))
    return forward / (forward + backward) if forward + backward > 0 else 0.5


def one_clock(
    hosts: npt.NDArray[np.str_],
    schedule: PipelineSchedule,
    start: Floats,
    end: Floats,
    enter: Floats,
    reduced: Floats,
    *,
    device: bool,
) -> tuple[Floats, bool, float | None]:
    """Returns the milliseconds to add to the times of each rank, [t, d, s, p]; whether that puts all of them on one
    clock; and how uncertain it is, in milliseconds, if neighbours did not share one before.

    ``hosts``, [d, s, p]: a name for what shares a clock, unless passes contradict that. ``start``, ``end``,
    [t, d, s, p, c, k, m]: passes in milliseconds; NaN for a stage that was not recorded, beyond which nothing is known.
    ``enter``, ``reduced``, [t, d, s, p]: when each rank entered the step and had finalised its gradients. ``device``:
    whether these are the clocks of GPUs, of which each rank has its own, in every step.

    Peers wait for each other, so they end their passes together. Pipelines are put next to each other by the end of
    their gradient reduction, which is one collective; without one, each has a clock of its own.
    """
    first_peer, forward_only = (start[:, :, :, 0], end[:, :, :, 0]), "backward" not in schedule.kinds
    recorded = np.asarray(np.isfinite(start).any(axis=(0, 4, 5, 6)))
    each_rank = np.arange(hosts.size).reshape(hosts.shape).astype(str)
    if device:
        hosts, enter = each_rank, np.full_like(enter, np.nan)  # entries are the host's, which is ahead of the GPU
    elif not forward_only:
        hosts = np.where(np.isin(hosts, _of_several(hosts[:, :, 0], *first_peer)), each_rank, hosts)
    shift, uncertain = np.zeros(start.shape[:4]), 0.0
    if len(np.unique(hosts[recorded])) == 1:
        return shift, True, None
    if hosts.shape[2] > 1:
        axes = (4, 5, 6) if device else (0, 4, 5, 6)
        apart_ms = np.nanmedian(end[:, :, :, :1] - end, axis=axes, keepdims=True)[..., 0, 0, 0]
        shift += np.where(hosts == hosts[:, :, :1], 0.0, apart_ms)
    for before, stage in pairwise(np.unique(np.argwhere(recorded)[:, 1]).tolist()):
        if stage > before + 1:
            difference, width = np.full((2, 1, len(hosts)), np.nan)
        elif forward_only:
            difference, width = _one_way(*first_peer, shift[..., 0], stage, each_step=device)
        else:
            difference, width = _both_ways(*first_peer, enter[:, :, :, 0], stage, each_step=device)
        same_host = hosts[:, stage, 0] == hosts[:, before, 0]
        uncertain = max(uncertain, float(np.where(same_host, 0.0, width).max()) / 2)
        shift[:, :, stage] += (shift[:, :, before, 0] + np.where(same_host, 0.0, difference))[..., None]
    if len(hosts) > 1 and not forward_only:  # without gradients, the steps of replicas begin independently
        ends = reduced[:, :, 0, 0] + shift[:, :, 0, 0]
        apart_ms = ends[:, :1] - ends
        apart_ms = apart_ms if device else np.median(apart_ms, axis=0, keepdims=True)
        shift += np.where(hosts[:, 0, 0] == hosts[0, 0, 0], 0.0, apart_ms)[..., None, None]
    if np.isfinite(shift).all():
        return shift, True, uncertain if hosts.shape[1] > 1 else None
    # Without a common clock each rank's step begins when it enters it itself.
    entry_shift = -np.where(np.isfinite(enter), enter, np.fmin.reduce(start, axis=(-3, -2, -1)))
    return entry_shift, False, None


def _of_several(hosts: npt.NDArray[np.str_], start: Floats, end: Floats) -> npt.NDArray[np.str_]:
    """Returns the names in ``hosts``, [d, s], that several machines bear, as containers may: passes contradict a single
    clock, and a clock for each rank resolves that. Calls that do not overlap in time are of different runs."""
    axes, names = (0, 3, 4, 5), []
    begins, ends = np.min(start, axis=axes), np.max(end, axis=axes)  # [d, s]
    for stage in range(1, hosts.shape[1]):
        low, high = (sign * _slack(start, end, stage, kind).min(axis=(0, 2)) for kind, sign in ((0, -1.0), (1, 1.0)))
        contradicted = (np.maximum(low, -high) > TOLERANCE_MS) & (low - high < TOLERANCE_MS)
        at_once = (begins[:, stage] < ends[:, stage - 1]) & (begins[:, stage - 1] < ends[:, stage])
        names.append(hosts[:, stage][contradicted & at_once & (hosts[:, stage] == hosts[:, stage - 1])])
    return np.unique(np.concatenate([hosts[:0, 0], *names]))


def _slack(start: Floats, end: Floats, stage: int, kind: int) -> Floats:
    """Returns how long after their inputs were made the passes of one kind began that a stage and the one before it
    exchange, by their own clocks, [t, d, c * m]."""
    receiver, sender = (stage, stage - 1) if kind == 0 else (stage - 1, stage)
    slack = start[:, :, receiver, :, kind] - end[:, :, sender, :, kind]
    return slack.reshape(*slack.shape[:2], -1)


def _both_ways(start: Floats, end: Floats, enter: Floats, stage: int, *, each_step: bool) -> tuple[Floats, Floats]:
    """Returns by how much the clock of a stage must be moved relative to the stage before, [t or 1, d], and how far
    apart its bounds are. ``start``, ``end``: [t, d, s, c, k, m]; ``enter``: [t, d, s], when each rank enters the
    step, or NaN.

    The quickest message of each direction is a bound. If its receiver was waiting, the bound is off by the transfer
    only; if not, it may be far off. So each bound is weighted by the wait of its receiver, and if both receivers waited
    for the transfers only, the clock is in the middle.
    """
    bounds, waits = list[Floats](), list[Floats]()
    for kind, receiver in ((0, stage), (1, stage - 1)):
        free_since = _free_since(start[:, :, receiver], end[:, :, receiver], enter[:, :, receiver])[:, :, :, kind]
        slack, waited = _slack(start, end, stage, kind), start[:, :, receiver, :, kind] - free_since
        waited = waited.reshape(slack.shape)
        if not each_step:
            slack, waited = (np.moveaxis(array, 0, 1).reshape(1, slack.shape[1], -1) for array in (slack, waited))
        bounds.append(slack.min(axis=2))
        # Several messages are about as quick, and some of them met a receiver that had just arrived.
        slower = (slack - bounds[-1][..., None]).round(3)  # recordings resolve microseconds
        quick = np.sort(slower, axis=2)[..., max(1, round(_QUICK * slack.shape[2])) - 1, None]
        waits.append(np.where(slower <= quick, waited, -np.inf).max(axis=2))
    low, high = -bounds[0], bounds[1]
    width = np.maximum(high - low, 1e-9)
    low_weight, high_weight = (np.clip(wait, 1e-9, width / 2) for wait in waits)
    return np.asarray((low * low_weight + high * high_weight) / (low_weight + high_weight)), np.abs(high - low)


def _one_way(start: Floats, end: Floats, shift: Floats, stage: int, *, each_step: bool) -> tuple[Floats, Floats]:
    """Returns what `_both_ways` does, for passes that go one way only. ``shift``: shifts of the stages before,
    [t, d, s].

    A sender that waits for its receiver leaves the exchange together with it, and then receives the input of its next
    pass. How long that takes is known from the stage before, if the input was ready. The clock is NaN if nothing shows
    that: the next pass of a sender that does not wait begins before the message arrives, so that the bounds contradict
    each other; and with model chunks, a sender exchanges with several stages at once.
    """
    t, d, _, chunks, _, microbatches = start.shape
    if chunks > 1 or microbatches == 1:
        return np.full((1, d), np.nan), np.zeros((1, d))
    start, end = start[:, :, :, 0, 0], end[:, :, :, 0, 0]
    low = -(start[:, :, stage] - end[:, :, stage - 1]).min(axis=2)
    leaves_after, receiving_ms = start[:, :, stage - 1, 1:] - start[:, :, stage, :-1], np.zeros((t, d))
    if stage > 1:
        input_made = end[:, :, stage - 2] + (shift[:, :, stage - 2] - shift[:, :, stage - 1])[..., None]
        receiving_ms = (start[:, :, stage - 1] - input_made).min(axis=2)
        leaves_after = np.where(input_made[..., 1:] <= end[:, :, stage - 1, :-1], leaves_after, np.inf)
    high = leaves_after.min(axis=2) - receiving_ms
    if not each_step:
        low, high = low.max(axis=0, keepdims=True), np.median(high, axis=0, keepdims=True)
    consistent = np.isfinite(high) & (high >= low)
    return np.where(consistent, high, np.nan), np.where(consistent, high - low, 0.0)


def _free_since(start: Floats, end: Floats, enter: Floats) -> Floats:
    """Returns the time from which a rank had nothing to do before every pass, [t, d, c, k, m]. It is the end of the
    pass before or, for the first pass, the beginning of the step (or of the pass itself, if that is not known)."""
    t, d = start.shape[:2]
    starts, ends = start.reshape(t, d, -1), end.reshape(t, d, -1)
    order = np.argsort(starts, axis=2)
    first = np.take_along_axis(starts, order[..., :1], axis=2)
    shifted = np.take_along_axis(ends, order, axis=2)
    shifted = np.concatenate((np.fmin(first, enter[..., None]), shifted[..., :-1]), axis=2)
    free_since = np.empty_like(starts)
    np.put_along_axis(free_since, order, shifted, axis=2)
    return free_since.reshape(start.shape)
