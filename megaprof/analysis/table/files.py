"""Tables of passes from traces, from timelines, and from both together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.reading import FleetReading, Key
from megaprof.analysis.table.recorded import tables_of_timelines
from megaprof.analysis.table.table import Floats, Table, Unfit
from megaprof.analysis.trace.gpu import combined_peak
from megaprof.analysis.trace.pool import Workers


def tables(
    traced: Mapping[Key, Table | Unfit], reading: FleetReading, fleets: Iterable[Fleet] = (), workers: Workers = 1
) -> dict[Key, Table | Unfit]:
    """Returns the table of every job, or why there is none. A table is made from traces, from timelines, or from both
    together. ``traced``: the tables from traces; ``fleets``: the survey of the timelines."""
    by_key = tables_of_timelines(reading, fleets, workers)
    for key, from_traces in traced.items():
        from_timelines = by_key.get(key)
        if isinstance(from_timelines, Table) and isinstance(from_traces, Table):
            by_key[key] = completed(from_timelines, from_traces)
        elif not isinstance(from_timelines, Table):
            by_key[key] = from_traces
    return by_key


def completed(recorded: Table, traced: Table) -> Table:
    """Returns a timeline's table, completed with what a trace shows about passes: which parts of them are exposed
    communication or an idle GPU. If the trace has at least as many ranks and steps, or another schedule, returns the
    trace's own table."""
    same_schedule = recorded.schedule == traced.schedule
    traced_ranks = traced.ranks[..., : traced.compute.shape[3]].size
    if not same_schedule or (traced_ranks >= recorded.ranks.size and len(traced.steps) >= len(recorded.steps)):
        return traced

    def part(lost_ms: Floats) -> Floats:
        """Returns milliseconds of each pass, in the shape of ``lost_ms``, by the usual fraction of traced passes."""
        of_peers = (slice(None),) * 3 + (None,) * (lost_ms.ndim - traced.passes.ndim)
        usual_fraction = np.median(lost_ms / np.maximum(traced.passes[of_peers], 1e-9), axis=(0, 1, -1))
        part_ms: Floats = recorded.passes[of_peers] * usual_fraction[..., None]
        return part_ms

    exposed, idle = {group: part(exposed_ms) for group, exposed_ms in traced.exposed.items()}, part(traced.idle)
    same_shape = recorded.compute.shape[1:4] == traced.compute.shape[1:4]
    working, compute = part(traced.working), part(traced.compute)
    if working.shape != recorded.working.shape or any(name.endswith("_waiting") for name in recorded.spent):
        # The timeline knows better which peer waits for which.
        unseen = idle + sum(exposed_ms for group, exposed_ms in exposed.items() if group not in recorded.spent)
        working, compute = np.maximum(recorded.working - unseen[:, :, :, None], 0.0), recorded.compute
    return replace(
        recorded,
        exposed=exposed,
        idle=idle,
        working=working,
        compute=compute,
        experts=traced.experts if same_shape else None,
        memory=tuple(map(combined_peak, zip(recorded.memory, traced.memory, strict=True))),
        modules=traced.modules,
    )
