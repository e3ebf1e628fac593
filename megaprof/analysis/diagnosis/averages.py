"""The stages of a run that timelines tell of, from its table of passes: the steps that its causes are priced in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megaprof.analysis.fleet.reading import INDEX_BITS, Series
from megaprof.analysis.notes import Note
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.stages.stages import (
    BUBBLE_PARTS,
    LONGEST,
    OF_REPLICAS,
    ONE_CLOCK,
    Basis,
    ChunkTimes,
    Collectives,
    Stage,
    TargetStages,
    imbalance,
    without_ranges,
)
from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.trace.calls import GROUPS, grouped
from megaprof.analysis.trace.groups import INSIDE, parallel_of
from megaprof.formats.metadata import Metadata
from megaprof.formats.ranges import PASSES
from megaprof.parallel.topology import ParallelSizes

_Place = tuple[int, int, int]  # replica, stage and peer


def averages(table: Table, slow: Collection[int] = (), suspects: Collection[int] = ()) -> TargetStages:
    """The stages on one rank each, of the pipeline with the fewest ``suspects``: what is said of the layout is not to
    be a slow machine's. ``slow`` ranks stand beside them."""
    first = next(each for each in table.metadata if each is not None)
    place = _shown(table, suspects)
    recorded = [stage for stage, each in enumerate(table.metadata) if each is not None]
    stages = tuple(_stage((place[0], stage, place[1]), first.sizes, table) for stage in recorded)
    basis: Basis = ONE_CLOCK if "backward" in table.schedule.kinds or table.ranks.shape[0] == 1 else OF_REPLICAS
    return TargetStages(
        target=table.target,
        role=table.role,
        sizes=first.sizes,
        schedule=first.schedule,
        forward_only=first.forward_only,
        microbatches=table.schedule.microbatches,
        steps=tuple(sorted(set(table.steps.tolist()))),
        step_time_ms=_spread(table.lengths[:, place[0]]),
        step_time_basis=basis if table.clocks else LONGEST,
        stages=stages,
        unjudgeable=None,
        warnings=tuple(_notes(table, first.sizes)),
        imbalance=imbalance(stages, first.sizes),
        slow_ranks=tuple(_of_slow(table, slow, stages, first.sizes)),
        framework=table.framework,
    )


def without_passes(series: Series, why: Note) -> TargetStages:
    """What is known of stages without the times of their passes: how long steps took, and their passes together."""
    first = next(iter(series.metadata.values()))
    ranks = grouped(sorted(series.ranks, key=lambda rank: rank.coords.rank), lambda rank: rank.coords.pp)
    stages = (
        replace(
            _NOTHING,
            pp=pp,
            ranks=tuple(each.coords.rank for each in ranks[pp]),
            chunks=_chunks(series.metadata[pp], None, None),
            compute_ms=Spread.of([each.mean_ms for each in ranks[pp] if len(each.counts)]),
        )
        for pp in sorted(ranks)
    )
    return TargetStages(
        target=first.target,
        role=first.role,
        sizes=first.sizes,
        schedule=first.schedule,
        forward_only=first.forward_only,
        microbatches=first.microbatches,
        steps=tuple(np.unique(series.steps >> INDEX_BITS).tolist()),
        step_time_ms=Spread.of(series.longest.tolist()),
        step_time_basis=LONGEST,
        stages=tuple(stages),
        unjudgeable=why,
        warnings=(why,),
        framework=first.framework,
    )


#: A stage of which no times are known.
_NOTHING = Stage(
    pp=0,
    ranks=(),
    chunks=(),
    forward_ms=None,
    backward_ms=None,
    compute_ms=None,
    exposed_ms=dict.fromkeys(GROUPS),
    bubble_ms=None,
    bubble_fraction=None,
    forward_per_microbatch_ms=None,
    backward_per_microbatch_ms=None,
    dp_tail_ms=None,
    pp_waiting_ms=None,
    gradients_ms=None,
    host_bound_ms=None,
    modules_ms={},
)


def _notes(table: Table, sizes: ParallelSizes) -> Iterator[Note]:
    """What must be known about stages of which only timelines tell."""
    if table.cold:
        yield Note("first_steps", steps=table.cold)
    missing = tuple(stage for stage, each in enumerate(table.metadata) if each is None)
    if missing:
        yield Note("stages_missing", stages=missing, count=sizes.pp - len(missing), of=sizes.pp)
    if table.aligned_ms is not None:
        yield Note("aligned_on_gpu" if table.device else "clocks_aligned", ms=(table.aligned_ms,))
    elif not table.clocks and not missing:
        hosts = {str(host) for stages in table.hosts for peers in stages for host in peers}
        yield Note("not_aligned_on_gpu") if table.device else Note("clocks_apart", names=tuple(sorted(hosts)))
    yield from without_ranges(each for own in table.metadata if own is not None for each in own.ranges.without)
    if sizes.pp > 1:
        yield Note("pp_unknown_in_timeline")
    if sizes.dp > 1:
        yield Note("dp_behind_all_passes")
    known = known_groups(table)
    if others := [axis for axis in parallel_of(INSIDE, sizes) if axis not in known]:
        yield Note("groups_hidden_in_timeline", names=tuple(others))
    if known:
        yield Note("groups_with_waiting", names=tuple(known))


def _shown(table: Table, suspects: Collection[int]) -> tuple[int, int]:
    """Replica and peer."""
    known = table.ranks[..., : table.compute.shape[3]]
    suspected = np.isin(known, list(suspects)).sum(axis=1)  # [d, p]
    replica, peer = np.unravel_index(int(suspected.argmin()), suspected.shape)
    return int(replica), int(peer)


def _of_slow(table: Table, slow: Collection[int], shown: Sequence[Stage], sizes: ParallelSizes) -> Iterator[Stage]:
    """Those of which passes of their own are known."""
    if table.ranks.shape[2] > table.compute.shape[3]:
        return
    for rank in sorted(set(slow).difference(*(stage.ranks for stage in shown))):
        for replica, stage, peer in np.argwhere(table.ranks == rank).tolist():
            yield _stage((replica, stage, peer), sizes, table)


def known_groups(table: Table) -> Mapping[str, Floats]:
    """Returns the communication inside passes, by group, as far as timelines know it: combined passes compute beside it
    on purpose."""
    return {} if table.schedule.combined else table.ran


def _stage(place: _Place, sizes: ParallelSizes, table: Table) -> Stage:
    replica, pp, _ = place
    ran = {group: each[(slice(None), *place)] for group, each in known_groups(table).items()}
    passes = table.passes[:, replica, pp]
    whole = passes.sum(axis=(1, 2, 3))
    inside = np.minimum(sum(ran.values(), np.zeros_like(whole)), whole)
    took = passes * (1.0 - inside / np.maximum(whole, 1e-9))[:, None, None, None]
    of_kind = dict(zip(table.schedule.kinds, np.moveaxis(took, 2, 0), strict=True))  # [t, c, m]
    forward, backward = (of_kind.get(kind) for kind in ("forward", "backward"))
    compute = took.sum(axis=(1, 2, 3))
    tail, length = _spread(table.reduction), table.lengths[:, replica]
    bubble = np.maximum(length - whole - table.reduction, 0.0) * (sizes.pp > 1)
    unknown = parallel_of((*INSIDE, "pp"), sizes)
    unknown += ["unknown"] * bool(parallel_of(INSIDE, sizes))
    metadata = table.metadata[pp]
    return replace(
        _NOTHING,
        pp=pp,
        ranks=(int(table.ranks[place]),),
        chunks=() if metadata is None else _chunks(metadata, forward, backward),
        forward_ms=_summed(forward, (1, 2)),
        backward_ms=_summed(backward, (1, 2)),
        compute_ms=_spread(compute),
        exposed_ms={
            **{group: None if group in unknown else _spread(np.zeros_like(whole)) for group in GROUPS},
            "dp": tail,
            **{group: _spread(each) for group, each in ran.items()},
        },
        bubble_ms=_spread(bubble),
        bubble_fraction=float(bubble.sum() / length.sum()),
        forward_per_microbatch_ms=_summed(forward, 1),
        backward_per_microbatch_ms=_summed(backward, 1),
        bubble_split=_split(table, replica, pp, bubble),
        dp_tail_ms=tail,
        # What is not communication behind the passes is none of the step here.
        gradients_ms=None,
        host_ms=dict.fromkeys(PASSES[:2]),
        collectives={axis: _parted(axis, table, place) for axis in parallel_of(INSIDE, sizes)},
    )


def _parted(axis: str, table: Table, place: _Place) -> Collectives:
    own = (slice(None), *place)
    waited, ran = (None if axis not in each else each[axis][own] for each in (table.for_peers, known_groups(table)))
    if waited is None:
        return Collectives(None, None, "arrivals_unknown")
    if ran is None:
        return Collectives(_spread(waited), None, "computed_beside" if axis in table.ran else "durations_unknown")
    return Collectives(_spread(waited), _spread(np.maximum(ran - waited, 0.0)), None)


def _split(table: Table, replica: int, stage: int, bubble: Floats) -> dict[str, Spread | None]:
    """What of the bubble lies before the first backward and behind the last forward, and what in between."""
    if not table.clocks:
        return dict.fromkeys(BUBBLE_PARTS)
    steps = len(table.length)
    start, end = (each[:, replica, stage].reshape(steps, -1) for each in (table.start, table.end))
    filled = table.start[:, replica, stage, :, -1].reshape(steps, -1).min(axis=1)
    drained = np.maximum(table.end[:, replica, stage, :, 0].reshape(steps, -1).max(axis=1), filled)
    before = np.clip(np.minimum(end, filled[:, None]) - start, 0.0, None).sum(axis=1)
    behind = np.clip(end - np.maximum(start, drained[:, None]), 0.0, None).sum(axis=1)
    warmup = np.clip(filled - before, 0.0, bubble)
    cooldown = np.clip(table.lengths[:, replica] - table.reduction - drained - behind, 0.0, bubble - warmup)
    return dict(zip(BUBBLE_PARTS, map(_spread, (warmup, bubble - warmup - cooldown, cooldown)), strict=True))


def _chunks(metadata: Metadata, *kinds: Floats | None) -> tuple[ChunkTimes, ...]:
    """``kinds``: forwards and backwards, [t, c, m]."""
    found = []
    for chunk, holds in enumerate(metadata.chunks):
        forward, backward = (None if each is None else _spread(each[:, chunk]) for each in kinds)
        found.append(ChunkTimes(chunk, holds, forward, backward))
    return tuple(found)


def _summed(times: Floats | None, axis: int | tuple[int, ...]) -> Spread | None:
    return None if times is None else _spread(times.sum(axis=axis))


def _spread(samples: Floats) -> Spread | None:
    return Spread.of(samples.ravel().tolist())
