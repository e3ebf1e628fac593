"""One step of the timeline, from when the training thread begins it until the background thread has written it."""

from __future__ import annotations

from typing import Any

from megaprof.formats.timeline import Memory
from megaprof.recorders.tape import Tape


class Calls:
    """The calls of one target and role so far."""

    __slots__ = ("descriptions", "finished", "index", "lengths", "number", "role", "target")

    def __init__(self, target: str, role: str | None) -> None:
        self.target = target
        """What they are for: ``train_actor``, ``train_log_probs``, ..."""
        self.role = role
        """Whose work they are; None where nobody said."""
        self.number: int | None = None
        """The step number of the last one that began."""
        self.index = 0
        """How many calls with that number began before it."""
        self.finished: tuple[int, int] | None = None
        """The step number of the last one that finished, and how many have finished."""
        self.lengths: tuple[int | None, int | None] | None = None
        """Sequence length and sequences of a microbatch in the first one."""
        self.descriptions: dict[tuple[Any, ...], Description] = {}
        """By what tells them apart."""


class Description:
    """What steps with the same metadata share."""

    __slots__ = ("calls", "metadata")

    def __init__(self, calls: Calls, metadata: dict[str, Any]) -> None:
        self.calls = calls
        """The calls of their target and role."""
        self.metadata = metadata
        """The ``megaprof`` object (docs/trace-metadata.md)."""


class RecordedStep(Tape):  # type: ignore[misc]  # in C or in Python
    """A tape with what else is known of its step. It refers to no model and to no tensor of the schedule's, because it
    may wait to be written.

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
    """How many calls with this number were before it."""
    description: Description
    """What it shares with other steps."""
    flags: int
    """Step flags of `megaprof.formats.timeline`."""
    own: int
    """Nanoseconds that the training thread took to begin and to end the record."""
    start_ns: int
    """When it began, in nanoseconds of the wall clock."""
    end_ns: int
    """When the host was through with it, likewise."""
    began: Any
    """The mark of its start."""
    ended: Any
    """The mark of its end."""
    memory: Memory | None
    """The GPU's memory at its end; None without a GPU."""
