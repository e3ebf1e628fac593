"""Find the pipeline layout with the shortest replayed step, from what each kind of layer costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb, inf, isfinite, prod
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from megaprof.analysis.simulation.replay import Milliseconds, Replay, compiled
from megaprof.analysis.what_if.layouts import Layout, default_layout, to_flags
from megaprof.parallel.schedules import PipelineSchedule

_PASSES_PER_SEARCH = 12_000_000
_PASSES_AT_ONCE = 2_000_000  # 16 MB
_PIECES_AT_ONCE = 1_000_000  # of those that a cut may make
_FEWEST, _MOST = 100, 2000  # replays a search

_Whole = npt.NDArray[np.intp]
Needs = Callable[[_Whole, _Whole], npt.NDArray[np.float64]]
"""What part of what it may have each of some stages [n] needs, [n], if its chunks hold so many layers (MTP layers
included), [n, chunk]. A stage may need 1."""
_Counts = tuple[int, ...]
"""How many units each piece holds. A layout keeps the units in their order, so this is all there is to choose."""


@dataclass(frozen=True)
class Cost:
    """One microbatch through one layer."""

    forward_ms: float
    """Milliseconds of its forward."""
    backward_ms: float = 0.0
    """Milliseconds of its backward."""


FREE = Cost(0.0)


@dataclass(frozen=True)
class CostModel:
    """What a microbatch costs in each kind of layer, and on its way from one piece to the next."""

    layer: Cost | tuple[Cost, ...]
    """One cost for all decoder layers, or one for each in the model's order (dense and MoE layers mixed)."""
    embedding: Cost = FREE
    """The embedding."""
    loss: Cost = FREE
    """The output layer and the loss."""
    mtp: Cost = FREE
    """Each multi-token prediction layer."""
    p2p_ms: float = 0.0
    """Milliseconds of one transfer."""

    def units(self, layers: int, mtp_layers: int = 0) -> list[tuple[str, Cost]]:
        """The model from front to back in parts that no layout divides: all MTP layers are one.

        Raises:
            ValueError: a cost that is negative or not finite, no layer, or not one cost for each layer.
        """
        if layers < 1 or mtp_layers < 0:
            raise ValueError(f"layers={layers} must be at least 1 and mtp_layers={mtp_layers} at least 0")
        each = (self.layer,) * layers if isinstance(self.layer, Cost) else tuple(self.layer)
        if len(each) != layers:
            raise ValueError(f"CostModel.layer has {len(each)} costs, expected one or layers={layers}")
        mtp = Cost(self.mtp.forward_ms * mtp_layers, self.mtp.backward_ms * mtp_layers)
        units = [("E", self.embedding), *(("t", cost) for cost in each)]
        units += [("m" * mtp_layers, mtp)] * (mtp_layers > 0) + [("L", self.loss)]
        for name, cost in units:
            if not all(isfinite(ms) and ms >= 0 for ms in (cost.forward_ms, cost.backward_ms)):
                raise ValueError(f"CostModel has {cost} for {name!r}; times must be finite and not negative")
        if not (isfinite(self.p2p_ms) and self.p2p_ms >= 0):
            raise ValueError(f"CostModel has p2p_ms={self.p2p_ms}; it must be finite and not negative")
        return units


@dataclass(frozen=True)
class Candidate:
    """A layout and what its replay says."""

    pieces: Layout
    """The layers of each piece."""
    flags: tuple[str, ...]
    """Megatron's arguments for it."""
    step_ms: float
    """Milliseconds of the replayed step."""


class _Problem:
    """One search: the units, the run that they belong to, and every layout replayed so far."""

    def __init__(
        self, units: list[tuple[str, Cost]], replay: Replay, p2p_ms: float, factor: Milliseconds, needs: Needs | None
    ) -> None:
        schedule, self.factor = replay.schedule, factor
        self.pp, self.vpp, self.microbatches = schedule.stages, schedule.chunks, schedule.microbatches
        if len(units) < self.pp * self.vpp:
            raise ValueError(
                f"pp={self.pp} x vpp={self.vpp} pieces cannot be made of {len(units)} layers (E and L included)"
            )
        self.names = [name for name, _ in units]
        self.by_kind = [[one.forward_ms for _, one in units]]
        if not schedule.forward_only:
            self.by_kind.append([one.backward_ms for _, one in units])
        self.work = [sum(each) for each in zip(*self.by_kind, strict=True)]
        self.pipeline, self.p2p_ms = replay, p2p_ms
        self.stages_need, self.step_ms = needs, dict[_Counts, float]()
        self.layers_before = np.cumsum([0, *(name.count("t") + name.count("m") for name in self.names)])
        self.passes = prod(replay.shape)
        self.budget = min(_MOST, max(_FEWEST, _PASSES_PER_SEARCH // self.passes))

    def bounds(self, counts: _Counts) -> list[tuple[int, int]]:
        begins = [sum(counts[:piece]) for piece in range(len(counts) + 1)]
        return list(pairwise(begins))

    def pieces(self, counts: _Counts) -> Layout:
        return tuple("".join(self.names[begin:end]) for begin, end in self.bounds(counts))

    def counts(self, pieces: Layout) -> _Counts | None:
        """None for pieces that this search does not make (an empty one)."""
        found = tuple(len(piece.replace("m", "")) + ("m" in piece) for piece in pieces)
        return found if all(found) else None

    def replay(self, several: Iterable[_Counts]) -> None:
        """Add the steps of several layouts that were not replayed yet."""
        fresh = [counts for counts in dict.fromkeys(several) if counts not in self.step_ms]
        at_once = max(1, _PASSES_AT_ONCE // self.passes)
        for first in range(0, len(fresh), at_once):
            some = fresh[first : first + at_once]
            each = [
                [[sum(units[begin:end]) for begin, end in self.bounds(counts)] for units in self.by_kind]
                for counts in some
            ]
            # [layout, kind, chunk, stage] to [layout, stage, chunk, kind, microbatch]
            pieces = np.array(each).reshape(len(some), len(self.by_kind), self.vpp, self.pp)
            times = (pieces.transpose(0, 3, 2, 1) * self.factor)[..., None]
            passes = np.broadcast_to(times, (*times.shape[:-1], self.microbatches))
            step_ms = self.pipeline.step_ms(passes, link=self.p2p_ms)
            self.step_ms.update(zip(some, step_ms.tolist(), strict=True))

    def needs(self, several: _Whole) -> npt.NDArray[np.float64]:
        """What part of what it may have each stage of some layouts [layout, piece] needs, [layout, stage]; 0 without a
        bound."""
        if self.stages_need is None:
            return np.zeros((len(several), self.pp))
        layers = np.diff(self.layers_before[np.cumsum(several, axis=1)], axis=1, prepend=0)
        layers = layers.reshape(-1, self.vpp, self.pp).transpose(0, 2, 1)
        # A stage that holds what it holds in the first layout needs as much: a move changes few.
        other = (layers != layers[0]).any(axis=2)
        other[0] = True
        found = self.stages_need(other.nonzero()[1], layers[other])
        each = np.tile(found[: self.pp], (len(several), 1))
        each[other] = found
        return each

    def fitting(self, several: _Whole | Sequence[_Counts]) -> list[_Counts]:
        """Those in which no stage needs more than it may."""
        every = np.asarray(several, dtype=np.intp)
        kept = every[self.needs(every).max(axis=1) <= 1.0] if len(every) else every
        return [tuple(counts) for counts in kept.tolist()]

    def quickest_first(self) -> list[_Counts]:
        """The layouts that were replayed."""
        return sorted(self.step_ms, key=lambda counts: (self.step_ms[counts], counts))

    @property
    def exhausted(self) -> bool:
        return len(self.step_ms) >= self.budget


def search(
    cost: CostModel,
    pp: int,
    vpp: int,
    layers: int,
    microbatches: int,
    *,
    mtp_layers: int = 0,
    forward_only: bool = False,
    combined: bool = False,
    microbatch_group_size: int | None = None,
    rendezvous: bool = False,
    in_turn: bool = False,
    factor: npt.ArrayLike = 1.0,
    needs: Needs | None = None,
    top: int = 5,
) -> list[Candidate]:
    """The ``top`` layouts with the shortest replayed step, the shortest first; of equals those with simpler flags.

    Exact where all layouts can be replayed (up to 2000 of them). Otherwise the replay judges Megatron's own splits and
    two exact optima (of the heaviest piece, and of a bound on the step that also counts filling and draining the
    pipeline), and improves the best of them by moving one layer at a time. Deterministic. Every piece holds something.
    MTP layers apart from the loss need megatron-core 0.16. ``factor``: how many times as long the passes of stages
    take, ``[stage, chunk, kind of pass]`` or what broadcasts to it. ``needs``: no layout is returned
    in which a stage needs more than 1. Where there is a layout that keeps this, one is found; MTP layers in several
    chunks are the exception: there a bound that hardly any layout keeps may be missed.

    Raises:
        ValueError: costs, counts or a schedule that cannot be, see `CostModel.units` and `PipelineSchedule.checked`.
    """
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    if pp < 1 or vpp < 1:
        raise ValueError(f"pp={pp} x vpp={vpp} must be at least 1 x 1")
    schedule = PipelineSchedule.checked(
        pp, vpp, microbatches, group_size=microbatch_group_size, forward_only=forward_only, combined=combined
    )
    factors = np.broadcast_to(np.asarray(factor, dtype=float), (pp, vpp, len(schedule.kinds)))
    problem = _Problem(
        cost.units(layers, mtp_layers), compiled(schedule, rendezvous, in_turn), cost.p2p_ms, factors, needs
    )
    pieces, units = pp * vpp, len(problem.work)
    if comb(units - 1, pieces - 1) <= problem.budget:
        cuts = ((0, *inside, units) for inside in combinations(range(1, units), pieces - 1))
        problem.replay(problem.fitting([tuple(end - begin for begin, end in pairwise(each)) for each in cuts]))
    else:
        problem.replay(_starts(problem, layers, mtp_layers))
        problem.replay([_lowered(problem, problem.quickest_first()[0])])
        for start in problem.fitting(problem.quickest_first())[:3]:
            _improve(problem, start)
    return _best(problem, top)


def _starts(problem: _Problem, layers: int, mtp_layers: int) -> Iterator[_Counts]:
    """Layouts worth a replay before the local search."""
    pp, vpp, m = problem.pp, problem.vpp, problem.microbatches
    prefix = np.array([sum(problem.work[:index]) for index in range(len(problem.work) + 1)])
    pieces = pp * vpp
    yield _smallest_maximum(pieces, lambda begin, end: prefix[end] - prefix[begin], len(problem.work))
    if vpp == 1:
        yield _smallest_maximum(
            pieces, lambda begin, end: m * (prefix[end] - prefix[begin]) + prefix[begin], len(problem.work)
        )
    plain = [
        default_layout(pp, vpp, layers, mtp_layers, account_for_embedding=embedding, account_for_loss=loss)
        for embedding in (False, True)
        for loss in (False, True)
    ]
    uneven = {
        default_layout(pp, vpp, layers, mtp_layers, first=layers - each * (pp - 2) - last, last=last)
        for each in range(vpp, layers // max(1, pp - 2) + 1, vpp)
        for last in range(vpp, layers - each * (pp - 2), vpp)
    }

    def heaviest(counts: _Counts) -> float:
        return max(_stage_work(problem, counts))

    found = [counts for layout in uneven if layout is not None and (counts := problem.counts(layout)) is not None]
    yield from (counts for layout in plain if layout is not None and (counts := problem.counts(layout)) is not None)
    yield from sorted(found, key=lambda counts: (heaviest(counts), counts))[:8]


_Places = npt.NDArray[np.intp]
_PieceCost = Callable[[_Places, _Places], Milliseconds]


def _smallest_maximum(pieces: int, cost: _PieceCost, units: int) -> _Counts:
    """Cut ``units`` into non-empty ``pieces`` so that the largest ``cost(begin, end)`` is smallest, and of such cuts
    the one with the smallest sum of squares. Exact, by dynamic programming."""
    largest = _best_cuts(units, pieces, cost, np.maximum)[0]
    limit = largest * (1 + 1e-12)

    def squared(begin: _Places, end: _Places) -> Milliseconds:
        each = cost(begin, end)
        return np.where(each > limit, inf, each * each)

    squares = _best_cuts(units, pieces, squared, np.add)[1]
    return tuple(end - begin for begin, end in zip((0, *squares), (*squares, units), strict=True))


def _best_cuts(units: int, pieces: int, cost: _PieceCost, join: np.ufunc) -> tuple[float, list[int]]:
    # Of cuts that are as good the shortest last piece counts, so begins descend.
    begins, ends = np.arange(units)[::-1, None], np.arange(units + 1)
    best = np.where(ends == 0, 0.0, inf)
    choices = []
    for _ in range(pieces):
        values, choice = np.empty(units + 1), np.empty(units + 1, dtype=np.intp)
        for some in np.array_split(ends, 1 + units * units // _PIECES_AT_ONCE):
            joined = np.where(begins < some, join(best[begins], cost(begins, some)), inf)
            shortest = joined.argmin(axis=0)
            values[some], choice[some] = joined[shortest, np.arange(len(some))], begins[shortest, 0]
        best = values
        choices.append(choice)
    cuts, end = [], units
    for choice in reversed(choices[1:]):
        end = int(choice[end])
        cuts.append(end)
    return float(best[units]), cuts[::-1]


def _stage_work(problem: _Problem, counts: _Counts) -> list[float]:
    work = [sum(problem.work[begin:end]) for begin, end in problem.bounds(counts)]
    usual = problem.factor.mean(axis=(1, 2)).tolist()
    return [usual[stage] * sum(work[stage :: problem.pp]) for stage in range(problem.pp)]


def _lowered(problem: _Problem, counts: _Counts) -> _Counts:
    """Move one unit at a time, from the stages that need more than they may first, as long as all stages together
    exceed what they may by less then, or by as much and need less. Nothing is replayed."""
    better: _Counts | None = counts
    while better is not None:
        counts, better = better, None
        (needs,) = problem.needs(np.array([counts]))
        for moves in _moves(problem, counts, needs > 1.0) if needs.max() > 1.0 else ():
            needs = problem.needs(np.vstack([counts, moves]))
            over, total = np.maximum(needs - 1.0, 0.0).sum(axis=1), needs.sum(axis=1)
            lower = (over < over[0]) | ((over == over[0]) & (total < total[0]))
            if lower.any():
                better = tuple(moves[int(lower.argmax()) - 1].tolist())
                break
    return counts


def _improve(problem: _Problem, counts: _Counts) -> None:
    """Move one unit from a piece to another (what lies between moves along) as long as the step gets shorter, from
    the most loaded stages to the least loaded first."""
    better: _Counts | None = counts
    while better is not None:
        counts, better = better, None
        for moves in _moves(problem, counts):
            if problem.exhausted:
                return
            fitting = problem.fitting(moves)
            problem.replay(fitting)
            limit = problem.step_ms[counts] * (1 - 1e-12)
            better = next((moved for moved in fitting if problem.step_ms[moved] < limit), None)
            if better is not None:
                break


def _moves(problem: _Problem, counts: _Counts, first: npt.NDArray[np.bool_] | None = None) -> Iterator[_Whole]:
    """[taker, piece], by piece that gives a unit away: those of the stages that come ``first``, [stage], and the most
    loaded first."""
    load = _stage_work(problem, counts)
    by_load = sorted(range(len(counts)), key=lambda piece: (load[piece % problem.pp], piece))
    givers = by_load[::-1]
    if first is not None:
        givers.sort(key=lambda piece: not first[piece % problem.pp])
    for giver in givers:
        if counts[giver] == 1:
            continue
        takers = [piece for piece in by_load if piece != giver]
        moves = np.tile(counts, (len(takers), 1))
        moves[:, giver] -= 1
        moves[np.arange(len(takers)), takers] += 1
        yield moves


def _best(problem: _Problem, top: int) -> list[Candidate]:
    def step(counts: _Counts) -> float:
        # Equal work summed in another order differs in the last bits; that must not decide between layouts.
        return float(f"{problem.step_ms[counts]:.10e}")

    ranked = sorted(problem.fitting(list(problem.step_ms)), key=lambda counts: (step(counts), counts))
    if not ranked:
        return []
    limit = step(ranked[min(top, len(ranked)) - 1])
    candidates = []
    for counts in ranked:
        if step(counts) > limit:
            break
        pieces = problem.pieces(counts)
        flags = to_flags(pieces, problem.pp)
        order = step(counts), "--pipeline-model-parallel-layout" in flags, len(flags), counts
        candidates.append((order, Candidate(pieces, flags, problem.step_ms[counts])))
    return [candidate for _, candidate in sorted(candidates, key=itemgetter(0))[:top]]
