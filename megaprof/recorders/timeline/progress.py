"""Measures how fast a rank has been, and since when a state has not changed. May be read from another thread."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from megaprof.formats.job.standstill import limit
from megaprof.formats.job.status import Recent
from megaprof.formats.timeline import Waited

#: The recent figures are of this many steps. As many readings of waits are kept, at most one a second and one a step.
RECENT_STEPS = 32

Key = tuple[str, "str | None"]
"""Target and role: what steps are counted by."""


class Tally:
    """The times of the last steps of every target and role. Filled and read on the background thread."""

    def __init__(self) -> None:
        self._steps: dict[Key, deque[tuple[int, ...]]] = {}
        self._starts: dict[Key, deque[int]] = {}
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

    def add(self, key: Key, microseconds: tuple[int, ...], start_ns: int) -> None:
        """Adds a step. `microseconds`: its length, and its time by kind of event, in the order of `codes.KINDS`.
        `start_ns`: when it began, in wall-clock nanoseconds."""
        self._steps.setdefault(key, deque(maxlen=RECENT_STEPS)).append(microseconds)
        self._starts.setdefault(key, deque(maxlen=RECENT_STEPS)).append(start_ns)
        self._latest = key
        self._since_reading += 1

    def __contains__(self, key: Key) -> bool:
        """Returns whether a step of this target and role was added."""
        return key in self._steps

    def recent(self, target: str | None = None, role: str | None = None) -> Recent | None:
        """Returns the medians of `target` and `role`; without a target those of the training steps, or if there are
        none, of what ran last."""
        chosen = self._main() if target is None else (target, role)
        steps = self._counting(chosen) if chosen is not None else []
        if not steps or chosen is None:
            return None
        step, forward, backward, combined, finalize, p2p = (
            statistics.median(times) / 1e3 for times in zip(*steps, strict=True)
        )
        # A long forward and a long backward need not be in the same step, so medians cannot be added.
        compute = statistics.median(sum(times[1:4]) for times in steps) / 1e3
        return Recent(chosen[0], len(steps), step, forward, backward, combined, compute, finalize, p2p, chosen[1])

    def seconds(self, key: Key) -> float | None:
        """Returns the seconds from one step to the next: the median step plus the median pause behind it, of the same
        steps as `recent`. None before the second step."""
        took = [step[0] for step in list(self._steps.get(key, ()))]
        starts = list(self._starts.get(key, ()))
        pauses = [
            max(0.0, (following - start) / 1e3 - length)
            for length, start, following in zip(took, starts, starts[1:], strict=False)
        ]
        usual = statistics.median(step[0] for step in self._counting(key)) if pauses else 0.0
        return (usual + statistics.median(pauses)) / 1e6 if pauses else None

    def _counting(self, key: Key) -> list[tuple[int, ...]]:
        """Returns the steps that count, which are those in which the rank did not stand still."""
        steps = list(self._steps.get(key, ()))
        longest = 1e6 * limit(statistics.median(step[0] for step in steps) / 1e6) if steps else 0.0
        return [step for step in steps if step[0] <= longest]

    def _main(self) -> Key | None:
        return next((key for key in list(self._steps) if key[0] == "train_actor"), self._latest)


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
