"""Whether a layout fits into the devices, by what the captured stages were measured to have allocated.

A stage in another layout needs its measured peak, and for every layer more (or less) what a layer takes: for its
parameters, gradients and states of the optimizer, and once for every microbatch in flight. That is what it takes on the
stage where it takes least, because the others hold more than layers. Without a figure for every stage nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from megaprof.analysis.trace.gpu import Peak
from megaprof.analysis.what_if.layouts import Layout, layers_per_stage
from megaprof.parallel.schedules import PipelineSchedule, phase_order


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
        return self.excess == 0.0

    @property
    def excess(self) -> float:
        """By how many times its bytes they need more than that, all stages together."""
        return sum(max(n / a - 1.0, 0.0) for n, a in zip(self.needed, self.allowed, strict=True))


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
    allowed: tuple[int, ...]
    """Bytes that it may have: what its smallest device has, or less."""

    def fit(self, pieces: Layout, needs: Sequence[int]) -> MemoryFit:
        """Of a layout that has ``needs`` layers times microbatches in flight."""
        per_layer = min(least / count for least, count in zip(self.least, self.layers, strict=True))
        activations = min((m - s) / h for m, s, h in zip(self.most, self.least, self.held, strict=True))
        needed = []
        for stage, count in enumerate(layers_per_stage(pieces, len(self.layers))):
            more = (count - self.layers[stage]) * per_layer + (needs[stage] - self.held[stage]) * activations
            needed.append(max(0, round(self.most[stage] + more)))
        return MemoryFit(tuple(needed), self.allowed)

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
    layers, known = layers_per_stage(pieces, len(held)), [each for each in found if each is not None]
    allowed = [[bytes for bytes in (each.capacity, limit) if bytes is not None] for each in known]
    if len(known) < len(held) or not all(allowed) or min(layers) < 1 or min(held) < 1:
        return None
    least, most = tuple(each.least for each in known), tuple(each.most for each in known)
    return Memory(tuple(layers), tuple(held), least, most, tuple(map(min, allowed)))


def in_flight_layers(pieces: Layout, schedule: PipelineSchedule) -> list[int]:
    """For every stage the most layers whose activations it holds at once: one for each microbatch that a chunk has run
    forward and not yet backward, times the chunk's layers (MTP layers included). All zero in a forward-only pass."""
    if schedule.forward_only:
        return [0] * schedule.stages
    layers = [piece.count("t") + piece.count("m") for piece in pieces]
    return [
        max((sum(map(mul, held, layers[stage :: schedule.stages])) for held in ways), default=0)
        for stage, ways in enumerate(_in_flight(schedule))
    ]


@lru_cache(maxsize=16)
def _in_flight(schedule: PipelineSchedule) -> list[set[tuple[int, ...]]]:
    """For every stage the microbatches that each of its chunks has run forward and not yet backward, at all times when
    it is about to run a backward."""
    found = []
    for stage in range(schedule.stages):
        held, ways, before = [0] * schedule.chunks, set[tuple[int, ...]](), "forward"
        for phase in phase_order(schedule, stage):
            if phase.kind != "forward" and before == "forward":
                ways.add(tuple(held))
            held[phase.chunk] += 1 if phase.kind == "forward" else -1
            before = phase.kind
        found.append(ways)
    return found
