"""What this rank says of itself. Everything here runs on the background thread."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from megaprof.formats.names import host
from megaprof.formats.status import Calls, CaptureState, Place, RankStatus
from megaprof.parallel.topology import AXES
from megaprof.recorders.timeline.progress import ChangeClock

if TYPE_CHECKING:
    from megaprof.capture.session import Session

Key = tuple[str, "str | None"]
"""Target and role: what calls are counted by."""

_SAMPLES = 32
#: Targets and roles that a status names.
_MOST_CALLS = 8


class Meter:
    """How often each target is called, from looking at its counter now and then."""

    def __init__(self) -> None:
        self._seen: dict[Key, deque[tuple[float, int]]] = {}

    def look(self, calls: dict[Key, int]) -> None:
        """`calls`: how many have begun so far."""
        now = time.monotonic()
        for key, count in calls.items():
            samples = self._seen.setdefault(key, deque(maxlen=_SAMPLES))
            if not samples or samples[-1][1] != count:
                samples.append((now, count))

    def seconds(self, key: Key) -> float | None:
        """Between two calls, on average over the last looks; None before there were two."""
        samples = self._seen.get(key)
        if samples is None or len(samples) < 2:
            return None
        (began, first), (ended, last) = samples[0], samples[-1]
        return (ended - began) / (last - first)


class Reporter:
    """Describes one session's rank, and since when it has not moved as far as its looks could tell."""

    def __init__(self, session: Session, meter: Meter, every: float) -> None:
        """`every`: seconds between two descriptions."""
        self._session = session
        self._meter = meter
        self._every = every
        self._host_moved, self._device_moved = ChangeClock(), ChangeClock()

    def describe(self, run: str | None, capture: CaptureState | None, *, ended: bool = False) -> RankStatus:
        """The rank now, in the run called `run`."""
        session, timeline = self._session, self._session.timeline
        position = None if timeline is None else timeline.position()
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
            recent=None if timeline is None else timeline.recent(),
            cost=None if timeline is None else timeline.cost(),
            capture=capture,
            ended=ended,
            off=session.disabled,
        )

    def _device_position(self) -> Place | None:
        timeline = self._session.timeline
        device = None if timeline is None else timeline.device_position()
        if device is None:
            return None
        return replace(device, since=self._device_moved.since(replace(device, since=0.0)))

    def _calls(self) -> tuple[Calls, ...]:
        timeline = self._session.timeline
        finished = {} if timeline is None else timeline.calls()
        begun = dict(self._session.calls)
        found = []
        for target, role in list(dict.fromkeys((*begun, *finished)))[:_MOST_CALLS]:
            step, count = finished.get((target, role), (None, None))
            seconds = self._meter.seconds((target, role))
            found.append(Calls(target, role and role[:80], begun.get((target, role)), seconds, step, count))
        return tuple(found)
