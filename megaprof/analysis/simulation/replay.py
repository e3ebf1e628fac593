"""Replay many steps of one pipeline schedule at once, from the time that each pass takes.

A schedule is compiled into nodes: one where each stage enters the step, one for each pass, one for each transfer
between two stages. A node ends its own time after the last of the nodes that it waits for:

    end = max(end of each node that it waits for) + time of the pass, link or entry

What a node waits for is a matter of the model of exchanges:

* Buffered (right for gloo, and close for ``overlap_p2p_comm``): a result travels by itself. A transfer begins when its
  pass ends; a pass begins when its stage is free and its input is there. Passes that run as one (`schedules.turns`)
  begin when all their inputs are there, and what they make leaves when the last of them ends.
* Rendezvous (NCCL with ``batch_p2p_comm`` and ``batch_p2p_sync``, Megatron's defaults without overlap): a stage
  alternates between passes and exchanges (`schedules.stage_program`). A transfer begins when both its stages have come
  to the exchange that contains it; transfers of one exchange run side by side; a stage is held until all of them are
  done. So a stage that has computed its result is held by a receiver that is still computing.
* In turn (gloo without overlap): a result travels by itself, as if buffered, but is received in the exchange that
  contains it: a stage is held until everything is there that this receives, whatever it runs next.

Nodes that wait for equally many others one after another form a level. Levels are evaluated in turn, each by a few
calls of numpy over its nodes and over all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megaprof.parallel.schedules import SPLIT_SCHEDULES, PassId, PipelineSchedule, producer, stage_program, turns

Milliseconds: TypeAlias = npt.NDArray[np.float64]

#: Node ends that are held at once, of all steps: 8 MB. Steps beyond that are evaluated in turn.
_MOST_HELD = 1 << 20


@dataclass(frozen=True, eq=False)
class Replay:
    """One schedule, ready to be evaluated; made by `compiled`.

    Arrays are milliseconds. ``passes`` is [..., stage, chunk, kind, microbatch], with the kinds of
    `PipelineSchedule.kinds` in their order; ``entry`` is [..., stage], when each stage enters the step (default:
    all at 0); ``link`` is [..., stage], the time of one transfer between a stage and the next one in either
    direction, the last of more than two stages' being that between it and the first, which interleaving uses; or one
    number for all (default: 0). Leading axes, such as draws and steps, are broadcast against each other. What depends
    on a missing time (NaN) is missing in the result.
    """

    schedule: PipelineSchedule
    """What is replayed."""
    rendezvous: bool
    """Which model of exchanges: whether a sender waits for its receiver."""
    in_turn: bool
    """Whether, where it does not, a receiver waits in every exchange."""
    _levels: tuple[tuple[int, int, npt.NDArray[np.intp]], ...]
    """Of each level but the first: its rows in the table of nodes, [begin, end), and the rows that they wait for
    ([any number, end - begin])."""
    _passes: npt.NDArray[np.intp]
    """The row of each pass, in the order of a flattened ``passes``."""
    _before: npt.NDArray[np.intp]
    """The rows that each pass waits for, [any number, pass]."""
    _transfers: npt.NDArray[np.intp]
    """The rows of the transfers."""
    _links: npt.NDArray[np.intp]
    """The link that each transfer takes."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Stages, chunks, kinds and microbatches: the last four axes of ``passes``."""
        own = self.schedule
        return own.stages, own.chunks, len(own.kinds), own.microbatches

    def step_ms(
        self, passes: npt.ArrayLike, *, entry: npt.ArrayLike | None = None, link: npt.ArrayLike | None = None
    ) -> Milliseconds:
        """Returns how long each step takes, [...]: from 0, where ``entry`` counts from, to the end of the last pass.

        Raises:
            ValueError: an array of another shape than the schedule has.
        """
        _, leading, tables = self._tables(passes, entry, link)
        longest = [table[self._passes].max(axis=0) for table in tables]
        return np.concatenate(longest).reshape(leading)

    def ends(
        self, passes: npt.ArrayLike, *, entry: npt.ArrayLike | None = None, link: npt.ArrayLike | None = None
    ) -> Milliseconds:
        """Returns when each pass ends, like ``passes``. Raises ValueError as `step_ms` does."""
        shape, _, tables = self._tables(passes, entry, link)
        return np.concatenate([table[self._passes].T for table in tables]).reshape(shape)

    def starts(
        self, passes: npt.ArrayLike, *, entry: npt.ArrayLike | None = None, link: npt.ArrayLike | None = None
    ) -> Milliseconds:
        """Returns when each pass begins, like ``passes``. Raises ValueError as `step_ms` does."""
        shape, _, tables = self._tables(passes, entry, link)
        return np.concatenate([table[self._before].max(axis=0).T for table in tables]).reshape(shape)

    def _tables(
        self, passes: npt.ArrayLike, entry: npt.ArrayLike | None, link: npt.ArrayLike | None
    ) -> tuple[tuple[int, ...], tuple[int, ...], Iterator[Milliseconds]]:
        """The shape of the passes of all steps, that of their leading axes, and the ends of all nodes,
        [node, steps], some steps at a time."""
        stages = (self.schedule.stages,)
        times = _checked("passes", passes, self.shape)
        entries = _checked("entry", 0.0 if entry is None else entry, stages)
        links = _checked("link", 0.0 if link is None else link, stages)
        leading = np.broadcast_shapes(times.shape[:-4], entries.shape[:-1], links.shape[:-1])

        def steps(array: Milliseconds, shape: tuple[int, ...]) -> Milliseconds:
            """[steps, one column for each value of a step]."""
            return np.broadcast_to(array, (*leading, *shape)).reshape(-1, int(np.prod(shape)))

        columns = steps(times, self.shape), steps(entries, stages), steps(links, stages)
        return (*leading, *self.shape), leading, self._evaluated(*columns)

    def _evaluated(self, passes: Milliseconds, entries: Milliseconds, links: Milliseconds) -> Iterator[Milliseconds]:
        nodes = entries.shape[1] + len(self._passes) + len(self._transfers)
        at_once = max(1, _MOST_HELD // nodes)
        for begin in range(0, max(1, len(passes)), at_once):
            some = slice(begin, begin + at_once)
            table = np.empty((nodes, len(passes[some])))
            table[: entries.shape[1]] = entries[some].T
            table[self._passes] = passes[some].T
            table[self._transfers] = links[some].T[self._links]
            for first, last, inputs in self._levels:
                own = table[first:last]
                own += np.maximum.reduce(table.take(inputs, axis=0), axis=0)
            yield table


@lru_cache(maxsize=64)
def compiled(schedule: PipelineSchedule, rendezvous: bool, in_turn: bool = False) -> Replay:
    """Returns the replay of ``schedule``, with exchanges as a rendezvous, or buffered and received ``in_turn`` or not.

    Raises:
        ValueError: a rendezvous in the interleaved schedule on 2 stages, where Megatron demands overlapped exchanges,
            or in a schedule that splits the backward.
    """
    programmed = rendezvous or in_turn
    if programmed and schedule.name == "interleaved" and schedule.stages == 2:
        raise ValueError("rendezvous=True: without overlapped p2p the interleaved schedule needs more than 2 stages")
    if programmed and schedule.name in SPLIT_SCHEDULES:
        raise ValueError(f"rendezvous=True: the exchanges of schedule={schedule.name!r} overlap")
    plan = _Plan(schedule)
    for stage in range(schedule.stages):
        if programmed:
            plan.add_program(stage, held=rendezvous)
        else:
            plan.add_order(stage)
    rows, levels = _levelled(plan.inputs)
    transfers = range(plan.first_transfer, len(plan.inputs))
    own = slice(schedule.stages, plan.first_transfer)
    return Replay(
        schedule,
        rendezvous,
        in_turn and not rendezvous,
        levels,
        rows[own],
        rows[_padded(plan.inputs[own])],
        rows[transfers],
        np.array(plan.links, dtype=np.intp),
    )


class _Plan:
    """Nodes in the making: first where each stage enters the step, then all passes, then transfers."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        each = [
            PassId(kind, chunk, microbatch)
            for chunk in range(schedule.chunks)
            for kind in schedule.kinds
            for microbatch in range(schedule.microbatches)
        ]
        self._place = {which: schedule.stages + place for place, which in enumerate(each)}
        self._each = len(each)
        self.first_transfer = schedule.stages * (1 + len(each))
        self.inputs: list[tuple[int, ...]] = [()] * self.first_transfer
        """The nodes that each node waits for."""
        self.links: list[int] = []
        """The link of each transfer."""
        self._by_receiver: dict[int, int] = {}
        # Where passes run as one, the node at whose end their results are there.
        self._turn_ends = {
            (stage, which): self.pass_node(stage, turn[-1])
            for stage in range(schedule.stages)
            for turn in turns(schedule, stage)
            for which in turn[:-1]
        }

    def pass_node(self, stage: int, which: PassId) -> int:
        return self._place[which] + stage * self._each

    def add_order(self, stage: int) -> None:
        """Turns of a stage that wait for the turn before and for the inputs of their passes."""
        before = stage
        for turn in turns(self.schedule, stage):
            arrivals = []
            for which in turn:
                source = producer(self.schedule, stage, which)
                if source is not None and source[0] != stage:
                    made = self._turn_ends.get(source, self.pass_node(*source))
                    arrivals.append(self._transfer(source[0], stage, self.pass_node(stage, which), (made,)))
            for which in turn:
                node = self.pass_node(stage, which)
                self.inputs[node] = (before, *arrivals)
                before, arrivals = node, []

    def add_program(self, stage: int, *, held: bool) -> None:
        """Passes and exchanges of a stage, each of which waits for what is before it; a transfer waits for that of
        its sender, and, where that is ``held``, of its receiver."""
        stages = self.schedule.stages
        following, preceding = (stage + 1) % stages, (stage - 1) % stages
        before: tuple[int, ...] = (stage,)
        for step in stage_program(self.schedule, stage):
            if isinstance(step, PassId):
                node = self.pass_node(stage, step)
                self.inputs[node] = before
                before = (node,)
                continue
            sent = ((stage, following, step.send_next), (stage, preceding, step.send_prev))
            received = ((preceding, stage, step.recv_prev), (following, stage, step.recv_next))
            out, come = (
                tuple(
                    self._transfer(sender, receiver, self.pass_node(receiver, which), waits_for)
                    for sender, receiver, which in transfers
                    if which is not None
                )
                for transfers, waits_for in ((sent, before), (received, before if held else ()))
            )
            before = out + come if held else before + come

    def _transfer(self, sender: int, receiver: int, needed_by: int, waits_for: tuple[int, ...]) -> int:
        """The transfer of a pass's input, which also waits for ``waits_for``."""
        node = self._by_receiver.get(needed_by)
        if node is None:
            low, high = sorted((sender, receiver))
            node = self._by_receiver[needed_by] = len(self.inputs)
            self.links.append(low if high == low + 1 else high)
            self.inputs.append(())
        self.inputs[node] += waits_for
        return node


def _levelled(
    inputs: Sequence[tuple[int, ...]],
) -> tuple[npt.NDArray[np.intp], tuple[tuple[int, int, npt.NDArray[np.intp]], ...]]:
    """The row of each node in a table that is sorted by level, and the levels but the first, as `Replay` has them."""
    missing = [len(each) for each in inputs]
    users: list[list[int]] = [[] for _ in inputs]
    for node, each in enumerate(inputs):
        for other in each:
            users[other].append(node)
    levels = [[node for node, count in enumerate(missing) if not count]]
    while levels[-1]:
        levels.append([])
        for user in chain.from_iterable(users[node] for node in levels[-2]):
            missing[user] -= 1
            if not missing[user]:
                levels[-1].append(user)
    order = list(chain.from_iterable(levels))
    if len(order) != len(inputs):
        raise RuntimeError("the stages of a schedule wait for each other; please report this")
    rows = np.empty(len(order), dtype=np.intp)
    rows[order] = np.arange(len(order))
    found, begin = [], len(levels[0])
    for level in levels[1:-1]:
        found.append((begin, begin + len(level), rows[_padded([inputs[node] for node in level])]))
        begin += len(level)
    return rows, tuple(found)


def _padded(inputs: Sequence[tuple[int, ...]]) -> npt.NDArray[np.intp]:
    """[most inputs, node]; a node with fewer has its first one again."""
    most = max(map(len, inputs))
    return np.array([each + each[:1] * (most - len(each)) for each in inputs], dtype=np.intp).T.copy()


def _checked(name: str, value: npt.ArrayLike, shape: tuple[int, ...]) -> Milliseconds:
    array = np.asarray(value, dtype=np.float64)
    if name == "passes" or array.ndim:
        if array.shape[-len(shape) :] != shape:
            axes = "[..., stage, chunk, kind, microbatch]" if len(shape) > 1 else "[..., stage]"
            raise ValueError(f"{name} has shape {array.shape}, expected {axes} to end with {shape}")
        return array
    return np.full(shape, float(array))
