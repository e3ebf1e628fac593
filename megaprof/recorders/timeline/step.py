"""A step of the timeline, from its beginning on the training thread until the background thread has written it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from megaprof.formats.timeline import DISTURBED, Memory
from megaprof.recorders.parts import Span
from megaprof.recorders.tape import Tape

#: The calls of a target and role that a capture also keeps: up to this many before a window, and this many behind it.
BEFORE, BEHIND = 20, 5


Facts = tuple[tuple[int, bytes], ...]
"""The facts written next to a step: which fact of `formats.timeline` it is, and its bytes."""


class PackedStep(NamedTuple):
    """A step as it is written."""

    description: Description
    """The metadata, which it shares with other steps."""
    events: bytes
    """The codes of its events as 64-bit integers, in the order of their starts."""
    begun: tuple[int, int, int, int]
    """An argument of `formats.timeline.step_record`, like the next two fields."""
    spent: tuple[int, ...]
    times: bytes
    facts: Facts
    """The facts written next to it."""


class Calls:
    """The calls of one target and role so far."""

    __slots__ = (
        "before",
        "began_ns",
        "busy_until_ns",
        "count",
        "descriptions",
        "finished",
        "index",
        "lengths",
        "near",
        "number",
        "packed",
        "role",
        "target",
    )

    def __init__(self, target: str, role: str | None) -> None:
        self.target = target
        """The target of the calls: ``train_actor``, ``train_log_probs``, ..."""
        self.role = role
        """The role that the calls belong to; None if the host names no role."""
        self.number: int | None = None
        """The step number of the last call that began."""
        self.began_ns = self.busy_until_ns = 0
        """When the first call of the last step began, and when the last call that was packed had ended, on its own
        clock. In nanoseconds of the wall clock; 0 before the first one."""
        self.index = 0
        """The number of calls with that step number that began before it."""
        self.count = 0
        """The number of finished calls."""
        self.finished: tuple[int, int] | None = None
        """The step number of the last call that finished, and the number of finished calls."""
        self.lengths: tuple[int | None, int | None] | None = None
        """The sequence length, and the sequences in a microbatch, of the first call."""
        self.descriptions: dict[tuple[Any, ...], Description] = {}
        """The descriptions so far. The key is made of the facts in which they differ."""
        self.near = range(0), range(0)
        """The numbers, from 1 on, of the calls from the last two windows on that are written with them. Windows that
        follow each other have one range."""
        self.before: deque[PackedStep] = deque(maxlen=BEFORE + 1)
        """The last calls that were packed but not written."""
        self.packed = 0
        """The number of the last call that was packed, from 1 on."""

    def ended(self, flags: int) -> int:
        """Counts a call that has ended, with its flags of `megaprof.formats.timeline`. Returns its number."""
        self.count += 1
        if flags & DISTURBED and self.count in self.near[1]:  # does not count among those behind the window
            self.near = self.near[0], range(self.near[1].start, self.near[1].stop + 1)
        return self.count

    def captured(self) -> None:
        """Has the calls before and behind the last one written, because it was in a window."""
        until = self.count + BEHIND + 1
        before, last = self.near
        self.near = (before, range(last.start, until)) if self.count in last else (last, range(self.count, until))

    def due(self) -> list[PackedStep]:
        """Takes the calls that are to be written by now. A file without an undisturbed call is of no use."""
        if not any(self.packed in near for near in self.near) or all(step.begun[1] & DISTURBED for step in self.before):
            return []
        steps = [*self.before]
        self.before.clear()
        return steps


class Description:
    """The description that steps with the same metadata share."""

    __slots__ = ("calls", "metadata")

    def __init__(self, calls: Calls, metadata: dict[str, Any]) -> None:
        self.calls = calls
        """The calls of the steps' target and role."""
        self.metadata = metadata
        """The ``megaprof`` object (docs/trace-metadata.md)."""


class RecordedStep(Tape):  # type: ignore[misc]  # in C or in Python
    """A tape with the other data of its step. It refers to no model and to no tensor of the schedule, because it may
    wait a while before it is written.

    A mark is a time on the timeline's clock: nanoseconds, or an event on a GPU.
    """

    __slots__ = (
        "began",
        "between",
        "count",
        "description",
        "end_ns",
        "ended",
        "entered",
        "flags",
        "index",
        "memory",
        "number",
        "own",
        "start_ns",
    )
    number: int
    """The number of the step."""
    index: int
    """The number of calls with the same step number before it."""
    count: int
    """Its number among the finished calls of its target and role, from 1 on."""
    description: Description
    """The description that it shares with other steps."""
    flags: int
    """The step flags, as in `megaprof.formats.timeline`."""
    own: int
    """The nanoseconds that the training thread took to begin and to end the record."""
    start_ns: int
    """The time of its start, in nanoseconds of the wall clock."""
    end_ns: int
    """The time at which the host finished it, in nanoseconds of the wall clock."""
    began: Any
    """The mark at its start."""
    ended: Any
    """The mark at its end."""
    between: list[Span] | None
    """The parts of the host's loop since the first call of the step before; None if it is not the first call."""
    entered: bool
    """True if the call itself is such a part."""
    memory: Memory | None
    """The GPU's memory when the step ended; None without a GPU."""
