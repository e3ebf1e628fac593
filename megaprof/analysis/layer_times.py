"""Times of single layers, where layer ranges were captured (``--profile-ranges layer`` or finer)."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megaprof import ranges
from megaprof.analysis.layout_search import Cost
from megaprof.analysis.traces import Trace

__all__ = ["LayerTimes", "layer_times"]

Target = tuple[str, "str | None"]
"""A target and a role."""
Layer = tuple[str, int]
"""``ranges.LAYER`` or ``ranges.MTP_LAYER``, and Megatron's number of the layer."""


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of every forward and every backward of each layer, one sample per microbatch, by target."""

    forward: dict[tuple[Target, Layer], list[float]] = field(default_factory=dict)
    backward: dict[tuple[Target, Layer], list[float]] = field(default_factory=dict)

    def add(self, other: LayerTimes) -> None:
        """Take over the samples of another trace."""
        for mine, theirs in ((self.forward, other.forward), (self.backward, other.backward)):
            for key, samples in theirs.items():
                mine.setdefault(key, []).extend(samples)

    def costs(self, target: Target, label: str, numbers: Iterable[int | None], *, forward_only: bool) -> list[Cost] | None:
        """The median of each of some layers, None when one of them has no samples."""
        costs = []
        for number in numbers:
            key = (target, (label, -1 if number is None else number))
            forward, backward = self.forward.get(key), self.backward.get(key)
            if not forward or not (backward or forward_only):
                return None
            costs.append(Cost(statistics.median(forward), statistics.median(backward) if backward else 0.0))
        return costs


def layer_times(trace: Trace) -> LayerTimes:
    """The layers' times in one trace.

    A layer's forward inside a backward is a recomputation, and is part of its backward's phase: only forwards in
    forward phases and backwards in backward phases count.
    """
    found = LayerTimes()
    modules = [r for r in trace.ranges if r.name.module in (ranges.LAYER, ranges.MTP_LAYER)]
    if not modules:
        return found
    phases = [r for r in trace.ranges if r.name.label in (ranges.FORWARD, ranges.BACKWARD)]
    calls = [r for r in trace.ranges if r.name.fields.get("step") is not None]
    phase_starts, call_starts = [r.start for r in phases], [r.start for r in calls]
    into: Mapping[str, dict[tuple[Target, Layer], list[float]]] = {
        ranges.FORWARD: found.forward,
        ranges.BACKWARD: found.backward,
    }
    for module in modules:
        phase = bisect_right(phase_starts, module.start) - 1
        call = bisect_right(call_starts, module.start) - 1
        number = module.name.fields.get("n")
        if phase < 0 or call < 0 or number is None or "mtp" in module.name.fields:
            continue
        kind = ranges.BACKWARD if module.name.is_module_backward else ranges.FORWARD
        label = module.name.module
        if phases[phase].name.label == kind and module.end <= phases[phase].end and label is not None:
            key = ((calls[call].name.label, trace.metadata.role), (label, number))
            into[kind].setdefault(key, []).append((module.end - module.start) / 1e6)
    return found
