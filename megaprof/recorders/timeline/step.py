"""A step of the timeline, from its beginning on the training thread until the background thread has written it."""

from __future__ import annotations

from typing import Any

from megaprof.formats.timeline import Memory
from megaprof.recorders.tape import Tape


class Calls:
    """The calls of one target and role so far."""

    __slots__ = ("count", "descriptions", "finished", "index", "lengths", "number", "role", "target")

    def __init__(self, target: str, role: str | None) -> None:
        self.target = target
        """The target of the calls: ``train_actor``, ``train_log_probs``, ..."""
        self.role = role
        """The role that the calls belong to; None if the host names no role."""
        self.number: int | None = None
        """The step number of the last call that began."""
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
        "description",
        "end_ns",
        "ended",
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
    memory: Memory | None
    """The GPU's memory when the step ended; None without a GPU."""
