"""How a rank describes itself. Everything here runs on the background thread."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace

from megaprof.formats.job.status import Calls, CaptureState, Position, RankStatus
from megaprof.formats.names import host
from megaprof.formats.phrases import printable
from megaprof.parallel.topology import AXES
from megaprof.recorders.timeline.progress import ChangeClock, Key

if TYPE_CHECKING:
    from megaprof.capture.session import Session

_SAMPLES = 32
#: Characters of a fault's message that a status has.
_LONGEST_WHY = 300


class Meter:
    """Measures how often each target is called, by looking at its counter now and then."""

    def __init__(self) -> None:
        self._seen: dict[Key, deque[tuple[float, int]]] = {}

    def look(self, calls: dict[Key, int]) -> None:
        """Notes how many `calls` have begun so far."""
        now = time.monotonic()
        for key, count in calls.items():
            samples = self._seen.setdefault(key, deque(maxlen=_SAMPLES))
            if not samples or samples[-1][1] != count:
                samples.append((now, count))

    def seconds(self, key: Key) -> float | None:
        """Returns the seconds from one call to the next, on average over the last looks; None before there were two."""
        samples = self._seen.get(key)
        if samples is None or len(samples) < 2:
            return None
        (began, first), (ended, last) = samples[0], samples[-1]
        return (ended - began) / (last - first)


class Reporter:
    """Describes the rank of one session, and since when it has not moved, as far as its looks can tell."""

    def __init__(self, session: Session, meter: Meter, every: float) -> None:
        """`every`: seconds between two descriptions."""
        self._session = session
        self._meter = meter
        self._every = every
        self._host_moved, self._device_moved = ChangeClock(), ChangeClock()

    def describe(self, run: str | None, capture: CaptureState | None, *, ended: bool = False) -> RankStatus:
        """Returns the rank's status now, in the run called `run`."""
        session, timeline = self._session, self._session.timeline
        position = None if timeline is None else timeline.position()
        recent = None if timeline is None else timeline.tally.recent()
        return RankStatus(
            run=run,
            rank=session.coords.rank,
            coords={axis: getattr(session.coords, axis) for axis in AXES},
            host=host(),
            name=socket.gethostname()[:64],
            pid=os.getpid(),
            time=time.time(),
            interval=self._every,
            since=self._host_moved.since((position, sum(dict(session.calls).values()))),
            calls=self._calls(),
            position=position,
            device_position=self._device_position(),
            recent=recent,
            waits=None if timeline is None else timeline.tally.waits,
            capture=capture,
            ended=ended,
            off=session.off is not None,
            why=None if session.off is None else printable(session.off[:_LONGEST_WHY]),
        )

    def _device_position(self) -> Position | None:
        timeline = self._session.timeline
        device = None if timeline is None else timeline.device_position()
        if device is None:
            return None
        since = self._device_moved.since(replace(device, since=0.0))
        return replace(device, since=since)

    def _calls(self) -> tuple[Calls, ...]:
        timeline = self._session.timeline
        finished = {} if timeline is None else timeline.calls()
        begun = dict(self._session.calls)
        found = []
        for target, role in dict.fromkeys((*begun, *finished)):
            step, count = finished.get((target, role), (None, None))
            # Looks are too coarse for a few steps; a timeline knows the same steps that it says the length of.
            tally = None if timeline is None or timeline.tally.recent(target, role) is None else timeline.tally
            seconds = (tally or self._meter).seconds((target, role))
            found.append(Calls(target, role, begun.get((target, role)), seconds, step, count))
        return tuple(found)
