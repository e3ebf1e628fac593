"""Whether a layout fits into the devices, by what the captured stages were measured to have allocated.

A stage in another layout needs its measured peak, and for every layer more (or less) what a layer takes: for its
parameters, gradients and states of the optimizer, and once for every microbatch in flight. That is what it takes on the
stage where it takes least, because the others hold more than layers. Without a figure for every stage nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.gpu import Peak
from megaprof.analysis.what_if.layouts import Layout
from megaprof.parallel.schedules import PipelineSchedule, phase_order

Whole: TypeAlias = npt.NDArray[np.intp]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MemoryFit:
    """What a layout needs."""

    needed: tuple[int, ...]
    """Bytes that each stage would have allocated at its peak."""
    allowed: tuple[int, ...]
    """Bytes that it may have."""

    @property
    def fits(self) -> bool:
        """Whether none has more than it may."""
        return all(needed <= allowed for needed, allowed in zip(self.needed, self.allowed, strict=True))


@dataclass(frozen=True)
class Memory:
    """What the captured stages had allocated, by stage."""

    layers: tuple[int, ...]
    """Layers that each holds, MTP layers included."""
    held: tuple[int, ...]
    """The most layers times microbatches that each has in flight."""
    least: tuple[int, ...]
    """Bytes that each had allocated at the least."""
    most: tuple[int, ...]
    """Bytes that each had allocated at the most, on any of its ranks."""
    allowed: tuple[int, ...]
    """Bytes that it may have: what its smallest device has, or less."""

    @cached_property
    def per_layer(self) -> float:
        """Bytes of a layer, on the stage where it takes least."""
        return min(least / count for least, count in zip(self.least, self.layers, strict=True))

    @cached_property
    def activations(self) -> float:
        """Bytes of a layer's activations of one microbatch, on the stage where they take least."""
        return min((m - s) / h for m, s, h in zip(self.most, self.least, self.held, strict=True))

    def needed(self, stages: Whole, layers: Whole, schedule: PipelineSchedule) -> Floats:
        """Returns the bytes that each of some ``stages`` [n] would have allocated at its peak, [n], if its chunks held
        so many ``layers`` (MTP layers included), [n, chunk]."""
        more = (layers.sum(axis=1) - np.take(self.layers, stages)) * self.per_layer
        more = more + (_held(stages, layers, schedule) - np.take(self.held, stages)) * self.activations
        needed: Floats = np.maximum(np.rint(np.take(self.most, stages) + more), 0.0)
        return needed

    def part(self, stages: Whole, layers: Whole, schedule: PipelineSchedule) -> Floats:
        """Returns what part that is of what each may have, [n]."""
        part: Floats = self.needed(stages, layers, schedule) / np.take(self.allowed, stages)
        return part

    def fit(self, pieces: Layout, schedule: PipelineSchedule) -> MemoryFit:
        """Of a layout."""
        needed = self.needed(np.arange(schedule.stages), _layers(pieces, schedule.stages), schedule)
        return MemoryFit(tuple(map(int, needed.tolist())), self.allowed)

    def halved(self, needs: Sequence[int]) -> MemoryFit:
        """Of half as many stages, which have ``needs`` layers times microbatches in flight: each holds the parameters,
        gradients and optimizer of two neighbours. An optimizer whose states replicas share holds less."""
        activations = [(m - s) / h for m, s, h in zip(self.most, self.least, self.held, strict=True)]
        needed, allowed = [], []
        for stage, need in enumerate(needs):
            both = slice(2 * stage, 2 * stage + 2)
            needed.append(round(sum(self.least[both]) + need * max(activations[both])))
            allowed.append(min(self.allowed[both]))
        return MemoryFit(tuple(needed), tuple(allowed))


def peaks(stages: Sequence[Peak | None]) -> tuple[int, ...] | None:
    """Bytes that each stage had allocated at the most; None where one has no figure."""
    found = [each.most for each in stages if each is not None]
    return tuple(found) if len(found) == len(stages) else None


def measured(
    found: Sequence[Peak | None], pieces: Layout, held: Sequence[int], limit: int | None = None
) -> Memory | None:
    """``found``: of every stage; ``held``: the most layers times microbatches that each has in flight; ``limit``: bytes
    that a stage may have allocated, where that is not what its device has. None where a stage has no figure, or nothing
    to scale."""
    layers, known = _layers(pieces, len(held)).sum(axis=1).tolist(), [each for each in found if each is not None]
    allowed = [[bytes for bytes in (each.capacity, limit) if bytes is not None] for each in known]
    if len(known) < len(held) or not all(allowed) or min(layers) < 1 or min(held) < 1:
        return None
    least, most = tuple(each.least for each in known), tuple(each.most for each in known)
    return Memory(tuple(layers), tuple(held), least, most, tuple(map(min, allowed)))


def in_flight_layers(pieces: Layout, schedule: PipelineSchedule) -> list[int]:
    """For every stage the most layers whose activations it holds at once: one for each microbatch that a chunk has run
    forward and not yet backward, times the chunk's layers (MTP layers included). All zero in a forward-only pass."""
    stages = schedule.stages
    found: list[int] = _held(np.arange(stages), _layers(pieces, stages), schedule).tolist()
    return found


def _layers(pieces: Layout, stages: int) -> Whole:
    """[stage, chunk]: how many each holds, MTP layers included."""
    return np.array([piece.count("t") + piece.count("m") for piece in pieces]).reshape(-1, stages).T


def _held(stages: Whole, layers: Whole, schedule: PipelineSchedule) -> Whole:
    """[n]: the most layers times microbatches in flight of some stages, whose chunks hold ``layers`` [n, chunk]."""
    if schedule.forward_only:
        return np.zeros(len(stages), dtype=np.intp)
    most: Whole = (_in_flight(schedule)[stages] * layers[:, None]).sum(axis=2).max(axis=1)
    return most


@lru_cache(maxsize=16)
def _in_flight(schedule: PipelineSchedule) -> Whole:
    """[stage, way, chunk]: the microbatches that the chunks of a stage have run forward and not yet backward, whenever
    it is about to run a backward. A stage that has fewer ways than another one has its first way several times."""
    found = []
    for stage in range(schedule.stages):
        held, ways, before = [0] * schedule.chunks, dict[tuple[int, ...], None](), "forward"
        for phase in phase_order(schedule, stage):
            if phase.kind != "forward" and before == "forward":
                ways[tuple(held)] = None
            held[phase.chunk] += 1 if phase.kind == "forward" else -1
            before = phase.kind
        found.append(_corners(np.array(list(ways))))
    longest = max(map(len, found))
    return np.array([[*ways, *[ways[0]] * (longest - len(ways))] for ways in found])


def _corners(ways: Whole) -> Whole:
    """Without what lies between two others on a line: however many layers chunks hold, one of the two is not less."""
    steps = np.diff(ways, axis=0)
    turns = (steps[1:] != steps[:-1]).any(axis=1)
    corners: Whole = ways[np.concatenate([[True], turns, [True]])[: len(ways)]]
    return corners
