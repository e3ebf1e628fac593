"""Reads when this rank came to each collective, from torch's flight recorder, to find the rank that comes last.

This runs on the background thread. A reading costs in proportion to the size of the ring, and yields the steps in the
ring that are complete and already written. So the recorder reads at steps whose numbers are multiples of a power of
two, which it chooses by the cost of a reading. That way all ranks read at the same steps.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megaprof.formats import timeline as format
from megaprof.formats.flight import Call, GroupConfig, settled
from megaprof.formats.steps.facts import Arrivals, pack_arrivals, pack_groups
from megaprof.recorders import flight
from megaprof.recorders.timeline.files import Place
from megaprof.runtime.logs import logger

#: The most CPU time for readings, as a part of the job's time. It adds to the timeline's own: 0.25 % of 100 ms.
BUDGET = 5e-4
#: The most written steps that are kept for the next reading, because a ring may still hold them.
_STEPS = 256
_GLOO = "gloo:"


@dataclass(frozen=True)
class Written:
    """A step that has been written to a file. Its times, when its call began and when the host finished it, are
    nanoseconds of the wall clock."""

    place: Place
    step: int
    start_ns: int
    end_ns: int


class Reading:
    """Reads the ring, and decides at which steps."""

    def __init__(self) -> None:
        self.due = 0
        """The step after which the next reading takes place. Peers read after the same step, and end it at nearly
        the same time, so they read the same steps."""
        self.took = 0.0
        self.share = 0.0
        """The CPU time of the last reading as a part of the time until the next one."""
        self._written: deque[Written] = deque(maxlen=_STEPS)
        self._groups: dict[str, GroupConfig] = {}
        self._described: dict[int, set[str]] = defaultdict(set)
        self._logged: set[str] = set()
        self._off = False

    def wrote(self, step: Written) -> None:
        """Notes that another step has been written."""
        self._written.append(step)

    def look(self, *, last: bool = False) -> list[tuple[Place, int, bytes]]:
        """Reads the ring if a reading is due. Returns the facts to write next to steps: the step's place, which fact it
        is, and its bytes. ``last``: this is the last reading, and takes place even if none is due."""
        if self._off or not self._written or not (last or self._written[-1].step >= self.due):
            return []
        self._groups |= flight.groups()  # at the last reading of a process its groups are already gone
        oldest, newest, began = self._written[0], self._written[-1], time.thread_time()
        try:
            entries = flight.calls()
        except flight.NoFlightRecorder as missing:
            self._off = True
            self._warn(str(missing))
            return []
        if not entries:
            self._warn(f"torch keeps no collectives: set {flight.SIZE}={flight.USUAL} before the first process group")
        facts = list(self._facts(entries))
        self.took = time.thread_time() - began
        self._plan(oldest, newest)
        return facts

    def _plan(self, oldest: Written, newest: Written) -> None:
        """Sets when the next reading is due, by the cost of the last one."""
        steps = max(1, newest.step - oldest.step)
        seconds = max((newest.end_ns - oldest.start_ns) / 1e9 / steps, 1e-6)
        every = 1 << max(0, int(np.ceil(np.log2(self.took / BUDGET / seconds))))
        self.due = (newest.step // every + 1) * every
        self.share = self.took / every / seconds

    def _facts(self, entries: Sequence[Call]) -> Iterator[tuple[Place, int, bytes]]:
        parallel = {name for name, group in self._groups.items() if "," in group.ranks}
        collectives = settled(e for e in entries if not e.is_p2p and e.process_group[0] in parallel)
        times = np.array([entry.time_created_ns for entry in collectives], dtype=np.int64)
        # A ring that has overflowed begins in the middle of a step.
        since = entries[0].time_created_ns if entries and entries[0].record_id > 0 else 0
        waiting = []
        whole = 0
        for step in self._written:
            if step.start_ns < since:
                continue
            whole += 1
            called = collectives[np.searchsorted(times, step.start_ns) : np.searchsorted(times, step.end_ns)]
            # Only then does torch time one of the device: up to a tenth of a second after it has ended.
            if not all(entry.retired for entry in called):
                waiting.append(step)
                continue
            groups = list(self._grouped(step, called))
            if groups:
                if new := {arrivals.group for arrivals in groups} - self._described[step.place.file]:
                    self._described[step.place.file] |= new
                    yield step.place, format.GROUPS, pack_groups({name: self._groups[name] for name in sorted(new)})
                yield step.place, format.COLLECTIVES, pack_arrivals(groups)
        if self._written and not whole and since:
            self._warn(
                f"torch keeps fewer collectives than a step has: set {flight.SIZE} to more than {len(entries)} before "
                "the first process group"
            )
        self._written = deque(waiting, _STEPS)

    def _grouped(self, step: Written, called: Sequence[Call]) -> Iterator[Arrivals]:
        by_group: dict[str, list[Call]] = defaultdict(list)
        for entry in called:
            by_group[entry.process_group[0]].append(entry)
        for name, members in sorted(by_group.items()):
            host = members[0].profiling_name.startswith(_GLOO)
            times_us = {
                # One of gloo runs on the host when it is called.
                each.collective_seq_id: int((each.time_created_ns - step.start_ns) // 1000 if host else 1e3 * ms)
                for each in members
                if (ms := 0.0 if host else each.duration_ms) is not None
            }
            if not times_us:
                self._warn(f"torch does not time them: set {flight.TIMING}=1 before the first process group")
                continue
            numbers, values = np.array(sorted(times_us.items()), dtype=np.int64).T
            yield Arrivals(name, not host, 0, numbers, values)

    def _warn(self, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            logger.warning("megaprof: the timeline does not say who comes last to collectives: %s", why)
