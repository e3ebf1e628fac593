"""Finds the pipeline layout with the shortest replayed step, from the cost of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import comb, inf, prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megaprof.analysis.samples import Floats
from megaprof.analysis.simulation import Indices, Replay
from megaprof.analysis.what_if.layouts import Layout, default_layout, to_flags

_PASSES_PER_SEARCH = 12_000_000
_PASSES_AT_ONCE = 2_000_000  # 16 MB
_PIECES_AT_ONCE = 1_000_000  # pieces that cuts may make
_FEWEST, _MOST = 100, 2000  # replays per search

Unit: TypeAlias = tuple[str, Sequence[float]]
"""A part of the model that no layout divides: its letters (``E``, ``t``, all MTP layers as ``mm``, ``L``), and the time
of a microbatch in it, in milliseconds by kind of pass."""
Needs: TypeAlias = Callable[[Indices, Indices], Floats]
"""Takes some stages [n] and the layers (MTP layers included) that their chunks hold [n, chunk]. Returns the fraction of
its allowed memory that each stage needs [n]."""
_Counts: TypeAlias = tuple[int, ...]
"""How many units each piece holds. Units keep their order, so these numbers are a whole layout."""


class _Problem:
    """One search: the model's units, the schedule, and every layout replayed so far."""

    def __init__(
        self, units: Sequence[Unit], replay: Replay, p2p_ms: float, factor: Floats, needs: Needs | None
    ) -> None:
        schedule, self.factor = replay.schedule, factor
        self.pp, self.vpp, self.microbatches = schedule.stages, schedule.chunks, schedule.microbatches
        self.names = [name for name, _ in units]
        of_units = np.array([times for _, times in units])
        self.ms_before = np.pad(np.cumsum(of_units, axis=0), ((1, 0), (0, 0)))  # [unit, kind]
        self.work = of_units.sum(axis=1).tolist()
        self.pipeline, self.p2p_ms = replay, p2p_ms
        self.stages_need, self.step_ms = needs, dict[_Counts, float]()
        self.layers_before = np.cumsum([0, *(name.count("t") + name.count("m") for name in self.names)])
        self.passes = prod(replay.shape)
        self.budget = min(_MOST, max(_FEWEST, _PASSES_PER_SEARCH // self.passes))

    def bounds(self, counts: _Counts) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(counts, initial=0)))

    def pieces(self, counts: _Counts) -> Layout:
        return tuple("".join(self.names[begin:end]) for begin, end in self.bounds(counts))

    def without_empty(self, several: Iterable[Layout | None]) -> list[_Counts]:
        """Returns the numbers of units of layouts, without those that have an empty piece: this search makes none."""
        counts = (tuple(len(each.replace("m", "")) + ("m" in each) for each in pieces) for pieces in several if pieces)
        return [each for each in counts if all(each)]

    def replay(self, several: Iterable[_Counts], longest: float = inf) -> None:
        """Replays those of several layouts that were not replayed yet. A step that certainly takes more than
        ``longest`` milliseconds counts as endless."""
        fresh = [counts for counts in dict.fromkeys(several) if counts not in self.step_ms]
        at_once = max(1, _PASSES_AT_ONCE // self.passes)
        for first in range(0, len(fresh), at_once):
            some = fresh[first : first + at_once]
            before = np.pad(np.cumsum(some, axis=1), ((0, 0), (1, 0)))
            # [layout, chunk and stage, kind] to [layout, stage, chunk, kind]
            pieces = np.diff(self.ms_before[before], axis=1).reshape(len(some), self.vpp, self.pp, -1)
            times = pieces.swapaxes(1, 2) * self.factor
            # A stage runs its passes between the first forward and the last backward of the stages before it.
            around = times[:, :, 0].sum(axis=-1) + times.shape[-1] * self.p2p_ms
            least = self.microbatches * times.sum(axis=(2, 3)) + np.cumsum(around, axis=1) - around
            step_ms, kept = np.full(len(some), inf), least.max(axis=1) <= longest * (1 + 1e-9)
            if kept.any():
                passes = np.broadcast_to(times[kept, ..., None], (kept.sum(), *times.shape[1:], self.microbatches))
                step_ms[kept] = self.pipeline.step_ms(passes, link=self.p2p_ms)
            self.step_ms.update(zip(some, step_ms.tolist(), strict=True))

    def needs(self, several: Indices) -> Floats:
        """Returns [layout, stage]: the fraction of its allowed memory that each stage needs in some layouts
        [layout, piece]; 0 without a bound."""
        if self.stages_need is None:
            return np.zeros((len(several), self.pp))
        layers = np.diff(self.layers_before[np.cumsum(several, axis=1)], axis=1, prepend=0)
        layers = layers.reshape(-1, self.vpp, self.pp).transpose(0, 2, 1)
        # Only stages that hold something else than in the first layout are computed: a move changes few of them.
        other = (layers != layers[0]).any(axis=2)
        other[0] = True
        changed = self.stages_need(other.nonzero()[1], layers[other])
        parts = np.tile(changed[: self.pp], (len(several), 1))
        parts[other] = changed
        return parts

    def fitting(self, several: Indices | Sequence[_Counts]) -> list[_Counts]:
        """Returns the layouts in which no stage needs more than it may."""
        every = np.asarray(several, dtype=np.intp)
        kept = every[self.needs(every).max(axis=1) <= 1.0] if len(every) else every
        return [tuple(counts) for counts in kept.tolist()]


def search(
    units: Sequence[Unit],
    replay: Replay,
    *,
    p2p_ms: float = 0.0,
    factor: npt.ArrayLike = 1.0,
    needs: Needs | None = None,
    top: int = 5,
) -> dict[Layout, float]:
    """Returns the ``top`` layouts with the shortest replayed step, and that step in milliseconds, the shortest first.
    Of layouts with equal steps, those with simpler flags come first.

    The search is exact if all layouts can be replayed (up to 2000 of them). Otherwise it replays Megatron's own splits
    and two exact optima (of the heaviest piece, and of a bound on the step that also counts filling and draining the
    pipeline), and improves the best of them by moving one layer at a time. It is deterministic. Every piece holds
    something, so a model of few layers may have no layout at all. MTP layers apart from the loss need megatron-core
    0.16.

    ``units``: the model from front to back. ``factor``: the factor by which the passes of stages take longer,
    ``[stage, chunk, kind of pass]`` or an array that broadcasts to it. ``needs``: no stage of a returned layout needs
    more than 1. If some layout keeps this bound, the search finds one. There is one exception: with MTP layers in
    several chunks, it may miss a bound that hardly any layout keeps.
    """
    pp, vpp, kinds, _ = replay.shape
    pieces = pp * vpp
    if len(units) < pieces:
        return {}
    factors = np.broadcast_to(np.asarray(factor, dtype=float), (pp, vpp, kinds))
    problem = _Problem(units, replay, p2p_ms, factors, needs)
    if comb(len(units) - 1, pieces - 1) <= problem.budget:
        cuts = ((0, *inside, len(units)) for inside in combinations(range(1, len(units)), pieces - 1))
        problem.replay(problem.fitting([tuple(end - begin for begin, end in pairwise(cut)) for cut in cuts]))
    else:
        problem.replay(_starts(problem))
        problem.replay([_lowered(problem, min(problem.step_ms, key=lambda counts: (problem.step_ms[counts], counts)))])
        quickest_first = sorted(problem.step_ms, key=lambda counts: (problem.step_ms[counts], counts))
        problem.step_ms = {start: problem.step_ms[start] for start in problem.fitting(quickest_first)}
        for start in [*problem.step_ms][:3]:
            _improve(problem, start, top)
    return _best(problem, top)


def _starts(problem: _Problem) -> Iterator[_Counts]:
    """Yields layouts worth a replay before the local search."""
    pp, vpp, m = problem.pp, problem.vpp, problem.microbatches
    layers, mtp_layers = ("".join(problem.names).count(letter) for letter in "tm")
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
        default_layout(pp, vpp, layers, mtp_layers, first=layers - middle * (pp - 2) - last, last=last)
        for middle in range(vpp, layers // max(1, pp - 2) + 1, vpp)
        for last in range(vpp, layers - middle * (pp - 2), vpp)
    }
    yield from problem.without_empty(plain)
    uneven_counts = problem.without_empty(uneven)
    yield from sorted(uneven_counts, key=lambda counts: (max(_stage_work(problem, counts)), counts))[:8]


def _smallest_maximum(pieces: int, cost: Callable[[Indices, Indices], Floats], units: int) -> _Counts:
    """Cuts ``units`` into non-empty ``pieces`` so that the largest ``cost(begin, end)`` is smallest. Of such cuts, it
    takes the one with the smallest sum of squares. Exact, by dynamic programming."""
    largest = _best_cuts(units, pieces, cost, np.maximum)[0]
    limit = largest * (1 + 1e-12)

    def squared(begin: Indices, end: Indices) -> Floats:
        piece_cost = cost(begin, end)
        return np.where(piece_cost > limit, inf, piece_cost * piece_cost)

    squares = _best_cuts(units, pieces, squared, np.add)[1]
    return tuple(end - begin for begin, end in zip((0, *squares), (*squares, units), strict=True))


def _best_cuts(
    units: int, pieces: int, cost: Callable[[Indices, Indices], Floats], join: np.ufunc
) -> tuple[float, list[int]]:
    # Of equally good cuts, the one with the shortest last piece is taken, so begins descend.
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
    """Moves one unit at a time, first from the stages that need more memory than they may. It goes on as long as a move
    lowers the sum by which stages exceed their limits, or keeps that sum and lowers the need of all stages together.
    Nothing is replayed."""
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


def _improve(problem: _Problem, counts: _Counts, top: int) -> None:
    """Moves one unit from a piece to another as long as the step gets shorter; the units in between move along. Moves
    from the most loaded stages to the least loaded ones come first. What is neither shorter nor among the ``top`` of
    all is not replayed."""
    better: _Counts | None = counts
    while better is not None:
        counts, better = better, None
        longest = max(problem.step_ms[counts], sorted([*problem.step_ms.values(), *[inf] * top])[top - 1])
        for moves in _moves(problem, counts):
            if len(problem.step_ms) >= problem.budget:
                return
            fitting = problem.fitting(moves)
            problem.replay(fitting, longest)
            limit = problem.step_ms[counts] * (1 - 1e-12)
            better = next((moved for moved in fitting if problem.step_ms[moved] < limit), None)
            if better is not None:
                break


def _moves(problem: _Problem, counts: _Counts, first: npt.NDArray[np.bool_] | None = None) -> Iterator[Indices]:
    """Yields layouts [taker, piece], once for each piece that gives a unit away. Pieces of the stages in ``first``
    [stage] come first, and the most loaded ones before others."""
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


def _best(problem: _Problem, top: int) -> dict[Layout, float]:
    def step(counts: _Counts) -> float:
        # Equal work summed in another order differs in the last bits; that must not decide between layouts.
        return float(f"{problem.step_ms[counts]:.10e}")

    ranked = sorted((each for each in problem.step_ms if step(each) < inf), key=lambda counts: (step(counts), counts))
    if not ranked:
        return {}
    limit = step(ranked[min(top, len(ranked)) - 1])

    def simplest_first(counts: _Counts) -> tuple[float, bool, int, _Counts]:
        flags = to_flags(problem.pieces(counts), problem.pp)
        return step(counts), "--pipeline-model-parallel-layout" in flags, len(flags), counts

    chosen = sorted((counts for counts in ranked if step(counts) <= limit), key=simplest_first)[:top]
    return {problem.pieces(counts): problem.step_ms[counts] for counts in chosen}
