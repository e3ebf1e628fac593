"""The stages of a run that timelines tell of, from its table of passes: the steps that its causes are priced in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from megaprof.analysis.stages import words
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.stages.stages import (
    LONGEST,
    OF_REPLICAS,
    ONE_CLOCK,
    Basis,
    ChunkTimes,
    Collectives,
    Stage,
    TargetStages,
    imbalance,
)
from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.trace.groups import INSIDE, parallel_of


def averages(measured: TargetStages, table: Table, slow: Collection[int] = ()) -> TargetStages:
    """``measured``, which holds what is known of a few steps, with the times of all steps of ``table``, on the same
    ranks, and of the ``slow`` ones beside them."""
    replica = int(np.argwhere(table.ranks == measured.stages[0].ranks[0])[0, 0])
    basis: Basis = ONE_CLOCK if "backward" in table.schedule.kinds or table.ranks.shape[0] == 1 else OF_REPLICAS
    stages = tuple(_stage(stage, measured, table) for stage in measured.stages)
    cold = [f"{words.steps(table.cold)} left out: the first steps of a job take longer than the others"]
    return replace(
        measured,
        steps=tuple(sorted(set(table.steps.tolist()))),
        step_time_ms=_spread(table.lengths[:, replica]),
        step_time_basis=basis if table.clocks else LONGEST,
        stages=stages,
        slow_ranks=tuple(_of_slow(measured, table, slow)),
        imbalance=None if measured.unjudgeable else imbalance(stages, measured.sizes),
        warnings=(*(cold if table.cold else []), *measured.warnings),
    )


def _of_slow(measured: TargetStages, table: Table, slow: Collection[int]) -> Iterator[Stage]:
    """Those of which passes of their own are known."""
    if table.ranks.shape[2] > table.compute.shape[3]:
        return
    shown = {rank for stage in measured.stages for rank in stage.ranks}
    for rank in sorted(set(slow) - shown):
        pp = int(np.argwhere(table.ranks == rank)[0, 1])
        yield from (_stage(replace(each, ranks=(rank,)), measured, table) for each in measured.stages if each.pp == pp)


def known_groups(table: Table) -> Mapping[str, Floats]:
    """Returns the communication inside passes, by group, as far as timelines know it: combined passes compute beside it
    on purpose."""
    return {} if table.schedule.combined else table.ran


def _stage(stage: Stage, measured: TargetStages, table: Table) -> Stage:
    replica, peer = (int(found[0]) for found in np.nonzero(table.ranks[:, stage.pp] == stage.ranks[0]))
    place = replica, stage.pp, min(peer, table.compute.shape[3] - 1)
    ran = {group: each[(slice(None), *place)] for group, each in known_groups(table).items()}
    passes = table.passes[:, replica, stage.pp]
    whole = passes.sum(axis=(1, 2, 3))
    inside = np.minimum(sum(ran.values(), np.zeros_like(whole)), whole)
    took = passes * (1.0 - inside / np.maximum(whole, 1e-9))[:, None, None, None]
    of_kind = dict(zip(table.schedule.kinds, np.moveaxis(took, 2, 0), strict=True))  # [t, c, m]
    forward, backward = (of_kind.get(kind) for kind in ("forward", "backward"))
    compute = took.sum(axis=(1, 2, 3))
    tail, length = _spread(table.reduction), table.lengths[:, replica]
    bubble = np.maximum(length - whole - table.reduction, 0.0) * (measured.sizes.pp > 1)
    return replace(
        stage,
        chunks=tuple(_chunk(chunk, forward, backward) for chunk in stage.chunks),
        forward_ms=_summed(forward, (1, 2)),
        backward_ms=_summed(backward, (1, 2)),
        compute_ms=_spread(compute),
        exposed_ms={
            **stage.exposed_ms,
            **({} if stage.exposed_ms.get("dp") is None else {"dp": tail}),
            **{group: _spread(each) for group, each in ran.items()},
        },
        bubble_ms=_spread(bubble),
        bubble_fraction=float(bubble.sum() / length.sum()),
        forward_per_microbatch_ms=_summed(forward, 1),
        backward_per_microbatch_ms=_summed(backward, 1),
        bubble_split=_split(table, replica, stage.pp, bubble),
        dp_tail_ms=tail,
        gradients_ms=None,  # what is not communication is none of the step here
        collectives={axis: _parted(axis, table, place) for axis in parallel_of(INSIDE, measured.sizes)},
    )


def _parted(axis: str, table: Table, place: tuple[int, int, int]) -> Collectives:
    """``place``: replica, stage and peer."""
    own = (slice(None), *place)
    waited, ran = (None if axis not in each else each[axis][own] for each in (table.for_peers, known_groups(table)))
    if waited is None:
        return Collectives(None, None, "of no step it is known when all ranks came to its collectives")
    if ran is None:
        why = "passes compute beside them" if axis in table.ran else "torch does not say how long they ran"
        return Collectives(_spread(waited), None, why)
    return Collectives(_spread(waited), _spread(np.maximum(ran - waited, 0.0)), None)


def _split(table: Table, replica: int, stage: int, bubble: Floats) -> dict[str, Spread | None]:
    """What of the bubble lies before the first backward and behind the last forward, and what in between."""
    if not table.clocks:
        return dict.fromkeys(("warmup_ms", "steady_ms", "cooldown_ms"))
    steps = len(table.length)
    start, end = (each[:, replica, stage].reshape(steps, -1) for each in (table.start, table.end))
    filled = table.start[:, replica, stage, :, -1].reshape(steps, -1).min(axis=1)
    drained = np.maximum(table.end[:, replica, stage, :, 0].reshape(steps, -1).max(axis=1), filled)
    before = np.clip(np.minimum(end, filled[:, None]) - start, 0.0, None).sum(axis=1)
    behind = np.clip(end - np.maximum(start, drained[:, None]), 0.0, None).sum(axis=1)
    warmup = np.clip(filled - before, 0.0, bubble)
    cooldown = np.clip(table.lengths[:, replica] - table.reduction - drained - behind, 0.0, bubble - warmup)
    parts = {"warmup_ms": warmup, "steady_ms": bubble - warmup - cooldown, "cooldown_ms": cooldown}
    return {name: _spread(each) for name, each in parts.items()}


def _chunk(chunk: ChunkTimes, forward: Floats | None, backward: Floats | None) -> ChunkTimes:
    own = (None if each is None else _spread(each[:, chunk.chunk]) for each in (forward, backward))
    return ChunkTimes(chunk.chunk, chunk.holds, *own)


def _summed(times: Floats | None, axis: int | tuple[int, ...]) -> Spread | None:
    return None if times is None else _spread(times.sum(axis=axis))


def _spread(samples: Floats) -> Spread | None:
    return Spread.of(samples.ravel().tolist())
