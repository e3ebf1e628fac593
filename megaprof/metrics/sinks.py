"""Hands the figures of a job to writers of the host and to OpenTelemetry, from the first rank and the last one.

The sinks are writers of the host and an OpenTelemetry meter provider. megaprof sets none of them up: there are those
that the host has. Each takes a summary, on the background thread. A model with a role has names and attributes of its
own, since a process may hold several models.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from megaprof.control.directory import RunningJob
from megaprof.metrics import Summary, summarise
from megaprof.parallel.topology import RankCoords
from megaprof.runtime.isolation import logger

#: Ranks that one look reads. In a larger world each look reads others, drawn at random.
MOST_RANKS = 1024
#: Status files that are read a second, at most.
READ_RATE = 50
LEAST_SECONDS = 10.0

Sink = Callable[[Summary], object]


Writers = tuple[Any | None, Any | None, Any | None]
"""Where the host writes its own scalars on this rank: a TensorBoard ``SummaryWriter``, the module ``wandb`` with a run
in it, and a meter of OpenTelemetry's; None for each that it does not have."""


#: For each figure its name in OpenTelemetry, its unit and its meaning.
FIGURES = {
    "step_ms": ("step", "ms", "Duration of a step: that of the stage that takes longest (median of its ranks)"),
    "imbalance": ("imbalance", "1", "Compute of the slowest stage over the mean of all stages"),
    "slowest_stage": ("slowest_stage", "1", "Pipeline rank of the stage that computes longest"),
    "bubble_fraction": ("bubble_fraction", "1", "Part of a step in which stages wait for others"),
    "straggler": ("straggler", "1", "Rank that computes longest compared with its peers"),
    "straggler_ratio": ("straggler_ratio", "1", "Its compute over the median of its peers"),
    "compute_ms": ("stage.compute", "ms", "Compute of a stage in a step, median of its ranks, without slow ones"),
    "host_bound_passes": ("stage.host_bound", "1", "Part of its passes that wait for the host"),
}


def _values(summary: Summary, figure: str) -> Iterator[tuple[dict[str, int], float]]:
    """Yields the values of a figure that are known, each with its stage where the figure is one of stages."""
    of_job = hasattr(summary, figure)
    owners: list[tuple[dict[str, int], Any]] = (
        [({}, summary)] if of_job else [({"stage": s.pp}, s) for s in summary.stages]
    )
    yield from ((which, value) for which, owner in owners if (value := getattr(owner, figure)) is not None)


def scalars(summary: Summary, role: str | None = None) -> dict[str, float]:
    """Returns the known figures, by the names that TensorBoard and W&B show."""
    prefix = "megaprof" if role is None else f"megaprof/{role}"
    return {
        "/".join((prefix, figure, *(f"stage_{stage}" for stage in which.values()))): float(value)
        for figure in FIGURES
        for which, value in _values(summary, figure)
        if math.isfinite(value)
    }


def host_sinks(host: Writers, role: str | None = None) -> Iterator[tuple[str, Sink]]:
    writer, wandb, _ = host
    if writer is not None:
        add = writer.add_scalar
        yield "TensorBoard", lambda summary: [add(*named, summary.step) for named in scalars(summary, role).items()]
    if wandb is not None:
        # Without commit: the figures join the step that the host has open instead of being one.
        yield "W&B", lambda summary: wandb.log(scalars(summary, role), commit=False)


def open_telemetry(meter: Any, role: str | None) -> Callable[[Summary | None], None]:
    """Returns a sink for observable gauges of ``meter``, whose provider reads the last summary whenever it exports.
    After None, the gauges yield nothing: they cannot be removed."""
    observation = sys.modules["opentelemetry.metrics"].Observation
    last: Summary | None = None

    def take(summary: Summary | None) -> None:
        nonlocal last
        last = summary

    def observed(options: object, figure: str) -> list[Any]:
        if (summary := last) is None:
            return []
        named = (("role", role), ("target", summary.target))
        labels = {name: value for name, value in named if value is not None}
        return [observation(value, {**labels, **which}) for which, value in _values(summary, figure)]

    for figure, (name, unit, help) in FIGURES.items():
        callback = partial(observed, figure=figure)
        meter.create_observable_gauge(f"megaprof.{name}", callbacks=[callback], unit=unit, description=help)
    return take


def meter(own: Any | None) -> Any | None:
    """Returns a meter of the provider that somebody has set in this process, or ``own``, the host's; None if there is
    none.

    ``get_meter_provider()`` alone would not do: it makes a provider if the environment asks for one, which is up to the
    host.
    """
    metrics = sys.modules.get("opentelemetry.metrics")
    internal = sys.modules.get("opentelemetry.metrics._internal")
    if metrics is None or internal is None or getattr(internal, "_METER_PROVIDER", None) is None:
        return own
    provider = metrics.get_meter_provider()
    # The API's own providers do nothing.
    does_nothing = type(provider).__module__.startswith("opentelemetry.metrics")
    return own if does_nothing else provider.get_meter("megaprof")


class Overview:
    """Gives a summary of the job to every sink, on the background thread of rank 0 and of the last rank: the last one
    is where Megatron-LM keeps its writers.

    A sink that fails is left alone from then on.
    """

    def __init__(
        self,
        coords: RankCoords,
        role: str | None,
        job: Callable[[], RunningJob | None],
        writers: Callable[[], Writers],
    ) -> None:
        """`job` returns the job as far as it is known, `writers` those that the host has made by now."""
        self.every = max(LEAST_SECONDS, min(coords.sizes.world, MOST_RANKS) / READ_RATE)
        """Seconds from one look to the next."""
        self._role, self._job, self._writers = role, job, writers
        self._broken: set[str] = set()
        self._otel: Callable[[Summary | None], None] | None = None

    def look(self) -> None:
        """Reads the statuses of all ranks, or of some, and hands their summary on, if there is a sink."""
        working = [(name, sink) for name, sink in self._sinks() if name not in self._broken]
        if not working or (job := self._job()) is None:
            return
        world = job.run.world
        statuses = job.statuses(sorted(Random().sample(range(world), min(world, MOST_RANKS))))
        summary = summarise(job.run, [status for status in statuses.values() if not status.late(time.time())])
        for name, sink in working:
            try:
                sink(summary)
            except Exception as fault:  # the host's writer, or its disk
                self._broken.add(name)
                logger.warning("megaprof: no scalars to %s any more: %r", name, fault)

    def close(self) -> None:
        if self._otel is not None:
            self._otel(None)

    def _sinks(self) -> Iterator[tuple[str, Sink]]:
        host = self._writers()
        yield from host_sinks(host, self._role)
        if self._otel is None and "OpenTelemetry" not in self._broken:
            try:
                found = meter(host[-1])
                self._otel = None if found is None else open_telemetry(found, self._role)
            except Exception as fault:
                self._broken.add("OpenTelemetry")
                logger.warning("megaprof: no scalars to OpenTelemetry: %r", fault)
        if self._otel is not None:
            yield "OpenTelemetry", self._otel
