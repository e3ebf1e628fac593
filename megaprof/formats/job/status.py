"""`status/rank00000.json`: where one rank stands and how fast it has been. The rank writes it every few seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from megaprof.formats.checks import Record, listing, nested, number, optional, sentence, text, truth, whole
from megaprof.formats.job import records
from megaprof.formats.job.run import LARGEST_PID, LATEST, MOST_RANKS, dead, interval
from megaprof.parallel.topology import AXES

#: Bytes of a status file, always.
SIZE = 2048
#: What a rank is in between two phases of a schedule call.
BETWEEN = "between"
#: A status is late when it is older than this many intervals, and than this many seconds.
LATE_INTERVALS, LATE_SECONDS = 5, 15.0
#: The target whose steps are the job's steps, where it has any.
_TRAINING = "train_actor"
#: Targets and roles that a record has room for.
_MOST_CALLS = 8
_LONGEST_REASON = 300
_LONGEST_WHY = 100
_STEP = whole(0, 1 << 62)
_MILLISECONDS = number(0, 1e9)


@dataclass(frozen=True)
class Position:
    """Inside a schedule call: in which phase, of which microbatch and model chunk."""

    target: Annotated[str, text(40)]
    """What the call is for, such as ``train_actor``."""
    step: Annotated[int, _STEP]
    """The number of its step."""
    phase: Annotated[str, text(80)]
    """The label of the range that is open (`formats.ranges`), or `BETWEEN` two of them."""
    microbatch: Annotated[int | None, optional(_STEP)]
    """Which one; None in a phase that has none."""
    chunk: Annotated[int | None, optional(_STEP)]
    """Which model chunk; None in a phase that has none."""
    since: Annotated[float, number(0, LATEST)]
    """Wall-clock seconds when it was first seen there."""
    role: Annotated[str | None, optional(sentence(80))] = None
    """Whose call it is; None without roles."""

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        chunk = f" (chunk {self.chunk})" if self.chunk else ""
        return f"{self.phase}{microbatch}{chunk}"


@dataclass(frozen=True)
class Calls:
    """How far one target of one role has come."""

    target: Annotated[str, text(40)]
    """What is called, such as ``train_actor``."""
    role: Annotated[str | None, optional(sentence(80))] = None
    """By whom; None without roles."""
    begun: Annotated[int | None, optional(_STEP)] = None
    """How many calls have begun."""
    seconds: Annotated[float | None, optional(number(0, 1e9))] = None
    """From the beginning of one to that of the next, lately; None before there were two."""
    step: Annotated[int | None, optional(_STEP)] = None
    """The number of the last finished step; None without a timeline."""
    count: Annotated[int | None, optional(_STEP)] = None
    """How many calls are finished; None without a timeline."""

    @property
    def label(self) -> str:
        """Target and role as one word for people."""
        return self.target if self.role is None else f"{self.target}.{self.role}"

    @property
    def last_step(self) -> int | None:
        """The last step that has begun, as far as that is known."""
        if self.step is not None:
            return self.step
        return self.begun - 1 if self.begun else None


@dataclass(frozen=True)
class Recent:
    """Medians over the last steps of one target and role. All times in milliseconds."""

    target: Annotated[str, text(40)]
    """What the steps are of."""
    steps: Annotated[int, _STEP]
    """How many they are."""
    step_ms: Annotated[float, _MILLISECONDS]
    """The whole call of the schedule."""
    forward_ms: Annotated[float, _MILLISECONDS]
    """All forward passes of a step."""
    backward_ms: Annotated[float, _MILLISECONDS]
    """All backward passes of a step."""
    combined_ms: Annotated[float, _MILLISECONDS]
    """All passes in which a forward and a backward overlap."""
    finalize_ms: Annotated[float, _MILLISECONDS]
    """The reduction of gradients."""
    p2p_ms: Annotated[float | None, optional(_MILLISECONDS)]
    """Exchanges with other stages; None from releases that did not note them on the GPU's clock."""
    role: Annotated[str | None, optional(sentence(80))] = None
    """Whose steps; None without roles."""


@dataclass(frozen=True)
class OwnCost:
    """What the timeline costs its process."""

    step_us: Annotated[float, number(0, 1e12)]
    """Per step on the training thread, median, in microseconds."""
    fraction: Annotated[float, number(0, 1e9)]
    """The same as a fraction of the step."""
    background_fraction: Annotated[float, number(0, 1e9)]
    """The background thread's CPU time as a fraction of one processor."""


@dataclass(frozen=True)
class CaptureState:
    """The capture on demand that is in the rank's hands."""

    request: Annotated[str, text(64)]
    """The id of the request."""
    state: Annotated[str, text(40)]
    """One of `formats.job.requests.STATES`."""
    reason: Annotated[str | None, optional(sentence(_LONGEST_REASON))] = None
    """Why it is no further; None where nothing is wrong."""


def _coords(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError("are not an object")
    return {axis: whole(0, MOST_RANKS)(value.get(axis)) for axis in AXES}


def _calls(value: object) -> tuple[Calls, ...]:
    if isinstance(value, dict):  # a job of an earlier version: one object, by target and role
        names = (label.partition(".") for label in value)
        entries = [{"target": target, "role": role or None} for target, _, role in names]
        value = [{**call, **names} for call, names in zip(value.values(), entries, strict=True) if type(call) is dict]
    found: tuple[Calls, ...] = listing(nested(Calls), _MOST_CALLS)(value)
    return found


@dataclass(frozen=True)
class RankStatus(Record):
    """One rank, as it describes itself. Times in wall-clock seconds of its host."""

    run: Annotated[str | None, optional(text(64))]
    """Which run it belongs to; None before it knows."""
    rank: Annotated[int, whole(0, MOST_RANKS)]
    """Its global rank."""
    coords: Annotated[dict[str, int], _coords]
    """Its place along `pp`, `tp`, `cp`, `ep` and `dp`."""
    host: Annotated[str, text()]
    """Its host and process id namespace, as `formats.names.host` says it."""
    name: Annotated[str, sentence(64)]
    """Its host for people."""
    pid: Annotated[int, whole(0, LARGEST_PID)]
    """Its process id there."""
    time: Annotated[float, number(0, LATEST)]
    """When this was written."""
    interval: Annotated[float, number(0, interval(MOST_RANKS))]
    """Seconds from one record to the next."""
    since: Annotated[float, number(0, LATEST)]
    """When its training thread was first seen where it is."""
    calls: Annotated[tuple[Calls, ...], _calls]
    """How far it has come: one entry for each target and role."""
    position: Annotated[Position | None, optional(nested(Position))] = None
    """Where its training thread is; None outside of a schedule call, and without a timeline."""
    device_position: Annotated[Position | None, optional(nested(Position))] = None
    """Where its GPU is; None where that has nothing left to do, and on a CPU."""
    recent: Annotated[Recent | None, optional(nested(Recent))] = None
    """How fast it has been; None without a timeline."""
    cost: Annotated[OwnCost | None, optional(nested(OwnCost))] = None
    """What that costs; None without a timeline."""
    capture: Annotated[CaptureState | None, optional(nested(CaptureState))] = None
    """The capture on demand in its hands, None when there is none."""
    ended: Annotated[bool, truth] = False
    """It has said goodbye."""
    off: Annotated[bool, truth] = False
    """Profiling is off since a fault."""
    why: Annotated[str | None, optional(sentence(_LONGEST_WHY))] = None
    """The fault; None without one, and from releases that did not say it."""

    def as_record(self) -> dict[str, Any]:
        """For JSON, within `SIZE` bytes: names of roles and reasons may be long, and JSON makes six bytes of many a
        letter, so these are what gives way."""
        record = {"version": 1, **_plain(vars(self))}
        if self.why is not None and len(self.why) > _LONGEST_WHY:
            return replace(self, why=self.why[:_LONGEST_WHY]).as_record()
        capture = self.capture
        if len(records.encode(record)) <= SIZE:
            return record
        if capture is not None and capture.reason:
            shorter = capture.reason[: min(len(capture.reason) // 2, _LONGEST_REASON)]
            return replace(self, capture=replace(capture, reason=shorter)).as_record()
        if self.why:
            return replace(self, why=self.why[: len(self.why) // 2]).as_record()
        return replace(self, calls=self.calls[: len(self.calls) // 2]).as_record() if self.calls else record

    @property
    def place(self) -> Position | None:
        """Where it is in its schedule call, None outside of one.

        The GPU runs behind its host; but what it waits for between two phases, only the host knows.
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
        """How long a step takes, in milliseconds; without a timeline, the time from one to the next."""
        if self.recent is not None:
            return self.recent.step_ms
        between = (call.seconds for call in sorted(self.calls, key=_training_first))
        return next((1e3 * seconds for seconds in between if seconds is not None), None)

    def step(self) -> int | None:
        """The step of the call that it is in, or else the last one that it finished: of its training steps where there
        are any."""
        if self.place is not None:
            return self.place.step
        steps = (call.last_step for call in sorted(self.calls, key=_training_first))
        return next((step for step in steps if step is not None), None)

    def step_of(self, target: str, role: str | None) -> int | None:
        """The step of `target` and `role` that it is in, or else the last one that it finished."""
        place = self.place
        inside = place is not None and (place.target, place.role) == (target, role)
        return place.step if place is not None and inside else self.finished(target, role)

    def finished(self, target: str, role: str | None) -> int | None:
        """The last step of `target` and `role` that it finished, while it is in no call of them."""
        own = (call.last_step for call in self.calls if (call.target, call.role) == (target, role))
        return next(own, None)

    @property
    def settled(self) -> bool:
        """Whether it has done before what it is doing: finished a call of the target and role that it is in, or,
        outside of any, a call at all. The first one may take minutes, for compilation or data."""
        place = self.place
        own = [call for call in self.calls if place is None or (call.target, call.role) == (place.target, place.role)]
        return any((call.begun or 0) > 1 or (call.count or 0) > 0 for call in own)

    def stuck(self, now: float) -> float:
        """Seconds for which it has not moved, by its own host's clock as far as that was written down."""
        return max(0.0, max(now, self.time) - self.moved)

    def late(self, now: float) -> bool:
        """No sign of life for too long, or a process of this host that is gone."""
        return not self.ended and (
            now - self.time > max(LATE_SECONDS, LATE_INTERVALS * self.interval) or dead(self.host, self.pid)
        )


def _training_first(call: Calls) -> bool:
    return call.target != _TRAINING


def _plain(value: Any) -> Any:
    """For JSON, what is inside this too. Microseconds are enough for a time, and 17 digits too many for a status
    file."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", None)  # of a dataclass
    return value if inside is None else {name: _plain(inner) for name, inner in inside.items()}
