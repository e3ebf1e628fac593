"""One step of the timeline while the training thread records it."""

from __future__ import annotations

from typing import Any


class Line:
    """One step while it is recorded. A mark is a time on the timeline's clock: nanoseconds, or an event on a GPU."""

    __slots__ = (
        "began",
        "end_ns",
        "ended",
        "flags",
        "index",
        "key",
        "memory",
        "metadata",
        "own",
        "start_ns",
        "step",
        "tape",
        "target",
    )

    def __init__(self, target: str, step: int, index: int, tape: Any) -> None:
        self.target = target
        """What the step is for: ``train_actor``, ``train_log_probs``, ..."""
        self.step = step
        """Its number."""
        self.index = index
        """Which call with this number it is, from 0 on."""
        self.tape = tape
        """Its events: a `recorders.tape.Tape`."""
        self.flags = 0
        """Step flags of `megaprof.formats.timeline`."""
        self.own = 0
        """What beginning and ending it cost the training thread, in nanoseconds."""
        self.start_ns = 0
        """When it began: wall clock, nanoseconds."""
        self.end_ns = 0
        """When the host was through with it, likewise."""
        self.began: Any = None
        """The mark of its start."""
        self.ended: Any = None
        """The mark of its end."""
        self.memory: Any = None
        """A `megaprof.formats.timeline.Memory` of its end; None without a GPU."""
        self.key: tuple[Any, ...] = ()
        """Equal for steps with the same metadata."""
        self.metadata: dict[str, Any] = {}
        """The ``megaprof`` object (docs/trace-metadata.md)."""
