"""Tables of passes from traces: the calls that each file was decoded to, once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megaprof.analysis.diagnosis.job import Job, layers_of, place_of, schedule_of, table_of
from megaprof.analysis.diagnosis.table import CALLS, Floats, RankSteps, Table, Unfit
from megaprof.analysis.trace.calls import WHOLE_STEP, Call, grouped
from megaprof.analysis.trace.intervals import covered, intervals
from megaprof.formats import ranges
from megaprof.parallel.schedules import PipelineSchedule

#: What waits inside a pass for communication; gradients and exchanges lie beside passes.
_INSIDE = ("tp", "ep", "cp", "unknown")
_MS = 1e-6


def tables_of_calls(calls: Iterable[Call]) -> dict[Job, Table | Unfit]:
    """The table of every job, or why there is none."""
    found: dict[Job, Table | Unfit] = {}
    own = (call for call in calls if call.label != WHOLE_STEP and not call.incomplete)
    for job, of_job in grouped(own, lambda call: Job(call.label, call.role, call.metadata.sizes)).items():
        try:
            found[job] = _table(job, of_job)
        except Unfit as fault:
            found[job] = fault
    return found


def _table(job: Job, calls: Sequence[Call]) -> Table:
    first = calls[0]
    if any(phase.kind == ranges.COMBINED for call in calls for phase in call.phases):
        raise Unfit("forwards and backwards run combined: their own times are not known")
    if len({(call.metadata.schedule, call.metadata.microbatches, call.forward_only) for call in calls}) > 1:
        raise Unfit("the calls differ in their schedule or in the number of microbatches")
    schedule = schedule_of(first.metadata, first.forward_only)
    origin = min(call.start for call in calls)
    by_rank = grouped(sorted(calls, key=lambda call: call.key), lambda call: call.rank)
    ranks = [_rank(own, schedule, origin) for own in by_rank.values()]
    return table_of(job, ranks, first.metadata, schedule)


def _rank(calls: Sequence[Call], schedule: PipelineSchedule, origin: int) -> RankSteps:
    latest = {call.key: call for call in calls}  # a step that was captured twice counts as it ran last
    calls = [latest[key] for key in sorted(latest)]
    metadata = calls[0].metadata
    shape = (len(calls), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end, compute, waited = (np.full(shape, np.nan) for _ in range(4))
    idle = np.zeros(shape)
    for t, call in enumerate(calls):
        unfed, until = _unfed(call)
        for each, idled, last in zip(call.phases, unfed, until, strict=True):
            if each.kind in schedule.kinds and each.chunk is not None and each.microbatch is not None:
                at = (t, each.chunk, schedule.kinds.index(each.kind), each.microbatch)
                if not (at[1] < shape[1] and at[3] < shape[3]):
                    raise Unfit("a pass bears a number that its schedule does not have")
                start[at], end[at] = (each.start - origin) * _MS, (last - origin) * _MS
                idle[at] = idled * _MS
                compute[at], waited[at] = each.compute_ns * _MS, each.exposed_ns * _MS
    replica, peer = place_of(metadata.coords)
    return RankSteps(
        rank=metadata.coords.rank,
        stage=metadata.coords.pp,
        replica=replica,
        peer=peer,
        host=metadata.host,
        layers=layers_of(metadata),
        steps=np.array([step << CALLS | index for step, index in sorted(latest)]),
        start=start,
        end=end,
        compute=compute,
        idle=idle,
        exposed=_exposed(calls, waited),
        enter=np.array([(call.extent[0] - origin) * _MS for call in calls]),
        reduced=np.array([_reduced(call, origin) for call in calls]),
        opening=np.array([n == 0 or call.source != calls[n - 1].source for n, call in enumerate(calls)]),
    )


def _exposed(calls: Sequence[Call], waited: Floats) -> dict[str, Floats]:
    """Exposed communication of every pass, divided among groups as that of its whole call is."""
    share = {group: np.array([float(call.exposed_ns[group] or 0) for call in calls]) for group in _INSIDE}
    total = np.maximum(sum(share.values()), 1.0)
    return {group: waited * (own / total)[:, None, None, None] for group, own in share.items() if own.any()}


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


def _reduced(call: Call, origin: int) -> float:
    """When gradients were reduced, NaN where nothing tells: replicas that are not parallel in data reduce none."""
    if call.metadata.sizes.dp == 1 or call.forward_only:
        return np.nan
    if call.gpu is not None:
        return (call.gpu.end - origin) * _MS
    return (int(call.finalize[-1, 1]) - origin) * _MS if len(call.finalize) else np.nan
