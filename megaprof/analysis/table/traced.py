"""Makes tables of passes from traces, that is from the calls that each file was decoded to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megaprof.analysis.clocks.exchanges import meetings
from megaprof.analysis.fleet.reading import Key
from megaprof.analysis.notes import BEYOND_SCHEDULE, Note
from megaprof.analysis.table.combined import forward_share, parts
from megaprof.analysis.table.counted import Counted
from megaprof.analysis.table.job import place_of, schedule_of
from megaprof.analysis.table.table import CALLS, GARBAGE, Floats, RankSteps, Table, Unfit
from megaprof.analysis.table.tabulate import tabulate
from megaprof.analysis.trace.calls import Call, ModuleKey, grouped
from megaprof.analysis.trace.gpu import combined_peak
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
    whole_calls = [call for call in calls if not call.incomplete]
    if not whole_calls:
        raise Unfit(Note("no_step", said="no step was recorded whole", why=calls[-1].incomplete))
    by_schedule = grouped(
        whole_calls, lambda call: (call.metadata.schedule, call.metadata.microbatches, call.forward_only)
    )
    calls = max(by_schedule.values(), key=len)
    first_call = calls[0]
    combined = any(phase.kind == ranges.COMBINED for call in calls for phase in call.phases)
    schedule = schedule_of(first_call.metadata, first_call.forward_only, combined=combined)
    origin = min(call.start for call in calls)
    by_rank = grouped(sorted(calls, key=lambda call: call.key), lambda call: call.rank)
    ranks = [_rank(rank_calls, schedule, origin) for rank_calls in by_rank.values()]
    table = tabulate(key, ranks, first_call.metadata, schedule, origin)
    table = replace(table, spent={**table.spent, **_exchanges(table, calls)})
    warnings = [*findings.warnings(), *_warnings(table, calls)]
    return replace(table, profiled_length=table.length, warnings=tuple(warnings))


def _warnings(table: Table, calls: Sequence[Call]) -> Iterator[Note]:
    """Yields what is wrong with the steps of a table, or missing. Raises Unfit if they are from different runs."""
    begin, end = table.entry, table.end.max(axis=(3, 4, 5))
    reduces = "backward" in table.schedule.kinds
    for t, step in enumerate(table.steps.tolist()):
        for rows in [slice(None)] if reduces else range(begin.shape[1]):
            extents = np.column_stack((begin[t, rows].ravel(), end[t, rows].ravel()))
            extents = extents[np.isfinite(extents).all(axis=1)]
            extents = extents[np.argsort(extents[:, 0])]
            if (extents[1:, 0] >= np.maximum.accumulate(extents[:-1, 1])).any():
                raise Unfit(Note("not_comparable", steps=(step,), said="stages do not overlap in time"))
    if calls[0].gpu is not None and calls[0].metadata.sizes.pp > 1 and not np.isfinite(table.spent["pp"]).all():
        yield Note("exposed_unknown", names=("pp",), said="only one end of its exchanges is known")


def _exchanges(table: Table, calls: Sequence[Call]) -> dict[str, Floats]:
    """Returns what `Table.spent` has of exchanges between stages. They are NaN if the clocks of the ranks are not known
    well enough, or not both ends of an exchange."""
    if table.sizes.pp == 1 or any(call.gpu is None for call in calls):
        return {}
    transfer_ms, waiting_ms = np.full((2, *table.offset_ns.shape), np.nan)
    if table.clocks and (table.aligned_ms or 0.0) <= _MOST_UNCERTAIN * table.length.min():
        places = {int(rank): place for place, rank in np.ndenumerate(table.ranks)}
        by_step = grouped((call for call in calls if call.rank in places), lambda call: call.key)
        for t, key in enumerate(zip(table.steps.tolist(), table.calls.tolist(), strict=True)):
            offset = {call.rank: table.offset_of(call.rank, t) for call in by_step[key]}
            for rank, (transfer_ns, waiting_ns) in meetings(by_step[key], offset).items():
                place = (t, *places[rank])
                transfer_ms[place], waiting_ms[place] = transfer_ns * _MS, waiting_ns * _MS
    return {"pp": transfer_ms, "pp_waiting": waiting_ms}


def _exposed(call: Call, group: str) -> float:
    """Returns the nanoseconds of exposed communication until the last pass ended (on a CPU, inside passes); NaN if it
    is not known which group they belong to. Groups that are not Megatron's count as ``unknown``."""
    if call.exposed_ns[group] is None:
        return np.nan
    names = (group, "other") if group == "unknown" else (group,)
    by_group = [call.gpu.early] if call.gpu is not None else [phase.exposed for phase in call.phases]
    return float(sum(exposed_ns.get(name, 0) for exposed_ns in by_group for name in names))


def _spent(calls: Sequence[Call]) -> dict[str, Floats]:
    """Returns `Table.spent` of one rank, [t] by name, without exchanges."""
    spent = {group: [_exposed(call, group) for call in calls] for group in ("dp", *_INSIDE)}
    if all(call.gpu is not None for call in calls):
        gpus = [call.gpu for call in calls if call.gpu is not None]
        spent["host_bound"] = [total(gpu.host_bound) for gpu in gpus]
        spent["gradients"] = [gpu.outside_ns for gpu in gpus]
        if not any(call.replayed for call in calls):
            for kind in ranges.PASSES[:2]:
                spent[f"host_{kind}"] = [
                    sum(phase.duration_ns for phase in call.phases if phase.kind == kind) for call in calls
                ]
    return {name: np.array(values, dtype=np.float64) * _MS for name, values in spent.items()}


def _rank(calls: Sequence[Call], schedule: PipelineSchedule, origin: int) -> RankSteps:
    metadata = calls[0].metadata
    shape = (len(calls), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end, compute, working = (np.full(shape, np.nan) for _ in range(4))
    # If only some collectives of a group can be told apart from the rest, only those are counted.
    exposed_groups = [
        group for group in _INSIDE if any(phase.exposed.get(group) for call in calls for phase in call.phases)
    ]
    exposed = {group: np.zeros(shape) for group in exposed_groups}
    idle, collected_ms = np.zeros(shape), np.zeros(shape)
    host_ms = compute if calls[0].gpu is None else idle  # what the host holds up
    sequences, work = _sequences(calls), np.full((len(calls), schedule.microbatches, 3), np.nan)
    for (t, number), (tokens, lengths) in sequences.items():
        if number < schedule.microbatches:
            work[t, number] = tokens, len(lengths), sum(length * length for length in lengths)
    for t, call in enumerate(calls):
        unfed_ns, ends_ns = _unfed(call)
        alone_ns = ([phase.duration_ns for phase in call.phases if phase.kind == kind] for kind in ranges.PASSES[:2])
        share = forward_share(*alone_ns) if schedule.combined else 0.0
        for phase, idle_ns, end_ns, garbage_ns in zip(
            call.phases, unfed_ns, ends_ns, _collected(call, ends_ns), strict=True
        ):
            for kind, chunk, microbatch, begin_share, end_share in parts(phase, share):
                if kind not in schedule.kinds or chunk is None or microbatch is None:
                    continue
                cell = (t, chunk, schedule.kinds.index(kind), microbatch)
                if not (cell[1] < shape[1] and cell[3] < shape[3]):
                    raise Unfit(BEYOND_SCHEDULE)
                length_ns, scale = end_ns - phase.start, (end_share - begin_share) * _MS
                start[cell] = (phase.start - origin + begin_share * length_ns) * _MS
                end[cell] = (phase.start - origin + end_share * length_ns) * _MS
                idle[cell] = idle_ns * scale
                compute[cell], working[cell] = phase.compute_ns * scale, phase.working_ns * scale
                for group, group_ms in exposed.items():
                    group_ms[cell] = phase.exposed.get(group, 0) * scale
                collected_ms[cell] = garbage_ns * scale
                host_ms[cell] -= garbage_ns * scale
    queued_ms = np.zeros(len(calls))
    for window in grouped(range(len(calls)), lambda t: calls[t].source).values():
        queued_ms[window] = _queued([calls[t] for t in window]) / len(window)
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
        spent=_spent(calls),
        idle=idle,
        waited=queued_ms,
        held={GARBAGE: collected_ms} if collected_ms.any() else {},
        exposed=exposed,
        enter=np.array([(call.extent[0] - origin) * _MS for call in calls]),
        reduced=np.array([_reduced(call, origin) for call in calls]),
        work=work,
        lengths_from=metadata.lengths_from,
        experts=_experts(calls),
        sequences={key: lengths for key, (_, lengths) in sequences.items()},
        memory=combined_peak(call.memory for call in calls),
        modules=_modules(calls),
    )


def _sequences(calls: Sequence[Call]) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
    """Returns tokens and sequence lengths by call and microbatch. The metadata only have them for the first call of a
    window."""
    sequences = {}
    for t, call in enumerate(calls):
        metadata = call.metadata
        if call.label == metadata.target and call.step == metadata.steps[0] and call.index == 0:
            for number, (tokens, lengths) in enumerate(
                zip(metadata.tokens or (), metadata.lengths or (), strict=False)
            ):
                if tokens and lengths:
                    sequences[t, number] = tokens, lengths
    return sequences


def _modules(calls: Sequence[Call]) -> dict[ModuleKey, tuple[int, ...]]:
    keys = dict.fromkeys(key for call in calls for key in call.modules)
    return {key: tuple(ns for call in calls for ns in call.modules.get(key, ())) for key in keys}


def _experts(calls: Sequence[Call]) -> float:
    """Returns the tokens of all experts of a rank in the first call of a window, on average; NaN without any."""
    tokens_by_source = {
        call.source: sum(expert_tokens) for call in calls if (expert_tokens := call.metadata.expert_tokens) is not None
    }
    return float(np.mean([*tokens_by_source.values()])) if tokens_by_source else np.nan


def _unfed(call: Call) -> tuple[list[int], list[int]]:
    """Returns how long the GPU waited for the host in every pass, and when each pass ended. If the GPU had nothing to
    do after the last kernel of a pass, the pass ends when it has work again."""
    ends = np.array([phase.end for phase in call.phases], dtype=np.int64)
    if call.gpu is None or not len(call.gpu.host_bound):
        return [0] * len(ends), ends.tolist()
    gaps = call.gpu.host_bound
    begins = np.sort([*(phase.start for phase in call.phases), *(exchange.start for exchange in call.gpu.exchanges)])
    begins = np.append(begins, np.iinfo(np.int64).max)
    last_gap = np.searchsorted(gaps[:, 0], ends, side="right") - 1
    is_unfed = (last_gap >= 0) & (gaps[last_gap, 0] <= ends) & (gaps[last_gap, 1] > ends)
    next_begin = begins[np.searchsorted(begins, ends)]
    next_begin = np.where(next_begin < begins[-1], next_begin, gaps[last_gap, 1])
    pass_ends = np.where(is_unfed, np.maximum(next_begin, ends), ends)
    spans = intervals((phase.start, phase.end) for phase in call.phases)
    return (covered(gaps, spans) + pass_ends - ends).tolist(), pass_ends.tolist()


def _collected(call: Call, pass_ends: Sequence[int]) -> list[int]:
    """Returns by how many nanoseconds garbage collection delayed every pass: on a GPU, only while it had no work."""
    delaying_spans = call.collecting if call.gpu is None else intersection(call.collecting, call.gpu.host_bound)
    spans = intervals((phase.start, end) for phase, end in zip(call.phases, pass_ends, strict=True))
    return [int(ns) for ns in covered(delaying_spans, spans)]


def _queued(calls: Sequence[Call]) -> float:
    """Returns how many milliseconds the training thread waited for a core in a window that holds only these calls."""
    profiler = calls[0].metadata.profiler
    if profiler is None or profiler.waited_ns is None or any(call.label != call.metadata.target for call in calls):
        return 0.0
    # The counter is read after the window is closed, for which the thread may wait, too.
    return min(profiler.waited_ns, max(call.extent[1] for call in calls) - min(call.extent[0] for call in calls)) * _MS


def _reduced(call: Call, origin: int) -> float:
    """Returns when gradients were finalised, in milliseconds; NaN if nothing shows it."""
    if call.forward_only:
        return np.nan
    if call.gpu is not None:
        return (call.gpu.end - origin) * _MS
    return (int(call.finalize[-1, 1]) - origin) * _MS if len(call.finalize) else np.nan
