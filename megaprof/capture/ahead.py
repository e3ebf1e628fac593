"""When the profiler is prepared ahead: behind a call that a captured one follows at once, in torch's own warm-up state.

Starting a profiler takes milliseconds, the first time up to a second, and each rank another time: it then enters the
captured step late, and its pipeline waits. Prepared in the gap before, it only has to be switched on. But a prepared
Kineto already keeps every kernel, and nobody can end it before the next call: behind a call that an RL rollout follows
it would fill the host's memory. So it is prepared only where the next call is known to come at once.
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
    """How closely a session's calls follow each other. Costs a clock's reading a call."""

    def __init__(self) -> None:
        self._before: Sequence[CountedStep] = ()
        self._began = 0
        self._between = 0

    def begins(self, steps: Sequence[CountedStep]) -> tuple[CountedStep, ...]:
        """A call begins, and with it ``steps``. Returns those of them that follow the one before without another call
        between them: the next call is probably the next step then, as it is in a job that only trains. Where calls
        share a number, as RL's mini-batches do, nobody knows which is the last."""
        now = time.perf_counter_ns()
        self._between, self._began = now - self._began, now
        before = [(each.target, each.role, each.number) for each in self._before]
        self._before = steps
        return tuple(each for each in steps if (each.target, each.role, each.number - 1) in before)

    def ends(self) -> bool:
        """Returns whether the call that ends took most of the time since the one before it began: the gap behind it is
        short then, if it is like the gap before it."""
        return self._between <= 2 * (time.perf_counter_ns() - self._began)


class Prepared:
    """Recorders that are prepared for the next call of the process, which uses them or ends that."""

    def __init__(self, owner: object, recorders: Sequence[Recorder]) -> None:
        """``owner``: the session whose recorders they are. Nothing is prepared yet."""
        self.owner = owner
        self.thread = threading.get_ident()
        self._recorders = recorders

    def prepare(self) -> None:
        """Prepare those that can be. Where one fails, its start will say so again."""
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
        """End what is prepared, but for the recorders that are ``used`` now."""
        in_full(*(each.discard for each in self._recorders if all(each is not other for other in used)))
