"""Captures that a job makes by itself: when its steps, or one of its stages, become slow."""

from __future__ import annotations

import statistics
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from megaprof.config.options import ProfileConfig
from megaprof.config.values import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.control.request import STEPS, Requester, new_request
from megaprof.formats.job import Refused
from megaprof.runtime.isolation import logger

if TYPE_CHECKING:
    from megaprof.control.listener import Listener


#: The usual step time is the median of the step times at the last looks: at most so many, and at least so many.
_HISTORY = 4096
_LEAST = 30
#: A change counts when this many looks in a row see it.
_IN_A_ROW = 3
#: The shortest time between two captures that the job makes by itself.
COOLDOWN_SECONDS = 3600.0


class Watchdog:
    """Asks for captures as `megaprof trigger` does, from the background thread of the lowest rank.

    It captures only what is new, and waits for a while after each capture, so that a job that stays slow does not fill
    its disk.
    """

    def __init__(self, config: ProfileConfig, listener: Listener) -> None:
        self._config = config
        self._listener = listener
        self._target = TRAIN_ACTOR if TRAIN_ACTOR in config.target else config.target[0]
        # A train_overall window lasts from one training step to the next: those are what is counted and timed.
        self._timed = TRAIN_ACTOR if self._target == TRAIN_OVERALL else self._target
        self._step_times: deque[float] = deque(maxlen=_HISTORY)
        self._calls = -1
        self._slow_looks = 0
        self._imbalance = 0.0
        self._uneven: deque[bool] = deque(maxlen=_IN_A_ROW)
        self._uneven_is_known = False
        self._not_before = 0.0
        self._requester: Requester | None = None

    def look(self) -> None:
        """Looks once at the step time, and asks for a capture if that, or the imbalance of the stages, is unusual."""
        if self._listener.closed:
            return
        if self._requester is not None:
            self._go_on(self._requester)
            return
        reason = self._slow_steps()
        if reason is None and len(self._uneven) == _IN_A_ROW and all(self._uneven) and not self._uneven_is_known:
            reason = f"the slowest stage computes {self._imbalance:.2f} times as long as the average one"
        if reason is not None and monotonic() >= self._not_before and not self._listener.busy:
            self._ask(reason)

    def see(self, imbalance: float | None) -> None:
        """Notes the latest imbalance of the stages; None if it is not known."""
        threshold = self._config.trigger_imbalance
        if threshold is None or imbalance is None:
            self._uneven.clear()
            return
        self._imbalance = imbalance
        self._uneven.append(imbalance > threshold)
        if len(self._uneven) == _IN_A_ROW and not any(self._uneven):
            self._uneven_is_known = False

    def _slow_steps(self) -> str | None:
        """Returns what is slow about the last steps, for people; None if nothing is."""
        factor = self._config.trigger_step_time
        calls, milliseconds = self._listener.step_time(self._timed)
        # A captured step is slow by itself, and without a new step there is nothing new to see.
        if factor is None or milliseconds is None or self._listener.busy or calls == self._calls:
            return None
        self._calls = calls
        usual = statistics.median(self._step_times) if len(self._step_times) >= _LEAST else None
        self._step_times.append(milliseconds)
        if usual is None or milliseconds <= factor * usual:
            self._slow_looks = 0
            return None
        self._slow_looks += 1
        if self._slow_looks < _IN_A_ROW:
            return None
        return f"steps take {milliseconds:.0f} ms, {milliseconds / usual:.2f} times the usual {usual:.0f} ms"

    def _ask(self, reason: str) -> None:
        self._not_before = monotonic() + COOLDOWN_SECONDS
        self._slow_looks = 0
        self._uneven.clear()
        job = self._listener.job
        if job is None:
            return
        try:
            by = f"the job itself, as {reason}"
            requester = Requester(job, new_request(job.run, self._target, role=job.run.role, steps=STEPS, by=by))
            requester.submit()
        except Refused as refusal:
            logger.warning("megaprof: %s, but a capture is not possible: %s", reason, refusal)
            return
        self._requester = requester
        logger.warning("megaprof: %s: capturing %d steps (%s)", reason, STEPS, requester.request.id)

    def _go_on(self, requester: Requester) -> None:
        """Follows a request up to its files."""
        outcome = requester.advance()
        if outcome is None:
            return
        self._requester = None
        if outcome.captured == 0:
            logger.warning("megaprof: nothing captured (%s): %s", outcome.request, outcome.reason)
            return
        self._step_times.clear()  # what was captured counts as usual from now on
        self._uneven_is_known = True
        steps = ", ".join(map(str, outcome.steps))
        missing = "" if outcome.reason is None else f", but {outcome.reason}"
        logger.warning(
            "megaprof: captured step %s on %d ranks (%s)%s", steps, outcome.captured, outcome.request, missing
        )
