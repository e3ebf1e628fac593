"""How a rank describes itself. Everything here runs on the background thread."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace

from megaprof.capture.process import process
from megaprof.formats.job.status import Calls, CaptureState, Position, RankStatus
from megaprof.formats.names import host
from megaprof.formats.phrases import printable
from megaprof.parallel.topology import AXES
from megaprof.recorders.timeline.progress import ChangeClock, Key

if TYPE_CHECKING:
    from megaprof.capture.session import Session

#: How many looks at a counter of calls the average time between two calls is taken over.
_LOOKS = 32
#: The most characters of a reason in a status.
LONGEST_REASON = 1000


class Reporter:
    """Describes the rank of one session: where it stands, how fast it is, and since when it has not moved."""

    def __init__(self, session: Session, every: float) -> None:
        """`every`: seconds between two descriptions."""
        self._session = session
        self._every = every
        self._coords = {axis: getattr(session.coords, axis) for axis in AXES}
        self._seen: dict[Key, deque[tuple[float, int]]] = {}
        self._host_moved, self._device_moved = ChangeClock(), ChangeClock()

    def look(self) -> None:
        """Notes how many calls have begun so far."""
        now = time.monotonic()
        for key, count in dict(self._session.calls).items():
            looks = self._seen.setdefault(key, deque(maxlen=_LOOKS))
            if not looks or looks[-1][1] != count:
                looks.append((now, count))

    def seconds(self, key: Key) -> float | None:
        """Returns the seconds from one call of a target and role to the next, lately; None before there were two."""
        timeline = self._session.timeline
        # Looks are too coarse for a few steps, and the timeline's figure is about the same steps as their length.
        if timeline is not None and key in timeline.tally:
            return timeline.tally.seconds(key)
        looks = self._seen.get(key)
        if looks is None or len(looks) < 2:
            return None
        (began, first), (ended, last) = looks[0], looks[-1]
        return (ended - began) / (last - first)

    def step_ms(self, key: Key) -> float | None:
        """Returns how long a step of a target and role takes lately, in milliseconds; without a timeline, the time from
        one to the next."""
        timeline = self._session.timeline
        recent = None if timeline is None else timeline.tally.recent(*key)
        if recent is not None:
            return recent.step_ms
        seconds = self.seconds(key)
        return None if seconds is None else 1e3 * seconds

    def describe(self, run: str | None, capture: CaptureState | None, *, ended: bool = False) -> RankStatus:
        """Returns the rank's status now, in the run called `run`."""
        session, timeline = self._session, self._session.timeline
        running, position = process.parts.now, None if timeline is None else timeline.position()
        part = running[0] if running is not None and position is None else None
        return RankStatus(
            run=run,
            rank=session.coords.rank,
            coords=self._coords,
            host=host(),
            name=socket.gethostname()[:64],
            pid=os.getpid(),
            time=time.time(),
            interval=self._every,
            since=self._host_moved.since((position, running, sum(dict(session.calls).values()))),
            calls=self._calls(),
            position=position,
            part=part,
            device_position=self._device_position(),
            recent=None if timeline is None else timeline.tally.recent(),
            waits=None if timeline is None else timeline.tally.waits,
            capture=capture,
            ended=ended,
            off=session.off is not None,
            why=None if session.off is None else printable(session.off[:LONGEST_REASON]),
        )

    def _device_position(self) -> Position | None:
        timeline = self._session.timeline
        device = None if timeline is None else timeline.device_position()
        if device is None:
            return None
        return replace(device, since=self._device_moved.since(replace(device, since=0.0)))

    def _calls(self) -> tuple[Calls, ...]:
        timeline = self._session.timeline
        finished = {} if timeline is None else timeline.calls()
        begun = dict(self._session.calls)
        described = []
        for key in dict.fromkeys((*begun, *finished)):
            step, count = finished.get(key, (None, None))
            described.append(Calls(*key, begun.get(key), self.seconds(key), step, count))
        return tuple(described)
