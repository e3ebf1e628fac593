"""What each layer of a model costs, from what its chunks take: in all, and in draws of what the data leave open.

A chunk takes what its layers, and the embedding, MTP layers or loss that it holds, cost together, times a factor of its
own: how much slower its ranks are. One layer costs what it does in the quickest chunks that could tell. What the first
and the last chunk take beyond their layers is their embedding and their loss, as far as ranges of these do not say
otherwise; or it is the factor of their ranks, which the times cannot tell, so every draw takes one of the two. Where
no chunk holds layers alone, an embedding or a loss of up to one layer is hidden in all of them: a draw takes one. Kinds
of layers that the chunks do not tell apart differ by up to twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.naming import AGAIN, looks
from megaprof.analysis.table.modules import EMBEDDING, LOSS, MTP
from megaprof.analysis.table.table import Floats
from megaprof.analysis.what_if.layout_search import Unit
from megaprof.analysis.what_if.layouts import Layout

_LETTERS = {"E": EMBEDDING, "m": MTP, "L": LOSS}
#: Kinds of layers of models that are no hybrids.
_LAYERS = {"dense", "encoder", "layer", "moe"}
#: Kinds of layers that hybrid models consist of, with their letters (``hybrid_layer_allocation.Symbols``).
_HYBRID = {"MambaLayer": "M", "attention": "*", "mlp": "-", "moe": "E"}
Assumption = Literal["kinds_alike", "ends_hidden", "mtp_like_layer"]
#: Kinds whose costs nothing tells differ by up to this factor.
_KINDS_DIFFER = 2.0


@dataclass(frozen=True)
class Held:
    """A model as it is laid out, and what ranges say of its parts."""

    pieces: Layout
    """Its layout."""
    kinds: tuple[str, ...]
    """Of its decoder layers, in order."""
    stages: int
    """Pipeline stages."""
    measured: Mapping[str, Floats] = field(default_factory=dict)
    """What a microbatch takes in a kind of layer, the embedding, one MTP layer, or the output layer and the loss, in
    milliseconds by kind of pass; without those that have no ranges."""

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that has a cost of its own."""
        flat = "".join(self.pieces)
        return (*dict.fromkeys(self.kinds), *(_LETTERS[letter] for letter in "EmL" if letter in flat))

    @property
    def hybrid(self) -> bool:
        """Whether the layers are those of a hybrid model, whose layout is no layout of Megatron's other models."""
        return not set(self.kinds) <= _LAYERS

    def pattern(self, pieces: Layout) -> str | None:
        """These layers in other ``pieces`` as hybrid models take them (``hybrid_layer_pattern``, megatron-core 0.17 and
        later); None where a layer's letter is not known, or what follows the layers is not (MTP)."""
        if not set(self.kinds) <= _HYBRID.keys() or "m" in "".join(pieces):
            return None
        letters = iter(_HYBRID[kind] for kind in self.kinds)
        return "|".join("".join(next(letters) for letter in piece if letter == "t") for piece in pieces)

    def counts(self, pieces: Layout | None = None) -> npt.NDArray[np.float64]:
        """[stage, chunk, name]: how many of each a chunk holds, in this layout or another one of the same layers."""
        kinds, names = iter(self.kinds), self.names
        each = pieces or self.pieces
        found = np.zeros((len(each), len(names)))
        for place, piece in enumerate(each):
            for letter in piece:
                found[place, names.index(next(kinds) if letter == "t" else _LETTERS[letter])] += 1
        return found.reshape(-1, self.stages, len(names)).swapaxes(0, 1)


@dataclass(frozen=True)
class Costs:
    """Leading axes are draws; ``k`` kinds of passes."""

    held: Held
    parts: Floats
    """[..., name, k]: milliseconds of each of `Held.names`."""
    factor: Floats
    """[..., stage, chunk, k]: how many times as long the chunk takes as its parts."""

    def of(self, pieces: Layout) -> Floats:
        """[..., stage, chunk, k]: milliseconds of every chunk in another layout."""
        found: Floats = np.einsum("scn,...nk->...sck", self.held.counts(pieces), self.parts)
        if found.shape == self.factor.shape:
            found *= self.factor
        else:
            found *= self.of_stage[..., None, :]
        return found

    @property
    def units(self) -> list[Unit]:
        """The model from front to back, as `layout_search.search` takes it; without draws."""
        ms = dict(zip(self.held.names, self.parts.tolist(), strict=True))
        nothing = [0.0] * self.parts.shape[-1]
        mtp = "".join(self.held.pieces).count("m")
        return [
            ("E", ms.get(EMBEDDING, nothing)),
            *(("t", ms[kind]) for kind in self.held.kinds),
            *([("m" * mtp, [each * mtp for each in ms[MTP]])] if mtp else []),
            ("L", ms.get(LOSS, nothing)),
        ]

    @property
    def of_stage(self) -> Floats:
        """[..., stage, k]: the factor of all chunks of a stage."""
        alone = np.einsum("scn,...nk->...sck", self.held.counts(), self.parts)
        found: Floats = (alone * self.factor).sum(axis=-2) / np.maximum(alone.sum(axis=-2), 1e-9)
        return found


@dataclass(frozen=True)
class Cost:
    """Cost of one microbatch in one layer."""

    forward_ms: float
    """Milliseconds of the forward."""
    backward_ms: float = 0.0
    """Milliseconds of the backward."""


@dataclass(frozen=True)
class CostFit:
    """The cost of each kind of layer, and what it is based on."""

    by_kind: dict[str, Cost]
    """Cost by kind (``dense``, ``moe``, ..., ``embedding``, ``mtp``, ``loss``)."""
    kinds: tuple[str, ...]
    """Kinds of the model's decoder layers, in order."""
    residual: float
    """Largest deviation from a chunk's measured time, as a fraction of that time."""
    from_ranges: bool
    """True if the costs come from ranges of single layers, False if they come from whole chunks."""
    assumptions: tuple[Assumption, ...]
    """What the times do not show: ``kinds_alike``: all kinds of layers are assumed to cost the same; ``ends_hidden``:
    layers, embedding and loss cannot be separated, because no chunk holds only layers; ``mtp_like_layer``: an MTP
    layer is assumed to cost as much as a decoder layer."""


def fitted(costs: Costs) -> CostFit:
    """``costs`` of no draw, as a report tells them."""
    held, parts = costs.held, costs.parts.tolist()
    by_kind = {name: Cost(*ms) for name, ms in zip(held.names, parts, strict=True)}
    off = float(np.abs(1.0 - 1.0 / costs.factor).max())
    told = set(held.names) <= set(held.measured)
    return CostFit(by_kind, held.kinds, off, told, tuple(_assumptions(costs)))


def _assumptions(costs: Costs) -> Iterator[Assumption]:
    held = costs.held
    counts = held.counts().reshape(-1, len(held.names))
    layers = len(set(held.kinds))
    unknown = [name for name in held.names if name not in held.measured]
    if len(set(held.kinds) - set(held.measured)) > 1 and not _told_apart(held):
        yield "kinds_alike"
    if not _only_layers(counts, layers).any() and any(name in unknown for name in (EMBEDDING, LOSS)):
        yield "ends_hidden"
    if MTP in unknown:
        yield "mtp_like_layer"


def split(content: Floats, held: Held, random: np.random.Generator | None = None) -> Costs:
    """``content`` [..., stage, chunk, k] as what its parts cost; ``random`` draws what the data leave open, once for
    every leading index."""
    names, leading = held.names, content.shape[:-3]
    counts = np.swapaxes(held.counts(), 0, 1).reshape(-1, len(names))  # in the order of the pieces
    whole = np.swapaxes(content, -3, -2).reshape(*leading, len(counts), -1)
    layers = list(dict.fromkeys(held.kinds))
    ratio = np.broadcast_to(_ratios(whole, held, random), (*leading, len(layers)))  # [..., kind of layer]
    size = np.einsum("pn,...n->...p", counts[:, : len(layers)], ratio)  # layers, as so many of an average one
    of_mtp = _hidden(random, leading, 0.5, 2.0) if random is not None else np.ones(leading)
    if MTP in names:
        size = size + counts[:, names.index(MTP)] * of_mtp[..., None]
    measured = {name: held.measured[name] for name in held.measured if name in names}
    unit = _unit(whole, size, counts, held, measured, random)
    parts = np.zeros((*leading, len(names), whole.shape[-1]))
    for place, name in enumerate(names):
        if name in layers:
            parts[..., place, :] = unit * ratio[..., layers.index(name), None]
        elif name == MTP:
            parts[..., place, :] = unit * of_mtp[..., None]
    if MTP in measured:
        parts[..., names.index(MTP), :] = measured[MTP]
    for name, piece in ((EMBEDDING, 0), (LOSS, -1)):
        if name in names:
            beside = np.einsum("n,...nk->...k", counts[piece], parts)
            parts[..., names.index(name), :] = _end(whole[..., piece, :], beside, measured.get(name), random)
    alone = np.einsum("pn,...nk->...pk", counts, parts)
    factor = np.where(alone > 0, whole / np.maximum(alone, 1e-9), 1.0)
    by_stage = factor.reshape(*leading, -1, held.stages, factor.shape[-1])
    return Costs(held, parts, np.swapaxes(by_stage, -3, -2))


def _unit(
    whole: Floats,
    size: Floats,
    counts: Floats,
    held: Held,
    measured: Mapping[str, Floats],
    random: np.random.Generator | None,
) -> Floats:
    """[..., k]: an average layer. Chunks of layers alone tell it, and nothing takes less than its layers do."""
    leading, names = whole.shape[:-2], held.names
    own = _only_layers(counts, len(set(held.kinds)))
    beside = np.zeros_like(whole)
    for name, piece in ((EMBEDDING, 0), (LOSS, -1)):
        if name in measured:
            beside[..., piece, :] += measured[name]
        elif not own.any() and random is not None and name in names:
            size = size.copy()
            size[..., piece] += random.uniform(0.0, 1.0, leading)
    each = np.maximum(whole - beside, 0.0) / np.maximum(size, 1e-9)[..., None]
    each = np.where(size[..., None] > 0, each, np.inf)
    least: Floats = each.min(axis=-2)
    if own.any() and np.isfinite(each[..., own, :]).all():
        usual = np.quantile(each[..., own, :], 0.5, axis=-2, method="lower")
        # Of few chunks of layers alone one may be slow, and the ends tell that it is.
        least = usual if own.sum() > 2 else np.minimum(usual, least)
    return np.where(np.isfinite(least), least, 0.0)


def _end(whole: Floats, beside: Floats, measured: Floats | None, random: np.random.Generator | None) -> Floats:
    """[..., k]: what an embedding or a loss costs, whose chunk holds other things that cost ``beside``."""
    if measured is not None:
        # Its range is as much longer as the rest of what its rank does.
        slow = np.maximum(whole - measured, 0.0) / np.maximum(beside, 1e-9)
        return np.where(slow > 0, measured / np.maximum(slow, 1e-9), measured) if beside.any() else measured + 0 * whole
    rest = np.maximum(whole - beside, 0.0)
    mean, usual = (each.reshape(-1, each.shape[-1]).mean(axis=0) for each in (rest, whole))
    # An end may take most of its time forwards or backwards; activations are computed again by layers.
    if looks(mean, usual) == AGAIN:
        return np.zeros_like(rest)
    if random is None:
        return rest
    return rest * random.integers(0, 2, rest.shape[:-1])[..., None]


def _hidden(random: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Floats:
    return np.exp(random.uniform(np.log(low), np.log(high), shape))


def _only_layers(counts: Floats, layers: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (counts[:, layers:].sum(axis=1) == 0) & (counts[:, :layers].sum(axis=1) > 0)
    return found


def _told_apart(held: Held) -> bool:
    """Whether the chunks tell the kinds of layers apart, from each other and from what the ends hold."""
    counts = held.counts().reshape(-1, len(held.names))
    return bool(np.linalg.matrix_rank(counts) == len(held.names))


def _ratios(whole: Floats, held: Held, random: np.random.Generator | None) -> Floats:
    """[..., kind of layer]: what each costs, against all layers on average."""
    kinds = list(dict.fromkeys(held.kinds))
    many = np.array([held.kinds.count(kind) for kind in kinds], dtype=float)
    if len(kinds) == 1:
        return np.ones(1)
    if all(kind in held.measured for kind in kinds):
        costs = np.array([sum(held.measured[kind]) for kind in kinds])
    elif _told_apart(held):
        counts = np.swapaxes(held.counts(), 0, 1).reshape(-1, len(held.names))
        solved = np.linalg.pinv(counts) @ whole.sum(axis=-1)[..., None]
        costs = np.maximum(solved[..., : len(kinds), 0], 0.0)
        costs = np.where(costs.sum(axis=-1, keepdims=True) > 0, costs, 1.0)
    elif random is not None:
        costs = _hidden(random, (*whole.shape[:-2], len(kinds)), _KINDS_DIFFER**-0.5, _KINDS_DIFFER**0.5)
    else:
        costs = np.ones(len(kinds))
    mean = (costs * many).sum(axis=-1, keepdims=True) / many.sum()
    found: Floats = costs / np.maximum(mean, 1e-9)
    return found
