"""Decides whether to prepare the profiler after a call because the next call is captured, and prepares it.

Starting a profiler takes milliseconds, the first time up to a second, and a different time on each rank. So the rank
enters the captured step late, and its pipeline waits. A profiler that was prepared after the call before, in torch's
own warm-up state, only has to be switched on. But prepared Kineto already keeps every kernel, and nobody can end it
before the next call: during an RL rollout it would fill the host's memory. So it is prepared only if the next call is
expected at once.
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
    """Observes how closely the calls of a session follow each other. Reads the clock once when a call begins."""

    def __init__(self) -> None:
        self._before: Sequence[CountedStep] = ()
        self._began = 0
        self._between = 0

    def begins(self, steps: Sequence[CountedStep]) -> tuple[CountedStep, ...]:
        """Returns the ``steps`` of a call that begins whose predecessors began with the call before. For these, the
        next call is probably the next step, as in a job that only trains. If calls share a number, as RL's mini-batches
        do, nobody knows which is the last."""
        now = time.perf_counter_ns()
        self._between, self._began = now - self._began, now
        before = [(step.target, step.role, step.number) for step in self._before]
        self._before = steps
        return tuple(step for step in steps if (step.target, step.role, step.number - 1) in before)

    def ends(self) -> bool:
        """Returns whether the next call is expected at once: the call that ends took at least half as long as the time
        from the beginning of the call before it to its own. If the next gap is like the last one, it is short."""
        return self._between <= 2 * (time.perf_counter_ns() - self._began)


class Prepared:
    """Recorders that are prepared for the next call of the process, which uses or discards them."""

    def __init__(self, owner: object, recorders: Sequence[Recorder]) -> None:
        """``owner``: the session that the recorders belong to. Prepares nothing yet."""
        self.owner = owner
        self.thread = threading.get_ident()
        self._recorders = recorders

    def prepare(self) -> None:
        """Prepares the recorders that can be prepared. A failure is only logged: starting the recorder will report it
        again."""
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
        """Discards the prepared recorders that are not among those ``used`` now."""
        in_full(*(one.discard for one in self._recorders if all(one is not other for other in used)))
