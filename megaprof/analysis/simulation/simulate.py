"""Replays one step of a pipeline schedule from plain times: `megaprof.simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.simulation.replay import Milliseconds, Replay, compiled
from megaprof.analysis.trace.passes import Pass
from megaprof.parallel.schedules import PipelineSchedule, phase_order

Times = Sequence[Sequence[Any]]
"""Milliseconds as [stage][chunk]; each entry is one number, or one number per microbatch."""


@dataclass(frozen=True)
class Simulation:
    """One replayed step."""

    step_ms: float
    """Milliseconds from the start of the first pass to the end of the last pass, over all stages."""
    bubble_fraction: tuple[float, ...]
    """The fraction of the step in which a stage computes nothing (exchanges included), by stage; 0.0 if the step takes
    no time."""
    stage_ms: tuple[float, ...]
    """Milliseconds in which a stage computes, by stage."""
    schedule: PipelineSchedule
    """The schedule that was replayed."""
    _replay: Replay = field(repr=False, compare=False)
    _passes: Milliseconds = field(repr=False, compare=False)
    _around: Mapping[str, npt.ArrayLike] = field(repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Pass[float], ...]:
        """All passes, by stage and in the order in which a stage runs them, with times since the start of the step.

        Each has ``stage``, ``chunk``, ``microbatch``, ``phase`` (``forward``, ``backward`` or ``weight``),
        ``start_ms`` and ``end_ms``.
        """
        entry, link = map(self._around.get, ("entry", "link"))
        starts = self._replay.starts(self._passes, entry=entry, link=link)
        ends = self._replay.ends(self._passes, entry=entry, link=link)
        passes = []
        for stage in range(self.schedule.stages):
            for pass_id in phase_order(self.schedule, stage):
                index = stage, pass_id.chunk, self.schedule.kinds.index(pass_id.kind), pass_id.microbatch
                start, end = 1e6 * float(starts[index]), 1e6 * float(ends[index])
                passes.append(Pass(pass_id.kind, stage, pass_id.chunk, pass_id.microbatch, start, end))
        return tuple(passes)


def simulate(
    forward_ms: Times,
    backward_ms: Times | None,
    microbatches: int,
    *,
    schedule: str | None = None,
    p2p_ms: float = 0.0,
    microbatch_group_size: int | None = None,
    rendezvous: bool = False,
    weight_ms: Times | None = None,
) -> Simulation:
    """Replays one step of a pipeline schedule.

    For example, two stages with a forward of 30 and 10 ms, a backward of 60 and 20 ms, and 8 microbatches:
    ``simulate([[30.0], [10.0]], [[60.0], [20.0]], 8).step_ms``.

    Args:
        forward_ms: Milliseconds as ``[stage][chunk]`` or ``[stage][chunk][microbatch]``.
        backward_ms: The same for backwards. None replays a forward-only pass.
        microbatches: Microbatches per step.
        schedule: One of `schedules.SCHEDULES` (Megatron's own) or `schedules.SPLIT_SCHEDULES`, which split each
            backward: ``zb_h1`` and, with two chunks per stage of which the second ones run from the last stage back to
            the first, ``zbv`` and ``dualpipev``. Torch's names are taken, too. None chooses as Megatron does.
        p2p_ms: Milliseconds of one transfer between neighbouring stages, and from the last stage's chunk to the first
            stage's next one.
        microbatch_group_size: For the interleaved schedule; see `PipelineSchedule.checked`.
        rendezvous: True if both ends of an exchange wait for each other, as in the rendezvous model of
            `megaprof.analysis.simulation.replay`.
        weight_ms: For schedules that split the backward: the half that computes weight gradients. ``backward_ms`` is
            then the other half.

    Raises:
        ValueError: Times have the wrong shape, or are negative or not finite. Megatron or torch refuses the schedule.
            ``rendezvous`` is true for the interleaved schedule on 2 stages, or for a schedule that splits the backward
            (their exchanges overlap). ``weight_ms`` is given for a schedule that does not split the backward, or
            missing for one that does.
    """
    stages, chunks = _shape("forward_ms", forward_ms)
    times = {"forward_ms": forward_ms}
    for label, kind_times in (("backward_ms", backward_ms), ("weight_ms", weight_ms)):
        if kind_times is None:
            continue
        times[label] = kind_times
        if (shape := _shape(label, kind_times)) != (stages, chunks):
            raise ValueError(f"{label} is {shape} [stages][chunks], forward_ms is {(stages, chunks)}")
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
    if list(times) != (needed := [f"{kind}_ms" for kind in checked.kinds]):
        raise ValueError(f"schedule={checked.name!r} needs {', '.join(needed)}, got {', '.join(times)}")
    passes = np.stack([_durations(label, kind_times, microbatches) for label, kind_times in times.items()], axis=2)
    return played(replay, passes, link=p2p)


def played(replay: Replay, passes: Milliseconds, **around: npt.ArrayLike) -> Simulation:
    """Returns one replayed step. ``passes``, and ``entry`` and ``link`` in ``around``, are as in `Replay`."""
    step_ms = float(replay.step_ms(passes, **around))
    stage_ms = tuple(passes.sum(axis=(1, 2, 3)).tolist())
    bubbles = tuple(max(0.0, 1.0 - busy / step_ms) if step_ms else 0.0 for busy in stage_ms)
    return Simulation(step_ms, bubbles, stage_ms, replay.schedule, replay, passes, around)


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
    """Returns the times as [stage, chunk, microbatch]. Raises ValueError if they are not usable."""
    durations: list[Any] = []
    for stage, row in enumerate(times):
        for chunk, entry in enumerate(row):
            name = f"{label}[{stage}][{chunk}]"
            if not hasattr(entry, "__len__") or isinstance(entry, str):
                durations.append([_milliseconds(name, entry)] * microbatches)
                continue
            if len(entry) != microbatches:
                raise ValueError(f"{name} has {len(entry)} times, expected one or {microbatches} (one a microbatch)")
            if set(map(type, entry)) != {float}:
                entry = [_milliseconds(name, value) for value in entry]
            durations.append(entry)
    table = np.array(durations).reshape(len(times), -1, microbatches)
    for stage, chunk, microbatch in np.argwhere(~((table >= 0) & (table < inf))):
        _milliseconds(f"{label}[{stage}][{chunk}]", float(table[stage, chunk, microbatch]))
    return table


def _milliseconds(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = inf
    if not isfinite(number) or number < 0 or isinstance(value, (str, bool)):
        raise ValueError(f"{name}={value!r} must be a finite, non-negative number of milliseconds")
    return number
