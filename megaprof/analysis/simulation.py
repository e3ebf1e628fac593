"""Replays many steps of one pipeline schedule at once, from the time that each pass takes; or one step from plain times
(`megaprof.simulate`).

A schedule is compiled into nodes: one for each stage's entry into the step, one for each pass, and one for each
transfer between two stages. A node starts when the last node that it waits for ends:

    end = max(end of each node that it waits for) + time of the pass, link or entry

A stage begins transfers, and waits for them, where its program says so (`schedules.stage_program`), until its next pass
begins. Two models of exchanges differ in what a transfer waits for:

* Rendezvous (NCCL, and gloo): it begins when both its stages have begun it. So a stage that waits until its result is
  sent is held by a receiver that is still computing. Of exchanges that overlap, that is one pass later.
* Buffered (messages that NCCL keeps for their receiver, because they are small): it begins when its sender has begun
  it, and only a receiver waits.

Passes that run as one (`schedules.turns`) begin when all their inputs have arrived, and their results leave when the
last pass ends.

Nodes are sorted into levels: a node's level is the length of the longest chain of nodes that it waits for. Levels are
evaluated one after another, each with a few numpy calls over its nodes and over all steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain, product
from math import inf, isfinite
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megaprof.analysis.samples import Floats
from megaprof.parallel.schedules import (
    SPLIT_SCHEDULES,
    Pass,
    PassId,
    PipelineSchedule,
    Wait,
    phase_order,
    stage_program,
)

Indices: TypeAlias = npt.NDArray[np.intp]

#: The most node ends in memory at once, over all steps: 32 MB. Further steps are evaluated afterwards.
_MOST_HELD = 1 << 22


@dataclass(frozen=True, eq=False)
class Replay:
    """One schedule, ready to be evaluated. `compiled` makes it.

    Its methods take arrays of milliseconds:

    * ``passes``, [..., stage, chunk, kind, microbatch]: the time of each pass. Kinds are in the order of
      `PipelineSchedule.kinds`.
    * ``entry``, [..., stage]: when each stage enters the step; one number counts for all stages (default: 0).
    * ``link``, [..., stage]: the time of one transfer between a stage and the next one, in either direction; one number
      counts for all links (default: 0). With more than two stages, the last entry is for the link between the last
      stage and the first, which interleaving uses.

    Leading axes, such as draws and steps, are broadcast against each other. A missing time (NaN) makes every result
    NaN that depends on it.
    """

    schedule: PipelineSchedule
    rendezvous: bool
    """True if a sender waits for its receiver: the rendezvous model of exchanges."""
    _levels: tuple[tuple[int, int, Indices], ...]
    """For each level but the first: its rows in the table of nodes, [begin, end), and the rows that they wait for,
    [any number, end - begin]."""
    _passes: Indices
    """The row of each pass, in the order of a flattened ``passes``."""
    _before: Indices
    """The rows that each pass waits for, [any number, pass]."""
    _transfers: Indices
    """The rows of the transfers."""
    _links: Indices
    """The link that each transfer takes."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Stages, chunks, kinds and microbatches: the last four axes of ``passes``."""
        schedule = self.schedule
        return schedule.stages, schedule.chunks, len(schedule.kinds), schedule.microbatches

    def step_ms(self, passes: npt.ArrayLike, *, entry: npt.ArrayLike = 0.0, link: npt.ArrayLike = 0.0) -> Floats:
        """Returns how long each step takes, [...], in milliseconds: from 0, the zero of ``entry``, to the end of the
        last pass."""
        return self._evaluated(lambda ends: ends.max(axis=0), (), passes, entry, link)

    def ends(self, passes: npt.ArrayLike, *, entry: npt.ArrayLike = 0.0, link: npt.ArrayLike = 0.0) -> Floats:
        """Returns when each pass ends, in milliseconds and in the shape of ``passes``."""
        return self._evaluated(lambda ends: ends[self._passes].T, self.shape, passes, entry, link)

    def starts(
        self, passes: npt.ArrayLike, *, entry: npt.ArrayLike = 0.0, link: npt.ArrayLike = 0.0, ended: bool = False
    ) -> Floats:
        """Returns when each pass begins, in milliseconds and in the shape of ``passes``. If these are when passes
        ``ended``, it is when each could have begun if all others ended then."""
        return self._evaluated(lambda ends: ends[self._before].max(axis=0).T, self.shape, passes, entry, link, ended)

    def _evaluated(
        self,
        figure: Callable[[Floats], Floats],
        shape: tuple[int, ...],
        passes: npt.ArrayLike,
        entry: npt.ArrayLike,
        link: npt.ArrayLike,
        ended: bool = False,
    ) -> Floats:
        """Returns a ``figure`` of every step, [..., *shape], which takes the ends of all nodes, [node, step], of a part
        of the steps at a time. ``ended``: passes are given by when they end."""
        stages = self.schedule.stages
        times, entries, links = (np.asarray(each, dtype=np.float64) for each in (passes, entry, link))
        leading = np.broadcast_shapes(times.shape[:-4], entries.shape[:-1], links.shape[:-1])
        times = np.broadcast_to(times, (*leading, *self.shape)).reshape(-1, len(self._passes))
        entries, links = (np.broadcast_to(each, (*leading, stages)).reshape(-1, stages) for each in (entries, links))
        nodes = stages + len(self._passes) + len(self._transfers)
        is_pass = np.zeros(nodes, dtype=np.bool_)
        is_pass[self._passes] = True
        steps_at_once, figures = max(1, _MOST_HELD // nodes), list[Floats]()
        for begin in range(0, max(1, len(times)), steps_at_once):
            part = slice(begin, begin + steps_at_once)
            table = np.empty((nodes, len(times[part])))
            table[:stages] = entries[part].T
            table[self._passes] = times[part].T
            table[self._transfers] = links[part].T[self._links]
            for first, last, inputs in self._levels:
                begins = table.take(inputs, axis=0).max(axis=0)
                if ended:
                    begins[is_pass[first:last]] = 0.0
                table[first:last] += begins
            figures.append(figure(table))
        return np.concatenate(figures).reshape((*leading, *shape))


@lru_cache(maxsize=64)
def compiled(schedule: PipelineSchedule, rendezvous: bool) -> Replay:
    """Returns the replay of ``schedule``. Exchanges are a rendezvous, or buffered.

    Raises:
        ValueError: ``rendezvous`` is true for a schedule that splits the backward.
    """
    if rendezvous and schedule.name in SPLIT_SCHEDULES:
        raise ValueError(f"rendezvous=True: the exchanges of schedule={schedule.name!r} overlap")
    inputs, links = _graph(schedule, rendezvous)
    levels = _levels(inputs)
    rows = np.argsort(np.concatenate(levels))

    def inputs_of(nodes: Sequence[int]) -> Indices:
        """Returns the rows that some nodes wait for, [most, node]. One that waits for fewer repeats its first."""
        several = [inputs[each] for each in nodes]
        most = max(map(len, several))
        return np.asarray(rows[[[*each, *each[:1] * (most - len(each))] for each in several]].T)

    begins, passes = accumulate(map(len, levels)), range(schedule.stages, len(inputs) - len(links))
    return Replay(
        schedule,
        rendezvous,
        tuple((begin, begin + len(level), inputs_of(level)) for begin, level in zip(begins, levels[1:], strict=False)),
        rows[passes],
        inputs_of(passes),
        rows[passes.stop :],
        np.array(links, dtype=np.intp),
    )


def rescheduled(replay: Replay, chunks: int, microbatches: int) -> Replay:
    """Returns the replay with this number of model chunks per stage, and of microbatches, in the schedule that Megatron
    then chooses. Raises ValueError if Megatron refuses it."""
    schedule = replay.schedule
    if (chunks, microbatches) == (schedule.chunks, schedule.microbatches):
        return replay
    same_chunks = chunks == schedule.chunks
    # By default, Megatron-LM overlaps the exchanges of the interleaved schedule.
    checked = PipelineSchedule.checked(
        schedule.stages,
        chunks,
        microbatches,
        name=schedule.name if same_chunks else "1f1b" if chunks == 1 else "interleaved",
        group_size=schedule.group_size if same_chunks and chunks > 1 else None,
        forward_only=schedule.forward_only,
        combined=schedule.combined,
        overlap=schedule.overlap if schedule.chunks > 1 else "steady",
        frees=schedule.frees,
    )
    # All arguments by position, as the search passes them too, so that both share one entry of the cache.
    return compiled(checked, replay.rendezvous)


def _graph(schedule: PipelineSchedule, rendezvous: bool) -> tuple[list[list[int]], list[int]]:
    """Returns, for each node, those that it waits for; and the link of each transfer. First come the stages' entries,
    then all passes, and then all transfers.

    The passes of a stage, and what it begins between them, wait for the pass before and for the transfers that the
    stage has waited for since. A transfer waits for its sender to begin it and, if exchanges are a ``rendezvous``, for
    its receiver too.
    """
    stages, chunks, kinds, microbatches = schedule.stages, schedule.chunks, schedule.kinds, schedule.microbatches
    inputs: list[list[int]] = [[] for _ in range(stages * (1 + chunks * len(kinds) * microbatches))]

    def node(stage: int, pass_id: PassId) -> int:
        position = (stage * chunks + pass_id.chunk) * len(kinds) + kinds.index(pass_id.kind)
        return stages + position * microbatches + pass_id.microbatch

    links, transfer_of = list[int](), dict[int, int]()  # transfers by the pass that needs their data
    for stage, chunk, kind in product(range(stages), range(chunks), kinds):
        if (link := schedule.placement.link(kind, stage, chunk)) is not None:
            begin = node(stage, PassId(kind, chunk, 0))
            transfer_of |= {begin + number: len(inputs) + number for number in range(microbatches)}
            inputs += ([] for _ in range(microbatches))
            links += [link] * microbatches
    for stage in range(stages):
        awaited, before = [stage], None
        for step in stage_program(schedule, stage):
            if isinstance(step, PassId):
                inputs[node(stage, step)] += awaited
                awaited, before = [node(stage, step)], None
                continue
            is_wait, transfers = (True, step.transfers) if isinstance(step, Wait) else (False, step)
            counted = [
                transfer_of[node(receiver, which)]
                for _, receiver, which in transfers.transfers(stage, stages)
                if rendezvous or (receiver == stage) == is_wait
            ]
            if not is_wait:
                for transfer in counted:
                    inputs[transfer] += awaited
            elif rendezvous and transfers == before:  # which wait for what the stage has waited for
                awaited = counted
            else:
                awaited = awaited + counted
            before = transfers
    return inputs, links


def _levels(inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the nodes of each level, from the ``inputs`` of each node."""
    left, users = list(map(len, inputs)), defaultdict[int, list[int]](list)
    for node, earlier in enumerate(inputs):
        for each in earlier:
            users[each].append(node)
    levels = [[node for node, count in enumerate(left) if not count]]
    while levels[-1]:
        levels.append([])
        for user in chain.from_iterable(users[node] for node in levels[-2]):
            left[user] -= 1
            if not left[user]:
                levels[-1].append(user)
    return levels[:-1]


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
    _passes: Floats = field(repr=False, compare=False)
    _entry: npt.ArrayLike = field(repr=False, compare=False)
    _link: npt.ArrayLike = field(repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Pass, ...]:
        """All passes, by stage and in the order in which a stage runs them, with times since the start of the step.

        Each has ``stage``, ``chunk``, ``microbatch``, ``phase`` (``forward``, ``backward`` or ``weight``),
        ``start_ms`` and ``end_ms``.
        """
        starts = self._replay.starts(self._passes, entry=self._entry, link=self._link)
        ends = self._replay.ends(self._passes, entry=self._entry, link=self._link)
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
            this module.
        weight_ms: For schedules that split the backward: the half that computes weight gradients. ``backward_ms`` is
            then the other half.

    Raises:
        ValueError: Times have the wrong shape, or are negative or not finite. Megatron or torch refuses the schedule.
            ``rendezvous`` is true for the interleaved schedule on 2 stages, or for a schedule that splits the backward
            (their exchanges overlap). ``weight_ms`` is given for a schedule that does not split the backward, or
            missing for one that does.
    """
    stages, chunks = _shape("forward_ms", forward_ms)
    given = {"forward_ms": forward_ms, "backward_ms": backward_ms, "weight_ms": weight_ms}
    times = {label: kind_times for label, kind_times in given.items() if kind_times is not None}
    for label, kind_times in times.items():
        if (shape := _shape(label, kind_times)) != (stages, chunks):
            raise ValueError(f"{label} is {shape} [stages][chunks], forward_ms is {(stages, chunks)}")
    checked = PipelineSchedule.checked(
        stages,
        chunks,
        microbatches,
        name=schedule,
        group_size=microbatch_group_size,
        forward_only=backward_ms is None,
        overlap="none" if rendezvous else "all",
    )
    if rendezvous and checked.name == "interleaved" and stages == 2:
        raise ValueError("rendezvous=True: without overlapped p2p the interleaved schedule needs more than 2 stages")
    p2p = _milliseconds("p2p_ms", p2p_ms)
    replay = compiled(checked, rendezvous)
    if list(times) != (needed := [f"{kind}_ms" for kind in checked.kinds]):
        raise ValueError(f"schedule={checked.name!r} needs {', '.join(needed)}, got {', '.join(times)}")
    passes = np.stack([_durations(label, kind_times, microbatches) for label, kind_times in times.items()], axis=2)
    return played(replay, passes, link=p2p)


def played(replay: Replay, passes: Floats, entry: npt.ArrayLike = 0.0, link: npt.ArrayLike = 0.0) -> Simulation:
    """Returns one replayed step. ``passes``, ``entry`` and ``link`` are as in `Replay`."""
    step_ms = float(replay.step_ms(passes, entry=entry, link=link))
    stage_ms = tuple(passes.sum(axis=(1, 2, 3)).tolist())
    bubbles = tuple(max(0.0, 1.0 - busy / step_ms) if step_ms else 0.0 for busy in stage_ms)
    return Simulation(step_ms, bubbles, stage_ms, replay.schedule, replay, passes, entry, link)


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


def _durations(label: str, times: Times, microbatches: int) -> Floats:
    """Returns the times as [stage, chunk, microbatch]. Raises ValueError if they are not usable."""
    table = np.empty((len(times), len(times[0]), microbatches))
    for stage, row in enumerate(times):
        for chunk, entry in enumerate(row):
            name = f"{label}[{stage}][{chunk}]"
            entries = entry if hasattr(entry, "__len__") and not isinstance(entry, str) else [entry] * microbatches
            if len(entries) != microbatches:
                raise ValueError(f"{name} has {len(entries)} times, expected one or {microbatches} (one a microbatch)")
            table[stage, chunk] = [_milliseconds(name, value) for value in entries]
    return table


def _milliseconds(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = inf
    if not isfinite(number) or number < 0 or isinstance(value, (str, bool)):
        raise ValueError(f"{name}={value!r} must be a finite, non-negative number of milliseconds")
    return number
