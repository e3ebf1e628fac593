"""A step of the timeline, from its beginning on the training thread until the background thread has written it; and how
fast the last steps were, which any thread may read."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from megaprof.formats.job import Recent, limit
from megaprof.formats.timeline import DISTURBED, Memory, Waited
from megaprof.recorders.loop import Span
from megaprof.recorders.tape import Tape

#: The calls of a target and role that a capture also keeps: up to this many before a window, and this many behind it.
BEFORE, BEHIND = 20, 5


Facts = tuple[tuple[int, bytes], ...]
"""The facts written next to a step: which fact of `formats.timeline` it is, and its bytes."""


class PackedStep(NamedTuple):
    """A step as it is written."""

    metadata: dict[str, Any]
    """The ``megaprof`` object (docs/trace-metadata.md), which it shares with other steps."""
    events: bytes
    """The codes of its events as 64-bit integers, in the order of their starts."""
    begun: tuple[int, int, int, int]
    """An argument of `formats.timeline.step_record`, like the next two fields."""
    spent: tuple[int, ...]
    times: bytes
    facts: Facts


@dataclass(slots=True, eq=False)
class Calls:
    """The calls of one target and role so far."""

    target: str
    role: str | None
    number: int | None = None
    began_ns: int = 0
    """When the last call began, in nanoseconds of the wall clock; 0 before the first one."""
    busy_until_ns: int = 0
    """When the last call that was packed had ended on its own clock, in the same way."""
    index: int = 0
    count: int = 0
    finished: tuple[int, int] | None = None
    """The step number of the last call that finished, and the number of finished calls."""
    lengths: tuple[int | None, int | None] | None = None
    """The sequence length, and the sequences in a microbatch, of the first call."""
    metadata: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    """The metadata so far. The key is made of the facts in which they differ."""
    near: tuple[range, range] = range(0), range(0)
    """The numbers, from 1 on, of the calls from the last two windows on that are written with them. Windows that follow
    each other have one range."""
    before: deque[PackedStep] = field(default_factory=lambda: deque(maxlen=BEFORE + 1))
    """The last calls that were packed but not written."""
    packed: int = 0
    """The number of the last call that was packed, from 1 on."""

    def ended(self, flags: int) -> int:
        """Counts a call that has ended, with its flags of `megaprof.formats.timeline`. Returns its number."""
        self.count += 1
        if flags & DISTURBED and self.count in self.near[1]:  # does not count among those behind the window
            self.near = self.near[0], range(self.near[1].start, self.near[1].stop + 1)
        return self.count

    def captured(self) -> None:
        """Has the calls before and behind the last one written, because it was in a window."""
        until = self.count + BEHIND + 1
        before, last = self.near
        self.near = (before, range(last.start, until)) if self.count in last else (last, range(self.count, until))

    def due(self) -> list[PackedStep]:
        """Takes the calls that are to be written by now. A file without an undisturbed call is of no use."""
        if not any(self.packed in near for near in self.near) or all(step.begun[1] & DISTURBED for step in self.before):
            return []
        steps = [*self.before]
        self.before.clear()
        return steps


class RecordedStep(Tape):  # type: ignore[misc]  # in C or in Python
    """A tape with the other data of its step. It refers to no model and to no tensor of the schedule, because it may
    wait a while before it is written.

    A mark is a time on the timeline's clock: nanoseconds, or an event on a GPU. Times in nanoseconds are the host's, of
    the wall clock; ``own`` is how long the training thread took to begin and to end the record.
    """

    __slots__ = (
        "began",
        "between",
        "calls",
        "count",
        "end_ns",
        "ended",
        "entered",
        "flags",
        "index",
        "memory",
        "metadata",
        "number",
        "own",
        "start_ns",
    )
    number: int
    """The number of the step."""
    index: int
    """The number of calls with the same step number before it."""
    count: int
    """Its number among the finished calls of its target and role, from 1 on."""
    calls: Calls
    metadata: dict[str, Any]
    """The description that it shares with other steps."""
    flags: int
    """The step flags, as in `megaprof.formats.timeline`."""
    own: int
    start_ns: int
    end_ns: int
    began: Any
    ended: Any
    between: list[Span] | None
    """The parts of the host's loop since the call before; None if there is none."""
    entered: bool
    """True if the call itself is such a part."""
    memory: Memory | None
    """The GPU's memory when the step ended; None without a GPU."""


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


def change_clock() -> Callable[[Any], float]:
    """Returns a function of a state, which returns the wall-clock time, in seconds, since which that state has been the
    same at every look."""
    last, since = None, 0.0

    def unchanged_since(state: Any) -> float:
        nonlocal last, since
        if state != last:
            last, since = state, time.time()
        return since

    return unchanged_since
