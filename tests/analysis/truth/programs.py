"""What every stage of a pipeline does, in order: Megatron's schedules, written down once more for the tests.

Facts of ``megatron/core/pipeline_parallel/schedules.py`` (0.12 to 0.19): warm-up of ``stages - stage - 1`` forwards,
or, with model chunks, of twice that and all but the last chunk of a group; then one forward and one backward in turn;
then the backwards that are left. Exchanges of model chunks may overlap with computing (without that, two stages are
refused): where forwards and backwards alternate (``steady``, ``overlap_p2p_comm``), or all of them (also
``overlap_p2p_comm_warmup_flush``). These are only written down for messages that hold no sender: a stage waits for the
input of a pass right before it, and for nothing else.

Nothing of ``megaprof.analysis`` is used: this is what its own schedules are tested with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = 0, 1
KINDS = ("forward", "backward")

#: Direction, sending stage, receiving stage. The n-th receive of a channel takes what its n-th send sent.
Channel = tuple[int, int, int]


@dataclass(frozen=True)
class Pass:
    """One microbatch on one model chunk."""

    kind: int
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Exchange:
    """One call of Megatron's, by its name; it returns when all of its messages are through. The first and the last
    stage make calls that have nothing to exchange."""

    name: str
    sends: tuple[Channel, ...] = ()
    receives: tuple[Channel, ...] = ()
    begins: bool = False
    """It returns at once. A later call whose name begins with ``wait`` returns when they are through."""


Program = Sequence[Pass | Exchange]


def program(
    stage: int, *, stages: int, chunks: int, microbatches: int, forward_only: bool, overlapped: bool | str = False
) -> Program:
    """What ``stage`` does in a step; ``overlapped``: only with model chunks; all exchanges, or those that are
    ``steady``."""
    if stages == 1:
        kinds = (FORWARD,) if forward_only else (FORWARD, BACKWARD)
        return [Pass(kind, 0, mb) for mb in range(microbatches) for kind in kinds]
    if chunks > 1:
        own = _Interleaved(stage, stages, chunks, microbatches, forward_only)
        return own.program(overlapped == "steady") if overlapped in (False, "steady") else own.overlapped()
    return _plain(stage, stages, microbatches, forward_only)


def programs_of(
    stages: int, chunks: int, microbatches: int, forward_only: bool = False, overlapped: bool | str = False
) -> list[Program]:
    """Of every stage."""
    given = {"chunks": chunks, "microbatches": microbatches, "forward_only": forward_only, "overlapped": overlapped}
    return [program(stage, stages=stages, **given) for stage in range(stages)]


def _plain(stage: int, stages: int, microbatches: int, forward_only: bool) -> Program:
    before, after = stage > 0, stage < stages - 1

    def call(*parts: str) -> Exchange:
        """``sf``: send a forward's output, ``rb``: receive a backward's input, ..."""
        names = {"s": "send", "r": "recv", "f": "forward", "b": "backward"}
        to = {"sf": (FORWARD, stage, stage + 1), "rf": (FORWARD, stage - 1, stage)}
        to |= {"sb": (BACKWARD, stage, stage - 1), "rb": (BACKWARD, stage + 1, stage)}
        there = {"sf": after, "rb": after, "rf": before, "sb": before}
        sends = tuple(to[part] for part in parts if part[0] == "s" and there[part])
        receives = tuple(to[part] for part in parts if part[0] == "r" and there[part])
        return Exchange("_".join(f"{names[part[0]]}_{names[part[1]]}" for part in parts), sends, receives)

    warm = min(stages - stage - 1, microbatches)
    done: list[Pass | Exchange] = []
    for mb in range(warm):
        done += [call("rf"), Pass(FORWARD, 0, mb), call("sf")]
    left = microbatches - warm
    if left:
        done.append(call("rf"))
    for n in range(left):
        done.append(Pass(FORWARD, 0, warm + n))
        if forward_only:
            done += [call("sf"), *([call("rf")] if n < left - 1 else [])]
        else:
            done += [call("sf", "rb"), Pass(BACKWARD, 0, n)]
            done.append(call("sb", "rf") if n < left - 1 else call("sb"))
    for mb in range(left, microbatches) if not forward_only else ():
        done += [call("rb"), Pass(BACKWARD, 0, mb), call("sb")]
    return done


class _Interleaved:
    """Several model chunks on a stage, in groups of as many microbatches as there are stages."""

    def __init__(self, stage: int, stages: int, chunks: int, microbatches: int, forward_only: bool) -> None:
        self.stage, self.stages, self.chunks, self.forward_only = stage, stages, chunks, forward_only
        self.first, self.last = stage == 0, stage == stages - 1
        self.order = [
            (chunk, mb)
            for begin in range(0, microbatches, stages)
            for chunk in range(chunks)
            for mb in range(begin, min(begin + stages, microbatches))
        ]
        warm = (stages - stage - 1) * 2 + (chunks - 1) * stages
        self.warm = len(self.order) if forward_only else min(warm, len(self.order))

    def at(self, kind: int, n: int) -> Pass:
        chunk, mb = self.order[n]
        return Pass(kind, chunk if kind == FORWARD else self.chunks - 1 - chunk, mb)

    def sends(self, kind: int, n: int | None) -> tuple[Channel, ...]:
        """Of what was computed as the n-th of its kind."""
        if n is None:
            return ()
        chunk = self.at(kind, n).chunk
        ends, last = (self.last, self.chunks - 1) if kind == FORWARD else (self.first, 0)
        if ends and chunk == last:
            return ()
        step = 1 if kind == FORWARD else -1
        return ((kind, self.stage, (self.stage + step) % self.stages),)

    def receives(self, kind: int, n: int) -> tuple[Channel, ...]:
        """Behind the n-th of its kind: the input of the next one, or, where a microbatch comes back to its first stage,
        of one that is computed later."""
        begins = self.first if kind == FORWARD else self.last
        if begins:
            source = n - (self.stages - 1)
            last = self.chunks - 1 if kind == FORWARD else 0
            if source < 0 or source >= len(self.order) or self.at(kind, source).chunk == last:
                return ()
        elif n + 1 >= len(self.order):
            return ()
        step = -1 if kind == FORWARD else 1
        return ((kind, (self.stage + step) % self.stages, self.stage),)

    def overlapped(self) -> Program:
        forwards = [self.at(FORWARD, n) for n in range(len(self.order))]
        backwards = [self.at(BACKWARD, n) for n in range(len(self.order))]
        passes = forwards[: self.warm]
        if not self.forward_only:
            left = forwards[self.warm :]
            passes += [each for pair in zip(left, backwards, strict=False) for each in pair] + backwards[len(left) :]
        done: list[Pass | Exchange] = []
        numbers = [0, 0]
        for each in passes:
            sends = self.sends(each.kind, numbers[each.kind])
            numbers[each.kind] += 1
            at = each.chunk * self.stages + self.stage + (-1 if each.kind == FORWARD else 1)
            if 0 <= at < self.stages * self.chunks:
                name = "wait_recv_prev" if each.kind == FORWARD else "wait_recv_next"
                done.append(Exchange(name, (), ((each.kind, at % self.stages, self.stage),)))
            names = ("send_forward_recv_forward", "send_backward_recv_backward")
            done += [each, Exchange(names[each.kind], sends)]
        return done

    def program(self, steady: bool = False) -> Program:
        count = len(self.order)
        begin = () if self.first else ((FORWARD, self.stage - 1, self.stage),)
        done: list[Pass | Exchange] = [Exchange("recv_forward", (), begin)]
        end = () if self.last else ((BACKWARD, self.stage + 1, self.stage),)
        for n in range(self.warm):
            done.append(self.at(FORWARD, n))
            sends, receives = self.sends(FORWARD, n), self.receives(FORWARD, n)
            turns = n == self.warm - 1 and not self.forward_only and self.warm < count
            if turns and not steady:
                done.append(Exchange("send_forward_backward_recv_forward_backward", sends, receives + end))
            else:
                done.append(Exchange("send_forward_recv_forward", sends, receives))
            if turns and steady:
                done.append(Exchange("send_backward_recv_backward", (), end, begins=True))
        left = count - self.warm
        coming, sent = {FORWARD: 0, BACKWARD: len(end)}, {FORWARD: (), BACKWARD: ()}

        def wait(kind: int, n: int) -> None:
            """Of the inputs on the way the first one, before a pass that has an input."""
            begins = (self.first, 0) if kind == FORWARD else (self.last, self.chunks - 1)
            if coming[kind] and (True, self.at(kind, n).chunk) != begins:
                step = -1 if kind == FORWARD else 1
                done.append(Exchange("wait_recv", (), ((kind, (self.stage + step) % self.stages, self.stage),)))
                coming[kind] -= 1

        for n in range(left if steady else 0):
            for kind, number, goes_on in ((FORWARD, self.warm + n, n < left - 1), (BACKWARD, n, True)):
                wait(kind, number)
                sends, receives = self.sends(kind, number), self.receives(kind, number) if goes_on else ()
                done += [self.at(kind, number), Exchange("send_recv", sends, receives, begins=True)]
                done.append(Exchange("wait_send", sent[kind]))
                sent[kind], coming[kind] = sends, coming[kind] + len(receives)
        for n in range(0 if steady else left):
            forward = self.warm + n
            done += [self.at(FORWARD, forward), self.at(BACKWARD, n)]
            sends = self.sends(FORWARD, forward) + self.sends(BACKWARD, n)
            receives = (self.receives(FORWARD, forward) if n < left - 1 else ()) + self.receives(BACKWARD, n)
            done.append(Exchange("send_forward_backward_recv_forward_backward", sends, receives))
        if self.forward_only:
            return done
        if self.warm == count:
            done.append(Exchange("recv_backward", (), end))
        for n in range(left, count):
            if steady and left:
                wait(BACKWARD, n)
            done.append(self.at(BACKWARD, n))
            receives = self.receives(BACKWARD, n) if n < count - 1 else ()
            done.append(Exchange("send_backward_recv_backward", self.sends(BACKWARD, n), receives))
        return [*done, Exchange("wait_send", sent[BACKWARD])] if steady else done
