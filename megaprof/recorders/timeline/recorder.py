"""The timeline recorder: every step of every target, without a window. The training thread stores numbers and goes on.

What a phase costs there: two clock reads (two CUDA events on a GPU), a number for what it is, and three stores. The
background thread does everything else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.config.options import ProfileConfig
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.status import OwnCost, Position, Recent
from megaprof.parallel.topology import RankCoords
from megaprof.recorders import Window
from megaprof.recorders.call import RecordedCall
from megaprof.recorders.describe import describe
from megaprof.recorders.line import Line
from megaprof.recorders.timeline.device import device_clock
from megaprof.recorders.timeline.files import TimelineFiles
from megaprof.recorders.timeline.progress import ChangeClock, Key, Tally, position
from megaprof.runtime.background import Background

#: Steps that may wait for the background thread or for the GPU. Beyond that the oldest is dropped, and counted.
WAITING_STEPS = 64
#: How long the GPU may take to finish a step before it is written without times.
GIVE_UP_SECONDS = 300.0
#: How long the end waits for a write that is under way.
END_SECONDS = 10.0
#: Phases of nothing, and how often, that the cost of one phase is measured with.
_TRIALS, _REPEATS = 32, 8


class TimelineRecorder:
    """Records the steps of one session on one rank.

    ``begin``, ``end`` and ``abandon`` run on the training thread, ``drain`` on the background thread; the other methods
    may be called from any thread. What a recorded phase costs is measured once, when the recorder is made.
    """

    def __init__(
        self,
        config: ProfileConfig,
        coords: RankCoords,
        role: str | None,
        background: Background,
        probe: Callable[[Line, int], None],
    ) -> None:
        """``probe(line, n)`` records ``n`` phases of nothing in ``line``, to measure what that costs. Raises ValueError
        without a directory."""
        if config.dir is None:
            raise ValueError("the timeline needs a directory")
        self._config = config
        self._coords = coords
        self._files = TimelineFiles(Path(config.dir), role, coords, config.timeline_megabytes << 20)
        self._background = background
        self._device = device_clock()
        self._mark: Callable[[], Any] = time.perf_counter_ns if self._device is None else self._device.mark
        self._finished: deque[Line] = deque()
        self._writing = threading.Lock()
        self._described: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._lengths: dict[tuple[str, str | None], tuple[Any, Any]] = {}
        self._calls: dict[Key, tuple[int, int]] = {}
        self._last: dict[tuple[str, str | None], tuple[int, int]] = {}
        self._line: Line | None = None
        self._tally = Tally()
        self._watch = ChangeClock()
        self._unit_ns = self._unit_cost(probe)
        self.steps_dropped = 0
        background.add(self.drain, 1.0, woken=True)

    @property
    def bytes_written(self) -> int:
        return self._files.bytes_written

    def begin(self, call: RecordedCall, target: str, role: str | None, step: int, *, captured: bool) -> Line:
        """A schedule call starts."""
        last, index = self._last.get((target, role), (None, -1))
        index = index + 1 if last == step else 0
        self._last[target, role] = (step, index)
        line = Line(target, step, min(index, 0xFFFF), self._mark)
        line.key, line.metadata = self._describe(call, target, role, step)
        line.flags = (format.CAPTURED if captured else 0) | (format.DEVICE_CLOCK if self._device is not None else 0)
        self._line = line
        line.start_ns = time.time_ns()
        line.began = line.mark()
        return line

    def end(self, line: Line, *, failed: bool) -> None:
        """The call returned, or raised an exception of the host's."""
        line.ended = line.mark()
        entered = time.perf_counter_ns()
        if failed:
            line.flags |= format.FAILED
        self._line = None
        key = (line.target, line.key[1])
        self._calls[key] = (line.step, self._calls.get(key, (0, 0))[1] + 1)
        if len(self._finished) >= WAITING_STEPS:
            self._finished.popleft()
            self.steps_dropped += 1
        self._finished.append(line)
        self._background.wake()
        line.own += round(time.perf_counter_ns() - entered + len(line.events) / 3 * self._unit_ns)

    def abandon(self) -> None:
        """After a fault: the step that was being recorded is not."""
        self._line = None

    def close(self) -> None:
        """Write what is finished and end the file, after what the background thread is writing just now. A disk that
        does not answer holds up the end of a job for so long and no longer."""
        self._background.remove(self.drain)
        if self._writing.acquire(timeout=END_SECONDS):
            try:
                self._drain()
                self._files.close()
            finally:
                self._writing.release()

    def calls(self) -> dict[Key, tuple[int, int]]:
        """By target and role: the last finished step, and how many calls are finished."""
        return dict(self._calls)

    def position(self) -> Position | None:
        """Where the training thread is now, None outside of a schedule call."""
        line = self._line
        state = None if line is None else (id(line), len(line.events), line.now)
        since = self._watch.since(state)
        return None if line is None else position(line.target, line.key[1], line.step, codes.name(line.now), since)

    def device_position(self) -> Position | None:
        """Where the GPU is: the first event of the oldest unfinished step that has not happened yet. None on a CPU,
        and when the GPU has done all that it was given."""
        if self._device is None:
            return None
        lines = [*self._finished, *([self._line] if self._line is not None else [])]
        for line in lines:
            events = list(line.events)
            for i in range(0, len(events) - 2, 3):
                if not self._device.finished(events[i + 2]):
                    began = self._device.finished(events[i + 1])
                    name = codes.name(events[i]) if began else None
                    return position(line.target, line.key[1], line.step, name, time.time())
        return None

    def recent(self, target: str | None = None, role: str | None = None) -> Recent | None:
        return self._tally.recent(target, role)

    def cost(self) -> OwnCost | None:
        return self._tally.cost(self._background.seconds)

    def drain(self) -> None:
        """Write every finished step whose times are known, in order."""
        with self._writing:
            self._drain()

    def _drain(self) -> None:
        while self._finished:
            try:
                line = self._finished.popleft()
            except IndexError:  # the training thread dropped it meanwhile
                return
            if self._device is not None and not self._device.finished(line.ended):
                if time.time_ns() - line.start_ns < GIVE_UP_SECONDS * 1e9:
                    self._finished.appendleft(line)
                    return
                line.flags |= format.INCOMPLETE
            self._write(line)

    def _write(self, line: Line) -> None:
        events, duration = self._times(line)
        length = np.bincount(events[:, 0] & codes.KIND_MASK, events[:, 2] - events[:, 1], codes.KIND_MASK + 1)
        length[codes.P2P] += length[codes.WAIT]  # of an overlapped exchange
        totals = {name: int(length[kind]) for kind, name in codes.KINDS.items()}
        own = line.own // 1000
        record = format.StepRecord(
            0, 0, line.step, line.index, line.start_ns, duration, events[:, 1], events[:, 2], totals, own, line.flags
        )
        self._files.append(line.key, line.metadata, events[:, 0].tolist(), record)
        if not line.flags & (format.INCOMPLETE | format.CAPTURED | format.FAILED):
            milliseconds = {kind: us / 1e3 for kind, us in totals.items()} | {"step": duration / 1e3}
            if self._device is not None:
                del milliseconds["p2p"]
            self._tally.add(line.target, line.key[1], milliseconds, line.own / 1e6)

    def _times(self, line: Line) -> tuple[npt.NDArray[np.int64], int]:
        """Code, start and end of every event in the order of the starts, and the whole step: microseconds."""
        if line.flags & format.INCOMPLETE:
            return np.empty((0, 3), dtype=np.int64), 0
        if self._device is None:
            zero, last = line.began, line.ended
            events = np.array(line.events, dtype=np.int64).reshape(-1, 3)
        else:
            zero, last = 0, 1000 * self._device.microseconds(line.began, line.ended)
            marks = [1000 * self._device.microseconds(line.began, mark) for mark in _marks(line)]
            events = np.empty((len(marks) // 2, 3), dtype=np.int64)
            events[:, 0], events[:, 1], events[:, 2] = line.events[0::3], marks[0::2], marks[1::2]
            self._device.take_back([line.began, *_marks(line), line.ended])
        # Rounded one by one rather than as lengths, so that errors do not add up.
        events[:, 1:] = (events[:, 1:] - (zero - 500)) // 1000
        if (events[1:, 1] < events[:-1, 1]).any():  # exchanges inside a combined pass end before it
            events = events[np.lexsort((-events[:, 2], events[:, 1]))]
        return events, (last - zero + 500) // 1000

    def _describe(
        self, call: RecordedCall, target: str, role: str | None, step: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Metadata of the call, made once for every kind of call. A length that varies from call to call is null."""
        facts = call.facts
        lengths = (facts.seq_length, facts.micro_batch_size)
        same = self._lengths.setdefault((target, role), lengths) == lengths
        key = (target, role, facts.schedule, facts.microbatches, facts.graph, same)
        metadata = self._described.get(key)
        if metadata is None:
            metadata = describe(Window(target, role, step, self._coords), call, self._config, None)
            metadata["ranges"] = _ranges(facts.graph)
            if not same:
                metadata |= {"seq_length": None, "micro_batch_size": None}
            clock = "host" if self._device is None else "device"
            metadata["timeline"] = {"clock": clock, "unit_cost_ns": round(self._unit_ns, 1)}
            self._described[key] = metadata
        return key, metadata

    def _unit_cost(self, probe: Callable[[Line, int], None]) -> float:
        """What recording one phase costs the training thread, in nanoseconds: the least of several trials, since the
        first ones are cold and any may be interrupted."""
        costs = []
        for _ in range(_REPEATS):
            line = Line("", 0, 0, self._mark)
            begin = time.perf_counter_ns()
            probe(line, _TRIALS)
            costs.append((time.perf_counter_ns() - begin) / _TRIALS)
            if self._device is not None:
                self._device.take_back(_marks(line))
        return min(costs)


def _marks(line: Line) -> list[Any]:
    """Start and end of every event, in turns."""
    return [mark for place, mark in enumerate(line.events) if place % 3]


def _ranges(graph: str | None) -> dict[str, Any]:
    if graph is None:
        return {"microbatch": True}
    return {"microbatch": False, "reason": "the step was replayed from a full-iteration CUDA graph"}
