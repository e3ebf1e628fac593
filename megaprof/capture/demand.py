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
    """What is captured."""
    role: str | None
    """Whose calls are counted."""
    first: int
    """The number of the first call that is captured, from 0 on."""
    steps: int
    """How many windows."""
    recorders: Sequence[Recorder]
    """What records them."""
    holding: tuple[str, ...] = ()
    """Options of its tools with which the profiler holds tensors (`megaprof.capture.compat`)."""
    cancelled: bool = False
    """True: nobody wants it any more. Set by the background thread."""
    seen: bool = False
    """True once the training thread knew of it when call ``first`` began."""
    taken: list[int] = field(default_factory=list)
    """The step numbers of the windows so far."""
    closed: int = 0
    """How many of them have ended."""
    over: bool = False
    """True: it opens no further window."""
    reason: str | None = None
    """Why there is no window, or no further one."""

    @property
    def counted(self) -> str:
        """The target whose calls are counted: a train_overall window begins with a training step."""
        return TRAIN_ACTOR if self.target == TRAIN_OVERALL else self.target

    def due(self, upcoming: int, *, own: bool, begins: bool) -> bool:
        """Returns whether a window opens with the call that begins.

        ``upcoming``: the number of the counted call that begins (``own``), or else of the next one. ``begins``: a step
        of the host's begins with this call; a window of train_overall opens only then.
        """
        overall = self.target == TRAIN_OVERALL
        if self.over or upcoming < self.first or not (own or (overall and begins)):
            return False
        if not self.taken and (self.cancelled or (upcoming > self.first and not self.seen)):
            self.give_up("cancelled" if self.cancelled else "the call came too early")
            return False
        self.seen = True
        if overall:
            return begins and len(self.taken) < self.steps
        self.over = upcoming >= self.first + self.steps
        return not self.over

    def comes(self, target: str, role: str | None, index: int) -> bool:
        """Returns whether the call of this target and role with this number is to be captured."""
        counted = (target, role) == (self.counted, self.role)
        return counted and not (self.over or self.cancelled) and self.first <= index < self.first + self.steps

    def closes(self) -> None:
        """A window of it ended."""
        self.closed += 1
        self.over = self.over or len(self.taken) >= self.steps

    def give_up(self, reason: str) -> None:
        """There will be no further window, because of ``reason``."""
        self.reason = reason
        self.over = True
