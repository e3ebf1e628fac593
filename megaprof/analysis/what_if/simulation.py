"""Replay a pipeline schedule from plain times.

Two models of communication:

* Buffered (the default; right for gloo, and close for ``overlap_p2p_comm``): a result travels by itself. A phase starts
  as soon as its stage is free and its input, produced ``p2p_ms`` ago or earlier on another stage, is there.
* Rendezvous (NCCL with ``batch_p2p_comm`` and ``batch_p2p_sync``, Megatron's defaults without overlap): a stage
  alternates between phases and exchanges (`orders.stage_program`). A transfer begins when
  both its stages have come to the exchange that contains it and takes ``p2p_ms``; transfers of one exchange run side by
  side; both stages are held until every transfer of their exchange is done. So a stage that has computed its result
  is held by a receiver that is still computing, and cannot go on with work that it already has the input for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf, isfinite
from typing import Any, NamedTuple

from megaprof.analysis.trace.passes import Pass, PassId
from megaprof.analysis.what_if.orders import (
    PipelineSchedule,
    SendReceive,
    arrange,
    backward_order,
    forward_order,
    phase_order,
    stage_program,
)

Times = Sequence[Sequence[Any]]
"""[stage][chunk], each entry a number of milliseconds or one number for each microbatch."""

# The first two nodes of every plan stand for "nothing before": the start of the step, and a moment before any other.
_START, _NEVER = 0, 1


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
    _plan: _Plan = field(repr=False, compare=False)
    _ends: list[float] = field(repr=False, compare=False)
    _lag: float = field(repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Pass[float], ...]:
        """Every pass, stage by stage in the order in which the stage runs them; times since the start of the step.

        Each has ``stage``, ``chunk``, ``microbatch``, ``phase`` (``forward`` or ``backward``), ``start_ms`` and
        ``end_ms``.
        """
        plan, ends, lag = self._plan, self._ends, self._lag
        return tuple(
            Pass(
                phase.kind,
                stage,
                phase.chunk,
                phase.microbatch,
                1e6 * max(ends[plan.before[node - 2]], ends[plan.source[node - 2]] + lag),
                1e6 * ends[node],
            )
            for stage, nodes in enumerate(plan.phases)
            for phase, node in zip(phase_order(self.schedule, stage), nodes, strict=True)
        )


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
    ``backward_ms`` None replays a forward-only pass. ``schedule``: see `orders.SCHEDULES`;
    None chooses as Megatron does. ``p2p_ms``: one transfer between neighbouring stages, and from the last stage's chunk
    to the first stage's next. ``microbatch_group_size``: see `PipelineSchedule.checked`. ``rendezvous``: the second of
    the two models of communication at the top of this file.

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
    lag = _milliseconds("p2p_ms", p2p_ms)
    if rendezvous and checked.name == "interleaved" and stages == 2:
        raise ValueError("rendezvous=True: without overlapped p2p the interleaved schedule needs more than 2 stages")
    durations = _durations("forward_ms", forward_ms, microbatches)
    if backward_ms is not None:
        durations += _durations("backward_ms", backward_ms, microbatches)
    plan = _rendezvous_plan(checked) if rendezvous and stages > 1 else _buffered_plan(checked)
    costs = [*durations, 0.0, lag]
    if rendezvous:
        lag = 0.0  # transfers are nodes of their own
    ends = _evaluate(plan, costs, lag)
    step = max(ends)
    stage_ms = tuple(_stage_totals(durations, stages, chunks * microbatches))
    bubbles = tuple(max(0.0, 1.0 - busy / step) if step else 0.0 for busy in stage_ms)
    return Simulation(step, bubbles, stage_ms, checked, plan, ends, lag)


class _Plan(NamedTuple):
    """A schedule as a list of nodes in an order in which each can be computed from those before it.

    Node n (counted from 2) ends at ``max(end[before[n-2]], end[source[n-2]] + lag) + cost``, its cost being at index
    ``cost[n-2]`` of the durations of all phases followed by 0 and p2p_ms. ``phases``: the nodes of each stage's phases.
    """

    before: list[int]
    source: list[int]
    cost: list[int]
    phases: list[list[int]]

    def add(self, before: int, source: int, cost: int) -> int:
        self.before.append(before)
        self.source.append(source)
        self.cost.append(cost)
        return len(self.before) + 1

    def check_complete(self, schedule: PipelineSchedule, each: int) -> None:
        if any(len(own) != each for own in self.phases):
            raise RuntimeError(f"the stages of {schedule} wait for each other; please report this")


def _evaluate(plan: _Plan, costs: Sequence[float], lag: float) -> list[float]:
    ends = [0.0, -inf]
    append = ends.append
    for before, source, cost in zip(plan.before, plan.source, plan.cost, strict=True):
        end, arrival = ends[before], ends[source] + lag
        append((arrival if arrival > end else end) + costs[cost])
    return ends


@lru_cache(maxsize=16)
def _buffered_plan(schedule: PipelineSchedule) -> _Plan:
    stages, slots = schedule.stages, _Slots(schedule)
    # The node of each phase by its slot, 0 while it has none; one more slot for "needs nothing from another stage".
    nodes = [0] * slots.count + [_NEVER]
    orders = [slots.own(stage) for stage in range(stages)]
    inputs = [slots.inputs(stage) for stage in range(stages)]
    plan = _Plan([], [], [], [[] for _ in range(stages)])
    last, position = [_START] * stages, [0] * stages
    waiting = list(range(stages))
    while waiting:
        # Run one stage as far as the inputs known so far allow; its results may let both neighbours go on.
        stage = waiting.pop(0)
        order, needs, own, previous = orders[stage], inputs[stage], plan.phases[stage], last[stage]
        begun = index = position[stage]
        while index < len(order):
            needed = nodes[needs[index]]
            if not needed:
                break
            slot = order[index]
            previous = nodes[slot] = plan.add(previous, needed, slot)
            own.append(previous)
            index += 1
        if index > begun:
            last[stage], position[stage] = previous, index
            _await_neighbours(waiting, stage, stages)
    plan.check_complete(schedule, slots.each)
    return plan


@lru_cache(maxsize=16)
def _rendezvous_plan(schedule: PipelineSchedule) -> _Plan:
    rendezvous = _Rendezvous(schedule)
    while rendezvous.waiting:
        rendezvous.run(rendezvous.waiting.pop(0))
    rendezvous.plan.check_complete(schedule, rendezvous.slots.each)
    return rendezvous.plan


class _Rendezvous:
    """A plan in the making: how far each stage has come in its program of passes and exchanges."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.slots = _Slots(schedule)
        self.programs = [stage_program(schedule, stage) for stage in range(schedule.stages)]
        self.plan = _Plan([], [], [], [[] for _ in self.programs])
        self.waiting = list(range(schedule.stages))
        self.last, self.position = [_START] * schedule.stages, [0] * schedule.stages
        # The node after which each end of each transfer was posted, -1 until then; the receiver's end is 2 * slot of
        # the pass that needs it, the sender's the one after.
        self.posts = [-1] * (2 * self.slots.count)

    def run(self, stage: int) -> None:
        """Let a stage go on until it waits in an exchange for another, or is done."""
        program = self.programs[stage]
        while self.position[stage] < len(program):
            step = program[self.position[stage]]
            if isinstance(step, SendReceive):
                if not self._meet(stage, self.slots.transfer_ends(step, stage)):
                    return
            else:
                self.last[stage] = self.plan.add(self.last[stage], _NEVER, self.slots.of(step, stage))
                self.plan.phases[stage].append(self.last[stage])
            self.position[stage] += 1

    def _meet(self, stage: int, ends: list[int]) -> bool:
        """Post this stage's ends of an exchange, and finish it if the other stages have come to theirs."""
        if self.posts[ends[0]] < 0:
            for end in ends:
                self.posts[end] = self.last[stage]
            _await_neighbours(self.waiting, stage, len(self.programs))
        others = [self.posts[end ^ 1] for end in ends]
        if min(others) < 0:
            return False
        no_time, transfer_time = self.slots.count, self.slots.count + 1
        for other in others[:-1]:
            self.last[stage] = self.plan.add(self.last[stage], other, no_time)
        self.last[stage] = self.plan.add(self.last[stage], others[-1], transfer_time)
        return True


def _await_neighbours(waiting: list[int], stage: int, stages: int) -> None:
    """The stages beside one may be able to go on; each waits for its turn once."""
    for each in ((stage + 1) % stages, (stage - 1) % stages):
        if each != stage and each not in waiting:
            waiting.append(each)


class _Slots:
    """Where each phase's duration stands in the list of all, [kind][stage][chunk][microbatch], and what it needs."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        self.stage_size = schedule.chunks * schedule.microbatches
        self.half = schedule.stages * self.stage_size
        self.each = self.stage_size * (1 if schedule.forward_only else 2)
        self.count = schedule.stages * self.each
        self.forwards = [self.of(phase, 0) for phase in forward_order(schedule)]
        self.backwards = [] if schedule.forward_only else [self.of(phase, 0) for phase in backward_order(schedule)]

    def of(self, phase: PassId, stage: int) -> int:
        kind, chunk, microbatch = phase
        offset = self.half if kind == "backward" else 0
        return offset + stage * self.stage_size + chunk * self.schedule.microbatches + microbatch

    def own(self, stage: int) -> list[int]:
        """The slots of a stage's phases in its order."""
        base = stage * self.stage_size
        forwards, backwards = [base + slot for slot in self.forwards], [base + slot for slot in self.backwards]
        return arrange(forwards, backwards, self.schedule.warmup(stage))

    def inputs(self, stage: int) -> list[int]:
        """For each phase of a stage in its order the slot of the phase on another stage that produces its input.

        The last stage of one chunk feeds the first stage of the next, and the other way round for backwards. A phase
        that needs nothing from another stage (the loss stage's backward follows its own forward) has slot ``count``.
        """
        count, size, microbatches, far = (
            self.count,
            self.stage_size,
            self.schedule.microbatches,
            self.schedule.stages - 1,
        )
        if stage > 0:
            forwards = [slot + (stage - 1) * size for slot in self.forwards]
        else:
            forwards = [slot + far * size - microbatches if slot >= microbatches else count for slot in self.forwards]
        if stage < far:
            backwards = [slot + (stage + 1) * size for slot in self.backwards]
        else:
            end = self.half + size
            backwards = [slot + microbatches if slot + microbatches < end else count for slot in self.backwards]
        return arrange(forwards, backwards, self.schedule.warmup(stage))

    def transfer_ends(self, exchange: SendReceive, stage: int) -> list[int]:
        """This stage's end of each transfer in an exchange; the other end is ``end ^ 1``."""
        stages = self.schedule.stages
        send_next, recv_prev, send_prev, recv_next = exchange
        ends = [2 * self.of(phase, stage) for phase in (recv_prev, recv_next) if phase is not None]
        if send_next is not None:
            ends.append(2 * self.of(send_next, (stage + 1) % stages) + 1)
        if send_prev is not None:
            ends.append(2 * self.of(send_prev, (stage - 1) % stages) + 1)
        return ends


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


def _durations(label: str, times: Times, microbatches: int) -> list[float]:
    """[stage][chunk][microbatch] in one list."""
    durations: list[float] = []
    for stage, row in enumerate(times):
        for chunk, entry in enumerate(row):
            name = f"{label}[{stage}][{chunk}]"
            if not hasattr(entry, "__len__") or isinstance(entry, str):
                durations += [_milliseconds(name, entry)] * microbatches
                continue
            if len(entry) != microbatches:
                raise ValueError(f"{name} has {len(entry)} times, expected one or {microbatches} (one a microbatch)")
            durations += [_milliseconds(name, value) for value in entry]
    return durations


def _milliseconds(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = inf
    if not isfinite(number) or number < 0 or isinstance(value, (str, bool)):
        raise ValueError(f"{name}={value!r} must be a finite, non-negative number of milliseconds")
    return number


def _stage_totals(durations: list[float], stages: int, each: int) -> list[float]:
    """Each stage's own compute time; ``each``: phases of one kind a stage."""
    totals = [0.0] * stages
    for begin in range(0, len(durations), each):
        totals[begin // each % stages] += sum(durations[begin : begin + each])
    return totals
