"""The timeline recorder writes every step of every target, without a window.

On the training thread, a pass or an exchange costs two clock reads (one CUDA event on a GPU) and three stores.
Everything else is done on the background thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.config.options import ProfileConfig
from megaprof.config.values import TRAIN_ACTOR
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.facts import CALLS, pack_between, pack_collections, pack_data, pack_work, part_of_call
from megaprof.formats.job import BETWEEN, Position, Recent
from megaprof.formats.ranges import WAITING
from megaprof.parallel.topology import RankCoords
from megaprof.recorders import Window
from megaprof.recorders.call import CallFacts, Fetch, RecordedCall, describe, read_work
from megaprof.recorders.device import DeviceClock, device_clock, device_memory
from megaprof.recorders.flight import Reading
from megaprof.recorders.loop import Collections, Parts, measure_waits
from megaprof.recorders.tape import Packed, Tape, pack, raw
from megaprof.recorders.timeline_steps import (
    BEHIND,
    RECENT_STEPS,
    Key,
    PackedStep,
    RecordedStep,
    TimedCalls,
    TimelineFiles,
)
from megaprof.runtime.background import Background
from megaprof.runtime.isolation import logger

Int64s = npt.NDArray[np.int64]
Wait = tuple[int, int, int]
"""A wait for data: `recorders.tape.PythonTape.waits`."""

#: Steps that may wait for the background thread or for the GPU. If there are more, the oldest is dropped and counted.
WAITING_STEPS = 256
#: The background thread writes once a second, or as soon as this many steps wait.
WAKING_STEPS = 64
#: Steps that the background thread writes before it pauses. They hold the interpreter's lock for about a millisecond.
STEPS_AT_ONCE = 16
#: A GPU that comes to a mark within this time after the host asked for it had nothing else to do.
AT_ONCE_US = 50
#: The part of a code that names the microbatch and the chunk of a forward.
_PLACE = (1 << codes.KIND_BITS + codes.CHUNK_BITS + codes.MICROBATCH_BITS) - 1 & ~codes.KIND_MASK
_NO_TIME = (0,) * len(codes.KINDS)
_UNUSUAL = format.INCOMPLETE | format.DISTURBED | format.FAILED
#: A step that the GPU has not finished after this time, or when the timeline ends, is written without times.
GIVE_UP_SECONDS = 300.0
#: The longest time that `TimelineRecorder.close` waits for a write in progress.
END_SECONDS = 10.0


class TimelineRecorder:
    """Records the steps of one session on one rank.

    ``begin``, ``end`` and ``abandon`` run on the training thread, and ``drain`` on the background thread. The other
    methods may be called from any thread.
    """

    def __init__(
        self,
        config: ProfileConfig,
        coords: RankCoords,
        role: str | None,
        background: Background,
        framework: str | None,
        directory: str,
        finished: Callable[[Path], object] | None,
        parts: Parts,
    ) -> None:
        """``framework`` names the host. Writes every step, or, with ``finished``, only those around windows; then each
        window's file is passed to this function once it is complete. ``parts``: what the host does between calls."""
        self._config = config
        self._coords = coords
        self._framework = framework
        self._files = TimelineFiles(Path(directory), role, coords, config.timeline_megabytes << 20)
        self._finished = finished
        self._parts = parts
        self._background = background
        self._device: DeviceClock | None = None
        self._memory: Callable[[], format.Memory] | None = None
        self._without: str | None = None  # why times are the host's although a GPU is in use
        self._waiting: deque[RecordedStep] = deque()
        self._writing = threading.Lock()
        self.by_key: dict[Key, TimedCalls] = {}
        """The calls so far, by target and role."""
        self._running: RecordedStep | None = None
        self._read_waits: Callable[[int], format.Waited | None] | None = None
        self._collectives = Reading() if config.collectives and finished is None else None
        self._last_shapes: list[tuple[Any, ...]] = []
        self._work_of_shapes = b""
        self._collections = Collections(parts)
        self._collections.start()
        #: Of each of the last steps, the microseconds for which the training thread waited for a core, and all of them.
        self._core_waits: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._seen: tuple[object, float] = None, 0.0  # where the training thread is, and since when, in seconds
        self.steps_dropped = 0
        """The number of steps that waited too long, because nothing could be written or the GPU was behind."""
        background.add(self.drain, 1.0, woken=True)

    @functools.cached_property
    def clock(self) -> Callable[[], Any] | None:
        """The clock of the tapes; None for the host's. It is chosen on the training thread when the first call begins,
        because hooks may be installed before the process uses its GPU."""
        self._memory = device_memory()
        self._read_waits = measure_waits()
        clock = device_clock()
        if isinstance(clock, str):
            self._without = clock
        else:
            self._device = clock
        return None if self._device is None else self._device.mark

    def begin(self, facts: CallFacts, key: Key, number: int, index: int, *, disturbed: bool) -> RecordedStep:
        """Starts to record a schedule call of a target and role: the number of its step, and of calls with that number
        before it. ``disturbed``: the profiler was opened or closed right before it."""
        calls = self.by_key.get(key)
        if calls is None:
            calls = self.by_key[key] = TimedCalls(*key)
        step = RecordedStep(facts.chunks, facts.forward_only, self.clock)
        step.number, step.index, step.own = number, index, 0
        step.calls, step.metadata = calls, self._metadata(calls, facts, number)
        step.flags = (format.DISTURBED if disturbed else 0) | (format.DEVICE_CLOCK if self._device is not None else 0)
        self._running = step
        step.between = self._parts.since(calls.began_ns) if calls.began_ns else None
        # One moment on two clocks: nothing else lies between them, where a busy machine could stop the thread.
        step.start_ns = calls.began_ns = time.time_ns()
        step.began = step.mark()
        return step

    def end(self, step: RecordedStep, *, failed: bool, disturbed: bool = False) -> None:
        """Ends the record of a call that returned, or ``failed`` with an exception of the host's. ``disturbed``: the
        profiler is prepared right behind it."""
        step.ended = step.mark()
        entered = time.perf_counter_ns()
        step.end_ns = time.time_ns()
        step.memory = None if self._memory is None else self._memory()
        step.flags |= (format.FAILED if failed else 0) | (format.DISTURBED if disturbed else 0)
        if step.began is None or step.ended is None:  # a CUDA graph was being captured
            step.flags |= format.INCOMPLETE
        self._running = None
        calls, waiting = step.calls, self._waiting
        calls.count += 1
        if step.flags & format.DISTURBED and calls.count in calls.near:  # does not count among those behind the window
            calls.near.add(max(calls.near) + 1)
        step.count, calls.finished = calls.count, (step.number, calls.count)
        waiting.append(step)
        if len(waiting) > WAITING_STEPS:
            waiting.popleft()
            self.steps_dropped += 1
        reads = self._collectives is not None and self._collectives.due == step.number
        if reads or len(waiting) % WAKING_STEPS == 0:  # else once a second: it costs more than a step's events
            self._background.wake()
        step.own += time.perf_counter_ns() - entered

    def abandon(self) -> None:
        """Drops the running step after a fault. No other one will begin."""
        self._running = None
        self._collections.stop()

    def close(self) -> None:
        """Writes all finished steps and ends the file. Waits for a write in progress, but at most `END_SECONDS`: a disk
        that does not answer must not keep a job from ending. It does not wait for the GPU."""
        self._collections.stop()
        self._background.remove(self.drain)
        if self._writing.acquire(timeout=END_SECONDS):
            try:
                self._drain(last=True)
            finally:
                self._writing.release()
        missing = self.steps_dropped + len(self._waiting), self._files.steps_lost
        if any(missing):
            logger.once(
                "megaprof: the timeline of rank %d lacks %d steps: %d waited too long, and %d could not be written",
                *(self._coords.rank, sum(missing), *missing),
            )

    def recent(self) -> Recent | None:
        """Returns the times of the last training steps, or if there are none, of what ran last."""
        known = [calls for calls in list(self.by_key.values()) if calls.times]
        training = (calls for calls in known if calls.target == TRAIN_ACTOR)
        main = next(training, max(known, key=lambda calls: calls.times[-1][-1], default=None))
        return None if main is None else main.recent()

    def waits(self) -> float | None:
        """Returns the part of the time of the last steps in which the training thread waited for a core; None if that
        is unknown."""
        waits = [*self._core_waits]
        length = sum(length for _, length in waits)
        return sum(waited for waited, _ in waits) / length if length else None

    def position(self) -> Position | None:
        """Returns where the training thread is now, None outside of a schedule call."""
        step = self._running
        state = None if step is None else (id(step), len(step), step.now)
        if state != self._seen[0]:
            self._seen = state, time.time()
        return None if step is None else _position(step, step.now, self._seen[1])

    def device_position(self) -> Position | None:
        """Returns where the GPU is: at the first unfinished event of the oldest unfinished step. None on a CPU, and
        when the GPU has finished all its work."""
        device = self._device
        if device is None:
            return None
        running = self._running
        with device.reading():
            for step in [*self._waiting, *([] if running is None else [running])]:
                marks = list(step.marks)
                for i in range(0, len(marks) - 1, 2):
                    if not marks[i + 1].query():
                        began = marks[i].query()
                        return _position(step, int(_events(step)[i // 2, 0]) if began else 0, time.time())
        return None

    def captured(self, target: str, role: str | None) -> None:
        """Has the calls before and behind a window written, now that the window is saved. ``target`` and ``role``: the
        calls that the window is of; a window of other work has all of them. It wakes the background thread, because
        the host may kill the process right behind a window, as Ray does."""
        calls = self.by_key.get((target, role))
        for each in self.by_key.values() if calls is None else (calls,):
            each.near.update(range(each.count, each.count + BEHIND + 1))
        self._background.wake()

    def owes(self, target: str, role: str | None) -> bool:
        """Returns whether the next call is written because it is behind a window."""
        calls = self.by_key.get((target, role))
        return calls is not None and calls.count + 1 in calls.near

    def drain(self) -> None:
        """Writes every finished step whose times are known, in order."""
        with self._writing:
            self._drain()

    def _drain(self, *, last: bool = False) -> None:
        """Writes them. ``last``: no step follows, so it waits for nothing, and ends the file."""
        while steps := self._ready(0.0 if last else GIVE_UP_SECONDS):
            step, packed = steps[-1]
            # How long the training thread has waited for a core since the last time stands next to the last step.
            waited = None if self._read_waits is None else self._read_waits(step.start_ns)
            if waited is not None:
                each = waited.waited / len(steps), waited.length / len(steps)
                self._core_waits.extend([each] * len(steps))
                if (payload := waited.pack()) is not None:
                    packed.facts.append((format.WAITED, payload))
            chosen: list[PackedStep] = []
            for step, packed in steps:
                if self._finished is None:
                    chosen.append(packed)
                else:  # it may be worth writing only if a window follows
                    step.calls.packed = step.count
                    step.calls.before.append(packed)
                    chosen += step.calls.due()
            places = self._files.append(chosen)
            if self._collectives is not None:
                for place, (step, _) in zip(places, steps, strict=False):
                    self._collectives.wrote((place, step.number, step.start_ns, step.end_ns))
            if self._waiting and not last:
                self._background.pause()
        if self._finished is not None:
            every = list(self.by_key.values())
            self._files.append([step for calls in every for step in calls.due()])
            last = last or all(max(calls.near, default=0) <= calls.packed for calls in every)
        if self._collectives is not None:
            self._files.add(self._collectives.look(last=last))
        if last and (path := self._files.close()) is not None and self._finished is not None:
            self._finished(path)

    def _ready(self, patience: float) -> list[tuple[RecordedStep, PackedStep]]:
        """Takes the next finished steps whose times are known, in order. A step on which the GPU is still working after
        ``patience`` seconds gets no times."""
        steps: list[tuple[RecordedStep, PackedStep]] = []
        with contextlib.nullcontext() if self._device is None else self._device.reading():
            while self._waiting and len(steps) < STEPS_AT_ONCE:
                try:
                    step = self._waiting.popleft()
                except IndexError:  # the training thread dropped it meanwhile
                    break
                known = self._device is None or step.flags & format.INCOMPLETE or step.ended.query()
                if not known and time.time_ns() - step.start_ns < patience * 1e9:
                    self._waiting.appendleft(step)
                    break
                if not known:
                    step.flags |= format.INCOMPLETE
                steps.append((step, self._packed(step)))
        return steps

    def _packed(self, step: RecordedStep) -> PackedStep:
        shape, times, totals, duration, host_bound = b"", b"", _NO_TIME, 0, np.empty(0, dtype=np.bool_)
        waits = step.waits
        if self._device is None:
            duration = (step.ended - step.began + 500) // 1000
            shape, times, totals = pack(raw(step), step.began)
        elif not step.flags & format.INCOMPLETE:
            try:
                duration, (shape, times, totals), host_bound, waits = _timed(step, self._device)
            except (RuntimeError, ValueError):
                # Its events are on streams that do not wait for each other: one is not finished, or before the step.
                step.flags |= format.INCOMPLETE
            else:
                self._device.take_back([step.began, *step.marks, step.ended])
        if not step.flags & _UNUSUAL:
            share = host_bound.mean() if host_bound.size else math.nan
            step.calls.took((duration, *totals), step.start_ns, share)
        complete = not step.flags & format.INCOMPLETE
        # Tensors of a step that the GPU may not have finished are not read.
        fetch = self._device.numbers if self._device is not None and complete else None
        facts = [(format.WORK, self._work(step.given, fetch))]
        if step.memory is not None:
            facts.append((format.MEMORY, step.memory.pack()))
        if collected := [(start, end) for start, end, _ in self._collections.until(step.end_ns)]:
            facts.append((format.COLLECTIONS, pack_collections(collected, step.start_ns)))
        if step.between is not None:
            facts.append((format.BETWEEN, pack_between(_between(step))))
        step.calls.busy_until_ns = step.start_ns + 1000 * duration
        if host_bound.size:
            facts.append((format.HOST_BOUND, np.packbits(host_bound, bitorder="little").tobytes()))
        if waits and complete:
            facts.append((format.DATA, pack_data(waits)))
        begun = min(step.index, 0xFFFF), step.flags, step.number, step.start_ns
        return PackedStep(step.metadata, shape, begun, (duration, *totals, step.own // 1000), times, facts)

    def _work(self, given: list[tuple[Any, ...]], fetch: Fetch | None) -> bytes:
        """Returns the packed work of the microbatches of a step. Most jobs are given the same shapes in every step, so
        the last ones are kept with their work. Tensors are always read: they cannot be compared without a device."""
        shapes_alone = {*map(len, given)} == {2}
        if shapes_alone and given == self._last_shapes:
            return self._work_of_shapes
        work = pack_work(read_work(given, self._coords.sizes.cp, fetch))
        if shapes_alone:
            self._last_shapes, self._work_of_shapes = given, work
        return work

    def _metadata(self, calls: TimedCalls, facts: CallFacts, number: int) -> dict[str, Any]:
        """Returns the metadata of a call, made once for all calls with the same; ``number``: its step."""
        key = facts.schedule, facts.microbatches, facts.graph
        if (known := calls.metadata.get(key)) is not None:
            return known
        window = Window(calls.target, calls.role, number, self._coords)
        metadata = describe(window, RecordedCall(facts, Tape()), self._config, None, self._framework)
        calls.metadata[key] = metadata
        if facts.graph is None:
            metadata["ranges"] = {"microbatch": True}
        # Times are the host's, with the reason if the model is not on a CPU, unless there is a clock of its device.
        metadata["timeline"] = clock = {"clock": "host" if self._device is None else "device"}
        reason, device = self._without, metadata.get("device")
        if reason is None and device not in (None, "cpu"):
            reason = f"the model is on {device}, which torch.cuda does not use here"
        if self._device is None and reason is not None:
            clock["reason"] = reason
            logger.once(
                "megaprof: the timeline of rank %d is on the host's clock, which says when work was given to the GPU "
                "and not when it ran: %s",
                *(self._coords.rank, reason),
            )
        if self._finished is not None:
            metadata["timeline"]["around_windows"] = True
        return metadata


def _timed(step: RecordedStep, device: DeviceClock) -> tuple[int, Packed, npt.NDArray[np.bool_], list[Wait]]:
    """Returns the microseconds that the step took on the GPU, its packed events, whether the GPU waited for the host in
    each of its passes, and its waits for data: the time in which the GPU waited, too, because it came to the forward,
    and had no other work. Raises RuntimeError or ValueError if its marks are not in order."""
    marks = list({id(mark): mark for mark in (step.began, *step.marks, step.ended)}.values())
    came_us = {id(mark): device.microseconds(step.began, mark) for mark in marks}
    late_us = dict(zip(came_us, device.late_us(marks), strict=True))
    events = _events(step).copy()
    events[:, 1:] = np.reshape([1000 * came_us[id(mark)] for mark in step.marks], (-1, 2))
    at_once = np.array([late_us[id(mark)] <= AT_ONCE_US for mark in step.marks], dtype=np.bool_)
    host_bound, waits = (at_once[::2] & at_once[1::2])[codes.are_passes(events[:, 0])], step.waits
    if waits:
        kinds = events[:, 0] & codes.KIND_MASK
        forwards = np.flatnonzero((kinds == codes.FORWARD) | (kinds == codes.COMBINED)).tolist()
        first = [(events[i, 0] & _PLACE, step.marks[2 * i]) for i in forwards]
        came_ns = {int(place): mark.asked + 1000 * late_us[id(mark)] for place, mark in first}
        waits = [(code, min(max(start, came_ns.get(code & _PLACE, 0)), end), end) for code, start, end in waits]
    return came_us[id(step.ended)], pack(events, 0), host_bound, waits


def _between(step: RecordedStep) -> list[tuple[str, int]]:
    """Returns the parts of the host's loop from the call before until a step, in order, with their nanoseconds; no name
    for what is not known. The time in which the GPU was still at work on the call before is left out. A process that
    has given its weights to a rollout waits for that until it next runs the schedule."""
    since, rows, synchronised = step.calls.busy_until_ns, list[tuple[str, int]](), False
    own = part_of_call(step.calls.target, step.calls.role)
    spans = sorted(step.between or [], key=lambda span: span[1])
    for part, start, end in [*spans, ("", step.start_ns, step.start_ns)]:
        synchronised = part not in CALLS and (synchronised or part == "weight_sync")
        name = "rollout" if part == WAITING and synchronised else "" if part == own else part
        # No time counts twice: the step of an optimizer may collect garbage.
        rows += [("", max(start - since, 0)), (name, max(end - max(start, since), 0))]
        since = max(end, since)
    return rows


def _events(step: RecordedStep) -> Int64s:
    """Returns code, start and end of the events, ``[event, 3]``. The tape cannot grow while the array is held."""
    return np.frombuffer(raw(step), dtype=np.int64).reshape(-1, 3)


def _position(step: RecordedStep, code: int, since: float) -> Position:
    """Returns the position inside ``step``. ``code``: the event that runs there, 0 between two events."""
    calls, name = step.calls, codes.name(code)
    if name is None:
        return Position(calls.target, step.number, BETWEEN, None, None, since, calls.role)
    microbatch, chunk = name.fields.get("mb"), name.fields.get("chunk")
    return Position(calls.target, step.number, name.label, microbatch, chunk, since, calls.role)
