"""Makes tables of passes from traces, that is from the calls that each file was decoded to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megaprof.analysis.clocks.clocks import aligned
from megaprof.analysis.clocks.exchanges import Meeting, meetings
from megaprof.analysis.fleet.reading import Key
from megaprof.analysis.notes import Note
from megaprof.analysis.table import queueing
from megaprof.analysis.table.combined import forward_share, parts
from megaprof.analysis.table.counted import OPENED, Counted, opened_apart
from megaprof.analysis.table.job import place_of, schedule_of, table_of
from megaprof.analysis.table.table import CALLS, GARBAGE, WAIT, Floats, RankSteps, Table, Unfit
from megaprof.analysis.trace.calls import Call, ModuleKey, grouped
from megaprof.analysis.trace.gpu import together
from megaprof.analysis.trace.intervals import covered, intersection, intervals, total
from megaprof.formats import ranges
from megaprof.parallel.schedules import PipelineSchedule

#: Groups that communicate inside a pass. Gradients and exchanges come between passes.
_INSIDE = ("tp", "ep", "cp", "unknown")
_MS = 1e-6
#: Clocks that are uncertain by more than this fraction of a step cannot tell waiting from transferring.
_MOST_UNCERTAIN = 0.02


def table_of_calls(counted: Counted) -> Table | Unfit:
    """Returns the table of the calls that count, or why there is none."""
    try:
        return _table(counted)
    except Unfit as fault:
        return fault


def _table(counted: Counted) -> Table:
    calls, findings, key = counted.calls, counted.findings, Key(*counted.target)
    # If stages are missing, the times of the others are still known.
    if findings.unjudgeable and findings.unjudgeable.kind != "stages_missing":
        raise Unfit(findings.unjudgeable)
    whole = [call for call in calls if not call.incomplete]
    if not whole:
        raise Unfit(Note("no_whole_step", why=calls[-1].incomplete))
    by_step = grouped(whole, lambda call: call.key).values()
    apart = [opened_apart(step) for step in by_step]
    whole = [call for step, why in zip(by_step, apart, strict=True) if why is None for call in step]
    if not whole:
        raise Unfit(Note("step_disturbed", steps=(calls[-1].step,), why=apart[-1]))
    alike = grouped(whole, lambda call: (call.metadata.schedule, call.metadata.microbatches, call.forward_only))
    calls = max(alike.values(), key=len)
    first = calls[0]
    combined = any(phase.kind == ranges.COMBINED for call in calls for phase in call.phases)
    schedule = schedule_of(first.metadata, first.forward_only, combined=combined)
    origin = min(call.start for call in calls)
    met = {key: _met(step) for key, step in grouped(calls, lambda call: call.key).items()}
    by_rank = grouped(sorted(calls, key=lambda call: call.key), lambda call: call.rank)
    ranks = [_rank(own, schedule, origin, [met[call.key].get(call.rank) for call in own]) for own in by_rank.values()]
    table = table_of(key, ranks, first.metadata, schedule)
    warnings = [*findings.warnings(), *_warnings(table, calls)]
    return replace(table, warnings=tuple(warnings))


def _warnings(table: Table, calls: Sequence[Call]) -> Iterator[Note]:
    """Yields what is wrong with the steps of a table, or missing. Raises Unfit if they are from different runs."""
    begin, end = table.entry, table.end.max(axis=(3, 4, 5))
    opened = {call.step for call in calls if call.after_opening}
    together = "backward" in table.schedule.kinds
    for t, step in enumerate(table.steps.tolist()):
        for rows in [slice(None)] if together else range(begin.shape[1]):
            extents = np.column_stack((begin[t, rows].ravel(), end[t, rows].ravel()))
            extents = extents[np.isfinite(extents).all(axis=1)]
            extents = extents[np.argsort(extents[:, 0])]
            if (extents[1:, 0] >= np.maximum.accumulate(extents[:-1, 1])).any():
                raise Unfit(Note("stages_apart", steps=(step,)))
        apart = float(np.nan_to_num(begin[t]).max())
        if step in opened and apart > OPENED * table.length[t]:
            yield Note("entered_apart_by_nsys", steps=(step,), ms=(apart,))
    if calls[0].gpu is not None and calls[0].metadata.sizes.pp > 1 and not np.isfinite(table.spent["pp"]).all():
        yield Note("pp_not_split")


def _met(step: Sequence[Call]) -> dict[int, Meeting]:
    """Returns the exchanges of one step by rank; none if the clocks of its hosts are not known well enough."""
    hosts = {call.metadata.host for call in step}
    offset: dict[int, int] = {}
    if len(hosts) > 1 or None in hosts:
        alignment = aligned(step)
        longest = max(end - begin for begin, end in (call.extent for call in step))
        if not alignment.within(round(_MOST_UNCERTAIN * longest)):
            return {}
        offset = {rank: alignment.offset(rank) for rank in alignment.hosts}
    return meetings(step, offset)


def _exposed(call: Call, group: str) -> float:
    """Returns the nanoseconds of exposed communication until the last pass ended (on a CPU, inside passes); NaN if it
    is not known which group they belong to. Groups that are not Megatron's count as ``unknown``."""
    if call.exposed_ns[group] is None:
        return np.nan
    names = (group, "other") if group == "unknown" else (group,)
    parts = [call.gpu.early] if call.gpu is not None else [each.exposed for each in call.phases]
    return float(sum(part.get(name, 0) for part in parts for name in names))


def _spent(calls: Sequence[Call], met: Sequence[Meeting | None]) -> dict[str, Floats]:
    """Returns `Table.spent` of one rank, [t] by name."""
    none = np.nan
    found = {group: [_exposed(call, group) for call in calls] for group in ("dp", *_INSIDE)}
    if all(call.gpu is not None for call in calls):
        gpu = [call.gpu for call in calls if call.gpu is not None]
        found["host_bound"] = [total(each.host_bound) for each in gpu]
        found["gradients"] = [each.outside_ns for each in gpu]
        if calls[0].metadata.sizes.pp > 1:
            found["pp"] = [none if each is None else total(each.transfer) for each in met]
            found["pp_waiting"] = [none if each is None else each.waiting_ns for each in met]
        if not any(call.replayed for call in calls):
            for kind in ranges.PASSES[:2]:
                found[f"host_{kind}"] = [sum(p.duration_ns for p in call.phases if p.kind == kind) for call in calls]
    return {name: np.array(each, dtype=np.float64) * _MS for name, each in found.items()}


def _rank(calls: Sequence[Call], schedule: PipelineSchedule, origin: int, met: Sequence[Meeting | None]) -> RankSteps:
    metadata = calls[0].metadata
    shape = (len(calls), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end, compute, working = (np.full(shape, np.nan) for _ in range(4))
    # If only some collectives of a group can be told apart from the rest, only those are counted.
    there = [group for group in _INSIDE if any(each.exposed.get(group) for call in calls for each in call.phases)]
    exposed = {group: np.zeros(shape) for group in there}
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
                idle[at], compute[at], working[at] = idled * part, each.compute_ns * part, each.working_ns * part
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
        working=working,
        spent=_spent(calls, met),
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
    """Returns tokens and sequence lengths by call and microbatch. The metadata only have them for the first call of a
    window."""
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
    """Returns the tokens of all experts of a rank in the first call of a window, on average; NaN without any."""
    told = {call.source: sum(own) for call in calls if (own := call.metadata.expert_tokens) is not None}
    return float(np.mean([*told.values()])) if told else np.nan


def _unfed(call: Call) -> tuple[list[int], list[int]]:
    """Returns how long the GPU waited for the host in every pass, and when each pass ended. If the GPU had nothing to
    do after the last kernel of a pass, the pass ends when it has work again."""
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
    """Returns by how many nanoseconds garbage collection delayed every pass: on a GPU, only while it had no work."""
    held = call.collecting if call.gpu is None else intersection(call.collecting, call.gpu.host_bound)
    spans = intervals((each.start, end) for each, end in zip(call.phases, until, strict=True))
    return [int(ns) for ns in covered(held, spans)]


def _queued(calls: Sequence[Call]) -> float:
    """Returns how many milliseconds the training thread waited for a core in a window that holds only these calls."""
    profiler = calls[0].metadata.profiler
    if profiler is None or profiler.waited_ns is None or any(call.label != call.metadata.target for call in calls):
        return 0.0
    return profiler.waited_ns * _MS


def _reduced(call: Call, origin: int) -> float:
    """Returns when gradients were finalised, in milliseconds; NaN if nothing shows it."""
    if call.forward_only:
        return np.nan
    if call.gpu is not None:
        return (call.gpu.end - origin) * _MS
    return (int(call.finalize[-1, 1]) - origin) * _MS if len(call.finalize) else np.nan
