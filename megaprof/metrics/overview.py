"""One rank's look at all others now and then: for the scalars, and for the captures that a job makes by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megaprof.config.options import ProfileConfig
from megaprof.formats.job import RunRecord
from megaprof.metrics import sinks
from megaprof.metrics.figures import summarise
from megaprof.parallel.topology import RankCoords
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.control.listener import Listener


#: Ranks that one look reads. In a larger world each look reads others, evenly from all of it.
MOST_RANKS = 1024
#: Status files that are read a second, at most.
READ_RATE = 50
LEAST_SECONDS = 10.0


class Overview:
    """Gives a summary of the job to every sink, on the background thread of the lowest and of the last rank: the last
    one is where Megatron-LM keeps its writers.

    It reads nothing while nobody wants to know. A sink that fails is left alone from then on.
    """

    def __init__(
        self,
        config: ProfileConfig,
        listener: Listener,
        coords: RankCoords,
        role: str | None,
        writers: Callable[[], sinks.Writers],
        see: Callable[[float | None], None] | None = None,
    ) -> None:
        """`writers` returns those that the host has made by now. `see` is called with the imbalance at each look."""
        self._listener = listener
        self.every = max(LEAST_SECONDS, min(coords.sizes.world, MOST_RANKS) / READ_RATE)
        """Seconds from one look to the next."""
        self._role = role
        self._writers = writers
        self._see = see
        self._looks = 0
        self._broken: set[str] = set()
        writes = config.prometheus is not None and coords.rank == 0
        self._prometheus = sinks.Prometheus(str(config.prometheus), role) if writes else None
        self._otel: sinks.OpenTelemetry | None = None

    def look(self) -> None:
        """Reads the statuses of all ranks, or of some, and hands their summary on."""
        job = self._listener.job
        if job is None or self._listener.closed:
            return
        working = [(name, sink) for name, sink in self._sinks() if name not in self._broken]
        if not working and self._see is None:
            return
        statuses = job.statuses(self._ranks(job.run))
        self._looks += 1
        summary = summarise(job.run, [status for status in statuses.values() if not status.late(time.time())])
        for name, sink in working:
            try:
                sink(summary)
            except Exception as fault:  # the host's writer, or its disk
                self._broken.add(name)
                logger.warning("megaprof: no scalars to %s any more: %r", name, fault)
        if self._see is not None:
            self._see(summary.imbalance)

    def close(self) -> None:
        if self._otel is not None:
            self._otel.close()

    def _sinks(self) -> list[tuple[str, sinks.Sink]]:
        """Returns the sinks that there are now, by name."""
        host = self._writers()
        there = list(sinks.host_sinks(host, self._role))
        if self._prometheus is not None:
            there.append(("Prometheus", self._prometheus))
        if self._otel is None and "OpenTelemetry" not in self._broken:
            try:
                meter = sinks.meter(host.meter)
                self._otel = None if meter is None else sinks.OpenTelemetry(meter, self._role)
            except Exception as fault:
                self._broken.add("OpenTelemetry")
                logger.warning("megaprof: no scalars to OpenTelemetry: %r", fault)
        if self._otel is not None:
            there.append(("OpenTelemetry", self._otel))
        return there

    def _ranks(self, run: RunRecord) -> list[int]:
        """Returns all ranks, or in a large world every n-th one of each stage, beginning with another one each time."""
        stride = math.ceil(run.world / MOST_RANKS)
        layout, sizes = run.layout, run.sizes
        if stride == 1 or layout is None:
            return list(range(self._looks % stride, run.world, stride))
        chosen = range(self._looks % stride, run.world // sizes.pp, stride)
        places = ((i % sizes.tp, i // sizes.tp % sizes.cp, i // sizes.tp // sizes.cp) for i in chosen)
        return [layout.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) for tp, cp, dp in places for pp in range(sizes.pp)]
