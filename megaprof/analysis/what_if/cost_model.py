"""What a microbatch costs in each kind of layer, from what the stages were measured to take.

Two sources. Where layer ranges were captured (``--profile-ranges layer``) every decoder layer has its own times, and
what a model chunk takes beyond them belongs to its embedding, MTP layers or loss. Otherwise the costs are fitted to the
chunks' times: non-negative least squares, relative to each chunk's time. Few chunks cannot tell many costs apart, so
the model with the fewest unknown costs that explains every chunk within `EXPLAINED` is taken; what it leaves out counts
as free, and is named. When no model comes within `MOST_RESIDUAL` of every chunk, there is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from megaprof.analysis.what_if.layout_search import FREE, Cost, CostModel

#: How far a model may be from a chunk's measured time to count as explaining it.
EXPLAINED = 0.01
#: And how far it may be to be used at all.
MOST_RESIDUAL = 0.10

LAYER_RANGES = "layer ranges"
STAGE_TIMES = "the stages' times"
_EMBEDDING, _MTP, _LOSS = "embedding", "mtp", "loss"
_EXTRAS = (_EMBEDDING, _MTP, _LOSS)
# Every subset of the kinds is tried; a hybrid model has three or four.
_MOST_KINDS = 6

_Array = npt.NDArray[np.float64]


class NoCostModel(Exception):
    """The measured times do not give a cost for each kind of layer; the message says why."""


@dataclass(frozen=True)
class ChunkCost:
    """What one model chunk holds, and one microbatch's milliseconds through it."""

    stage: int
    """Its pipeline rank."""
    kinds: tuple[str, ...]
    """Of its decoder layers, in order."""
    cost: Cost
    """The whole chunk."""
    embedding: bool = False
    """Whether it holds the embedding."""
    mtp: int = 0
    """Number of its multi-token prediction (MTP) layers."""
    loss: bool = False
    """Whether it holds the output layer and the loss."""
    layers: tuple[Cost, ...] | None = None
    """The time of each decoder layer; None where layer ranges are missing."""
    mtp_layers: Cost | None = None
    """The time of all its MTP layers together; None where their ranges are missing."""

    def count(self, name: str) -> int:
        """How many layers of a kind, or of embedding, mtp and loss, it holds."""
        extras = {_EMBEDDING: int(self.embedding), _MTP: self.mtp, _LOSS: int(self.loss)}
        return extras[name] if name in extras else self.kinds.count(name)


@dataclass(frozen=True)
class CostFit:
    """What each kind of layer costs, and how far to trust that."""

    by_kind: dict[str, Cost]
    """Cost by kind (``dense``, ``moe``, ..., ``embedding``, ``mtp``, ``loss``)."""
    kinds: tuple[str, ...]
    """Of the model's decoder layers, in order."""
    residual: float
    """The largest deviation from a chunk's measured time, as a fraction of it."""
    source: str
    """What the costs were taken from."""
    assumptions: tuple[str, ...]
    """What the times could not say."""

    def model(self, p2p_ms: float = 0.0) -> CostModel:
        """The costs as `layout_search.search` takes them."""
        each = tuple(self.by_kind[kind] for kind in self.kinds)
        embedding, loss, mtp = (self.by_kind.get(name, FREE) for name in (_EMBEDDING, _LOSS, _MTP))
        return CostModel(each[0] if len(set(each)) == 1 else each, embedding, loss, mtp, p2p_ms)


def fit_costs(chunks: Sequence[ChunkCost], error: float = 0.0) -> CostFit:
    """Costs per kind of layer from the model chunks of a run, given in the order in which a microbatch passes them.

    ``error``: how uncertain a chunk's time is, as a fraction of it: a model that comes as near explains it.

    Raises:
        NoCostModel: no decoder layer, or no cost per kind explains the chunks' times.
    """
    kinds = tuple(kind for chunk in chunks for kind in chunk.kinds)
    if not kinds:
        raise NoCostModel("the stages hold no decoder layers")
    if len(set(kinds)) > _MOST_KINDS:
        raise NoCostModel(f"{len(set(kinds))} kinds of layers are too many to tell their costs apart")
    if any(sum(chunk.cost) <= 0 for chunk in chunks):
        raise NoCostModel("a model chunk took no time")
    if (captured := _from_layer_ranges(chunks, kinds)) is not None:
        return captured
    fits = [fit for grouping in _groupings(kinds) for fit in _fits(chunks, grouping)]
    if not fits:
        raise NoCostModel("the stages' times do not tell the cost of a layer from that of an embedding or a loss")
    explaining = [fit for fit in fits if fit.residual <= max(EXPLAINED, error)]
    best = (
        min(explaining, key=lambda fit: (fit.unknowns, fit.residual))
        if explaining
        else min(fits, key=attrgetter("residual"))
    )
    if best.residual > max(MOST_RESIDUAL, error):
        chunk, off = best.worst(chunks)
        raise NoCostModel(
            f"no cost per layer explains the stages: stage {chunk.stage} is {off:+.0%} off what fits all of them best"
        )
    return CostFit(best.by_kind(), kinds, best.residual, STAGE_TIMES, tuple(_assumptions(best, chunks)))


@dataclass(frozen=True)
class _Fit:
    """Costs of some columns: each a group of kinds with one cost, or one extra."""

    columns: tuple[tuple[str, ...], ...]
    forward: _Array
    backward: _Array
    deviations: _Array  # of each chunk's whole pass, as a fraction of it

    @property
    def unknowns(self) -> int:
        return len(self.columns)

    @property
    def residual(self) -> float:
        return float(np.abs(self.deviations).max())

    def by_kind(self) -> dict[str, Cost]:
        costs = zip(self.columns, self.forward.tolist(), self.backward.tolist(), strict=True)
        return {name: Cost(forward, backward) for names, forward, backward in costs for name in names}

    def worst(self, chunks: Sequence[ChunkCost]) -> tuple[ChunkCost, float]:
        index = int(np.abs(self.deviations).argmax())
        return chunks[index], float(-self.deviations[index])


def _groupings(kinds: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every kind with a cost of its own, or one cost for all of them."""
    different = sorted(set(kinds))
    yield tuple((kind,) for kind in different)
    if len(different) > 1:
        yield (tuple(different),)


def _fits(chunks: Sequence[ChunkCost], grouping: tuple[tuple[str, ...], ...]) -> Iterator[_Fit]:
    present = [name for name in _EXTRAS if any(chunk.count(name) for chunk in chunks)]
    for count in range(len(present) + 1):
        for extras in combinations(present, count):
            fit = _solve(chunks, (*grouping, *((name,) for name in extras)), [FREE] * len(chunks))
            if fit is not None:
                yield fit


def _solve(chunks: Sequence[ChunkCost], columns: tuple[tuple[str, ...], ...], known: Sequence[Cost]) -> _Fit | None:
    """Fit the columns to what the chunks take beyond ``known``; None when they cannot be told apart."""
    counts = [[float(sum(map(chunk.count, names))) for names in columns] for chunk in chunks]
    weights = np.array([1.0 / sum(chunk.cost) for chunk in chunks])
    matrix = np.array(counts).reshape(len(chunks), len(columns)) * weights[:, None]
    if columns and np.linalg.matrix_rank(matrix) < len(columns):
        return None
    forward, backward = (
        _non_negative(matrix, np.array([c.cost[i] - k[i] for c, k in zip(chunks, known, strict=True)]) * weights)
        for i in (0, 1)
    )
    explained = matrix @ (forward + backward) + np.array([sum(each) for each in known]) * weights
    return _Fit(columns, forward, backward, explained - 1.0)


def _non_negative(matrix: _Array, values: _Array) -> _Array:
    """Non-negative least squares, exact: the best of the unconstrained solutions on every subset of the columns."""
    width = matrix.shape[1]
    best, smallest = np.zeros(width), float(values @ values)
    for count in range(width, 0, -1):
        for subset in map(list, combinations(range(width), count)):
            solution = np.linalg.lstsq(matrix[:, subset], values, rcond=None)[0]
            off = matrix[:, subset] @ solution - values
            if (solution >= 0).all() and (error := float(off @ off)) < smallest:
                best, smallest = np.zeros(width), error
                best[subset] = solution
        if best.any() and count == width:
            break  # no constraint was active: nothing is better
    return best


def _from_layer_ranges(chunks: Sequence[ChunkCost], kinds: tuple[str, ...]) -> CostFit | None:
    """None where ranges are missing, or where they and what is beside them do not add up to the chunks' times."""
    times: dict[str, list[Cost]] = {}
    for chunk in chunks:
        if chunk.layers is None or len(chunk.layers) != len(chunk.kinds):
            return None
        for kind, cost in zip(chunk.kinds, chunk.layers, strict=True):
            times.setdefault(kind, []).append(cost)
    by_kind = {
        kind: Cost(statistics.median(c.forward_ms for c in costs), statistics.median(c.backward_ms for c in costs))
        for kind, costs in times.items()
    }
    with_mtp = [(chunk.mtp, chunk.mtp_layers) for chunk in chunks if chunk.mtp]
    if with_mtp and all(cost is not None for _, cost in with_mtp):
        total = sum(count for count, _ in with_mtp)
        sums = [sum(cost[i] for _, cost in with_mtp if cost is not None) / total for i in (0, 1)]
        by_kind[_MTP] = Cost(*sums)
    known = [
        Cost(*(sum(chunk.count(name) * cost[i] for name, cost in by_kind.items()) for i in (0, 1))) for chunk in chunks
    ]
    extras = [name for name in _EXTRAS if name not in by_kind and any(chunk.count(name) for chunk in chunks)]
    for count in range(len(extras), -1, -1):
        for chosen in combinations(reversed(extras), count):
            fit = _solve(chunks, tuple((name,) for name in chosen), known)
            if fit is not None and fit.residual <= MOST_RESIDUAL:
                missing = [name for name in extras if name not in chosen]
                assumptions = (_counted_as_free(missing),) if missing else ()
                return CostFit({**by_kind, **fit.by_kind()}, kinds, fit.residual, LAYER_RANGES, assumptions)
    return None


def _assumptions(fit: _Fit, chunks: Sequence[ChunkCost]) -> Iterator[str]:
    named = {name for names in fit.columns for name in names}
    if missing := [name for name in _EXTRAS if name not in named and any(chunk.count(name) for chunk in chunks)]:
        yield _counted_as_free(missing)
    for names in fit.columns:
        if len(names) > 1:
            yield f"{' and '.join(names)} layers take the same time"
    if fit.unknowns >= len(chunks):
        yield f"{fit.unknowns} costs from {len(chunks)} model chunks: they fit by construction, nothing checks them"


def _counted_as_free(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} count{'s' if len(names) == 1 else ''} as free: not told apart from the layers"
