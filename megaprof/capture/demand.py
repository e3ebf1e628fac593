"""A capture that was asked for while the job runs: what the training thread knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megaprof.config.windows import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.recorders import Recorder


@dataclass(eq=False)
class Demand:
    """``steps`` windows of ``target``, from call number ``first`` on (counted from 0 since the hooks went in).

    All ranks of a job make the same calls in the same order, so the same number is the same step everywhere. A rank
    that learns of it too late takes no window at all rather than another step. Made by the background thread, which
    then only reads it and may set ``cancelled``; the training thread does the rest.
    """

    target: str
    role: str | None
    first: int
    steps: int
    recorders: Sequence[Recorder]
    cancelled: bool = False
    taken: list[int] = field(default_factory=list)
    """The step numbers of the windows so far."""
    closed: int = 0
    """How many of them have ended."""
    over: bool = False
    reason: str | None = None
    """Why there is no window, or no further one."""

    @property
    def counted(self) -> str:
        """The target whose calls are counted: a train_overall window begins with a training step."""
        return TRAIN_ACTOR if self.target == TRAIN_OVERALL else self.target

    def due(self, target: str, role: str | None, index: int) -> bool:
        """Whether a window opens with call ``index`` of ``target`` by ``role``."""
        if self.over or (target, role) != (self.counted, self.role) or index < self.first:
            return False
        if not self.taken and (self.cancelled or index > self.first):
            self.give_up("cancelled" if self.cancelled else "the call came too early")
        elif index >= self.first + self.steps:
            self.over = True
        return not self.over

    def closes(self) -> None:
        """A window of it ended."""
        self.closed += 1
        self.over = self.over or len(self.taken) >= self.steps

    def give_up(self, reason: str) -> None:
        self.reason = reason
        self.over = True
