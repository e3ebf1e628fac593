"""Puts the recordings of ranks into one table of passes: which of them, in which steps, on which clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.table.one_clock import one_clock
from megaprof.analysis.table.table import CALLS, Floats, RankSteps, Table, Unfit
from megaprof.analysis.trace.calls import ModuleKey
from megaprof.analysis.trace.gpu import together
from megaprof.formats.metadata import Metadata
from megaprof.formats.steps.work import SOURCES
from megaprof.parallel.schedules import PipelineSchedule


def tabulate(
    ranks: Sequence[RankSteps],
    schedule: PipelineSchedule,
    *,
    target: str,
    role: str | None,
    rendezvous: bool,
) -> Table:
    """Puts the ranks of one job into a table. Raises Unfit if a stage is missing, or if no step is whole."""
    order, common, positions = _places(ranks, schedule.stages)

    def stacked(name: str) -> Floats:
        """Returns one array of every rank, [t, d, s, p, ...]."""
        rows = [_at(r, getattr(r, name), common) for r in order]
        return np.moveaxis(np.stack(rows), 1, 0).reshape(len(common), *positions, *rows[0].shape[1:])

    start, end = stacked("start"), stacked("end")
    there = np.array([r.metadata is not None for r in order]).reshape(positions)
    whole = np.isfinite(end - start)[:, there].reshape(len(common), -1).all(axis=1)
    if not whole.any():
        raise Unfit(Note("no_whole_step"))
    enter, reduced = stacked("enter"), stacked("reduced")
    shift, clocks, aligned_ms = one_clock(order, positions, schedule, start, end, enter, reduced)
    wide = shift[..., None, None, None]
    start, end, enter, reduced = start + wide, end + wide, enter + shift, reduced + shift
    device = any(r.device for r in order)
    if device:  # the entry of the host says nothing about when the GPU begins
        enter = np.fmin.reduce(start, axis=(-3, -2, -1))
    # Replicas that reduce no gradients do not wait for each other, so the step of each begins with its own entry.
    first = np.fmin.reduce(enter, axis=(2, 3))
    if "backward" in schedule.kinds:
        first = np.broadcast_to(first.min(axis=1, keepdims=True), first.shape)
    since = first[:, :, None, None, None, None, None]
    start, end, enter, reduced = start - since, end - since, enter - since[..., 0, 0, 0], reduced - since[..., 0, 0, 0]
    last = np.fmax.reduce(end.reshape(len(common), -1), axis=1)
    done = np.fmax(last, np.fmax.reduce(reduced.reshape(len(common), -1), axis=1))

    def parts(name: str) -> dict[str, Floats]:
        """Returns the arrays of every rank by name, [t, d, s, p, c, k, m]."""
        found = {}
        for part in sorted({part for r in order for part in getattr(r, name)}):
            none = np.zeros((1, *order[0].start.shape[1:]))
            rows = [
                own[part][np.searchsorted(r.steps, common)]
                if part in (own := getattr(r, name))
                else np.repeat(none, len(common), axis=0)
                for r in order
            ]
            found[part] = np.moveaxis(np.stack(rows), 1, 0).reshape(len(common), *positions, *rows[0].shape[1:])
        return found

    held = {kind: np.nan_to_num(each)[whole] for kind, each in parts("held").items()}
    # Peers may have different data, and all wait for the one with the most. The first stage that knows its data counts:
    # later stages get an input that they do not read, in SkyRL with padding that the first stage does not have.
    by_stage = np.fmax.reduce(stacked("work"), axis=3)[whole]
    work = np.take_along_axis(by_stage, np.isfinite(by_stage).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
    experts = np.array([r.experts for r in order]).reshape(positions)
    names = _names(order, positions)
    unknown = np.full(len(common), np.nan)
    spent = {
        name: np.stack([_at(r, r.spent[name], common) if name in r.spent else unknown for r in order], axis=1)
        for name in sorted({name for r in order for name in r.spent})
    }
    of_stage = [[r for r in order if r.stage == stage] for stage in range(schedule.stages)]
    entry = enter.max(axis=3) if clocks and not device else np.full(enter.shape[:3], np.nan)
    return Table(
        target=target,
        role=role,
        schedule=schedule,
        rendezvous=rendezvous,
        steps=np.array(common)[whole] >> CALLS,
        opening=stacked("opening").max(axis=(1, 2, 3))[whole].astype(np.bool_),
        ranks=np.array([[rank for rank, _ in own] for own in names]).reshape(*positions[:2], -1),
        hosts=_nested([[host for _, host in own] for own in names], positions[1]),
        metadata=tuple(own[0].metadata for own in of_stage),
        layers=np.array([_layers(own[0].metadata, schedule.chunks) for own in of_stage]),
        start=start.min(axis=3)[whole],
        end=end.max(axis=3)[whole],
        compute=stacked("compute")[whole],
        working=stacked("working")[whole],
        spent={name: each.reshape(len(common), *positions)[whole] for name, each in spent.items()},
        # The last peer to arrive waits for nobody, so the smallest time is communication alone.
        exposed={group: each.min(axis=3)[whole] for group, each in parts("exposed").items()},
        idle=stacked("idle").min(axis=3)[whole],
        # All peers wait for the one that is held up most.
        held={kind: each.max(axis=3) for kind, each in held.items()},
        waited=stacked("waited")[whole],
        entry=entry[whole],
        reduction=(done - last)[whole],
        length=done[whole],
        clocks=clocks,
        aligned_ms=aligned_ms,
        device=device,
        memory=tuple(together(r.memory for r in own) for own in of_stage),
        modules=tuple(_modules(own) for own in of_stage),
        work=work if np.isfinite(work).any() else None,
        lengths_from=max((r.lengths_from for r in order if r.lengths_from), key=SOURCES.index, default=None),
        experts=experts if np.isfinite(experts).all() else None,
        sequences=_sequences(order, positions, np.array(common)[whole]),
    )


def _at(rank: RankSteps, values: Floats, steps: Sequence[int]) -> Floats:
    """Returns the values of these steps."""
    found: Floats = values[np.searchsorted(rank.steps, steps)]
    return found


def _layers(metadata: Metadata | None, chunks: int) -> list[float]:
    """Returns the layers of every chunk; NaN if the model did not say."""
    held = [None] * chunks if metadata is None else [chunk.layers for chunk in metadata.chunks]
    return [np.nan if layers is None else float(layers) for layers in held]


def _modules(ranks: Sequence[RankSteps]) -> dict[ModuleKey, tuple[int, ...]]:
    found: dict[ModuleKey, tuple[int, ...]] = {}
    for rank in ranks:
        for key, each in rank.modules.items():
            found[key] = (*found.get(key, ()), *each)
    return found


def _sequences(
    order: Sequence[RankSteps], positions: tuple[int, int, int], steps: npt.NDArray[np.int64]
) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Returns `Table.sequences`, by the first rank of each replica that recorded them."""
    place = {int(step): t for t, step in enumerate(steps)}
    found: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for n, rank in enumerate(order):
        replica = n // (positions[1] * positions[2])
        for (t, microbatch), lengths in rank.sequences.items():
            if (at := place.get(int(rank.steps[t]))) is not None:
                found.setdefault((at, replica, microbatch), lengths)
    return found


_Place = tuple[int, int]  # stage and peer


def _places(ranks: Sequence[RankSteps], stages: int) -> tuple[list[RankSteps], list[int], tuple[int, int, int]]:
    """Returns the ranks of whole replicas in the order of replica, stage and peer; the steps that all of them have; and
    how many replicas, stages and peers there are. If no replica is whole, the one with most stages is used. Raises
    Unfit if there is no common step."""
    by_replica: dict[int, dict[_Place, RankSteps]] = {}
    for each in ranks:
        by_replica.setdefault(each.replica, {})[each.stage, each.peer] = each
    peers = {place[1] for own in by_replica.values() for place in own}
    wanted = {(stage, peer) for stage in range(stages) for peer in peers}
    whole = {replica: own for replica, own in sorted(by_replica.items()) if set(own) == wanted}
    if not whole:
        # One peer of each stage is enough for a pipeline.
        for replica, own in sorted(by_replica.items()):
            whole[replica] = {(stage, 0): own[stage, peer] for stage, peer in sorted(own, reverse=True)}
        peers, most = {0}, max(map(len, whole.values()))
        whole = {replica: own for replica, own in whole.items() if len(own) == most}
        if most < stages:
            replica, own = next(iter(whole.items()))
            nobody = {(stage, 0): _nobody(next(iter(own.values())), stage) for stage in range(stages)}
            whole = {replica: nobody | own}
    kept, common = _with_steps(whole)
    if not common:
        raise Unfit(Note("no_step_of_all"))
    order = [whole[replica][place] for replica in kept for place in sorted(whole[replica])]
    return order, common, (len(kept), stages, len(peers))


def _nobody(like: RankSteps, stage: int) -> RankSteps:
    """Returns a placeholder for the rank of a stage that was not recorded."""
    lacking = ("start", "end", "compute", "working", "idle", "work")
    none = {name: np.full_like(getattr(like, name), np.nan) for name in lacking}
    never = np.full_like(like.enter, np.nan)
    return RankSteps(
        **none,
        names=((-1, None),),
        metadata=None,
        stage=stage,
        replica=like.replica,
        peer=like.peer,
        steps=like.steps,
        spent={},
        held={},
        exposed={},
        enter=never,
        reduced=never,
        opening=np.zeros_like(like.opening),
        waited=np.zeros_like(like.waited),
    )


def _with_steps(whole: Mapping[int, Mapping[_Place, RankSteps]]) -> tuple[list[int], list[int]]:
    """Returns the replicas with the largest number of common steps times replicas, and these steps. So a rank that
    ended early or began late does not take away the steps of all others."""
    own = {
        replica: set.intersection(*(set(rank.steps.tolist()) for rank in ranks.values()))
        for replica, ranks in whole.items()
    }
    best: tuple[list[int], set[int]] = [], set()
    chosen: list[int] = []
    common: set[int] = set()
    for replica in sorted(own, key=lambda each: -len(own[each])):
        common = common & own[replica] if chosen else own[replica]
        chosen.append(replica)
        if len(chosen) * len(common) > len(best[0]) * len(best[1]):
            best = list(chosen), common
    return sorted(best[0]), sorted(best[1])


def _names(order: Sequence[RankSteps], positions: tuple[int, int, int]) -> list[list[tuple[int, str | None]]]:
    """Returns the ranks of every replica and stage with their hosts, equally many for each."""
    p = positions[2]
    own = [[name for each in order[n : n + p] for name in each.names] for n in range(0, len(order), p)]
    if len({len(names) for names in own}) > 1:
        own = [[each.names[0] for each in order[n : n + p]] for n in range(0, len(order), p)]
    return own


def _nested(items: Sequence[Sequence[str | None]], stages: int) -> tuple[tuple[tuple[str | None, ...], ...], ...]:
    return tuple(tuple(map(tuple, items[n : n + stages])) for n in range(0, len(items), stages))
