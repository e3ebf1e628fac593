"""Captures that a job makes by itself: when its steps, or one of its stages, become slow."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from megaprof.config.options import ProfileConfig
from megaprof.config.windows import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.control.requester import Requester
from megaprof.control.requests import new_request
from megaprof.formats.job.requests import Refused
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.control.listener import Listener


#: The usual step time is the median of so many samples at most, one per look, and of so many at least.
_HISTORY = 4096
_LEAST = 30
#: How many looks in a row must see something before a capture is asked for.
_IN_A_ROW = 3
STEPS = 2


class Watchdog:
    """Asks for captures as `megaprof trigger` does, from the background thread of the lowest rank.

    It captures only what is new, and waits for a while after each capture, so that a job that stays slow does not fill
    its disk.
    """

    def __init__(self, config: ProfileConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._target = TRAIN_ACTOR if TRAIN_ACTOR in config.target else config.target[0]
        # A train_overall window lasts from one training step to the next: those are what is counted and timed.
        self._timed = TRAIN_ACTOR if self._target == TRAIN_OVERALL else self._target
        self._samples: deque[float] = deque(maxlen=_HISTORY)
        self._slow = 0
        self._uneven = self._even = 0
        self._known_uneven = False
        self._imbalance: float | None = None
        self._calls = -1
        self._not_before = 0.0
        self._requester: Requester | None = None

    def __call__(self, listener: Listener) -> None:
        if self._requester is not None:
            self._go_on(self._requester)
            return
        reason = self._slow_steps(listener) or self._uneven_stages()
        if reason is not None and self._clock() >= self._not_before and not listener.busy:
            self._ask(listener, reason)

    def see(self, imbalance: float | None) -> None:
        """Notes the latest imbalance of the stages; None if it is not known."""
        threshold = self._config.trigger_imbalance
        self._imbalance = imbalance
        if threshold is None or imbalance is None:
            self._uneven = self._even = 0
            return
        over = imbalance > threshold
        self._uneven, self._even = (self._uneven + 1, 0) if over else (0, self._even + 1)
        if self._even >= _IN_A_ROW:
            self._known_uneven = False

    def _slow_steps(self, listener: Listener) -> str | None:
        factor = self._config.trigger_step_time
        calls, milliseconds = listener.step_time(self._timed)
        # A captured step is slow by itself, and without a new step there is nothing new to see.
        if factor is None or milliseconds is None or listener.busy or calls == self._calls:
            return None
        self._calls = calls
        usual = statistics.median(self._samples) if len(self._samples) >= _LEAST else None
        self._samples.append(milliseconds)
        if usual is None or milliseconds <= factor * usual:
            self._slow = 0
            return None
        self._slow += 1
        if self._slow < _IN_A_ROW:
            return None
        return f"steps take {milliseconds:.0f} ms, {milliseconds / usual:.2f} times the usual {usual:.0f} ms"

    def _uneven_stages(self) -> str | None:
        if self._uneven < _IN_A_ROW or self._known_uneven or self._imbalance is None:
            return None
        return f"the slowest stage computes {self._imbalance:.2f} times as long as the average one"

    def _ask(self, listener: Listener, reason: str) -> None:
        self._not_before = self._clock() + self._config.trigger_cooldown
        self._slow = self._uneven = 0
        job = listener.job
        if job is None:
            return
        try:
            by = f"the job itself, as {reason}"
            request = new_request(job.run, self._target, role=job.run.role, steps=STEPS, by=by)
            requester = Requester(job, request)
            requester.submit()
        except Refused as refusal:
            logger.warning("megaprof: %s, but a capture is not possible: %s", reason, refusal)
            return
        self._requester = requester
        logger.warning("megaprof: %s: capturing %d steps (%s)", reason, STEPS, request.id)

    def _captured(self) -> None:
        """From now on, what was captured counts as usual."""
        self._samples.clear()
        self._known_uneven = True

    def _go_on(self, requester: Requester) -> None:
        outcome = requester.advance()
        if outcome is None:
            return
        self._requester = None
        if outcome.captured == 0:
            logger.warning("megaprof: nothing captured (%s): %s", outcome.request, outcome.reason)
            return
        self._captured()
        steps = ", ".join(map(str, outcome.steps))
        missing = "" if outcome.reason is None else f", but {outcome.reason}"
        logger.warning(
            "megaprof: captured step %s on %d ranks (%s)%s", steps, outcome.captured, outcome.request, missing
        )
