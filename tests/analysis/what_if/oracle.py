"""What the layout search is judged by: the replay of any layout, and what no layout can beat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megaprof.analysis.simulation import Simulation, compiled, simulate
from megaprof.analysis.what_if.contents import Cost
from megaprof.analysis.what_if.layout_search import Unit, search
from megaprof.analysis.what_if.layouts import Layout
from megaprof.parallel.schedules import PipelineSchedule

FREE = Cost(0.0)


@dataclass(frozen=True)
class CostModel:
    """What a microbatch costs in each kind of layer, and on its way from one piece to the next. ``layer``: one cost for
    all decoder layers, or one for each."""

    layer: Cost | tuple[Cost, ...]
    embedding: Cost = FREE
    loss: Cost = FREE
    mtp: Cost = FREE
    p2p_ms: float = 0.0

    def units(self, layers: int, mtp_layers: int = 0) -> list[tuple[str, Cost]]:
        """The model from front to back in parts that no layout divides: all MTP layers are one."""
        each = (self.layer,) * layers if isinstance(self.layer, Cost) else self.layer
        mtp = Cost(self.mtp.forward_ms * mtp_layers, self.mtp.backward_ms * mtp_layers)
        units = [("E", self.embedding), *(("t", cost) for cost in each)]
        return [*units, *([("m" * mtp_layers, mtp)] if mtp_layers else []), ("L", self.loss)]


def searched(
    cost: CostModel,
    pp: int,
    vpp: int,
    layers: int,
    microbatches: int,
    *,
    mtp_layers: int = 0,
    forward_only: bool = False,
    rendezvous: bool = False,
    **options: Any,
) -> dict[Layout, float]:
    """The layouts that the search finds for such a model."""
    overlap = "none" if rendezvous else "all"  # as `simulate` has it
    schedule = PipelineSchedule.checked(pp, vpp, microbatches, forward_only=forward_only, overlap=overlap)
    units: list[Unit] = [
        (name, [one.forward_ms] if forward_only else [one.forward_ms, one.backward_ms])
        for name, one in cost.units(layers, mtp_layers)
    ]
    return search(units, compiled(schedule, rendezvous), p2p_ms=cost.p2p_ms, **options)


def replay_layout(
    pieces: Sequence[str],
    pp: int,
    cost: CostModel,
    microbatches: int,
    *,
    forward_only: bool = False,
    microbatch_group_size: int | None = None,
    rendezvous: bool = False,
) -> Simulation:
    """Replay any layout (checked or not, empty pieces too) with the times that a cost model gives it."""
    layers, mtp_layers = "".join(pieces).count("t"), "".join(pieces).count("m")
    costs: dict[str, Iterator[Cost]] = {"E": iter([cost.embedding]), "L": iter([cost.loss])}
    costs["t"] = iter([one for name, one in cost.units(layers) if name == "t"])
    costs["m"] = iter([cost.mtp] * mtp_layers)
    placed = [[next(costs[letter]) for letter in piece] for piece in pieces]

    def times(values: list[float]) -> list[list[float]]:
        return [values[stage::pp] for stage in range(pp)]

    return simulate(
        times([sum(one.forward_ms for one in piece) for piece in placed]),
        None if forward_only else times([sum(one.backward_ms for one in piece) for piece in placed]),
        microbatches,
        p2p_ms=cost.p2p_ms,
        microbatch_group_size=microbatch_group_size,
        rendezvous=rendezvous,
    )


def lower_bound_ms(
    cost: CostModel,
    pp: int,
    vpp: int,
    layers: int,
    microbatches: int,
    *,
    mtp_layers: int = 0,
    forward_only: bool = False,
) -> float:
    """No layout's step is shorter than this.

    The largest of: the mean stage's work; one microbatch's way through all pieces; the heaviest indivisible layer's
    work; and, with one chunk a stage, this. Stage s can begin only after the first microbatch's forward through the
    stages before it and is followed by the last one's backward through them, so step >= m w_s + (w_0 + ... + w_{s-1})
    for m microbatches and work w per microbatch; the sum W of all w fixed, the largest of these is smallest when all
    are equal, which gives W / (1 - (1 - 1/m)^p). A forward passes the later stages too: (m - 1 + p) W / p.
    """
    if min(pp, vpp, microbatches) < 1:
        raise ValueError(f"pp={pp}, vpp={vpp} and microbatches={microbatches} must be at least 1")
    work = [one.forward_ms + one.backward_ms * (not forward_only) for _, one in cost.units(layers, mtp_layers)]
    total, m = sum(work), microbatches
    way = total + (pp * vpp - 1) * (1 if forward_only else 2) * cost.p2p_ms
    bounds = [m * total / pp, way, m * max(work)]
    if vpp == 1:
        bounds.append((m - 1 + pp) * total / pp if forward_only else total / (1 - (1 - 1 / m) ** pp))
    return max(bounds)
