"""When everything in a step happens, for all steps and replicas at once: a plain simulation of events.

Every stage works through its program (`programs`). A pass takes the time that it is given. An exchange begins when its
stage comes to it; the stage goes on when it is through, or goes on at once and waits for it later. A message is through
``link`` milliseconds after both ends are there (a rendezvous, as with NCCL). Where messages are buffered, it is through
``link`` milliseconds after it was sent, and its sender does not wait.

Every time is an array ``[step, replica]`` in milliseconds since the step began on the rank that began it first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.analysis.truth.programs import Channel, Exchange, Pass, Program

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Done:
    """Something that a stage has done."""

    what: Pass | Exchange
    start: Times
    end: Times


class Load:
    """Another program, in bursts, in which everything on a machine takes twice as long.

    ``bursts``: by step and replica, start and end in milliseconds, ascending. Beyond ``LONGEST`` nothing is disturbed.
    """

    LONGEST = 1e7

    def __init__(self, bursts: Sequence[Sequence[Sequence[tuple[float, float]]]]) -> None:
        steps, replicas = len(bursts), len(bursts[0])
        self.origin = self.LONGEST * np.arange(steps * replicas).reshape(steps, replicas)
        when, done = [0.0], [0.0]
        for step, replica in np.ndindex(steps, replicas):
            for start, end in bursts[step][replica]:
                for at, rate in ((self.origin[step, replica] + start, 1.0), (self.origin[step, replica] + end, 0.5)):
                    done.append(done[-1] + rate * (at - when[-1]))
                    when.append(at)
        when.append(self.LONGEST * (steps * replicas + 1))
        done.append(done[-1] + when[-1] - when[-2])
        self.when, self.done = np.array(when), np.array(done)

    def end(self, start: Times, work: Times) -> Times:
        """When a pass is through that takes ``work`` on a quiet machine."""
        done = np.interp(self.origin + start, self.when, self.done) + work
        return np.interp(done, self.done, self.when) - self.origin

    def work(self, start: Times, end: Times, replica: int) -> Times:
        """What was done of it from ``start`` to ``end``, [step]."""
        origin = self.origin[:, replica]
        done: Times = np.subtract(*(np.interp(origin + at, self.when, self.done) for at in (end, start)))
        return done


def simulate(
    programs: Sequence[Program],
    work: Times,
    enter: Times,
    link: Times,
    *,
    buffered: bool = False,
    loads: Sequence[Load | None] = (),
) -> list[list[Done]]:
    """What every stage does, in order.

    ``work``: of every pass, ``[stage, chunk, kind, microbatch, step, replica]``; ``enter``: of every stage,
    ``[stage, step, replica]``; ``link``: of a message between a stage and the next (the last one's: to the first),
    ``[stage, step, replica]``; ``loads``: of every stage.
    Raises ValueError where the programs wait for each other for ever.
    """
    stages = len(programs)
    clock = [enter[stage] for stage in range(stages)]
    done: list[list[Done]] = [[] for _ in programs]
    posts: dict[tuple[Channel, int, bool], Times] = {}  # channel, number, whether it is the sender's
    counts: dict[tuple[Channel, bool], int] = defaultdict(int)
    begun: dict[tuple[Channel, bool], deque[int]] = defaultdict(deque)  # and not waited for
    waiting: list[list[tuple[Channel, int, bool]] | None] = [None] * stages
    place = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(programs):
            while place[stage] < len(own):
                what, now = own[place[stage]], clock[stage]
                if isinstance(what, Pass):
                    takes = work[stage, what.chunk, what.kind, what.microbatch]
                    load = loads[stage] if loads else None
                    clock[stage] = now + takes if load is None else load.end(now, takes)
                else:
                    if waiting[stage] is None:
                        waiting[stage] = _post(what, now, posts, counts, begun)
                        moved = True
                    ends = _through(waiting[stage] or [], posts, link, buffered)
                    if ends is None:
                        break
                    clock[stage] = np.maximum.reduce([now, *ends])
                    waiting[stage] = None
                done[stage].append(Done(what, now, clock[stage]))
                place[stage] += 1
                moved = True
    if any(at < len(own) for at, own in zip(place, programs, strict=True)):
        raise ValueError(f"stages wait for each other for ever, at {place} of {[len(own) for own in programs]}")
    return done


def _post(
    what: Exchange,
    now: Times,
    posts: dict[tuple[Channel, int, bool], Times],
    counts: dict[tuple[Channel, bool], int],
    begun: dict[tuple[Channel, bool], deque[int]],
) -> list[tuple[Channel, int, bool]]:
    """The messages that a call waits for, each with its number on its channel."""
    found = []
    for channels, sender in ((what.sends, True), (what.receives, False)):
        for channel in channels:
            before = begun[channel, sender]
            if what.name.startswith("wait") and before:
                found.append((channel, before.popleft(), sender))
                continue
            message = (channel, counts[channel, sender], sender)
            counts[channel, sender] += 1
            posts[message] = now
            if what.begins:
                before.append(message[1])
            else:
                found.append(message)
    return found


def _through(
    messages: Sequence[tuple[Channel, int, bool]],
    posts: dict[tuple[Channel, int, bool], Times],
    link: Times,
    buffered: bool,
) -> list[Times] | None:
    """When each is; None where one of them is not yet known."""
    ends = []
    for channel, number, sender in messages:
        if sender and buffered:
            continue
        other = posts.get((channel, number, not sender))
        if other is None:
            return None
        own = posts[channel, number, sender]
        # Between neighbours; from the last stage to the first one with model chunks.
        _, a, b = channel
        takes = link[min(a, b) if abs(a - b) == 1 else max(a, b)]
        ends.append(np.maximum(own, other + takes) if buffered else np.maximum(own, other) + takes)
    return ends


def passes_end(done: Sequence[Sequence[Done]]) -> Times:
    """When every stage is through with its step, ``[stage, step, replica]``."""
    return np.stack([own[-1].end for own in done])
