"""`status/rank00000.json`: where one rank stands and how fast it is. The rank writes it every few seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megaprof.formats.flight import Entry, GroupConfig
from megaprof.formats.job.records import (
    LARGEST_PID,
    LONGEST_INTERVAL,
    MOST_RANKS,
    Count,
    Name,
    Record,
    Seconds,
    Time,
    dead,
)
from megaprof.parallel.topology import AXES

#: The phase of a rank between two phases of a schedule call.
BETWEEN = "between"
#: A status is late when it is older than this many intervals, and than this many seconds.
LATE_INTERVALS, LATE_SECONDS = 5, 15.0
#: The target whose steps are the job's steps, if it has any.
_TRAINING = "train_actor"

Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
Coordinate = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
State = Literal["accepted", "recording", "done", "failed"]
FINAL = frozenset(("done", "failed"))
"""States of a capture that no other state follows."""


class Position(msgspec.Struct, frozen=True):
    """The position of a rank in a schedule call: the phase, its microbatch and its model chunk."""

    target: Name
    """The target of the call, such as ``train_actor``."""
    step: Count
    """The number of its step."""
    phase: Name
    """The label of the range that is open (`formats.ranges`), or `BETWEEN` two of them."""
    microbatch: Count | None
    """Its microbatch; None in a phase that has none."""
    chunk: Count | None
    """Its model chunk; None in a phase that has none."""
    since: Time
    """When the rank was first seen there, in wall-clock seconds."""
    role: str | None = None
    """The role that makes the call; None without roles."""

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        chunk = f" (chunk {self.chunk})" if self.chunk else ""
        return f"{self.phase}{microbatch}{chunk}"


class Calls(msgspec.Struct, frozen=True):
    """The progress of one target of one role."""

    target: Name
    """The target, such as ``train_actor``."""
    role: str | None = None
    """The role that makes the calls; None without roles."""
    begun: Count | None = None
    """The number of calls that have begun."""
    seconds: Seconds | None = None
    """Recent seconds from the start of one call to the start of the next; None before the second call."""
    step: Count | None = None
    """The number of the last finished step; None without a timeline."""
    count: Count | None = None
    """The number of finished calls; None without a timeline."""

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
    """The number of these steps."""
    step_ms: Milliseconds
    """The whole call of the schedule."""
    forward_ms: Milliseconds
    """All forward passes of a step."""
    backward_ms: Milliseconds
    """All backward passes of a step."""
    combined_ms: Milliseconds
    """All passes in which a forward and a backward overlap."""
    compute_ms: Milliseconds
    """Forward, backward and combined passes of a step together. This is no sum of their medians."""
    finalize_ms: Milliseconds
    """The reduction of gradients."""
    p2p_ms: Milliseconds | None
    """Exchanges with other stages; None if they were not timed on the GPU's clock."""
    role: str | None = None
    """The role of the steps; None without roles."""
    host_bound_passes: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The fraction of the passes in which the GPU waited for its host; None unless steps are timed on its clock."""


class CaptureState(msgspec.Struct, frozen=True):
    """The answer of a rank to the request in `capture.json`."""

    request: Name
    """The id of the request."""
    state: State
    """The state of the capture on this rank."""
    calls: Count = 0
    """The number of calls of the target that have begun on this rank."""
    seconds: Seconds | None = None
    """Recent seconds from the start of one call to the start of the next; None before the second call."""
    reason: str | None = None
    """Why the rank does not capture; None if nothing is wrong."""
    steps: tuple[Count, ...] = ()
    """The numbers of the captured steps."""
    files: tuple[str, ...] = ()
    """The written files, relative to the save directory."""


class RankStatus(Record, frozen=True):
    """One rank, as it describes itself. Times in wall-clock seconds of its host."""

    run: Name | None
    """The run that it belongs to; None before the rank knows."""
    rank: Coordinate
    """Its global rank."""
    coords: dict[str, Coordinate]
    """Its place along `pp`, `tp`, `cp`, `ep` and `dp`."""
    host: Name
    """Its host and process id namespace, as `formats.names.host` names them."""
    name: str
    """The name of its host, for people."""
    pid: Annotated[int, Meta(ge=0, le=LARGEST_PID)]
    """Its process id there."""
    time: Time
    """When this was written."""
    interval: Annotated[float, Meta(ge=0, le=LONGEST_INTERVAL)]
    """Seconds from one record to the next."""
    since: Time
    """When its training thread was first seen at its present position."""
    calls: tuple[Calls, ...]
    """Its progress: one entry for each target and role."""
    position: Position | None = None
    """The position of its training thread; None outside of a schedule call, and without a timeline."""
    part: Name | None = None
    """The part of the host's loop that its training thread is in, such as ``saving``; None in a schedule call, and if
    it is not known."""
    device_position: Position | None = None
    """The position of its GPU; None if the GPU has nothing left to do, and on a CPU."""
    recent: Recent | None = None
    """The times of its last steps; None without a timeline."""
    waits: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The part of the time of its last steps, including any standstill, in which its training thread could have run but
    had no processor core. None without a timeline, and if the system does not say."""
    capture: CaptureState | None = None
    """Its answer to the request in `capture.json`; None if there is no request."""
    ended: bool = False
    """True once the rank has ended normally."""
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
        """The rank's position in its schedule call; None outside of one.

        It is the position of the GPU, which runs behind the host. If the GPU is between two phases, it is the position
        of the host, because only the host knows what it waits for then.
        """
        device = self.device_position
        if device is not None and (device.phase != BETWEEN or self.position is None):
            return device
        return self.position

    @property
    def whereabouts_unknown(self) -> bool:
        """True if it may be in its last step or behind it, because only a timeline shows where a rank is."""
        return self.place is None and any(call.begun and call.count is None for call in self.calls)

    @property
    def moved(self) -> float:
        """When it was first seen at its present position, in wall-clock seconds."""
        return self.since if self.place is None else self.place.since

    @property
    def compute_ms(self) -> float | None:
        """Forward, backward and combined passes of a step together, in milliseconds."""
        return None if self.recent is None else self.recent.compute_ms

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


class InFlight(Record, frozen=True):
    """`collectives/rank00000.json`: a dump of torch's flight recorder without the past. A rank writes it while it
    stands still, and removes it when it moves."""

    run: Name
    """The run that it belongs to."""
    rank: Coordinate
    """The global rank."""
    entries: list[Entry]
    """The calls that have not ended, and the last collective of each group, in the order of the calls."""
    pg_config: dict[str, GroupConfig]
    """The rank's process groups, by torch's name."""


def _training_first(call: Calls) -> bool:
    return call.target != _TRAINING
