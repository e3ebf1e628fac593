"""A pipeline whose exchanges happen at times known to the nanosecond, on clocks that are wrong by a known amount."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.analysis.kineto import MS
from tests.analysis.synthetic import TraceBuilder, chunk

_TRAVELS = 0.1  # milliseconds


def exchanging(
    ahead: list[float], *, microbatches: int = 3, hosts: list[str] | None = None, **options: Any
) -> list[TraceBuilder]:
    """One trace per stage: all forwards, then all backwards, each sent on as soon as it is done; milliseconds.

    ``ahead``: by how much each stage's clock is. A forward takes 2, a backward 3, a message 0.1.
    """
    count = len(ahead)
    arrived = [0.0] * microbatches
    free = [0.0] * count
    traces = []
    for stage in range(count):
        metadata = {"host": hosts[stage] if hosts else f"node-{stage}"} | options.get("metadata", {})
        holds = [chunk(2, embedding=stage == 0, loss=stage == count - 1)]
        more = {key: value for key, value in options.items() if key != "metadata"}
        traces.append(
            TraceBuilder(pp=stage, pp_size=count, microbatches=microbatches, chunks=holds, metadata=metadata, **more)
        )
    for kind, order, takes in (("forward", range(count), 2.0), ("backward", range(count - 1, -1, -1), 3.0)):
        arrived = [free[order[0]]] * microbatches
        for place, stage in enumerate(order):
            now, trace = free[stage], traces[stage]

            def add(
                name: str, start: float, end: float, *, trace: TraceBuilder = trace, by: float = ahead[stage]
            ) -> None:
                trace.event(f"megaprof/{name}", start + by, end - start)

            for mb in range(microbatches):
                begin = max(now, arrived[mb])
                if place:
                    add(f"recv_{kind}", now, begin)
                add(f"{kind} mb={mb} chunk=0", begin, begin + takes)
                now = begin + takes
                if place < count - 1:
                    add(f"send_{kind}", now, now + 0.05)
                    arrived[mb] = now + _TRAVELS
                    now += 0.05
            free[stage] = now
    for stage, trace in enumerate(traces):
        trace.call(ahead[stage], max(free))
    return traces


def write(traces: list[TraceBuilder], directory: Path) -> list[Path]:
    return [trace.write(directory) for trace in traces]


__all__ = ["MS", "exchanging", "write"]
