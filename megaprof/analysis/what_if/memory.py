"""Whether a layout fits into the devices, by what the captured stages were measured to have allocated.

A stage in another layout needs its measured peak, and for every layer more (or less) what a layer takes: for its
parameters, gradients and states of the optimizer, and once for every microbatch in flight. That is what it takes on the
stage where it takes least, because the others hold more than layers. Without a figure for every stage nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaprof.analysis.trace.calls import Call
from megaprof.analysis.what_if.layouts import Layout, layers_per_stage
from megaprof.parallel.schedules import PipelineSchedule, phase_order

_GIB = 1 << 30


@dataclass(frozen=True)
class Fit:
    """What a layout needs on the stage that is closest to its device's memory, or furthest above it."""

    stage: int
    """Its pipeline rank."""
    needed: int
    """Bytes that it would have allocated at its peak."""
    measured: int
    """Bytes that it was measured to have."""
    capacity: int
    """Bytes that its device has."""

    @property
    def fits(self) -> bool:
        """Whether they are enough."""
        return self.needed <= self.capacity

    def __str__(self) -> str:
        would = "about" if self.fits else "would need about"
        return (
            f"stage {self.stage}: {would} {self.needed / _GIB:.1f} of the {self.capacity / _GIB:.1f} GiB of its device "
            f"at its peak, by scaling the measured {self.measured / _GIB:.1f} GiB"
        )


@dataclass(frozen=True)
class Memory:
    """What the captured stages had allocated, by stage."""

    layers: tuple[int, ...]
    """Layers that each holds."""
    held: tuple[int, ...]
    """The most layers times microbatches that each has in flight."""
    least: tuple[int, ...]
    """Bytes that each had allocated at the least."""
    most: tuple[int, ...]
    """Bytes that each had allocated at the most, on any of its ranks."""
    capacity: tuple[int, ...]
    """Bytes that its smallest device has."""

    def fit(self, pieces: Layout, needs: Sequence[int]) -> Fit:
        """Of a layout that has ``needs`` layers times microbatches in flight."""
        per_layer = min(least / count for least, count in zip(self.least, self.layers, strict=True))
        activations = min((m - s) / h for m, s, h in zip(self.most, self.least, self.held, strict=True))
        found = []
        for stage, count in enumerate(layers_per_stage(pieces, len(self.layers))):
            more = (count - self.layers[stage]) * per_layer + (needs[stage] - self.held[stage]) * activations
            needed = max(0, round(self.most[stage] + more))
            found.append(Fit(stage, needed, self.most[stage], self.capacity[stage]))
        return max(found, key=lambda fit: fit.needed / fit.capacity)


def measured(calls: Mapping[int, Sequence[Call]], pieces: Layout, held: Sequence[int]) -> Memory | None:
    """``calls``: by stage; ``held``: the most layers times microbatches that each has in flight. None where a stage has
    no figure, or nothing to scale."""
    stages = range(len(held))
    layers = layers_per_stage(pieces, len(held))
    found = [[call.memory for call in calls.get(stage, ())] for stage in stages]
    known = [[each for each in own if each is not None] for own in found]
    if not all(known) or min(layers) < 1 or min(held) < 1:
        return None
    capacities = [[each.capacity for each in own if each.capacity is not None] for own in known]
    if not all(capacities):
        return None
    return Memory(
        tuple(layers),
        tuple(held),
        tuple(min(each.least for each in own) for own in known),
        tuple(max(each.most for each in own) for own in known),
        tuple(map(min, capacities)),
    )


def in_flight_layers(pieces: Layout, schedule: PipelineSchedule) -> list[int]:
    """For every stage the most layers whose activations it holds at once: one for each microbatch that a chunk has run
    forward and not yet backward, times the chunk's layers (MTP layers included). All zero in a forward-only pass."""
    most = [0] * schedule.stages
    if schedule.forward_only:
        return most
    for stage in range(schedule.stages):
        layers = [sum(piece.count(letter) for letter in "tm") for piece in pieces[stage :: schedule.stages]]
        held = 0
        for phase in phase_order(schedule, stage):
            held += layers[phase.chunk] if phase.kind == "forward" else -layers[phase.chunk]
            most[stage] = max(most[stage], held)
    return most
