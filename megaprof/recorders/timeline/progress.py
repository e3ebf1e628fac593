"""Where a rank stands and how fast it has been, for whoever asks from another thread."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from megaprof.formats.job.status import BETWEEN, Position, Recent
from megaprof.formats.ranges import RangeName
from megaprof.formats.timeline import Waited

#: Steps that the recent figures are the medians of, and readings of waits, about one a second.
RECENT_STEPS = 32

Key = tuple[str, "str | None"]
"""Target and role: what steps are counted by."""


class Tally:
    """The last steps of every target and role. Filled and read on the background thread."""

    def __init__(self) -> None:
        self._steps: dict[Key, deque[tuple[int, ...]]] = {}
        self._starts: dict[Key, deque[int]] = {}
        self._latest: Key | None = None
        self._waits: deque[Waited] = deque(maxlen=RECENT_STEPS)

    def add_wait(self, found: Waited) -> None:
        """How long the training thread waited for a processor core since the last reading."""
        self._waits.append(found)

    @property
    def waits(self) -> float | None:
        """For which part of the time it did lately; None where nobody knows."""
        found = list(self._waits)
        length = sum(each.length for each in found)
        return sum(each.waited for each in found) / length if length else None

    def add(self, key: Key, microseconds: tuple[int, ...], start_ns: int) -> None:
        """`microseconds`: of the step, and by kind of event, in the order of `codes.KINDS`. `start_ns`: when it began,
        in wall-clock nanoseconds."""
        self._steps.setdefault(key, deque(maxlen=RECENT_STEPS)).append(microseconds)
        self._starts.setdefault(key, deque(maxlen=RECENT_STEPS)).append(start_ns)
        self._latest = key

    def recent(self, target: str | None = None, role: str | None = None) -> Recent | None:
        """Of `target` and `role`; without a target, of the training steps where there are any, else of what ran
        last."""
        chosen = self._main() if target is None else (target, role)
        steps = list(self._steps.get(chosen, ())) if chosen is not None else []
        if not steps or chosen is None:
            return None
        step, forward, backward, combined, finalize, p2p = (
            statistics.median(own) / 1e3 for own in zip(*steps, strict=True)
        )
        return Recent(chosen[0], len(steps), step, forward, backward, combined, finalize, p2p, chosen[1])

    def seconds(self, key: Key) -> float | None:
        """Seconds from one step to the next: a usual step and the usual pause behind it, of the same steps as `recent`;
        None before there were two."""
        took = [step[0] for step in list(self._steps.get(key, ()))]
        starts = list(self._starts.get(key, ()))
        pauses = [
            max(0.0, (following - start) / 1e3 - own)
            for own, start, following in zip(took, starts, starts[1:], strict=False)
        ]
        return (statistics.median(took) + statistics.median(pauses)) / 1e6 if pauses else None

    def _main(self) -> Key | None:
        return next((key for key in list(self._steps) if key[0] == "train_actor"), self._latest)


class ChangeClock:
    """Since when a state has not changed, as far as its observer looked."""

    def __init__(self) -> None:
        self._last: Any = None
        self._since = 0.0

    def since(self, state: Any) -> float:
        """Wall-clock seconds when `state` was first seen without another one after it."""
        if state != self._last:
            self._last, self._since = state, time.time()
        return self._since


def position(target: str, role: str | None, step: int, name: RangeName | None, since: float) -> Position:
    """`name`: the range that is open; None between two of them."""
    if name is None:
        return Position(target, step, BETWEEN, None, None, since, role)
    return Position(target, step, name.label, name.fields.get("mb"), name.fields.get("chunk"), since, role)
