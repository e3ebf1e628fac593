"""Tables of passes from traces: the calls that each file was decoded to, once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megaprof.analysis.fleet.reading import Key
from megaprof.analysis.notes import Note
from megaprof.analysis.stages.consistency import Findings, opened_apart
from megaprof.analysis.stages.stages import counted
from megaprof.analysis.table import queueing
from megaprof.analysis.table.combined import forward_share, parts
from megaprof.analysis.table.job import place_of, schedule_of, table_of
from megaprof.analysis.table.table import CALLS, GARBAGE, WAIT, RankSteps, Table, Unfit
from megaprof.analysis.trace.calls import WHOLE_STEP, Call, ModuleKey, grouped
from megaprof.analysis.trace.gpu import together
from megaprof.analysis.trace.intervals import covered, intersection, intervals
from megaprof.formats import ranges
from megaprof.parallel.schedules import PipelineSchedule

#: What waits inside a pass for communication; gradients and exchanges lie beside passes.
_INSIDE = ("tp", "ep", "cp", "unknown")
_MS = 1e-6


def tables_of_calls(calls: Iterable[Call]) -> dict[Key, Table | Unfit]:
    """The table of every job, or why there is none, from those of its calls that the report's stages count."""
    found: dict[Key, Table | Unfit] = {}
    for key, own in grouped(calls, lambda call: Key(call.label, call.role, call.metadata.sizes)).items():
        try:
            found[key] = _table(key, own)
        except Unfit as fault:
            found[key] = fault
    return found


def _table(key: Key, calls: list[Call]) -> Table:
    if key.target == WHOLE_STEP:
        raise Unfit(Note("whole_step"))
    findings = Findings(stages=key.sizes.pp)
    calls = counted(calls, key.sizes, findings)
    if findings.unjudgeable:
        raise Unfit(findings.unjudgeable)
    if any(call.has_kernels and call.gpu is None for call in calls):
        raise Unfit(Note("launches_unknown"))
    if not any(call.phases for call in calls):
        raise Unfit(Note("no_passes"))
    whole = [call for call in calls if not call.incomplete]
    if not whole:
        raise Unfit(Note("no_whole_step", why=calls[-1].incomplete))
    by_step = grouped(whole, lambda call: call.key).values()
    apart = [opened_apart(step) for step in by_step]
    whole = [call for step, why in zip(by_step, apart, strict=True) if why is None for call in step]
    if not whole:
        raise Unfit(apart[-1])
    alike = grouped(whole, lambda call: (call.metadata.schedule, call.metadata.microbatches, call.forward_only))
    calls = max(alike.values(), key=len)
    first = calls[0]
    combined = any(phase.kind == ranges.COMBINED for call in calls for phase in call.phases)
    schedule = schedule_of(first.metadata, first.forward_only, combined=combined)
    origin = min(call.start for call in calls)
    by_rank = grouped(sorted(calls, key=lambda call: call.key), lambda call: call.rank)
    ranks = [_rank(own, schedule, origin) for own in by_rank.values()]
    return table_of(key, ranks, first.metadata, schedule)


def _rank(calls: Sequence[Call], schedule: PipelineSchedule, origin: int) -> RankSteps:
    metadata = calls[0].metadata
    shape = (len(calls), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end, compute = (np.full(shape, np.nan) for _ in range(3))
    known = [group for group in _INSIDE if any(call.exposed_ns[group] for call in calls)]
    exposed = {group: np.zeros(shape) for group in known}
    idle, collected = np.zeros(shape), np.zeros(shape)
    of_host = compute if calls[0].gpu is None else idle  # what the host holds up
    sequences, work = _sequences(calls), np.full((len(calls), schedule.microbatches, 3), np.nan)
    for (t, number), (tokens, lengths) in sequences.items():
        if number < schedule.microbatches:
            work[t, number] = tokens, len(lengths), sum(each * each for each in lengths)
    for t, call in enumerate(calls):
        unfed, until = _unfed(call)
        alone = ([p.duration_ns for p in call.phases if p.kind == kind] for kind in ranges.PASSES[:2])
        share = forward_share(*alone) if schedule.combined else 0.0
        for each, idled, last, garbage in zip(call.phases, unfed, until, _collected(call, until), strict=True):
            for kind, chunk, microbatch, first, behind in parts(each, share):
                if kind not in schedule.kinds or chunk is None or microbatch is None:
                    continue
                at = (t, chunk, schedule.kinds.index(kind), microbatch)
                if not (at[1] < shape[1] and at[3] < shape[3]):
                    raise Unfit(Note("place_beyond_schedule"))
                length, part = last - each.start, (behind - first) * _MS
                start[at] = (each.start - origin + first * length) * _MS
                end[at] = (each.start - origin + behind * length) * _MS
                idle[at], compute[at] = idled * part, each.compute_ns * part
                for group, of_group in exposed.items():
                    of_group[at] = each.exposed.get(group, 0) * part
                collected[at] = garbage * part
                of_host[at] -= garbage * part
    queued, windows = np.zeros(len(calls)), []
    for own in grouped(range(len(calls)), lambda t: calls[t].source).values():
        ms = _queued([calls[t] for t in own])
        queued[own] = ms / len(own)
        windows.append((own, ms))
    waits = queueing.of_passes(of_host, windows)
    of_host -= waits
    replica, peer = place_of(metadata.coords)
    return RankSteps(
        names=((metadata.coords.rank, metadata.host),),
        metadata=metadata,
        stage=metadata.coords.pp,
        replica=replica,
        peer=peer,
        steps=np.array([call.step << CALLS | call.index for call in calls]),
        start=start,
        end=end,
        compute=compute,
        idle=idle,
        waited=queued,
        held={kind: each for kind, each in ((GARBAGE, collected), (WAIT, waits)) if each.any()},
        exposed=exposed,
        enter=np.array([(call.extent[0] - origin) * _MS for call in calls]),
        reduced=np.array([_reduced(call, origin) for call in calls]),
        work=work,
        lengths_from=metadata.lengths_from,
        experts=_experts(calls),
        sequences={key: lengths for key, (_, lengths) in sequences.items()},
        memory=together(call.memory for call in calls),
        modules=_modules(calls),
        opening=np.array([n == 0 or call.source != calls[n - 1].source for n, call in enumerate(calls)]),
    )


def _sequences(calls: Sequence[Call]) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
    """By call and microbatch its tokens, and the lengths of its sequences: the metadata have those of a window's first
    call."""
    found = {}
    for t, call in enumerate(calls):
        own = call.metadata
        if call.label == own.target and call.step == own.steps[0] and call.index == 0:
            for number, (tokens, lengths) in enumerate(zip(own.tokens or (), own.lengths or (), strict=False)):
                if tokens and lengths:
                    found[t, number] = tokens, lengths
    return found


def _modules(calls: Sequence[Call]) -> dict[ModuleKey, tuple[int, ...]]:
    keys = dict.fromkeys(key for call in calls for key in call.modules)
    return {key: tuple(ns for call in calls for ns in call.modules.get(key, ())) for key in keys}


def _experts(calls: Sequence[Call]) -> float:
    """Tokens of all of a rank's experts in the first call of a window, on average; NaN without any."""
    told = {call.source: sum(own) for call in calls if (own := call.metadata.expert_tokens) is not None}
    return float(np.mean([*told.values()])) if told else np.nan


def _unfed(call: Call) -> tuple[list[int], list[int]]:
    """Returns how long the GPU waited for the host in every pass, and when each ended: where the GPU had nothing to do
    behind its last kernel, only when it had again."""
    ends = np.array([each.end for each in call.phases], dtype=np.int64)
    if call.gpu is None or not len(call.gpu.host_bound):
        return [0] * len(ends), ends.tolist()
    gaps = call.gpu.host_bound
    begins = np.sort([*(each.start for each in call.phases), *(each.start for each in call.gpu.exchanges)])
    begins = np.append(begins, np.iinfo(np.int64).max)
    place = np.searchsorted(gaps[:, 0], ends, side="right") - 1
    unfed = (place >= 0) & (gaps[place, 0] <= ends) & (gaps[place, 1] > ends)
    following = begins[np.searchsorted(begins, ends)]
    following = np.where(following < begins[-1], following, gaps[place, 1])
    until = np.where(unfed, np.maximum(following, ends), ends)
    spans = intervals((each.start, each.end) for each in call.phases)
    return (covered(gaps, spans) + until - ends).tolist(), until.tolist()


def _collected(call: Call, until: Sequence[int]) -> list[int]:
    """Nanoseconds by which Python's garbage collection held every pass up: on a GPU, while that waited for the host."""
    held = call.collecting if call.gpu is None else intersection(call.collecting, call.gpu.host_bound)
    spans = intervals((each.start, end) for each, end in zip(call.phases, until, strict=True))
    return [int(ns) for ns in covered(held, spans)]


def _queued(calls: Sequence[Call]) -> float:
    """Milliseconds that the training thread waited for a processor core in a window of these calls and no others."""
    profiler = calls[0].metadata.profiler
    if profiler is None or profiler.waited_ns is None or any(call.label != call.metadata.target for call in calls):
        return 0.0
    return profiler.waited_ns * _MS


def _reduced(call: Call, origin: int) -> float:
    """When gradients were reduced, NaN where nothing tells: replicas that are not parallel in data reduce none."""
    if call.metadata.sizes.dp * call.metadata.sizes.cp == 1 or call.forward_only:
        return np.nan
    if call.gpu is not None:
        return (call.gpu.end - origin) * _MS
    return (int(call.finalize[-1, 1]) - origin) * _MS if len(call.finalize) else np.nan
