"""Finds the cost of each layer from the times of chunks: an estimate, and draws of everything that the data leave open.

The time of a chunk is the cost of its layers, and of the embedding, MTP layers or loss that it holds, times a factor:
how much slower its ranks are than others. The cost of a layer comes from the fastest chunks that show it. The time of
the first and the last chunk beyond their layers is that of embedding and loss, unless ranges of these say otherwise; or
their ranks are slower. Times do not show which of the two it is, so every draw assumes one of them. If no chunk holds
only layers, each may contain an embedding or a loss of up to one layer; a draw assumes one. Kinds of layers that the
chunks cannot separate differ by up to a factor of two.
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
#: Kinds of layers of models that are not hybrids.
_LAYERS = {"dense", "encoder", "layer", "moe"}
#: Kinds of layers that hybrid models consist of, with their letters (``hybrid_layer_allocation.Symbols``).
_HYBRID = {"MambaLayer": "M", "attention": "*", "mlp": "-", "moe": "E"}
Assumption = Literal["kinds_alike", "ends_hidden", "mtp_like_layer"]
#: Kinds of layers whose costs cannot be separated differ by up to this factor.
_KINDS_DIFFER = 2.0


@dataclass(frozen=True)
class Held:
    """The layout of a model, and the times of its parts that ranges show."""

    pieces: Layout
    """Its layout."""
    kinds: tuple[str, ...]
    """The kind of each decoder layer, in order."""
    stages: int
    """Pipeline stages."""
    measured: Mapping[str, Floats] = field(default_factory=dict)
    """Milliseconds of a microbatch, by kind of pass, in a kind of layer, the embedding, one MTP layer, or the output
    layer and the loss. Parts without ranges are missing."""

    @property
    def names(self) -> tuple[str, ...]:
        """All parts that have a cost of their own."""
        flat = "".join(self.pieces)
        return (*dict.fromkeys(self.kinds), *(_LETTERS[letter] for letter in "EmL" if letter in flat))

    @property
    def hybrid(self) -> bool:
        """True for a hybrid model. Its layout is written in another way than those of other models."""
        return not set(self.kinds) <= _LAYERS

    def pattern(self, pieces: Layout) -> str | None:
        """Returns other ``pieces`` as hybrid models write them (``hybrid_layer_pattern``, megatron-core 0.17 and
        later); None if the letter of a layer is not known, as for MTP layers."""
        if not set(self.kinds) <= _HYBRID.keys() or "m" in "".join(pieces):
            return None
        letters = iter(_HYBRID[kind] for kind in self.kinds)
        return "|".join("".join(next(letters) for letter in piece if letter == "t") for piece in pieces)

    def counts(self, pieces: Layout | None = None) -> npt.NDArray[np.float64]:
        """Returns [stage, chunk, name]: how many of each part a chunk holds, in this layout or in other ``pieces``."""
        kinds, names = iter(self.kinds), self.names
        pieces = pieces or self.pieces
        counts = np.zeros((len(pieces), len(names)))
        for place, piece in enumerate(pieces):
            for letter in piece:
                counts[place, names.index(next(kinds) if letter == "t" else _LETTERS[letter])] += 1
        return counts.reshape(-1, self.stages, len(names)).swapaxes(0, 1)


@dataclass(frozen=True)
class Costs:
    """The costs of the parts of a model. Leading axes, if any, are draws; ``k`` is the axis of kinds of passes."""

    held: Held
    """The model."""
    parts: Floats
    """[..., name, k]: milliseconds of each of `Held.names`."""
    factor: Floats
    """[..., stage, chunk, k]: time of the chunk / cost of its parts."""

    def of(self, pieces: Layout) -> Floats:
        """Returns [..., stage, chunk, k]: milliseconds of every chunk in another layout."""
        chunks: Floats = np.einsum("scn,...nk->...sck", self.held.counts(pieces), self.parts)
        if chunks.shape == self.factor.shape:
            chunks *= self.factor
        else:
            chunks *= self.of_stage[..., None, :]
        return chunks

    @property
    def units(self) -> list[Unit]:
        """The model from front to back, in the form that `layout_search.search` takes. Only for costs without draws."""
        ms = dict(zip(self.held.names, self.parts.tolist(), strict=True))
        nothing = [0.0] * self.parts.shape[-1]
        mtp = "".join(self.held.pieces).count("m")
        return [
            ("E", ms.get(EMBEDDING, nothing)),
            *(("t", ms[kind]) for kind in self.held.kinds),
            *([("m" * mtp, [layer_ms * mtp for layer_ms in ms[MTP]])] if mtp else []),
            ("L", ms.get(LOSS, nothing)),
        ]

    @property
    def of_stage(self) -> Floats:
        """[..., stage, k]: the factor of a stage, over all its chunks."""
        alone = np.einsum("scn,...nk->...sck", self.held.counts(), self.parts)
        factor: Floats = (alone * self.factor).sum(axis=-2) / np.maximum(alone.sum(axis=-2), 1e-9)
        return factor


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
    """The cost of each kind (``dense``, ``moe``, ..., ``embedding``, ``mtp``, ``loss``)."""
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
    """Returns ``costs``, without draws, for a report."""
    held, parts = costs.held, costs.parts.tolist()
    by_kind = {name: Cost(*ms) for name, ms in zip(held.names, parts, strict=True)}
    off = float(np.abs(1.0 - 1.0 / costs.factor).max())
    from_ranges = set(held.names) <= set(held.measured)
    return CostFit(by_kind, held.kinds, off, from_ranges, tuple(_assumptions(costs)))


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
    """Divides ``content`` [..., stage, chunk, k] into the costs of its parts. ``random`` draws what the data leave
    open, once for every leading index."""
    names, leading = held.names, content.shape[:-3]
    counts = np.swapaxes(held.counts(), 0, 1).reshape(-1, len(names))  # in the order of the pieces
    whole = np.swapaxes(content, -3, -2).reshape(*leading, len(counts), -1)
    layers = list(dict.fromkeys(held.kinds))
    ratio = np.broadcast_to(_ratios(whole, held, random), (*leading, len(layers)))  # [..., kind of layer]
    size = np.einsum("pn,...n->...p", counts[:, : len(layers)], ratio)  # in average layers
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
    """Returns [..., k]: the cost of an average layer. Chunks that hold only layers show it, and no chunk takes less
    than its layers."""
    leading, names = whole.shape[:-2], held.names
    plain = _only_layers(counts, len(set(held.kinds)))
    beside = np.zeros_like(whole)
    for name, piece in ((EMBEDDING, 0), (LOSS, -1)):
        if name in measured:
            beside[..., piece, :] += measured[name]
        elif not plain.any() and random is not None and name in names:
            size = size.copy()
            size[..., piece] += random.uniform(0.0, 1.0, leading)
    per_layer = np.maximum(whole - beside, 0.0) / np.maximum(size, 1e-9)[..., None]
    per_layer = np.where(size[..., None] > 0, per_layer, np.inf)
    least: Floats = per_layer.min(axis=-2)
    if plain.any() and np.isfinite(per_layer[..., plain, :]).all():
        usual = np.quantile(per_layer[..., plain, :], 0.5, axis=-2, method="lower")
        # If few chunks hold layers alone, one of them may be slow; the chunks at the ends show whether it is.
        least = usual if plain.sum() > 2 else np.minimum(usual, least)
    return np.where(np.isfinite(least), least, 0.0)


def _end(whole: Floats, beside: Floats, measured: Floats | None, random: np.random.Generator | None) -> Floats:
    """Returns [..., k]: the cost of an embedding or a loss in a chunk whose other parts cost ``beside``."""
    if measured is not None:
        # A slow rank makes the range longer by the same factor as the rest of its chunk.
        slow = np.maximum(whole - measured, 0.0) / np.maximum(beside, 1e-9)
        return np.where(slow > 0, measured / np.maximum(slow, 1e-9), measured) if beside.any() else measured + 0 * whole
    rest = np.maximum(whole - beside, 0.0)
    mean, usual = (times.reshape(-1, times.shape[-1]).mean(axis=0) for times in (rest, whole))
    # An embedding or a loss may take most of its time in one kind of pass. A time that looks like recomputation belongs
    # to the layers.
    if looks(mean, usual) == AGAIN:
        return np.zeros_like(rest)
    if random is None:
        return rest
    return rest * random.integers(0, 2, rest.shape[:-1])[..., None]


def _hidden(random: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Floats:
    return np.exp(random.uniform(np.log(low), np.log(high), shape))


def _only_layers(counts: Floats, layers: int) -> npt.NDArray[np.bool_]:
    """Returns [piece]: True if the piece holds decoder layers and nothing else."""
    plain: npt.NDArray[np.bool_] = (counts[:, layers:].sum(axis=1) == 0) & (counts[:, :layers].sum(axis=1) > 0)
    return plain


def _told_apart(held: Held) -> bool:
    """Returns whether the chunks separate the kinds of layers from each other and from embedding, MTP and loss."""
    counts = held.counts().reshape(-1, len(held.names))
    return bool(np.linalg.matrix_rank(counts) == len(held.names))


def _ratios(whole: Floats, held: Held, random: np.random.Generator | None) -> Floats:
    """Returns [..., kind of layer]: its cost as a multiple of the average layer's."""
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
    ratios: Floats = costs / np.maximum(mean, 1e-9)
    return ratios
