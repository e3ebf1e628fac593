"""One rank's look at all others now and then: for the scalars, and for the captures that a job makes by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megaprof.config.options import ProfileConfig
from megaprof.metrics import sinks
from megaprof.metrics.figures import Summary, summarise
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.control.listener import Listener
    from megaprof.formats.job.run import RunRecord


#: Ranks that one look reads; of a larger world others each time, evenly from all of it.
MOST_RANKS = 1024
#: Status files that are read a second, at most.
READ_RATE = 50
LEAST_SECONDS = 10.0


class Overview:
    """Follows the listener of the lowest rank, and that of the last one, where Megatron-LM keeps its writers.

    It reads nothing while nobody wants to know. A sink that fails is left alone from then on.
    """

    def __init__(self, config: ProfileConfig, *, leads: bool, role: str | None, every: float | None = None) -> None:
        self._config = config
        self._leads = leads
        self._role = role
        self._every = every
        self._due = 0.0
        self._looks = 0
        self._broken: set[str] = set()
        self._prometheus = (
            sinks.Prometheus(config.prometheus, role) if leads and config.prometheus is not None else None
        )
        self._otel: sinks.OpenTelemetry | None = None
        self._wanted: list[Callable[[Summary], None]] = []

    def want(self, consumer: Callable[[Summary], None]) -> None:
        """Give each summary to `consumer` as well, which does not raise."""
        self._wanted.append(consumer)

    def __call__(self, listener: Listener) -> None:
        job, now = listener.job, time.monotonic()
        if job is None or now < self._due:
            return
        self._due = now + (self._every or max(LEAST_SECONDS, min(job.run.world, MOST_RANKS) / READ_RATE))
        found = [(name, sink) for name, sink in self._sinks() if name not in self._broken]
        if not found and not self._wanted:
            return
        statuses = job.statuses(self._ranks(job.run))
        self._looks += 1
        fresh = [status for status in statuses.values() if not status.late(time.time())]
        summary = summarise(job.run, fresh)
        for name, sink in found:
            try:
                sink(summary)
            except Exception as fault:  # the host's writer, or its disk
                self._broken.add(name)
                logger.warning("megaprof: no scalars to %s any more: %r", name, fault)
        for consumer in self._wanted:
            consumer(summary)

    def close(self) -> None:
        if self._otel is not None:
            self._otel.close()

    def _sinks(self) -> list[tuple[str, sinks.Sink]]:
        found = list(sinks.host_sinks(self._role))
        if self._prometheus is not None:
            found.append(("Prometheus", self._prometheus))
        if self._otel is None and "OpenTelemetry" not in self._broken:
            try:
                meter = sinks.meter()
                self._otel = None if meter is None else sinks.OpenTelemetry(meter, self._role)
            except Exception as fault:
                self._broken.add("OpenTelemetry")
                logger.warning("megaprof: no scalars to OpenTelemetry: %r", fault)
        if self._otel is not None:
            found.append(("OpenTelemetry", self._otel))
        return found

    def _ranks(self, run: RunRecord) -> list[int]:
        """All, or every n-th one of each stage, beginning with another one each time."""
        stride = math.ceil(run.world / MOST_RANKS)
        layout = run.layout
        if stride == 1 or layout is None:
            return list(range(self._looks % stride, run.world, stride))
        per_stage = run.world // run.sizes.pp
        sizes = run.sizes
        chosen = range(self._looks % stride, per_stage, stride)
        places = ((i % sizes.tp, i // sizes.tp % sizes.cp, i // sizes.tp // sizes.cp) for i in chosen)
        return [layout.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) for tp, cp, dp in places for pp in range(sizes.pp)]
