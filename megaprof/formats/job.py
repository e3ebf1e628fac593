"""What lies in the control directory of a job: small JSON files, which other processes read while the job runs.

``run.json`` is the running job, by its lowest rank. ``capture.json`` is the one request to capture, by a command.
``status/rank00000.json`` is where a rank stands, and its answer to the request. ``collectives/rank00000.json`` is what
a rank that stands still has in flight. Models of several roles (actor, critic) may share a save directory, and each has
a rank 0; so the files of a role lie in a directory of their own, ``role-actor``.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from megaprof.formats.flight import Flight
from megaprof.formats.names import dead, host
from megaprof.parallel.selectors import Selector, parse_selector
from megaprof.parallel.topology import AXES, ParallelSizes, RankCoords, WorldLayout

CONTROL, RUN, CAPTURE, STATUS, COLLECTIVES = "control", "run.json", "capture.json", "status", "collectives"
ROLE = "role-"
#: Status files that the whole job writes each second, at most.
STATUS_RATE = 1000
#: No job has more ranks, and nobody reads more status files.
MOST_RANKS = 1 << 18
_LARGEST_PID = 1 << 31
#: The most windows of a request, so that a status that names a file for each window and tool stays short enough.
MOST_WINDOWS = 100
LONGEST_TIMEOUT = 24 * 3600.0
#: The phase of a rank between two phases of a schedule call.
BETWEEN = "between"
#: A status is late when it is older than this many intervals, and than this many seconds.
LATE_INTERVALS, LATE_SECONDS = 5, 15.0
#: The target whose steps are the job's steps, if it has any.
_TRAINING = "train_actor"

#: Types that several records use. A time is in wall-clock seconds, up to the year 2242: as nanoseconds, that fits into
#: 63 bits.
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Time = Annotated[float, Meta(ge=0, le=float(1 << 33))]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record that is a file of its own. Unknown fields of a newer writer are ignored."""

    version: Literal[2] = 2
    """The version of the files in a control directory. A record of another version is refused."""


R = TypeVar("R", bound=msgspec.Struct)


def decode(content: bytes, kind: type[R]) -> R:
    """Returns the record in a file's `content`. Raises ValueError, whose message completes "it ..."."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ValueError(f"is damaged, or was written by another version of megaprof: {fault}") from None


def interval(world: int) -> float:
    """Returns the seconds between two looks of a rank, so that the whole job looks at most `STATUS_RATE` times a
    second."""
    return max(1.0, world / STATUS_RATE)


#: The interval in the largest job.
LONGEST_INTERVAL = interval(MOST_RANKS)


class RunRecord(Record, frozen=True):
    """A running job, or one role's part of it, as rank 0 describes it."""

    run: Name
    """A random name: another run in the same directory has another one."""
    host: Name
    """The host of rank 0 (`formats.names.host`)."""
    pid: Annotated[int, Meta(ge=0, le=_LARGEST_PID)]
    """Of rank 0."""
    started: Time
    sizes: ParallelSizes
    order: Name | None
    """Megatron's rank order, such as ``tp-cp-ep-dp-pp``; None if no order explains the ranks."""
    role: str | None
    interval: Annotated[float, Meta(ge=0.01, le=LONGEST_INTERVAL)]
    """Seconds between two looks of a rank, and between two of its status records."""
    ended: Time | None = None
    """None while it runs."""

    def __post_init__(self) -> None:
        """Raises ValueError if the sizes make more ranks than any job has."""
        largest = max(self.world, self.sizes.vpp, self.sizes.ep, self.sizes.etp)
        if largest > MOST_RANKS:
            raise ValueError(f"its sizes make {largest} ranks, more than {MOST_RANKS}")

    @classmethod
    def new(cls, coords: RankCoords, layout: WorldLayout | None, role: str | None, seconds: float) -> RunRecord:
        """Returns the record of the job of the rank at `coords`. It begins now, and a rank looks every `seconds`."""
        return cls(
            run=secrets.token_hex(8),
            host=host(),
            pid=os.getpid(),
            started=time.time(),
            sizes=coords.sizes,
            order=None if layout is None else layout.order,
            role=role,
            interval=seconds,
        )

    @property
    def world(self) -> int:
        return self.sizes.world

    @property
    def layout(self) -> WorldLayout | None:
        """Every rank's coordinates; None if no rank order explains them."""
        if self.order is None:
            return None
        try:
            return WorldLayout(self.sizes, self.order)
        except ValueError:
            return None


class Refused(Exception):
    """The request will not be carried out; the message says why."""


class Request(Record, frozen=True):
    """Some windows of a target, one after another, on some ranks, by some tools."""

    id: Name
    run: Name
    """The run that it is for."""
    timeout: Annotated[float, Meta(ge=1, le=LONGEST_TIMEOUT)]
    """Seconds after which nobody waits for it any more."""
    target: Name
    role: Name | None
    """The role whose calls are captured; None if the job has only one role."""
    steps: Annotated[int, Meta(ge=1, le=MOST_WINDOWS)]
    select: Annotated[str, Meta(min_length=1, max_length=4000)]
    """The ranks that capture, as in `--profile-select`."""
    options: dict[str, bool | str | list[str]]
    """``tool``, and options of the tools, as `ProfileConfig` names them."""
    by: str = "megaprof trigger"
    """Who asks, for people."""
    first: Count | None = None
    """The number of the first call to capture, counted from 0 since the hooks were installed; None until every selected
    rank has reported its number of calls."""

    @property
    def selector(self) -> Selector:
        """The ranks that capture. Raises ValueError."""
        return parse_selector(self.select)


Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
Coordinate = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
State = Literal["accepted", "recording", "done", "failed"]


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
    """The number of the last finished step; without a timeline, of the last one that has begun. None before that."""
    count: Count | None = None
    """The number of finished calls; None without a timeline."""


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


class Answer(msgspec.Struct, frozen=True):
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

    @property
    def final(self) -> bool:
        """True if no other answer follows."""
        return self.state in ("done", "failed")


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
    pid: Annotated[int, Meta(ge=0, le=_LARGEST_PID)]
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
    capture: Answer | None = None
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
        known = (1e3 * call.seconds for call in self._training_first if call.seconds is not None)
        return next(known, None)

    @property
    def last_step(self) -> int | None:
        """The step of the call that it is in, or else the last one that it finished, preferably of training."""
        if self.place is not None:
            return self.place.step
        return next((call.step for call in self._training_first if call.step is not None), None)

    @property
    def _training_first(self) -> list[Calls]:
        return sorted(self.calls, key=lambda call: call.target != _TRAINING)

    def step_of(self, target: str, role: str | None) -> int | None:
        """Returns the step of `target` and `role` that it is in, or else the last one that it finished."""
        place = self.place
        is_inside = place is not None and (place.target, place.role) == (target, role)
        return place.step if place is not None and is_inside else self.finished(target, role)

    def finished(self, target: str, role: str | None) -> int | None:
        """Returns the last step of `target` and `role` that it finished, while it is in no call of them."""
        return next((call.step for call in self.calls if (call.target, call.role) == (target, role)), None)

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


class InFlight(Flight, kw_only=True):
    """`collectives/rank00000.json`: a dump of torch's flight recorder without the past: the calls that have not ended,
    and the last collective of each group. A rank writes it while it stands still, and removes it when it moves."""

    version: Literal[2] = 2
    run: Name
    rank: Coordinate


# The rule of a standstill (`limit`) is the same for a job that runs, where `megaprof status` looks at the statuses of
# its ranks, and for one that is read afterwards, where `megaprof report` looks at the steps of its timelines. A step
# that stood still counts for no time, neither in a report nor in the recent times of a rank.

#: A rank stands still when it has not moved for this many seconds, and for this many times the length of its steps.
STUCK_SECONDS, STUCK_STEPS = 10.0, 5
#: In its first step, which compiles and loads, it stands still only after this many seconds.
FIRST_STEP_SECONDS = 300.0


def limit(usual_seconds: float, least: float = STUCK_SECONDS) -> float:
    """Returns the seconds after which a rank in a step stands still, for steps that usually take ``usual_seconds``."""
    return max(least, STUCK_STEPS * usual_seconds)


@dataclass(frozen=True)
class Standing:
    """A rank that the others waited for, and where it was."""

    rank: int
    """Global rank."""
    stage: int
    """Pipeline rank."""
    phase: str | None = None
    """Label of the range that it was in, such as ``forward``; None if not known."""
    microbatch: int | None = None
    """Microbatch of that range."""
    chunk: int | None = None
    """Model chunk of that range."""


@dataclass(frozen=True)
class Standstill:
    """A step in which the job stood still, or in the middle of which it ended."""

    step: int
    """Number of the step."""
    seconds: float
    """Seconds for which nothing has moved; afterwards, by how much longer than usual the step was. 0 if the job ended
    while it moved."""
    waited_for: tuple[Standing, ...]
    """Ranks that the others waited for; empty if not known."""
    waiting: int
    """Number of ranks that waited."""
    outcome: Literal["went_on", "last", "unfinished", "lasts"]
    """``went_on``: other steps followed. ``last``: the step ended, and none followed. ``unfinished``: the job ended in
    the middle of it. ``lasts``: the job is still there."""
    target: str | None = None
    """Target of the step, if the job has several; otherwise None."""
    inside: bool | None = True
    """False if the job stood still after the step, outside of the schedule, as in a checkpoint or a rollout; None if
    only a timeline would have shown whether it was in the step or after it."""


def completed(standstills: Iterable[Standstill], last: Standstill | None) -> tuple[Standstill, ...]:
    """Returns `standstills` of a job's timelines with the ranks that were waited for in the step in which it ended.

    A rank that is killed does not write its last step. But its status file says where it stood, and `last` is the
    standstill by the status files.
    """
    return tuple(
        with_fields(stood, waited_for=tuple({x.rank: x for x in (*last.waited_for, *stood.waited_for)}.values()))
        if last is not None and (stood.step, stood.outcome) == (last.step, "unfinished")
        else stood
        for stood in standstills
    )
