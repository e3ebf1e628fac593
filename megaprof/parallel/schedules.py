"""Pipeline schedules as data: the order of passes on each stage, which pass needs the result of which, and which stages
exchange what. Everything in megaprof that needs to know one of these reads it here.

Source of Megatron's rules: ``megatron/core/pipeline_parallel/schedules.py`` (0.12 to 0.19 agree), that is
``get_schedule_table``, ``get_pp_rank_microbatches``, ``recv_tensor_from_previous_stage`` and the loops of the three
``forward_backward_*`` functions; ``combined_1f1b.py``; and ``p2p_communication.py``. The tests compare all of it with
those schedules as they really run.

Schedules that split backwards, and fill the bubble with the halves that compute the gradients of weights, are not
Megatron's. torch has them, and torchtitan uses them. Source of their orders:
``torch/distributed/pipelining/schedules.py`` (2.13), which the tests compare them with. ``zb_h1`` and ``zbv`` are ZB-H1
and ZB-V (Qi et al. 2023, arXiv 2401.10241; in torch ``InterleavedZeroBubble`` with one chunk a stage, and
``ZBVZeroBubble``), and ``dualpipev`` is DeepSeek's DualPipeV (``DualPipeV``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from megaprof.parallel.topology import checked_number

SCHEDULES = ("no_pipelining", "1f1b", "interleaved")
"""Names for Megatron's three ``forward_backward_*`` functions: no pipelining, without and with interleaving."""
SPLIT_SCHEDULES = ("zb_h1", "zbv", "dualpipev")
"""Schedules that run the two halves of a backward apart."""
_V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of one stage on one microbatch, or its work between passes, from ``start`` to ``end``.

    Times are in nanoseconds. Measured times are integers on the wall clock of the rank's host. Replayed times count
    from the beginning of the step.
    """

    kind: str
    """``forward``, ``backward`` or ``combined``; between passes ``finalize_grads`` or the operation of an exchange."""
    stage: int
    """Pipeline rank."""
    chunk: int | None
    """Model chunk of the stage; None if it is unknown, or if there is none."""
    microbatch: int | None
    """Microbatch of the step, and that of the forward for a combined pass; None if it is unknown, or if there is
    none."""
    start: float
    """When it began: on the GPU, if that was captured."""
    end: float
    """When it ended: on the GPU, if that was captured."""
    rank: int | None = None
    """Global rank; None if the pass was replayed."""

    @property
    def phase(self) -> str:
        """``kind``, as `megaprof.simulate` documents it."""
        return self.kind

    @property
    def start_ms(self) -> float:
        """``start`` in milliseconds."""
        return self.start / 1e6

    @property
    def end_ms(self) -> float:
        """``end`` in milliseconds."""
        return self.end / 1e6


class PassId(NamedTuple):
    """One pass of a stage: a microbatch forward or backward through a model chunk."""

    kind: str
    """``forward`` or ``backward``. In a schedule that splits backwards, ``backward`` is the half that computes the
    gradient of the input, and ``weight`` the other half."""
    chunk: int
    microbatch: int


class SendReceive(NamedTuple):
    """One call to send and receive, which begins transfers; `Wait` says where the stage waits until they are done.

    Each field is the pass whose input is transferred, as numbered on the *receiving* stage; None if there is no such
    transfer.
    """

    send_next: PassId | None = None
    """Sent to the next stage: the input of its forward."""
    recv_prev: PassId | None = None
    """Received from the previous stage: the input of this stage's forward."""
    send_prev: PassId | None = None
    """Sent to the previous stage: the input of its backward."""
    recv_next: PassId | None = None
    """Received from the next stage: the input of this stage's backward."""

    def transfers(self, stage: int, stages: int) -> Iterator[tuple[int, int, PassId]]:
        """Yields the sender and the receiver of every transfer of ``stage``, and the pass there that needs it."""
        following, previous = (stage + 1) % stages, (stage - 1) % stages
        ends = (stage, following), (previous, stage), (stage, previous), (following, stage)
        return ((*both, pass_id) for both, pass_id in zip(ends, self, strict=True) if pass_id is not None)


class Wait(NamedTuple):
    """Where a stage waits until transfers are done that it began."""

    transfers: SendReceive


Program: TypeAlias = list[PassId | SendReceive | Wait]
"""What a stage does, in order."""


#: What each of Megatron's exchanges transfers, as the fields of `SendReceive`: functions of ``p2p_communication`` up to
#: 0.13, methods of ``P2PCommunicator`` from 0.14.
EXCHANGES = {
    "recv_forward": ("recv_prev",),
    "recv_backward": ("recv_next",),
    "send_forward": ("send_next",),
    "send_backward": ("send_prev",),
    "send_forward_recv_backward": ("send_next", "recv_next"),
    "send_backward_recv_forward": ("send_prev", "recv_prev"),
    "send_forward_recv_forward": ("send_next", "recv_prev"),
    "send_backward_recv_backward": ("send_prev", "recv_next"),
    "send_forward_backward_recv_forward_backward": SendReceive._fields,
}
#: The transfers by the kind of pass whose input they carry. With ``overlap_p2p_comm``, Megatron waits for a handle with
#: the name of the transfer.
SENDS = {"forward": "send_next", "backward": "send_prev"}
RECEIVES = {"forward": "recv_prev", "backward": "recv_next"}


class Placement(NamedTuple):
    """The order of the model's pieces: chunk 0 of all stages in turn, then chunk 1, and so on."""

    stages: int
    chunks: int = 1
    """Model chunks of each stage."""
    v_shaped: bool = False
    """True if every other chunk passes the stages in reverse, so that the last stage continues with its own result."""

    def consumer(self, kind: str, stage: int, chunk: int) -> tuple[int, int] | None:
        """Returns the stage and chunk that the result of a forward or backward goes to; None after the last one."""
        return None if kind == "weight" else self._neighbour(stage, chunk, 1 if kind == "forward" else -1)

    def producer(self, kind: str, stage: int, chunk: int) -> tuple[int, int] | None:
        """Returns the stage and chunk where the input of a forward or backward comes from; None for the model's first
        forward, and for the backward that follows the loss."""
        return None if kind == "weight" else self._neighbour(stage, chunk, -1 if kind == "forward" else 1)

    def link(self, kind: str, stage: int, chunk: int) -> int | None:
        """Returns the link over which the input of a pass comes, by the stage before it; the last stage's leads to the
        first. None if it comes from no other stage."""
        source = self.producer(kind, stage, chunk)
        if source is None or source[0] == stage:
            return None
        low, high = sorted((source[0], stage))
        return low if high == low + 1 else high

    def beside(self, stage: int) -> tuple[int | None, int | None]:
        """Returns the stages before and after ``stage``. At an end of the pipeline, one of them is the other end if
        chunks make the pipeline a ring, else None."""
        is_ring = min(self.stages, self.chunks) > 1 and not self.v_shaped
        before, after = (stage - 1) % self.stages, (stage + 1) % self.stages
        return (before if stage or is_ring else None), (after if after or is_ring else None)

    def _neighbour(self, stage: int, chunk: int, step: int) -> tuple[int, int] | None:
        piece = chunk * self.stages + self._position(stage, chunk) + step
        if not 0 <= piece < self.stages * self.chunks:
            return None
        chunk, position = divmod(piece, self.stages)
        return self._position(position, chunk), chunk

    def _position(self, stage: int, chunk: int) -> int:
        """Returns the position of ``stage`` in the order in which a chunk passes the stages. It is its own inverse."""
        return self.stages - 1 - stage if self.v_shaped and chunk % 2 else stage


class PipelineSchedule(NamedTuple):
    """Everything that determines the order of passes. Make one with `PipelineSchedule.checked`."""

    name: str
    """One of `SCHEDULES` or `SPLIT_SCHEDULES`."""
    stages: int
    chunks: int
    """Model chunks of each stage."""
    microbatches: int
    """Of a step."""
    group_size: int
    """Microbatches that pass one chunk before the next chunk begins; only used by the interleaved schedule."""
    forward_only: bool = False
    """True if there are no backwards."""
    combined: bool = False
    """True if consecutive forwards and backwards run together (``overlap_moe_expert_parallel_comm``)."""
    overlap: str = "steady"
    """Where the interleaved schedule exchanges beside passes: ``none``; ``steady``, where forwards and backwards
    alternate (``overlap_p2p_comm``); or ``all``, also before and after that (``overlap_p2p_comm_warmup_flush``)."""
    frees: bool = False
    """True if a stage then waits until the result of each forward is sent, because it frees it
    (``deallocate_pipeline_outputs``, from 0.18)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.forward_only:
            return ("forward",)
        return ("forward", "backward", "weight") if self.name in SPLIT_SCHEDULES else ("forward", "backward")

    @property
    def placement(self) -> Placement:
        """The order of the model's pieces on its stages and chunks."""
        return Placement(self.stages, self.chunks, self.name in _V_SHAPED)

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
        combined: bool = False,
        overlap: str = "steady",
        frees: bool = False,
    ) -> PipelineSchedule:
        """Returns the schedule that Megatron would run (torch, for `SPLIT_SCHEDULES`); refuses what it refuses.

        ``name`` None: no_pipelining for one stage, 1f1b for one chunk a stage, else interleaved, as Megatron's
        ``get_forward_backward_func`` chooses. ``group_size``: ``microbatch_group_size_per_vp_stage``, by default the
        number of stages; the other schedules do not look at it.

        Raises:
            ValueError: unknown name, a count below 1, a name that does not fit stages and chunks, or microbatches
                that the schedule refuses.
        """
        for label, value in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
            checked_number(label, value, least=1)
        if group_size is not None:
            checked_number("microbatch_group_size", group_size, least=1)
        if name is None:
            name = "no_pipelining" if stages == 1 else "1f1b" if chunks == 1 else "interleaved"
        if name not in SCHEDULES + SPLIT_SCHEDULES:
            valid_names = ", ".join(SCHEDULES + SPLIT_SCHEDULES)
            raise ValueError(f"schedule={name!r} is unknown, expected one of {valid_names} (or None)")
        if name in SPLIT_SCHEDULES:
            return cls(name, stages, chunks, microbatches, stages)._checked_split(forward_only, combined)
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
        if combined and name == "1f1b":
            raise ValueError("combined=True needs schedule='interleaved' or one stage, got '1f1b'")
        if name != "interleaved":
            overlap = "steady"  # equal schedules are equal
        return cls(
            name, stages, chunks, microbatches, group, forward_only, combined and not forward_only, overlap, frees
        )

    def _checked_split(self, forward_only: bool, combined: bool) -> PipelineSchedule:
        chunks = 2 if self.name in _V_SHAPED else 1
        if forward_only or combined:
            raise ValueError(f"schedule={self.name!r} has backwards, and runs them alone")
        if self.stages == 1 or self.chunks != chunks:
            raise ValueError(
                f"schedule={self.name!r} needs at least 2 stages with {chunks} model chunks each, got {self.stages} "
                f"with {self.chunks}"
            )
        if self.name == "dualpipev" and self.microbatches < 2 * self.stages:
            raise ValueError(
                f"microbatches={self.microbatches} are fewer than schedule='dualpipev' needs, {2 * self.stages} "
                f"(twice the number of stages)"
            )
        return self

    def warmup(self, stage: int) -> int:
        """Returns how many forwards ``stage`` runs before its first backward follows one
        (``get_pp_rank_microbatches``). Not defined for `SPLIT_SCHEDULES`."""
        total = self.chunks * self.microbatches
        if self.forward_only:
            return total
        forwards = self.stages - stage - 1
        if self.name == "interleaved":
            forwards = 2 * forwards + (self.chunks - 1) * self.group_size
        return min(forwards + self.combined, total)


@lru_cache(maxsize=32)
def order_of(schedule: PipelineSchedule, kind: str) -> tuple[PassId, ...]:
    """Returns the forwards or the backwards of every stage, in order: groups of microbatches, and within a group chunk
    after chunk. Backwards count chunks from the last."""
    count, chunks = schedule.microbatches, range(schedule.chunks)
    group = schedule.group_size if schedule.name == "interleaved" else count
    return tuple(
        PassId(kind, chunk, microbatch)
        for group_start in range(0, count, group)
        for chunk in (chunks if kind == "forward" else reversed(chunks))
        for microbatch in range(group_start, min(group_start + group, count))
    )


_SPLIT_KINDS = {"F": "forward", "B": "backward", "W": "weight"}


def turns(schedule: PipelineSchedule, stage: int) -> list[tuple[PassId, ...]]:
    """Returns what ``stage`` runs, in order. The passes of one turn run as one: the turn begins when all their inputs
    are there, and their results are there when it ends."""
    if schedule.name in SPLIT_SCHEDULES:
        order = {"zb_h1": _zb_h1, "zbv": _zbv, "dualpipev": _dualpipev}[schedule.name]
        count, made = Counter[str](), list[tuple[PassId, ...]]()
        for turn in order(schedule.stages, schedule.microbatches, stage):
            names = turn.split()  # each has the next microbatch of its kind and chunk
            made.append(tuple(PassId(_SPLIT_KINDS[name[0]], int(name[1:]), count[name]) for name in names))
            count.update(names)
        return [turn for turn in made if turn[0].microbatch < schedule.microbatches]
    forwards, warmup = order_of(schedule, "forward"), schedule.warmup(stage)
    backwards = () if schedule.forward_only else order_of(schedule, "backward")
    steady = zip(forwards[warmup:], backwards, strict=False)
    return [
        *((pass_id,) for pass_id in forwards[:warmup]),
        *(steady if schedule.combined else ((pass_id,) for pair in steady for pass_id in pair)),
        *((pass_id,) for pass_id in backwards[len(forwards) - warmup :]),
    ]


def _zb_h1(stages: int, microbatches: int, stage: int) -> list[str]:
    """ZB-H1: 1F1B in which a stage runs its weight halves later, by as many microbatches as there are stages before it.
    Returns the turns, whose passes are such as ``F0``: kind and chunk."""
    ahead = min(stages - 1 - stage, microbatches)
    order = ["F0"] * ahead
    for index in range(microbatches):
        order += ["F0"] * (ahead + index < microbatches) + ["B0"] + ["W0"] * (index >= stage)
    return order + ["W0"] * min(stage, microbatches)


def _zbv(stages: int, microbatches: int, stage: int) -> list[str]:
    """ZB-V for passes that all take equally long; laid out for at least 2 * stages - 1 microbatches."""
    ahead, count = stages - stage, max(2 * stages - 1, microbatches)
    order = ["F0"] * (2 * ahead - 1) + ["F1", "F0"] * stage + ["F1", "B1", "W1"] * ahead
    for index in range(count - stages):
        order += ["F0"] * (2 * stages - stage - 1 + index < count) + ["B0", "W0", "F1", "B1", "W1"]
    return order + ["B0", "B1"] * stage + ["B0", "W0"] * ahead + ["W1"] * stage + ["W0"] * stage


def _dualpipev(stages: int, microbatches: int, stage: int) -> list[str]:
    """DualPipeV: in its middle, a forward and a whole backward of the other chunk run as one."""
    ahead = stages - stage - 1
    order = ["F0"] * (2 * ahead) + ["F0", "F1"] * (stage + 1) + ["B1", "W1", "F1"] * ahead
    for index in range(microbatches - 2 * stages + stage + 1):
        order += ["F0", "B1 W1"] if index == 0 and ahead == 0 else ["F0 B1 W1"]
        order.append("F1 B0 W0")
    order += ["B1 W1", "F1 B0 W0"] * ahead
    # The second half of the last backwards is split.
    delayed: list[str] = []  # weight halves that are still to run
    for index in range(2 * (stage + 1)):
        chunk = 1 - index % 2
        order.append(f"B{chunk}" if index > stage else f"B{chunk} W{chunk}")
        delayed += [f"W{chunk}"] * (index > stage)
    for _ in range(ahead):
        order += [delayed.pop(0), "B0"]
        delayed.append("W0")
    return order + delayed


def phase_order(schedule: PipelineSchedule, stage: int) -> list[PassId]:
    """Returns the passes that ``stage`` runs, in order."""
    return list(chain.from_iterable(turns(schedule, stage)))


def stage_program(schedule: PipelineSchedule, stage: int) -> Program:
    """Returns the passes of `phase_order` with the exchanges between them. Calls that neither send nor receive are left
    out, and so is waiting for nothing."""
    if schedule.name == "interleaved":
        return _interleaved_program(schedule, stage)
    if schedule.name in SPLIT_SCHEDULES:
        return _split_program(schedule, stage)
    return _one_forward_one_backward_program(schedule, stage)


def _exchange(**transfers: PassId | None) -> Program:
    """Returns an exchange that the stage waits for at once; nothing if there is nothing to transfer."""
    exchange = SendReceive(**transfers)
    return [exchange, Wait(exchange)] if any(exchange) else []


def _one_forward_one_backward_program(schedule: PipelineSchedule, stage: int) -> Program:
    alternates, placement, program = schedule.warmup(stage) < schedule.microbatches, schedule.placement, Program()
    sending = {kind for kind in schedule.kinds if placement.consumer(kind, stage, 0) is not None}
    receiving = {kind for kind in schedule.kinds if placement.producer(kind, stage, 0) is not None}
    for before, which in pairwise([None, *phase_order(schedule, stage), None]):
        sent = {SENDS[before.kind]: before} if before and before.kind in sending else {}
        received = {RECEIVES[which.kind]: which} if which and which.kind in receiving else {}
        # Where forwards and backwards alternate, one exchange takes a result away and brings the next input.
        if alternates and before and which and before.kind != which.kind:
            program += _exchange(**sent, **received)
        else:
            program += [*_exchange(**sent), *_exchange(**received)]
        program += [which] if which else []
    return program


def _interleaved_program(schedule: PipelineSchedule, stage: int) -> Program:
    stages, warmup, overlap = schedule.stages, schedule.warmup(stage), schedule.overlap
    orders = {kind: order_of(schedule, kind) for kind in ("forward", "backward")}
    forwards, backwards = orders.values()
    total, placement, done = len(forwards), schedule.placement, Counter[str]()
    takes_over = {"forward": stage == 0, "backward": stage == stages - 1}  # from the far end of the pipeline

    def consumer(which: PassId, stage: int = stage) -> PassId | None:
        """Returns the pass that needs the result of ``which``, as numbered on its own stage; None if none does."""
        place = placement.consumer(which.kind, stage, which.chunk)
        return None if place is None else which._replace(chunk=place[1])

    def received(which: PassId) -> PassId | None:
        """Returns what arrives in the exchange after a pass: the input of the next one of its kind or, on the stage
        that takes over from the far end, what that end has computed stages - 1 passes ago."""
        order, index = orders[which.kind], done[which.kind]
        done[which.kind] += 1
        if index == total - 1 or (takes_over[which.kind] and index < stages - 1):
            return None
        return consumer(order[index - (stages - 1)], stages - 1 - stage) if takes_over[which.kind] else order[index + 1]

    program: Program = []
    under_way = {name: deque[PassId]() for name in SendReceive._fields}  # begun, and not waited for

    def begin(**transfers: PassId | None) -> None:
        there = {name: which for name, which in transfers.items() if which is not None}
        program.extend([SendReceive(**there)] if there else [])
        for name, which in there.items():
            under_way[name].append(which)

    def wait(name: str) -> None:
        if under_way[name]:
            program.append(Wait(SendReceive(**{name: under_way[name].popleft()})))

    def run(*passes: PassId, alone: bool = False, gradient: PassId | None = None) -> None:
        """Adds passes and what is exchanged for them. ``alone``: before or after those that alternate; ``gradient``:
        an input of the first backward that arrives as well."""
        sent = {SENDS[which.kind]: consumer(which) for which in passes}
        arriving = {RECEIVES[which.kind]: received(which) for which in passes}
        for which in passes:
            if placement.producer(which.kind, stage, which.chunk) is not None:
                wait(RECEIVES[which.kind])
        if overlap == "none" or (alone and overlap != "all"):
            arriving |= {"recv_next": gradient} if gradient else {}
            program.extend([*passes, *_exchange(**sent, **arriving)])
            return
        if alone and not takes_over[passes[0].kind]:
            begin(**arriving)
            arriving = {}
        program.extend(passes)
        for which in passes:
            name, receive = SENDS[which.kind], RECEIVES[which.kind]
            begin(**{name: sent[name], receive: arriving.get(receive)})
            # What the stage sent the last time is waited for.
            kept = sent[name] is not None and not (schedule.frees and which.kind == "forward")
            while len(under_way[name]) > kept:
                wait(name)

    first_gradient = None if stage == stages - 1 or schedule.forward_only else backwards[0]
    program += _exchange(recv_prev=None if stage == 0 else forwards[0])
    for index, forward in enumerate(forwards[:warmup]):
        turning = index == warmup - 1 < total - 1
        run(forward, alone=True, gradient=first_gradient if turning and overlap == "none" else None)
    if warmup == total:
        program += _exchange(recv_next=first_gradient)
    elif overlap != "none":
        begin(recv_next=first_gradient)
    for pair in zip(forwards[warmup:], backwards, strict=False):
        for passes in [pair] if schedule.combined or overlap == "none" else [pair[:1], pair[1:]]:
            run(*passes)
    for backward in () if schedule.forward_only else backwards[total - warmup :]:
        run(backward, alone=True)
    wait("send_prev")
    return program


def _split_program(schedule: PipelineSchedule, stage: int) -> Program:
    """Returns `stage_program` of one of `SPLIT_SCHEDULES`: exchanges go on beside passes, and nobody waits to send."""
    program: Program = []
    for turn in turns(schedule, stage):
        sends = []
        for which in turn:
            source = schedule.placement.producer(which.kind, stage, which.chunk)
            target = schedule.placement.consumer(which.kind, stage, which.chunk)
            if source is not None and source[0] != stage:
                received = SendReceive(**{"recv_next" if source[0] > stage else "recv_prev": which})
                program += [received, Wait(received)]
            if target is not None and target[0] != stage:
                name = "send_next" if target[0] > stage else "send_prev"
                sends.append(SendReceive(**{name: which._replace(chunk=target[1])}))
        program += [*turn, *sends]
    return program
