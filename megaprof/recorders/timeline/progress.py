"""Measures how fast a rank has been, and since when a state has not changed. May be read from another thread."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from megaprof.formats.job import Recent, limit
from megaprof.formats.timeline import Waited

#: The recent figures are of this many steps. As many readings of waits are kept, at most one a second and one a step.
RECENT_STEPS = 32

Key = tuple[str, "str | None"]
"""Target and role: what steps are counted by."""


@dataclass
class _LastSteps:
    """The last steps of one target and role."""

    times: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Microseconds of each: its length, its forwards, backwards, combined passes and all of these, and its time by
    other kind of event. Then the fraction of its passes that waited for the host; NaN if that is not known."""
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS - 1))
    """Microseconds between two of them."""
    end: float | None = None
    """When the last one ended, in wall-clock microseconds."""

    def counting(self) -> list[tuple[float, ...]]:
        """Returns the times of the steps that count, the shortest step first. A step in which the rank stood still does
        not count."""
        steps = sorted(self.times)
        longest = 1e6 * limit(_median_length(steps) / 1e6)
        return steps[: bisect_right(steps, longest, key=itemgetter(0))]


class Tally:
    """The times of the last steps of every target and role. Filled and read on the background thread."""

    def __init__(self) -> None:
        self._steps: dict[Key, _LastSteps] = {}
        self._latest: Key | None = None
        self._waits: deque[tuple[Waited, int]] = deque(maxlen=RECENT_STEPS)
        self._since_reading = 0

    def add_wait(self, waited: Waited) -> None:
        """Adds how long the training thread waited for a processor core since the last reading. Drops the readings of
        steps whose times are not kept either: waits and times must be of the same steps, or a rank that has only begun
        to wait looks slow."""
        self._waits.append((waited, self._since_reading))
        self._since_reading = 0
        kept = sum(steps for _, steps in self._waits)
        while len(self._waits) > 1 and kept - self._waits[0][1] >= RECENT_STEPS:
            kept -= self._waits.popleft()[1]

    @property
    def waits(self) -> float | None:
        """The share of the time in which the training thread lately waited for a core; None if that is unknown."""
        readings = [waited for waited, _ in list(self._waits)]
        length = sum(waited.length for waited in readings)
        return sum(waited.waited for waited in readings) / length if length else None

    def add(self, key: Key, microseconds: tuple[int, ...], start_ns: int, host_bound: float = math.nan) -> None:
        """Adds a step. `microseconds`: its length, and its time by kind of event, in the order of `codes.KINDS`.
        `start_ns`: when it began, in wall-clock nanoseconds. `host_bound`: the fraction of its passes in which the GPU
        waited for the host; NaN if that is not known."""
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = _LastSteps()
        length, *passes = microseconds[:4]
        start = start_ns / 1e3
        if steps.end is not None:
            steps.pauses.append(max(0.0, start - steps.end))
        steps.end = start + length
        steps.times.append((length, *passes, sum(passes), *microseconds[4:], host_bound))
        self._latest = key
        self._since_reading += 1

    def __contains__(self, key: Key) -> bool:
        """Returns whether a step of this target and role was added."""
        return key in self._steps

    def recent(self, target: str | None = None, role: str | None = None) -> Recent | None:
        """Returns the medians of `target` and `role`; without a target those of the training steps, or if there are
        none, of what ran last."""
        main = next((key for key in list(self._steps) if key[0] == "train_actor"), self._latest)
        chosen = main if target is None else (target, role)
        last = self._steps.get(chosen) if chosen is not None else None
        if last is None or chosen is None:
            return None
        *columns, host_bound = zip(*last.counting(), strict=True)
        waiting = [share for share in host_bound if not math.isnan(share)]
        # A long forward and a long backward need not be in the same step, so medians of passes cannot be added.
        medians = (statistics.median(times) / 1e3 for times in columns)
        share = statistics.fmean(waiting) if waiting else None
        return Recent(*(chosen[0], len(host_bound), *medians, chosen[1], share))

    def seconds(self, key: Key) -> float | None:
        """Returns the seconds from one step to the next: the median step plus the median pause behind it, of the same
        steps as `recent`. None before the second step."""
        last = self._steps.get(key)
        if last is None or not last.pauses:
            return None
        return (_median_length(last.counting()) + statistics.median(last.pauses)) / 1e6


def _median_length(steps: Sequence[tuple[float, ...]]) -> float:
    """Returns the median length of steps that are sorted by length."""
    return (steps[(len(steps) - 1) // 2][0] + steps[len(steps) // 2][0]) / 2


class ChangeClock:
    """Remembers since when a state has been the same at every look."""

    def __init__(self) -> None:
        self._last: Any = None
        self._since = 0.0

    def since(self, state: Any) -> float:
        """Returns the wall-clock time, in seconds, since which `state` has been the same at every look."""
        if state != self._last:
            self._last, self._since = state, time.time()
        return self._since
