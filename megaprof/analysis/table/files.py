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
            by_key[key] = completed(from_timelines, from_traces) or from_traces
        elif not isinstance(from_timelines, Table):
            by_key[key] = from_traces
    return by_key


def completed(recorded: Table, traced: Table) -> Table | None:
    """Returns the table of a timeline with what a trace shows about passes. How long they take is a matter of steps
    without a profiler, and so of the timeline; what they consist of is a matter of the trace. Returns None if the two
    do not show the same passes, or one of them not as the GPU ran them.

    On a GPU, kernels take as long under a profiler as without it. So compute and transfers are taken over in
    milliseconds, and what is left of the timeline's pass is waiting: for peers, as far as their arrivals show it, and
    else for the host. On a CPU, the profiler makes compute longer, so transfers are taken over, and shares of peers.
    """
    on_gpu = "host_bound" in traced.spent
    whole = all(metadata is not None for metadata in (*recorded.metadata, *traced.metadata))
    if recorded.schedule != traced.schedule or recorded.device != on_gpu or not whole:
        return None
    passes, peers = recorded.passes, recorded.working.shape[3]
    usual = [np.maximum(ms, 1e-9)[..., None] for ms in (passes.mean(axis=(0, 5)), np.median(passes, axis=(0, 5)))]
    replicas = [np.flatnonzero(traced.ranks[:, 0, 0] == rank) for rank in recorded.ranks[:, 0, 0]]

    def parts(traced_ms: Floats) -> Floats:
        """Returns which part of a pass takes ``traced_ms`` [t, d, s, (p,) c, k, m] in the trace, [d, s, (p,) c, k, 1].
        By means, bursts in the other steps would look like waiting, and by medians, other microbatches."""
        of_pass = []
        for ms, took in zip((traced_ms.mean(axis=(0, -1)), np.median(traced_ms, axis=(0, -1))), usual, strict=True):
            of_replicas = np.stack([ms[same if len(same) else ...].mean(axis=0) for same in replicas])[..., None]
            of_pass.append(of_replicas / (took if of_replicas.ndim == 5 else took[:, :, None]))
        return np.where(of_pass[0] > of_pass[1], *of_pass)

    def of_peers(traced_ms: Floats) -> Floats:
        """Returns the times of the timeline's peers, [t, d, s, p, ...]; of other ones, all wait for the longest."""
        return (
            traced_ms if traced_ms.shape[3] == peers else np.repeat(traced_ms.max(axis=3, keepdims=True), peers, axis=3)
        )

    left, exposed = np.ones_like(usual[0]), dict[str, Floats]()
    for group, exposed_ms in traced.exposed.items():
        waits = recorded.spent.get(f"{group}_waiting")
        part = parts(exposed_ms)
        if waits is not None:  # even the last peer waits, because another one comes last to another collective
            of_pass = np.nanmean(waits.min(axis=3) / np.maximum(passes.sum(axis=(3, 4, 5)), 1e-9), axis=0)
            part = part + of_pass[..., None, None, None]
        part = np.minimum(part, left)
        exposed[group], left = passes * part, left - part
    working, compute, idle, spent = recorded.working, recorded.compute, recorded.idle, dict(recorded.spent)
    own = parts(of_peers(traced.working))  # [d, s, p, c, k, 1]
    if on_gpu:
        own = np.minimum(own, left[:, :, None])
        idle = np.maximum(passes * (left - own.max(axis=2)) - sum(recorded.held.values()), 0.0)
        working = passes[:, :, :, None] * own
        compute = np.minimum(passes[:, :, :, None] * parts(of_peers(traced.compute)), working)
        spent["host_bound"] = np.broadcast_to(idle.sum(axis=(3, 4, 5))[..., None], working.shape[:4])
        for name in filter(traced.spent.__contains__, ("pp", "dp", "gradients")):  # outside of passes
            of_ranks = np.median(of_peers(traced.spent[name]), axis=0)
            usual_ms = [np.median(of_ranks[same if len(same) else ...], axis=0) for same in replicas]
            spent[name] = np.broadcast_to(np.stack(usual_ms), working.shape[:4])
    elif not any(name.endswith("_waiting") for name in spent):
        working = (passes * left)[:, :, :, None] * (own / np.maximum(own.max(axis=2, keepdims=True), 1e-9))
        compute = np.minimum(compute, working)
    for group in exposed.keys() - spent.keys():
        others = sum(ms for other, ms in exposed.items() if other != group)
        spent[group] = (passes - idle - others).sum(axis=(3, 4, 5))[..., None] - working.sum(axis=(4, 5, 6))
    notes = [note for note in (*recorded.warnings, *traced.warnings) if note.kind != "first_steps"]
    return replace(
        recorded,
        exposed=exposed,
        idle=idle,
        working=working,
        compute=compute,
        spent=spent,
        profiled_length=traced.length,
        experts=traced.experts if recorded.ranks.shape == traced.ranks.shape else None,
        memory=tuple(map(combined_peak, zip(recorded.memory, traced.memory, strict=True))),
        modules=traced.modules,
        warnings=tuple(n for n in notes if n.kind != "exposed_unknown" or not n.names or {*n.names} - spent.keys()),
    )
