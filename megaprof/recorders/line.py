"""One step of the timeline while the training thread records it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Line:
    """One step while it is recorded: ``events`` holds code, start and end in turns; ``now`` is what is open."""

    __slots__ = (
        "began",
        "ended",
        "events",
        "flags",
        "index",
        "key",
        "mark",
        "metadata",
        "now",
        "own",
        "start_ns",
        "step",
        "target",
    )

    def __init__(self, target: str, step: int, index: int, mark: Callable[[], Any]) -> None:
        self.target = target
        self.step = step
        self.index = index
        self.mark = mark
        self.events: list[Any] = []
        self.now = 0
        self.flags = 0
        self.own = 0  # nanoseconds
        self.start_ns = 0
        self.began: Any = None
        self.ended: Any = None
        self.key: tuple[Any, ...] = ()
        self.metadata: dict[str, Any] = {}
