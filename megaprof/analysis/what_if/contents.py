"""Finds the cost of each layer, in time and in memory, from what chunks take.

Of the time there is an estimate, and draws of everything that the data leave open. The time of a chunk is the cost of
its layers, and of the embedding, MTP layers or loss that it holds, times a factor: how much slower its ranks are than
others. Chunks are divided as for causes (`diagnosis.model.divided`). Kinds of layers that the chunks cannot separate
differ by up to a factor of two.

A stage in another layout needs its measured peak of memory plus or minus that of the layers that it gets or loses: the
parameters, gradients and optimizer states of a layer, and its activations for each microbatch in flight. Both numbers
are from the stage on which they are smallest, because the others hold more than layers. Unless every stage was
measured, nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from megaprof.analysis.diagnosis.model import divided, outside_layers
from megaprof.analysis.diagnosis.policy import KINDS_DIFFER
from megaprof.analysis.simulation import Indices
from megaprof.analysis.table.table import EMBEDDING, LOSS, MTP, Floats
from megaprof.analysis.what_if.layout_search import Unit
from megaprof.analysis.what_if.layouts import Layout, layers_per_stage, to_flags
from megaprof.formats import timeline as format
from megaprof.parallel.schedules import PipelineSchedule, phase_order

_LETTERS = {"E": EMBEDDING, "m": MTP, "L": LOSS}
#: Kinds of layers of models that are not hybrids.
_LAYERS = {"dense", "encoder", "layer", "moe"}
#: Kinds of layers that hybrid models consist of, with their letters (``hybrid_layer_allocation.Symbols``).
_HYBRID = {"MambaLayer": "M", "attention": "*", "mlp": "-", "moe": "E"}
Assumption = Literal["kinds_alike", "ends_hidden", "mtp_like_layer"]


@dataclass(frozen=True)
class Model:
    """A model: its layout, the kind of each decoder layer in order, and the milliseconds of a microbatch, by kind of
    pass, in the parts that ranges show (`Table.part_ms`)."""

    pieces: Layout
    kinds: tuple[str, ...]
    stages: int
    measured: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All parts that have a cost of their own."""
        flat = "".join(self.pieces)
        return (*dict.fromkeys(self.kinds), *(_LETTERS[letter] for letter in "EmL" if letter in flat))

    def flags(self, pieces: Layout) -> tuple[str, ...]:
        """Returns Megatron's flags for other ``pieces``; none if no option of Megatron describes them.

        Megatron's even split needs no flag for its layers. One is given all the same, to replace one that the run has
        now. A hybrid model has its layout in its pattern (``hybrid_layer_pattern``, megatron-core 0.17 and later), and
        Megatron refuses other flags next to that. No pattern has MTP layers, or layers whose letter is not known.
        """
        if not set(self.kinds) <= _LAYERS:
            if not set(self.kinds) <= _HYBRID.keys() or "m" in "".join(pieces):
                return ()
            letters = iter(_HYBRID[kind] for kind in self.kinds)
            pattern = "|".join("".join(next(letters) for letter in piece if letter == "t") for piece in pieces)
            return "--hybrid-layer-pattern", pattern
        flags = to_flags(pieces, self.stages)
        if any(flag.startswith(("--decoder", "--account", "--pipeline")) for flag in flags):
            return flags
        return "--decoder-first-pipeline-num-layers", str(layers_per_stage(pieces, self.stages)[0]), *flags

    def counts(self, pieces: Layout | None = None) -> Floats:
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

    ``parts`` [..., name, k] has the milliseconds of each of `Model.names`, ``fixed`` [..., k] what every pass takes
    beside its parts, and ``factor`` [..., stage, chunk, k] the time of a chunk / the cost of its parts.
    """

    model: Model
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
        ms = dict(zip(self.model.names, self.parts.tolist(), strict=True))
        nothing = [0.0] * self.parts.shape[-1]
        mtp = "".join(self.model.pieces).count("m")
        return [
            ("E", ms.get(EMBEDDING, nothing)),
            *(("t", ms[kind]) for kind in self.model.kinds),
            *([("m" * mtp, [layer_ms * mtp for layer_ms in ms[MTP]])] if mtp else []),
            ("L", ms.get(LOSS, nothing)),
        ]

    @property
    def of_stage(self) -> Floats:
        """[..., stage, k]: the factor of a stage, over all its chunks."""
        alone = self._alone(self.model.pieces)
        factor: Floats = (alone * self.factor).sum(axis=-2) / np.maximum(alone.sum(axis=-2), 1e-9)
        return factor

    def _alone(self, pieces: Layout) -> Floats:
        """Returns [..., stage, chunk, k]: what every chunk of a layout would take on a usual rank."""
        chunks: Floats = np.einsum("scn,...nk->...sck", self.model.counts(pieces), self.parts)
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
    model, parts = costs.model, costs.parts.tolist()
    by_kind = {name: Cost(*ms) for name, ms in zip(model.names, parts, strict=True)}
    off = float(np.abs(1.0 - 1.0 / costs.factor).max())
    unknown, only_ends = set(model.names) - set(model.measured), all(set(piece) != {"t"} for piece in model.pieces)
    assumed: dict[Assumption, bool] = {
        "kinds_alike": len(set(model.kinds) - set(model.measured)) > 1 and not _told_apart(model),
        "ends_hidden": only_ends and bool(unknown & {EMBEDDING, LOSS}),
        "mtp_like_layer": MTP in unknown,
    }
    return CostFit(by_kind, model.kinds, off, not unknown, tuple(each for each, is_so in assumed.items() if is_so))


def costs_of(content: Floats, model: Model, random: np.random.Generator | None = None) -> Costs:
    """Divides ``content`` [..., stage, chunk, k] into the costs of its parts, as causes do (`diagnosis.model.divided`).
    ``random`` draws what the data leave open, once for every leading index."""
    names, counts, leading = model.names, model.counts(), content.shape[:-3]
    sizes = np.zeros((*leading, len(names)))  # in average layers
    sizes[..., : len(set(model.kinds))] = _ratios(content, model, random)
    if MTP in names:
        sizes[..., names.index(MTP)] = 1.0 if random is None else _up_to(KINDS_DIFFER, random, leading)
    outside = outside_layers(model.measured, *counts.shape[:2])  # known if ranges measured both ends
    found = divided(content, np.einsum("scn,...n->...sc", counts, sizes), outside, random)
    parts = sizes[..., None] * found.unit[..., None, :]
    if MTP in model.measured:
        parts[..., names.index(MTP), :] = model.measured[MTP]
    alone = np.einsum("scn,...nk->...sck", counts, parts) + found.fixed[..., None, None, :]
    ends = found.ends
    if outside is None and random is not None:
        ends = np.where(found.slow_ends[..., None], 0.0, np.maximum(content - alone, 0.0))
    for name, at in ((EMBEDDING, 0), (LOSS, -1)):
        if name in names:
            parts[..., names.index(name), :] = ends[..., at, at, :]
            alone[..., at, at, :] += ends[..., at, at, :]
    return Costs(model, parts, found.fixed, np.where(alone > 0, content / np.maximum(alone, 1e-9), 1.0))


def _up_to(factor: float, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Returns factors between 1 / ``factor`` and ``factor``."""
    return np.exp(random.uniform(-np.log(factor), np.log(factor), shape))


def _told_apart(model: Model) -> bool:
    """Returns whether the chunks separate the kinds of layers from each other and from embedding, MTP and loss."""
    counts = model.counts().reshape(-1, len(model.names))
    return bool(np.linalg.matrix_rank(counts) == len(model.names))


def _ratios(content: Floats, model: Model, random: np.random.Generator | None) -> Floats:
    """Returns [..., kind of layer]: its cost as a multiple of the average layer's."""
    kinds = list(dict.fromkeys(model.kinds))
    many = np.array([model.kinds.count(kind) for kind in kinds], dtype=float)
    if len(kinds) == 1:
        return np.ones(1)
    if all(kind in model.measured for kind in kinds):
        costs = np.array([sum(model.measured[kind]) for kind in kinds])
    elif _told_apart(model):
        counts = model.counts().reshape(-1, len(model.names))
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


@dataclass(frozen=True)
class StageMemory:
    """The memory of the captured run, by stage: the ``layers`` that it holds, including MTP layers, the most layers
    times microbatches ``in_flight``, the fewest bytes that it had allocated (``least``), the most that any of
    its ranks had (``most``), and those that it may allocate (``allowed``): its smallest device's, or less."""

    layers: tuple[int, ...]
    in_flight: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    allowed: tuple[int, ...]

    def needed(self, stages: Indices, layers: Indices, schedule: PipelineSchedule) -> Floats:
        """Returns [n]: the bytes that each of some ``stages`` [n] would allocate at its peak if its chunks held
        ``layers`` [n, chunk], including MTP layers."""
        per_layer = min(least / count for least, count in zip(self.least, self.layers, strict=True))
        more = (layers.sum(axis=1) - np.take(self.layers, stages)) * per_layer
        activations = min((m - s) / h for m, s, h in zip(self.most, self.least, self.in_flight, strict=True))
        more = more + (_most_in_flight(stages, layers, schedule) - np.take(self.in_flight, stages)) * activations
        needed: Floats = np.maximum(np.rint(np.take(self.most, stages) + more), 0.0)
        return needed

    def part(self, stages: Indices, layers: Indices, schedule: PipelineSchedule) -> Floats:
        """Returns [n]: `needed` as a fraction of what each stage may allocate."""
        part: Floats = self.needed(stages, layers, schedule) / np.take(self.allowed, stages)
        return part

    def fit(self, pieces: Layout, schedule: PipelineSchedule) -> tuple[bool, tuple[int, ...]]:
        """Returns whether a layout fits, and the bytes that each stage would allocate at its peak."""
        needed = self.needed(np.arange(schedule.stages), _layers(pieces, schedule.stages), schedule)
        return bool((needed <= self.allowed).all()), tuple(map(int, needed.tolist()))


def measured_memory(
    stages: Sequence[format.Memory | None], pieces: Layout, in_flight: Sequence[int], limit: int | None = None
) -> StageMemory | None:
    """Returns the memory of a run with these ``pieces``; None if some stage was not measured, or has no layer or
    activation to scale by. ``in_flight``: see `in_flight_layers`; ``limit``: bytes that a stage may allocate, if that
    is less than its device has."""
    layers = _layers(pieces, len(in_flight)).sum(axis=1).tolist()
    at_peak = [stage for stage in stages if stage is not None]
    allowed = [[bytes for bytes in (stage.capacity or None, limit) if bytes is not None] for stage in at_peak]
    if len(at_peak) < len(in_flight) or not all(allowed) or min(layers) < 1 or min(in_flight) < 1:
        return None
    least, most = tuple(stage.allocated for stage in at_peak), tuple(stage.peak for stage in at_peak)
    return StageMemory(tuple(layers), tuple(in_flight), least, most, tuple(map(min, allowed)))


def in_flight_layers(pieces: Layout, schedule: PipelineSchedule) -> list[int]:
    """Returns, by stage, the most activations that it holds at once, in layers times microbatches. For each microbatch
    that a chunk has run forward and not yet backward, the layers of the chunk count, including MTP layers. All are zero
    in a forward-only pass."""
    stages = schedule.stages
    most: list[int] = _most_in_flight(np.arange(stages), _layers(pieces, stages), schedule).tolist()
    return most


def _layers(pieces: Layout, stages: int) -> Indices:
    """Returns [stage, chunk]: how many layers each holds, including MTP layers."""
    return np.array([piece.count("t") + piece.count("m") for piece in pieces]).reshape(-1, stages).T


def _most_in_flight(stages: Indices, layers: Indices, schedule: PipelineSchedule) -> Indices:
    """Returns [n]: the most layers times microbatches in flight on some stages, whose chunks hold ``layers`` [n,
    chunk]."""
    if schedule.forward_only:
        return np.zeros(len(stages), dtype=np.intp)
    most: Indices = (_in_flight(schedule)[stages] * layers[:, None]).sum(axis=2).max(axis=1)
    return most


@lru_cache(maxsize=16)
def _in_flight(schedule: PipelineSchedule) -> Indices:
    """Returns [stage, way, chunk]: the microbatches that each chunk of a stage has run forward and not yet backward,
    once for each different way in which a backward finds them. A stage with fewer ways than others repeats the
    first."""
    stages = []
    for stage in range(schedule.stages):
        held, ways, before = [0] * schedule.chunks, dict[tuple[int, ...], None](), "forward"
        for phase in phase_order(schedule, stage):
            if phase.kind != "forward" and before == "forward":
                ways[tuple(held)] = None
            held[phase.chunk] += 1 if phase.kind == "forward" else -1
            before = phase.kind
        found = np.array(list(ways))
        # One that is between two others on a line needs no more than one of these two, whatever the chunks hold.
        steps = np.diff(found, axis=0)
        turns = (steps[1:] != steps[:-1]).any(axis=1)
        stages.append(found[np.concatenate([[True], turns, [True]])[: len(found)]])
    longest = max(map(len, stages))
    return np.array([[*ways, *[ways[0]] * (longest - len(ways))] for ways in stages])
