"""Decides whether the profiler is prepared after a call, because the next one is captured, and prepares it.

Starting a profiler takes milliseconds, the first time up to a second, and a different time on each rank: the rank then
enters the captured step late, and its pipeline waits. A profiler that was prepared after the call before, in torch's
own warm-up state, only has to be switched on. But prepared Kineto already keeps every kernel, and nobody can end it
before the next call: during an RL rollout it would fill the host's memory. So it is prepared only where the next call
is expected at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from megaprof.capture.agenda import CountedStep
from megaprof.recorders import Recorder
from megaprof.runtime.interruption import from_host
from megaprof.runtime.isolation import in_full
from megaprof.runtime.logs import logger


class Pace:
    """Observes how closely a session's calls follow each other. Costs one reading of the clock per call."""

    def __init__(self) -> None:
        self._before: Sequence[CountedStep] = ()
        self._began = 0
        self._between = 0

    def begins(self, steps: Sequence[CountedStep]) -> tuple[CountedStep, ...]:
        """Returns those of ``steps``, which begin with a call, whose predecessor began with the call before. The next
        call is then probably the next step, as in a job that only trains. Where calls share a number, as RL's
        mini-batches do, nobody knows which is the last."""
        now = time.perf_counter_ns()
        self._between, self._began = now - self._began, now
        before = [(each.target, each.role, each.number) for each in self._before]
        self._before = steps
        return tuple(each for each in steps if (each.target, each.role, each.number - 1) in before)

    def ends(self) -> bool:
        """Returns whether the call that ends took at least half of the time since the call before it began. If the next
        gap is like the last one, it is short then."""
        return self._between <= 2 * (time.perf_counter_ns() - self._began)


class Prepared:
    """Recorders that are prepared for the next call of the process, which uses or discards them."""

    def __init__(self, owner: object, recorders: Sequence[Recorder]) -> None:
        """``owner``: the session whose recorders they are. Nothing is prepared yet."""
        self.owner = owner
        self.thread = threading.get_ident()
        self._recorders = recorders

    def prepare(self) -> None:
        """Prepare the recorders that can be. A failure is no loss: the recorder's start will report it again."""
        for recorder in reversed(self._recorders):
            prepare = getattr(recorder, "prepare", None)
            try:
                if prepare is not None:
                    prepare()
            except Exception as fault:
                if from_host(fault):
                    raise
                logger.warning("megaprof: the profiler could not be prepared ahead of a step: %r", fault)
                recorder.discard()

    def leave(self, used: Sequence[Recorder]) -> None:
        """Discard the recorders that are not among those ``used`` now."""
        in_full(*(each.discard for each in self._recorders if all(each is not other for other in used)))
