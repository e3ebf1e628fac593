"""Predicts whether a layout fits into the devices, from the memory that the captured stages had allocated.

A stage in another layout needs its measured peak plus or minus the memory of the layers that it gets or loses: the
parameters, gradients and optimizer states of a layer, and its activations for each microbatch in flight. Both numbers
are from the stage on which they are smallest, because the others hold more than layers. Unless every stage was
measured, nothing is predicted.
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
class Memory:
    """The memory of the captured run, by stage: the ``layers`` that it holds, including MTP layers, the most layers
    times microbatches in flight (``held``), the fewest bytes that it had allocated (``least``), the most that any of
    its ranks had (``most``), and those that it may allocate (``allowed``): its smallest device's, or less."""

    layers: tuple[int, ...]
    held: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    allowed: tuple[int, ...]

    @cached_property
    def per_layer(self) -> float:
        """Bytes of a layer, on the stage where they are fewest."""
        return min(least / count for least, count in zip(self.least, self.layers, strict=True))

    @cached_property
    def activations(self) -> float:
        """Bytes of a layer's activations of one microbatch, on the stage where they are fewest."""
        return min((m - s) / h for m, s, h in zip(self.most, self.least, self.held, strict=True))

    def needed(self, stages: Whole, layers: Whole, schedule: PipelineSchedule) -> Floats:
        """Returns [n]: the bytes that each of some ``stages`` [n] would allocate at its peak if its chunks held
        ``layers`` [n, chunk], including MTP layers."""
        more = (layers.sum(axis=1) - np.take(self.layers, stages)) * self.per_layer
        more = more + (_held(stages, layers, schedule) - np.take(self.held, stages)) * self.activations
        needed: Floats = np.maximum(np.rint(np.take(self.most, stages) + more), 0.0)
        return needed

    def part(self, stages: Whole, layers: Whole, schedule: PipelineSchedule) -> Floats:
        """Returns [n]: `needed` as a fraction of what each stage may allocate."""
        part: Floats = self.needed(stages, layers, schedule) / np.take(self.allowed, stages)
        return part

    def fit(self, pieces: Layout, schedule: PipelineSchedule) -> tuple[bool, tuple[int, ...]]:
        """Returns whether a layout fits, and the bytes that each stage would allocate at its peak."""
        needed = self.needed(np.arange(schedule.stages), _layers(pieces, schedule.stages), schedule)
        return bool((needed <= self.allowed).all()), tuple(map(int, needed.tolist()))


def peaks(stages: Sequence[Peak | None]) -> tuple[int, ...] | None:
    """Returns the most bytes that each stage had allocated; None if some stage was not measured."""
    most = [peak.most for peak in stages if peak is not None]
    return tuple(most) if len(most) == len(stages) else None


def measured(
    stages: Sequence[Peak | None], pieces: Layout, held: Sequence[int], limit: int | None = None
) -> Memory | None:
    """Returns the memory of a run with these ``pieces``; None if some stage was not measured, or has no layer or
    activation to scale by. ``held``: the most layers times microbatches that each stage has in flight; ``limit``: bytes
    that a stage may allocate, if that is less than its device has."""
    layers, at_peak = _layers(pieces, len(held)).sum(axis=1).tolist(), [peak for peak in stages if peak is not None]
    allowed = [[bytes for bytes in (peak.capacity, limit) if bytes is not None] for peak in at_peak]
    if len(at_peak) < len(held) or not all(allowed) or min(layers) < 1 or min(held) < 1:
        return None
    least, most = tuple(peak.least for peak in at_peak), tuple(peak.most for peak in at_peak)
    return Memory(tuple(layers), tuple(held), least, most, tuple(map(min, allowed)))


def in_flight_layers(pieces: Layout, schedule: PipelineSchedule) -> list[int]:
    """Returns, by stage, the most activations that it holds at once, in layers times microbatches. For each microbatch
    that a chunk has run forward and not yet backward, the layers of the chunk count, including MTP layers. All are zero
    in a forward-only pass."""
    stages = schedule.stages
    most: list[int] = _held(np.arange(stages), _layers(pieces, stages), schedule).tolist()
    return most


def _layers(pieces: Layout, stages: int) -> Whole:
    """Returns [stage, chunk]: how many layers each holds, including MTP layers."""
    return np.array([piece.count("t") + piece.count("m") for piece in pieces]).reshape(-1, stages).T


def _held(stages: Whole, layers: Whole, schedule: PipelineSchedule) -> Whole:
    """Returns [n]: the most layers times microbatches in flight on some stages, whose chunks hold ``layers`` [n,
    chunk]."""
    if schedule.forward_only:
        return np.zeros(len(stages), dtype=np.intp)
    most: Whole = (_in_flight(schedule)[stages] * layers[:, None]).sum(axis=2).max(axis=1)
    return most


@lru_cache(maxsize=16)
def _in_flight(schedule: PipelineSchedule) -> Whole:
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
