"""The order in which Megatron's schedules run phases, and when their stages exchange tensors.

Source of every rule: ``megatron/core/pipeline_parallel/schedules.py`` (0.12 to 0.19 agree): ``get_schedule_table``,
``get_pp_rank_microbatches``, ``recv_tensor_from_previous_stage`` and the loops of the three
``forward_backward_*`` functions. The tests compare both functions here with those schedules as they really run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")

SCHEDULES = ("no_pipelining", "1f1b", "interleaved")
"""Names for Megatron's three ``forward_backward_*`` functions: no pipelining, without and with interleaving."""


class PassId(NamedTuple):
    """Which of a stage's passes: one microbatch forward or backward through one model chunk."""

    kind: str
    """``forward`` or ``backward``."""
    chunk: int
    """Model chunk of the stage, from 0."""
    microbatch: int
    """From 0."""


class SendReceive(NamedTuple):
    """One batched call to send and receive: the stage waits in it until all its transfers are done.

    Each field is the pass whose input is transferred, as numbered on the *receiving* stage; None: no such transfer.
    """

    send_next: PassId | None = None
    """To the stage behind: the input of its forward."""
    recv_prev: PassId | None = None
    """From the stage before: the input of the own forward."""
    send_prev: PassId | None = None
    """To the stage before: the input of its backward."""
    recv_next: PassId | None = None
    """From the stage behind: the input of the own backward."""


class PipelineSchedule(NamedTuple):
    """What determines the order of passes; make it with `PipelineSchedule.checked`."""

    name: str
    """One of `SCHEDULES`."""
    stages: int
    """Pipeline stages."""
    chunks: int
    """Model chunks of each."""
    microbatches: int
    """Microbatches of a step."""
    group_size: int
    """Microbatches that pass one chunk before the next one's turn; only the interleaved schedule looks at it."""
    forward_only: bool = False
    """Whether there are no backwards."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of passes that it has."""
        return ("forward",) if self.forward_only else ("forward", "backward")

    @classmethod
    def checked(
        cls,
        stages: int,
        chunks: int,
        microbatches: int,
        *,
        name: str | None = None,
        group_size: int | None = None,
        forward_only: bool = False,
    ) -> PipelineSchedule:
        """The schedule that Megatron would run, or a refusal where Megatron refuses.

        ``name`` None: no_pipelining for one stage, 1f1b for one chunk a stage, else interleaved, as Megatron's
        ``get_forward_backward_func`` chooses. ``group_size``: ``microbatch_group_size_per_vp_stage``, by default the
        number of stages; the other schedules do not look at it.

        Raises:
            ValueError: unknown name, a count below 1, a name that does not fit stages and chunks, or microbatches
                that the interleaved schedule refuses.
        """
        for label, value in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
            _check_count(label, value)
        if group_size is not None:
            _check_count("microbatch_group_size", group_size)
        if name is None:
            name = "no_pipelining" if stages == 1 else "1f1b" if chunks == 1 else "interleaved"
        if name not in SCHEDULES:
            raise ValueError(f"schedule={name!r} is unknown, expected one of {', '.join(SCHEDULES)} (or None)")
        if name == "no_pipelining" and stages > 1:
            raise ValueError(f"schedule='no_pipelining' runs on one stage, got {stages}")
        if name != "interleaved" and chunks > 1:
            raise ValueError(f"schedule={name!r} has one model chunk a stage, got {chunks}; more need 'interleaved'")
        if name == "interleaved" and stages == 1:
            raise ValueError("schedule='interleaved' needs at least 2 stages, got 1")
        group = stages if group_size is None else group_size
        if name == "interleaved":
            if not stages <= group <= microbatches:
                raise ValueError(
                    f"microbatch_group_size={group} must lie between the number of stages ({stages}) and of "
                    f"microbatches ({microbatches}) for the interleaved schedule"
                )
            if 0 < microbatches % group < stages:
                raise ValueError(
                    f"microbatches={microbatches} leaves {microbatches % group} in the last group; Megatron's "
                    f"interleaved schedule wants a multiple of microbatch_group_size={group}, or at least {stages} "
                    "(the number of stages) in the last group"
                )
        return cls(name, stages, chunks, microbatches, group, forward_only)

    def warmup(self, stage: int) -> int:
        """How many forwards ``stage`` runs before its first backward follows one (``get_pp_rank_microbatches``)."""
        total = self.chunks * self.microbatches
        if self.forward_only:
            return total
        behind = self.stages - stage - 1
        if self.name == "interleaved":
            behind = 2 * behind + (self.chunks - 1) * self.group_size
        return min(behind, total)


@lru_cache(maxsize=16)
def forward_order(schedule: PipelineSchedule) -> tuple[PassId, ...]:
    """Every stage's forwards in order: groups of microbatches, and within a group chunk after chunk."""
    count = schedule.microbatches
    group = schedule.group_size if schedule.name == "interleaved" else count
    return tuple(
        PassId("forward", chunk, microbatch)
        for first in range(0, count, group)
        for chunk in range(schedule.chunks)
        for microbatch in range(first, min(first + group, count))
    )


@lru_cache(maxsize=16)
def backward_order(schedule: PipelineSchedule) -> tuple[PassId, ...]:
    """Every stage's backwards in order: that of the forwards with the chunks counted from the last."""
    last = schedule.chunks - 1
    return tuple(PassId("backward", last - chunk, microbatch) for _, chunk, microbatch in forward_order(schedule))


def arrange(forwards: Sequence[T], backwards: Sequence[T], warmup: int) -> list[T]:
    """The three parts of all schedules: warm-up forwards, one forward and one backward in turn, other backwards."""
    steady = [item for pair in zip(forwards[warmup:], backwards, strict=False) for item in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def phase_order(schedule: PipelineSchedule, stage: int) -> list[PassId]:
    """The phases that ``stage`` runs, in Megatron's order."""
    backwards = () if schedule.forward_only else backward_order(schedule)
    return arrange(forward_order(schedule), backwards, schedule.warmup(stage))


def producer(schedule: PipelineSchedule, stage: int, which: PassId) -> tuple[int, PassId] | None:
    """Returns the stage and the pass there whose result is the input of a pass on ``stage``; None for the first
    forward of the model, and for the backward that follows the loss."""
    last, last_chunk = schedule.stages - 1, schedule.chunks - 1
    if which.kind == "forward":
        if stage:
            return stage - 1, which
        return (last, which._replace(chunk=which.chunk - 1)) if which.chunk else None
    if stage < last:
        return stage + 1, which
    return (0, which._replace(chunk=which.chunk + 1)) if which.chunk < last_chunk else None


def stage_program(schedule: PipelineSchedule, stage: int) -> list[PassId | SendReceive]:
    """The phases of `phase_order` with the exchanges between them, for communication that is not overlapped.

    That is 1F1B, and the interleaved schedule with ``overlap_p2p_comm`` off. Calls that neither send nor receive are
    left out.
    """
    if schedule.name == "interleaved":
        program = _interleaved_program(schedule, stage)
    else:
        program = _one_forward_one_backward_program(schedule, stage)
    return [step for step in program if isinstance(step, PassId) or any(step)]


def _one_forward_one_backward_program(schedule: PipelineSchedule, stage: int) -> list[PassId | SendReceive]:
    first, last = stage == 0, stage == schedule.stages - 1
    forwards, backwards, warmup = forward_order(schedule), backward_order(schedule), schedule.warmup(stage)

    def recv_forward(index: int) -> SendReceive:
        return SendReceive(recv_prev=None if first else forwards[index])

    program: list[PassId | SendReceive] = []
    for index in range(warmup):
        sent = None if last else forwards[index]
        program += [recv_forward(index), forwards[index], SendReceive(send_next=sent)]
    remaining = len(forwards) - warmup
    if remaining:
        program.append(recv_forward(warmup))
    for index in range(remaining):
        forward, backward = forwards[warmup + index], backwards[index]
        following = None if first or index == remaining - 1 else forwards[warmup + index + 1]
        program += [
            forward,
            SendReceive() if last else SendReceive(send_next=forward, recv_next=backward),
            backward,
            SendReceive(send_prev=None if first else backward, recv_prev=following),
        ]
    if not schedule.forward_only:
        for backward in backwards[remaining:]:
            received, sent = (None if last else backward), (None if first else backward)
            program += [SendReceive(recv_next=received), backward, SendReceive(send_prev=sent)]
    return program


def _interleaved_program(schedule: PipelineSchedule, stage: int) -> list[PassId | SendReceive]:
    stages, last_chunk = schedule.stages, schedule.chunks - 1
    first, last = stage == 0, stage == stages - 1
    forwards, backwards, warmup = forward_order(schedule), backward_order(schedule), schedule.warmup(stage)
    total = len(forwards)
    all_in_warmup = warmup == total

    def consumer(phase: PassId) -> PassId | None:
        """The phase of the stage after this one (before it, for a backward) that waits for the result of ``phase``."""
        if phase.kind == "forward":
            chunk = phase.chunk + last
            return phase._replace(chunk=chunk) if chunk <= last_chunk else None
        chunk = phase.chunk - first
        return phase._replace(chunk=chunk) if chunk >= 0 else None

    def received(order: tuple[PassId, ...], index: int) -> PassId | None:
        """What arrives in the exchange after phase ``index`` of ``order``: the next phase's input, or, on the stage
        that takes over from the far end of the pipeline, what that end has computed stages - 1 phases ago."""
        forward = order is forwards
        if not (first if forward else last):
            return order[index + 1] if index + 1 < total else None
        if index < stages - 1:
            return None
        produced = order[index - (stages - 1)]
        chunk = produced.chunk + (1 if forward else -1)
        return produced._replace(chunk=chunk) if 0 <= chunk <= last_chunk else None

    program: list[PassId | SendReceive] = [SendReceive(recv_prev=None if first else forwards[0])]
    for index in range(warmup):
        turn = index == warmup - 1 and not schedule.forward_only and not all_in_warmup
        program += [
            forwards[index],
            SendReceive(
                send_next=consumer(forwards[index]),
                recv_prev=received(forwards, index) if index < total - 1 else None,
                recv_next=backwards[0] if turn and not last else None,
            ),
        ]
    for index in range(total - warmup):
        forward, backward = forwards[warmup + index], backwards[index]
        program += [
            forward,
            backward,
            SendReceive(
                send_next=consumer(forward),
                recv_prev=received(forwards, warmup + index) if warmup + index < total - 1 else None,
                send_prev=consumer(backward),
                recv_next=received(backwards, index) if index < total - 1 else None,
            ),
        ]
    if not schedule.forward_only:
        if all_in_warmup and not last:
            program.append(SendReceive(recv_next=backwards[0]))
        for index in range(total - warmup, total):
            following = received(backwards, index) if index < total - 1 else None
            program += [backwards[index], SendReceive(send_prev=consumer(backwards[index]), recv_next=following)]
    return program


def _check_count(label: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{label} must be a positive integer, got {value!r}")
