"""What one rank did in a step, as boxes to draw and as messages to match with its neighbours'.

Which send belongs to which receive follows from microbatch and chunk, so nothing is counted and a schedule's order
does not matter: the output of a forward leaves in the first sending exchange behind it, and the input of a forward has
come when it begins, at the end of a receiving exchange before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from megaprof.analysis.clocks.clocks import Interval, Link
from megaprof.analysis.trace.calls import Call, calls_of, consumer
from megaprof.analysis.trace.traces import Range, Trace
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import parse_artifact_name, sanitise

EXCHANGE = "exchange"


class Capture(NamedTuple):
    """One captured step as file names tell it: ``role`` sanitised, empty for none."""

    target: str
    role: str
    step: int

    def __str__(self) -> str:
        return f"{self.target}{f' ({self.role})' if self.role else ''} step {self.step}"


class Message(NamedTuple):
    """The input of one phase on the receiving stage: of which call of a step, and of which kind, chunk, microbatch."""

    label: str
    step: int
    call: int
    stage: int
    kind: str
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Box:
    """Something that took a rank's time, in wall-clock nanoseconds of its host (when the GPU did it, where that was
    captured). ``kind``: ``forward``, ``backward``, ``combined``, ``finalize_grads`` or ``exchange``; ``name`` as in the
    trace, without the prefix."""

    kind: str
    name: str
    microbatch: int | None
    chunk: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """One schedule call on one rank: boxes in order of time, exchanges beside the others.

    ``host_time``: kernels ran on a GPU, and the trace does not say for which box.
    """

    metadata: Metadata
    label: str
    step: int
    index: int
    start: int
    end: int
    boxes: tuple[Box, ...]
    host_time: bool


class End(NamedTuple):
    """One end of a message: its time as a bound allows it, and the range of the trace in which it happened."""

    time: Interval
    within: Interval


@dataclass(frozen=True)
class Ends:
    """One rank's ends of messages. ``kernels``: they are NCCL's, which meet. ``unknown``: why there are none."""

    metadata: Metadata
    sends: dict[Message, End]
    receives: dict[Message, End]
    kernels: bool = False
    unknown: str | None = None


def capture_of(path: Path) -> Capture | None:
    """What the name of a file says it holds; None for a renamed one. The metadata inside decide in the end."""
    name = parse_artifact_name(path.name)
    return Capture(name.target, name.role or "", name.step) if name else None


def capture_in(metadata: Metadata) -> Capture:
    """The same from a file's metadata."""
    return Capture(sanitise(metadata.target), sanitise(metadata.role) if metadata.role else "", metadata.steps[0])


def timelines_of(trace: Trace) -> list[Timeline]:
    """One timeline for every schedule call in ``trace``, in order of time."""
    others = [r for r in trace.ranges if r.name.is_p2p or r.name.label == ranges.FINALIZE_GRADS]
    found = []
    for call in calls_of(trace):
        boxes = [Box(p.kind, p.kind, p.microbatch, p.chunk, *p.when) for p in call.phases]
        if call.gpu is not None:
            boxes += (Box(EXCHANGE, e.label, None, None, e.start, e.end) for e in call.gpu.exchanges)
        else:
            for r in others:
                if call.start <= r.start and r.end <= call.end:
                    kind = EXCHANGE if r.name.is_p2p else r.name.label
                    boxes.append(Box(kind, r.name.label, None, None, r.start, r.end))
        boxes.sort(key=lambda box: (box.start, -box.end))
        host_time = call.has_kernels and call.gpu is None
        place = call.metadata, call.label, call.step, call.index
        found.append(Timeline(*place, *call.extent, tuple(boxes), host_time))
    return found


def ends_of(trace: Trace) -> Ends:
    """The messages that ``trace`` sent to and received from neighbouring stages, as kernels where they are captured.

    On the host, a send's interval starts no later than its send did, and a receive's ends no earlier, so that bounds
    from them hold.
    """
    metadata, calls = trace.metadata, calls_of(trace)
    if metadata.sizes.pp == 1:
        return Ends(metadata, {}, {}, unknown="there is no pipeline to send along")
    kernels = any(call.gpu is not None and call.gpu.exchanges for call in calls)
    settings = metadata.p2p or {}
    if trace.has_kernels and not kernels and not (settings.get("batch_p2p_comm") and settings.get("batch_p2p_sync")):
        # The host returns before the GPU has received: its ranges bound nothing.
        unknown = "its exchanges run on the GPU without the host waiting for them, and no kernels of theirs are known"
        return Ends(metadata, {}, {}, unknown=unknown)
    sends: dict[Message, End] = {}
    receives: dict[Message, End] = {}
    for call in calls:
        inside = [r for r in trace.ranges if call.start <= r.start and r.end <= call.end]
        exchanges = list(_exchanges(call, inside, kernels, overlapped=bool(settings.get("overlap_p2p_comm"))))
        for kind in (ranges.FORWARD, ranges.BACKWARD):
            phases = _phases(inside, kind)
            leaving = sorted((e for e in exchanges if kind in e.sends), key=attrgetter("posted"))
            arriving = sorted((e for e in exchanges if kind in e.receives), key=attrgetter("done"))
            for number, phase in enumerate(phases):
                before = phases[number - 1].start if number else call.start
                following = phases[number + 1].start if number + 1 < len(phases) else call.end
                if (target := consumer(metadata, kind, phase.chunk)) is not None:
                    message = Message(call.label, call.step, call.index, target[0], kind, target[1], phase.microbatch)
                    if (end := _send(phase, leaving, following, kernels)) is not None:
                        sends[message] = end
                if consumer(metadata, _OTHER[kind], phase.chunk) is not None:
                    place = metadata.coords.pp, kind, phase.chunk, phase.microbatch
                    if (end := _receive(phase, arriving, before, kernels)) is not None:
                        receives[Message(call.label, call.step, call.index, *place)] = end
    return Ends(metadata, sends, receives, kernels)


def links_between(ends: Mapping[int, Ends]) -> list[tuple[Link, tuple[Message, ...]]]:
    """Which rank's sends are which rank's receives, by rank: neighbours of one pipeline, and their messages."""
    column = {rank: (e.metadata.coords.tp, e.metadata.coords.cp, e.metadata.coords.dp) for rank, e in ends.items()}
    at = {(column[rank], e.metadata.coords.pp): rank for rank, e in ends.items()}
    links = []
    for sender, end in sorted(ends.items()):
        by_receiver: dict[int, list[Message]] = {}
        for message in end.sends:
            receiver = at.get((column[sender], message.stage))
            if receiver is not None and message in ends[receiver].receives:
                by_receiver.setdefault(receiver, []).append(message)
        for receiver, messages in sorted(by_receiver.items()):
            received = ends[receiver].receives
            sent, got = [end.sends[m].time for m in messages], [received[m].time for m in messages]
            link = Link(sender, receiver, sent, got, rendezvous=end.kernels and ends[receiver].kernels)
            links.append((link, tuple(messages)))
    return links


class _Exchange(NamedTuple):
    """What one exchange carries, when the host ``posted`` it and was ``done`` with it, and how long it took."""

    sends: frozenset[str]
    receives: frozenset[str]
    posted: int
    done: int
    time: Interval


class _Phase(NamedTuple):
    start: int
    end: int
    chunk: int
    microbatch: int
    combined: bool


_OTHER = {ranges.FORWARD: ranges.BACKWARD, ranges.BACKWARD: ranges.FORWARD}
_WAITED = {"wait_recv_prev": ranges.FORWARD, "wait_recv_next": ranges.BACKWARD}


def _exchanges(call: Call, inside: Iterable[Range], kernels: bool, overlapped: bool) -> Iterator[_Exchange]:
    if kernels:
        for e in call.gpu.exchanges if call.gpu else ():
            yield _Exchange(*_carries(e.label, False), e.launched, e.launched, (e.start, e.end))
        return
    for r in inside:
        if r.name.is_p2p:
            yield _Exchange(*_carries(r.name.label, overlapped), r.start, r.end, (r.start, r.end))


def _carries(label: str, overlapped: bool) -> tuple[frozenset[str], frozenset[str]]:
    """The kinds of phases whose results an exchange sends, and whose inputs have come when it ends."""
    if label in _WAITED:
        return frozenset(), frozenset((_WAITED[label],))
    out, _, back = label.partition("recv_")
    kinds = (ranges.FORWARD, ranges.BACKWARD)
    # An overlapped exchange returns at once, and what it receives has come when the wait for it ends.
    received = () if overlapped else (kind for kind in kinds if kind in back)
    return frozenset(kind for kind in kinds if kind in out), frozenset(received)


def _phases(inside: Iterable[Range], kind: str) -> list[_Phase]:
    """Passes of ``kind`` whose microbatch and chunk are known, in order of time."""
    found = []
    for r in inside:
        fields, combined = r.name.fields, r.name.label == ranges.COMBINED
        if r.name.label != kind and not combined:
            continue
        prefix = "b" if combined and kind == ranges.BACKWARD else ""
        microbatch, chunk = fields.get(f"{prefix}mb"), fields.get(f"{prefix}chunk")
        if microbatch is not None and chunk is not None:
            found.append(_Phase(r.start, r.end, chunk, microbatch, combined))
    return found


def _send(phase: _Phase, leaving: list[_Exchange], following: int, kernels: bool) -> End | None:
    """The exchange that took the result of ``phase`` away, before the next phase of its kind; else the phase itself,
    unless kernels are wanted."""
    own = phase.start, phase.end
    index = bisect_left(leaving, phase.end, key=attrgetter("posted"))
    if not phase.combined and index < len(leaving) and leaving[index].posted <= following:
        return End(leaving[index].time, leaving[index].time)
    if kernels:
        return None
    return End(own if phase.combined else (phase.end, phase.end), own)  # of a combined one: somewhere inside


def _receive(phase: _Phase, arriving: list[_Exchange], before: int, kernels: bool) -> End | None:
    """The last exchange before ``phase`` that may have brought its input, behind the start of the last phase of its
    kind; else the phase itself, unless kernels are wanted."""
    own = phase.start, phase.end
    index = bisect_right(arriving, phase.start, key=attrgetter("done")) - 1
    if not phase.combined and index >= 0 and arriving[index].done > before:
        return End(arriving[index].time, arriving[index].time)
    if kernels:
        return None
    return End(own if phase.combined else (phase.start, phase.start), own)
