"""`status/rank00000.json`: where one rank stands and how fast it is. The rank writes it every few seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megaprof.formats.job.records import Count, Name, Record, Seconds, Time
from megaprof.formats.job.run import LARGEST_PID, LONGEST_INTERVAL, MOST_RANKS, dead
from megaprof.parallel.topology import AXES

#: The phase of a rank between two phases of a schedule call.
BETWEEN = "between"
#: A status is late when it is older than this many intervals, and than this many seconds.
LATE_INTERVALS, LATE_SECONDS = 5, 15.0
#: The target whose steps are the job's steps, where it has any.
_TRAINING = "train_actor"

Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
Coordinate = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
State = Literal["accepted", "recording", "done", "failed"]
FINAL = frozenset(("done", "failed"))
"""States of a capture that no other state follows."""


class Position(msgspec.Struct, frozen=True):
    """Where a rank is inside a schedule call: in which phase, of which microbatch and model chunk."""

    target: Name
    """What the call is for, such as ``train_actor``."""
    step: Count
    """The number of its step."""
    phase: Name
    """The label of the range that is open (`formats.ranges`), or `BETWEEN` two of them."""
    microbatch: Count | None
    """Its microbatch; None in a phase that has none."""
    chunk: Count | None
    """Its model chunk; None in a phase that has none."""
    since: Time
    """Wall-clock seconds when it was first seen there."""
    role: str | None = None
    """The role that makes the call; None without roles."""

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        chunk = f" (chunk {self.chunk})" if self.chunk else ""
        return f"{self.phase}{microbatch}{chunk}"


class Calls(msgspec.Struct, frozen=True):
    """How far one target of one role has come."""

    target: Name
    """What is called, such as ``train_actor``."""
    role: str | None = None
    """The role that calls it; None without roles."""
    begun: Count | None = None
    """How many calls have begun."""
    seconds: Seconds | None = None
    """Seconds from the start of one call to the start of the next, lately; None before the second call."""
    step: Count | None = None
    """The number of the last finished step; None without a timeline."""
    count: Count | None = None
    """How many calls are finished; None without a timeline."""

    @property
    def last_step(self) -> int | None:
        """The last step that has begun; None if that is not known."""
        if self.step is not None:
            return self.step
        return self.begun - 1 if self.begun else None


class Recent(msgspec.Struct, frozen=True):
    """Medians over the last steps of one target and role. All times in milliseconds."""

    target: Name
    """The target of the steps."""
    steps: Count
    """How many they are."""
    step_ms: Milliseconds
    """The whole call of the schedule."""
    forward_ms: Milliseconds
    """All forward passes of a step."""
    backward_ms: Milliseconds
    """All backward passes of a step."""
    combined_ms: Milliseconds
    """All passes in which a forward and a backward overlap."""
    finalize_ms: Milliseconds
    """The reduction of gradients."""
    p2p_ms: Milliseconds | None
    """Exchanges with other stages; None where they were not noted on the GPU's clock."""
    role: str | None = None
    """The role of the steps; None without roles."""


class CaptureState(msgspec.Struct, frozen=True):
    """The answer of a rank to the request in `capture.json`."""

    request: Name
    """The id of the request."""
    state: State
    """How far the rank has come."""
    calls: Count = 0
    """How many calls of the target have begun there."""
    seconds: Seconds | None = None
    """Seconds from the start of one call to the start of the next, lately; None before the second call."""
    reason: str | None = None
    """Why the rank does not capture; None where nothing is wrong."""
    steps: tuple[Count, ...] = ()
    """The numbers of the captured steps."""
    files: tuple[str, ...] = ()
    """What was written, relative to the save directory."""


class RankStatus(Record, frozen=True):
    """One rank, as it describes itself. Times in wall-clock seconds of its host."""

    run: Name | None
    """The run that it belongs to; None before the rank knows."""
    rank: Coordinate
    """Its global rank."""
    coords: dict[str, Coordinate]
    """Its place along `pp`, `tp`, `cp`, `ep` and `dp`."""
    host: Name
    """Its host and process id namespace, as `formats.names.host` says it."""
    name: str
    """Its host for people."""
    pid: Annotated[int, Meta(ge=0, le=LARGEST_PID)]
    """Its process id there."""
    time: Time
    """When this was written."""
    interval: Annotated[float, Meta(ge=0, le=LONGEST_INTERVAL)]
    """Seconds from one record to the next."""
    since: Time
    """When its training thread was first seen where it is."""
    calls: tuple[Calls, ...]
    """How far it has come: one entry for each target and role."""
    position: Position | None = None
    """Where its training thread is; None outside of a schedule call, and without a timeline."""
    device_position: Position | None = None
    """Where its GPU is; None if that has nothing left to do, and on a CPU."""
    recent: Recent | None = None
    """How fast it has been; None without a timeline."""
    waits: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The part of the last half minute in which its training thread could have run but had no processor core; None
    without a timeline, and if the system does not say."""
    capture: CaptureState | None = None
    """Its answer to the request in `capture.json`; None if there is no request."""
    ended: bool = False
    """True once the rank has ended as it should."""
    off: bool = False
    """True if a fault has turned profiling off."""
    why: str | None = None
    """The fault; None without one."""

    def __post_init__(self) -> None:
        """Raises ValueError unless its place is given along every axis."""
        if self.coords.keys() != set(AXES):
            raise ValueError(f"coords are not along {', '.join(AXES)}")

    @property
    def place(self) -> Position | None:
        """Where it is in its schedule call; None outside of one.

        That is where its GPU is, which runs behind the host, unless the GPU is between two phases: only the host knows
        what it waits for then.
        """
        device = self.device_position
        if device is not None and (device.phase != BETWEEN or self.position is None):
            return device
        return self.position

    @property
    def moved(self) -> float:
        """When it was first seen where it is."""
        return self.since if self.place is None else self.place.since

    @property
    def compute_ms(self) -> float | None:
        """Forward, backward and combined passes of a step together, in milliseconds."""
        recent = self.recent
        return None if recent is None else recent.forward_ms + recent.backward_ms + recent.combined_ms

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of a step; without a timeline, the time from one step to the next."""
        if self.recent is not None:
            return self.recent.step_ms
        call_seconds = (call.seconds for call in sorted(self.calls, key=_training_first))
        return next((1e3 * seconds for seconds in call_seconds if seconds is not None), None)

    def last_step(self) -> int | None:
        """Returns the step of the call that it is in, or else the last one that it finished, preferably of training."""
        if self.place is not None:
            return self.place.step
        steps = (call.last_step for call in sorted(self.calls, key=_training_first))
        return next((step for step in steps if step is not None), None)

    def step_of(self, target: str, role: str | None) -> int | None:
        """Returns the step of `target` and `role` that it is in, or else the last one that it finished."""
        place = self.place
        is_inside = place is not None and (place.target, place.role) == (target, role)
        return place.step if place is not None and is_inside else self.finished(target, role)

    def finished(self, target: str, role: str | None) -> int | None:
        """Returns the last step of `target` and `role` that it finished, while it is in no call of them."""
        last_steps = (call.last_step for call in self.calls if (call.target, call.role) == (target, role))
        return next(last_steps, None)

    @property
    def past_first_step(self) -> bool:
        """True once it has finished a call of the target and role that it is in, or, outside of a call, any call. The
        first one may take minutes, for compilation or data."""
        place = self.place
        calls = [call for call in self.calls if place is None or (call.target, call.role) == (place.target, place.role)]
        return any((call.begun or 0) > 1 or (call.count or 0) > 0 for call in calls)

    def stuck(self, now: float) -> float:
        """Returns the seconds for which it has not moved. Uses the time of its last record if that is after `now`."""
        return max(0.0, max(now, self.time) - self.moved)

    def late(self, now: float) -> bool:
        """Returns whether it has given no sign of life for too long, or was a process of this host that is gone."""
        return not self.ended and (
            now - self.time > max(LATE_SECONDS, LATE_INTERVALS * self.interval) or dead(self.host, self.pid)
        )


def _training_first(call: Calls) -> bool:
    return call.target != _TRAINING
