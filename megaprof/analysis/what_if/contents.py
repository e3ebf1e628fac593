"""Finds the cost of each layer from the times of chunks: an estimate, and draws of everything that the data leave open.

The time of a chunk is the cost of its layers, and of the embedding, MTP layers or loss that it holds, times a factor:
how much slower its ranks are than others. Chunks are divided as for causes (`diagnosis.model.divided`). Kinds of layers
that the chunks cannot separate differ by up to a factor of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.model import divided, outside_layers
from megaprof.analysis.diagnosis.policy import KINDS_DIFFER
from megaprof.analysis.table.table import EMBEDDING, LOSS, MTP, Floats
from megaprof.analysis.what_if.layout_search import Unit
from megaprof.analysis.what_if.layouts import Layout

_LETTERS = {"E": EMBEDDING, "m": MTP, "L": LOSS}
#: Kinds of layers of models that are not hybrids.
_LAYERS = {"dense", "encoder", "layer", "moe"}
#: Kinds of layers that hybrid models consist of, with their letters (``hybrid_layer_allocation.Symbols``).
_HYBRID = {"MambaLayer": "M", "attention": "*", "mlp": "-", "moe": "E"}
Assumption = Literal["kinds_alike", "ends_hidden", "mtp_like_layer"]


@dataclass(frozen=True)
class Held:
    """The layout of a model, the kind of each decoder layer in order, and the milliseconds of a microbatch, by kind of
    pass, in the parts that ranges show (`Table.part_ms`)."""

    pieces: Layout
    kinds: tuple[str, ...]
    stages: int
    measured: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def outside(self) -> Floats | None:
        """[stage, chunk, k]: what passes take outside of their layers; None unless ranges measured it of both ends."""
        return outside_layers(self.measured, self.stages, len(self.pieces) // self.stages)

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
    """The costs of the parts of a model. Leading axes, if any, are draws; ``k`` is the axis of kinds of passes.

    ``parts`` [..., name, k] has the milliseconds of each of `Held.names`, ``fixed`` [..., k] what every pass takes
    beside its parts, and ``factor`` [..., stage, chunk, k] the time of a chunk / the cost of its parts.
    """

    held: Held
    parts: Floats
    fixed: Floats
    factor: Floats

    def of(self, pieces: Layout) -> Floats:
        """Returns [..., stage, chunk, k]: milliseconds of every chunk in another layout."""
        chunks = self._alone(pieces)
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
        alone = self._alone(self.held.pieces)
        factor: Floats = (alone * self.factor).sum(axis=-2) / np.maximum(alone.sum(axis=-2), 1e-9)
        return factor

    def _alone(self, pieces: Layout) -> Floats:
        """Returns [..., stage, chunk, k]: what every chunk of a layout would take on a usual rank."""
        chunks: Floats = np.einsum("scn,...nk->...sck", self.held.counts(pieces), self.parts)
        return chunks + self.fixed[..., None, None, :]


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
    unknown, only_ends = set(held.names) - set(held.measured), all(set(piece) != {"t"} for piece in held.pieces)
    assumed: dict[Assumption, bool] = {
        "kinds_alike": len(set(held.kinds) - set(held.measured)) > 1 and not _told_apart(held),
        "ends_hidden": only_ends and bool(unknown & {EMBEDDING, LOSS}),
        "mtp_like_layer": MTP in unknown,
    }
    return CostFit(by_kind, held.kinds, off, not unknown, tuple(each for each, is_so in assumed.items() if is_so))


def split(content: Floats, held: Held, random: np.random.Generator | None = None) -> Costs:
    """Divides ``content`` [..., stage, chunk, k] into the costs of its parts, as causes do (`model.divided`).
    ``random`` draws what the data leave open, once for every leading index."""
    names, counts, leading = held.names, held.counts(), content.shape[:-3]
    sizes = np.zeros((*leading, len(names)))  # in average layers
    sizes[..., : len(set(held.kinds))] = _ratios(content, held, random)
    if MTP in names:
        sizes[..., names.index(MTP)] = 1.0 if random is None else _up_to(KINDS_DIFFER, random, leading)
    found = divided(content, np.einsum("scn,...n->...sc", counts, sizes), held.outside, random)
    parts = sizes[..., None] * found.unit[..., None, :]
    if MTP in held.measured:
        parts[..., names.index(MTP), :] = held.measured[MTP]
    alone = np.einsum("scn,...nk->...sck", counts, parts) + found.fixed[..., None, None, :]
    ends = found.ends
    if held.outside is None and random is not None:
        ends = np.where(found.slow_ends[..., None], 0.0, np.maximum(content - alone, 0.0))
    for name, at in ((EMBEDDING, 0), (LOSS, -1)):
        if name in names:
            parts[..., names.index(name), :] = ends[..., at, at, :]
            alone[..., at, at, :] += ends[..., at, at, :]
    return Costs(held, parts, found.fixed, np.where(alone > 0, content / np.maximum(alone, 1e-9), 1.0))


def _up_to(factor: float, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Returns factors between 1 / ``factor`` and ``factor``."""
    return np.exp(random.uniform(-np.log(factor), np.log(factor), shape))


def _told_apart(held: Held) -> bool:
    """Returns whether the chunks separate the kinds of layers from each other and from embedding, MTP and loss."""
    counts = held.counts().reshape(-1, len(held.names))
    return bool(np.linalg.matrix_rank(counts) == len(held.names))


def _ratios(content: Floats, held: Held, random: np.random.Generator | None) -> Floats:
    """Returns [..., kind of layer]: its cost as a multiple of the average layer's."""
    kinds = list(dict.fromkeys(held.kinds))
    many = np.array([held.kinds.count(kind) for kind in kinds], dtype=float)
    if len(kinds) == 1:
        return np.ones(1)
    if all(kind in held.measured for kind in kinds):
        costs = np.array([sum(held.measured[kind]) for kind in kinds])
    elif _told_apart(held):
        counts = held.counts().reshape(-1, len(held.names))
        solved = np.linalg.pinv(counts) @ content.sum(axis=-1).reshape(*content.shape[:-3], -1, 1)
        costs = np.maximum(solved[..., : len(kinds), 0], 0.0)
        costs = np.where(costs.sum(axis=-1, keepdims=True) > 0, costs, 1.0)
    elif random is not None:
        costs = _up_to(KINDS_DIFFER**0.5, random, (*content.shape[:-3], len(kinds)))
    else:
        costs = np.ones(len(kinds))
    mean = (costs * many).sum(axis=-1, keepdims=True) / many.sum()
    ratios: Floats = costs / np.maximum(mean, 1e-9)
    return ratios
