"""What leaving the timeline on costs, measured in the running job: blocks of steps with and without it, in pairs.

Now and then the recorder rests for a block of training steps. The block beside it, with the recorder, is the other half
of the pair; which one comes first changes from pair to pair, so that a drift of the job cancels out. Wall time and CPU
time of the whole process are read where a block begins and where it ends, so everything counts: hooks that run in cold
caches, the background thread, and the training thread waiting for the interpreter's lock.

Where blocks begin depends on the number of the call alone, and how long they are on the power of two of steps that
takes some seconds. So all ranks of a job rest in the same steps, and the wall time is that of the pipeline without any
recorder.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from megaprof.formats.timeline import Cost

#: How long a block takes at least, in seconds: several rounds of the background thread.
BLOCK_SECONDS = 2.0
#: The first pairs come once in so many blocks, the later ones less often.
EARLY, LATE, EARLY_PAIRS = 64, 512, 8
#: Pairs that the figures are the medians of, and how many it takes at least to give any.
PAIRS, FEWEST = 64, 3
_LONGEST_BLOCK = 4096
_RATE_STEPS = 16
_HOOKS = 256


Reading = tuple[float, float]
"""Wall clock and CPU time of the process, in seconds."""


def _read() -> Reading:
    return time.perf_counter(), time.process_time()


class Pairs:
    """Says before each training step whether the recorder rests in it.

    `rests` runs on the training thread and costs a division and a comparison where no pair is under way.
    """

    def __init__(self, flush: Callable[[], None], read: Callable[[], Reading] = _read) -> None:
        """``flush`` asks the background thread for what it has left over, before a block begins and before it
        ends."""
        self._flush = flush
        self._read = read
        self._steps = 0  # of a block; 0: not known yet
        self._period = _RATE_STEPS
        self._taken = 0
        self._rate: tuple[int, float] | None = None
        self._begin: Reading = (0.0, 0.0)
        self._spent: list[Reading] | None = None  # per step, of the blocks of this pair; None: no pair is under way
        self._pairs: deque[tuple[Reading, Reading]] = deque(maxlen=PAIRS)
        self._index = -1
        self._hooks: deque[float] = deque(maxlen=_HOOKS)
        self._known: tuple[int, Cost | None] = (0, None)  # by how many pairs
        self.rested = 0
        """Steps in which the recorder rested so far."""

    def rests(self, index: int) -> bool:
        """``index``: how many training steps of this process began before this one."""
        place = index % self._period
        if place > 2 * self._steps + 2:
            return False
        return self._in_pair(index, place)

    def cost(self) -> Cost | None:
        """As of the last pair; None before there are `FEWEST`. May be called from any thread."""
        taken = self._taken
        if self._known[0] != taken and len(self._pairs) >= FEWEST:
            self._known = taken, self._cost(list(self._pairs))
        return self._known[1]

    def _cost(self, pairs: list[tuple[Reading, Reading]]) -> Cost:
        wall, wall_error = _median([1e6 * (on[0] - off[0]) for off, on in pairs])
        cpu, cpu_error = _median([1e6 * (on[1] - off[1]) for off, on in pairs])
        step = 1e6 * statistics.median(off[0] for off, _ in pairs)
        hooks = statistics.median(self._hooks or [0.0])
        return Cost(len(pairs), self.rested, step, wall + hooks, wall_error, cpu + hooks, cpu_error)

    def hooks_took(self, microseconds: float) -> None:
        """How long the hooks around a step took in which the recorder rests: they are in both halves of a pair, so it
        is measured beside them and added."""
        self._hooks.append(microseconds)

    @property
    def taken(self) -> int:
        """How many pairs there were since the start."""
        return self._taken

    def _in_pair(self, index: int, place: int) -> bool:
        if self._steps == 0:
            if place == 0:
                self._pace(index)
            return False
        follows, self._index = index == self._index + 1, index
        if place == 0:
            self._spent = []
        elif not follows or self._spent is None:
            self._spent = None  # the beginning was missed: the next pair then
            return False
        # A block is a step to settle and the steps that count.
        block, within = divmod(place, self._steps + 1)
        if within == 0 and block:
            wall, cpu = self._read()
            self._spent.append(((wall - self._begin[0]) / self._steps, (cpu - self._begin[1]) / self._steps))
        if block == 2:
            self._end(index)
            return False
        if within == 1:
            self._begin = self._read()
        resting = (block == 0) == self._rests_first(index)
        if within == 0 or (within == self._steps and not resting):
            self._flush()  # what is left over belongs to neither block, and what is recorded in one to that one
        self.rested += resting
        return resting

    def _rests_first(self, index: int) -> bool:
        return index // self._period % 2 == 0

    def _end(self, index: int) -> None:
        first, second = self._spent or ((0.0, 0.0), (0.0, 0.0))
        self._pairs.append((first, second) if self._rests_first(index) else (second, first))
        self._taken += 1
        self._spent = self._rate = None
        self._steps, self._period = 0, _RATE_STEPS  # the pace is looked at again before the next pair

    def _pace(self, index: int) -> None:
        """Choose the length of a block from the time of the last steps; looked at once in so many calls."""
        now = self._read()[0]
        if self._rate is None:
            self._rate = index, now
            return
        per_step = (now - self._rate[1]) / (index - self._rate[0])
        wanted = BLOCK_SECONDS / per_step if per_step > 0 else _LONGEST_BLOCK
        self._steps = min(_LONGEST_BLOCK, 1 << max(0, math.ceil(wanted) - 1).bit_length())
        self._period = self._steps * (EARLY if self._taken < EARLY_PAIRS else LATE)


def _median(values: list[float]) -> tuple[float, float]:
    """Median and its standard error, from what lies half a root of their number above and below it in rank: one
    disturbed block changes little, and it takes no time, unlike a bootstrap, which gives the same."""
    ordered = sorted(values)
    most = len(ordered) - 1
    middle, off = most / 2, math.sqrt(len(ordered)) / 2

    def at(rank: float) -> float:
        below = math.floor(rank)
        return ordered[below] + (rank - below) * (ordered[min(below + 1, most)] - ordered[below])

    return at(middle), (at(min(most, middle + off)) - at(max(0.0, middle - off))) / 2
