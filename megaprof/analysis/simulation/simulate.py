"""Replay one step of a pipeline schedule from plain times: `megaprof.simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import Any

import numpy as np

from megaprof.analysis.simulation.replay import Milliseconds, Replay, compiled
from megaprof.analysis.trace.passes import Pass
from megaprof.parallel.schedules import PipelineSchedule, phase_order

Times = Sequence[Sequence[Any]]
"""[stage][chunk], each entry a number of milliseconds or one number for each microbatch."""


@dataclass(frozen=True)
class Simulation:
    """One replayed step."""

    step_ms: float
    """Milliseconds from the first pass's start to the last pass's end over all stages."""
    bubble_fraction: tuple[float, ...]
    """Of every stage: the fraction of the step in which it computes nothing, exchanges included; 0.0 when the step
    takes no time."""
    stage_ms: tuple[float, ...]
    """Of every stage: milliseconds in which it computes."""
    schedule: PipelineSchedule
    """The schedule that was replayed."""
    _replay: Replay = field(repr=False, compare=False)
    _passes: Milliseconds = field(repr=False, compare=False)
    _p2p_ms: float = field(repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Pass[float], ...]:
        """Every pass, stage by stage in the order in which the stage runs them; times since the start of the step.

        Each has ``stage``, ``chunk``, ``microbatch``, ``phase`` (``forward`` or ``backward``), ``start_ms`` and
        ``end_ms``.
        """
        starts = self._replay.starts(self._passes, link=self._p2p_ms)
        ends = self._replay.ends(self._passes, link=self._p2p_ms)
        found = []
        for stage in range(self.schedule.stages):
            for which in phase_order(self.schedule, stage):
                place = stage, which.chunk, self.schedule.kinds.index(which.kind), which.microbatch
                start, end = 1e6 * float(starts[place]), 1e6 * float(ends[place])
                found.append(Pass(which.kind, stage, which.chunk, which.microbatch, start, end))
        return tuple(found)


def simulate(
    forward_ms: Times,
    backward_ms: Times | None,
    microbatches: int,
    *,
    schedule: str | None = None,
    p2p_ms: float = 0.0,
    microbatch_group_size: int | None = None,
    rendezvous: bool = False,
) -> Simulation:
    """Replay one step of a Megatron schedule.

    ``forward_ms``, ``backward_ms``: milliseconds as ``[stage][chunk]``, or ``[stage][chunk][microbatch]``;
    ``backward_ms`` None replays a forward-only pass. ``schedule``: see `schedules.SCHEDULES`;
    None chooses as Megatron does. ``p2p_ms``: one transfer between neighbouring stages, and from the last stage's chunk
    to the first stage's next. ``microbatch_group_size``: see `PipelineSchedule.checked`. ``rendezvous``: the second of
    the two models of exchanges in `megaprof.analysis.simulation.replay`.

    Raises:
        ValueError: times of the wrong shape, negative or not finite; a schedule that Megatron refuses (for
            ``rendezvous`` also the interleaved schedule on 2 stages, where Megatron demands overlapped communication).
    """
    stages, chunks = _shape("forward_ms", forward_ms)
    if backward_ms is not None and _shape("backward_ms", backward_ms) != (stages, chunks):
        raise ValueError(
            f"backward_ms is {_shape('backward_ms', backward_ms)} [stages][chunks], forward_ms is {(stages, chunks)}"
        )
    checked = PipelineSchedule.checked(
        stages,
        chunks,
        microbatches,
        name=schedule,
        group_size=microbatch_group_size,
        forward_only=backward_ms is None,
    )
    p2p = _milliseconds("p2p_ms", p2p_ms)
    replay = compiled(checked, rendezvous)
    by_kind = [_durations("forward_ms", forward_ms, microbatches)]
    if backward_ms is not None:
        by_kind.append(_durations("backward_ms", backward_ms, microbatches))
    passes = np.stack(by_kind, axis=2)
    step = float(replay.step_ms(passes, link=p2p))
    stage_ms = tuple(passes.sum(axis=(1, 2, 3)).tolist())
    bubbles = tuple(max(0.0, 1.0 - busy / step) if step else 0.0 for busy in stage_ms)
    return Simulation(step, bubbles, stage_ms, checked, replay, passes, p2p)


def _shape(label: str, times: Times) -> tuple[int, int]:
    try:
        chunks = [len(stage) for stage in times]
    except TypeError:
        raise ValueError(f"{label} must be [stage][chunk] or [stage][chunk][microbatch], got {times!r}") from None
    if not chunks or not chunks[0]:
        raise ValueError(f"{label} needs at least one stage and one chunk, got {times!r}")
    for stage, count in enumerate(chunks):
        if count != chunks[0]:
            raise ValueError(f"{label}[{stage}] has {count} chunks, {label}[0] has {chunks[0]}; all must be equal")
    return len(chunks), chunks[0]


def _durations(label: str, times: Times, microbatches: int) -> Milliseconds:
    """[stage, chunk, microbatch]."""
    durations: list[list[Any]] = []
    for stage, row in enumerate(times):
        for chunk, entry in enumerate(row):
            name = f"{label}[{stage}][{chunk}]"
            if not hasattr(entry, "__len__") or isinstance(entry, str):
                durations.append([_milliseconds(name, entry)] * microbatches)
                continue
            if len(entry) != microbatches:
                raise ValueError(f"{name} has {len(entry)} times, expected one or {microbatches} (one a microbatch)")
            durations.append([_milliseconds(name, value) for value in entry])
    return np.array(durations).reshape(len(times), -1, microbatches)


def _milliseconds(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = inf
    if not isfinite(number) or number < 0 or isinstance(value, (str, bool)):
        raise ValueError(f"{name}={value!r} must be a finite, non-negative number of milliseconds")
    return number
