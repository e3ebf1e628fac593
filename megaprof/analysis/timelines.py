"""What one rank did in a step, as boxes to draw and as messages to match with its neighbours'.

Which send belongs to which receive follows from microbatch and chunk, so nothing is counted and a schedule's order
does not matter: the output of a forward leaves in the first sending exchange behind it, and the input of a forward has
come when it begins, at the end of a receiving exchange before it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megaprof import ranges
from megaprof.analysis.calls import calls_of
from megaprof.analysis.clocks import Interval, Link
from megaprof.analysis.traces import Metadata, Range, Trace
from megaprof.artifacts.names import sanitise

EXCHANGE = "exchange"

_OWN_NAME = re.compile(r"(?P<target>[\w-]+)(?:\.(?P<role>[\w-]+))?\.step(?P<step>\d{1,18})\.pp\d", re.ASCII)


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
    """Something that took a rank's time, in wall-clock nanoseconds of its host. ``kind``: ``forward``, ``backward``,
    ``combined``, ``finalize_grads`` or ``exchange``; ``name`` as in the trace, without the prefix."""

    kind: str
    name: str
    microbatch: int | None
    chunk: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """One schedule call on one rank: boxes in order of time, exchanges beside the others."""

    metadata: Metadata
    label: str
    step: int
    index: int
    start: int
    end: int
    boxes: tuple[Box, ...]
    has_kernels: bool


class End(NamedTuple):
    """One end of a message: its time as a bound allows it, and the range of the trace in which it happened."""

    time: Interval
    within: Interval


@dataclass(frozen=True)
class Ends:
    """One rank's ends of messages. ``unknown``: why there are none that clocks could be aligned by, or None."""

    metadata: Metadata
    sends: dict[Message, End]
    receives: dict[Message, End]
    unknown: str | None = None


def capture_of(path: Path) -> Capture | None:
    """What the name of a file says it holds; None for a renamed one. The metadata inside decide in the end."""
    match = _OWN_NAME.match(path.name)
    return Capture(match["target"], match["role"] or "", int(match["step"])) if match else None


def capture_in(metadata: Metadata) -> Capture:
    """The same from a file's metadata."""
    return Capture(sanitise(metadata.target), sanitise(metadata.role) if metadata.role else "", metadata.steps[0])


def timelines_of(trace: Trace) -> list[Timeline]:
    """One timeline for every schedule call in ``trace``, in order of time."""
    others = [r for r in trace.ranges if r.name.is_p2p or r.name.label == ranges.FINALIZE_GRADS]
    found = []
    for call in calls_of(trace):
        boxes = [Box(p.kind, p.kind, p.microbatch, p.chunk, p.start, p.end) for p in call.phases]
        for r in others:
            if call.start <= r.start and r.end <= call.end:
                boxes.append(Box(EXCHANGE if r.name.is_p2p else r.name.label, r.name.label, None, None, r.start, r.end))
        boxes.sort(key=lambda box: (box.start, -box.end))
        found.append(
            Timeline(
                call.metadata, call.label, call.step, call.index, call.start, call.end, tuple(boxes), trace.has_kernels
            )
        )
    return found


def ends_of(trace: Trace) -> Ends:
    """The messages that ``trace`` sent to and received from neighbouring stages.

    A send's interval starts no later than its send did, and a receive's ends no earlier, so that bounds from them hold.
    """
    metadata = trace.metadata
    if metadata.sizes.pp == 1:
        return Ends(metadata, {}, {}, "there is no pipeline to send along")
    settings = metadata.p2p or {}
    if trace.has_kernels and not (settings.get("batch_p2p_comm") and settings.get("batch_p2p_sync")):
        # The host returns before the GPU has received: its ranges bound nothing.
        return Ends(metadata, {}, {}, "its exchanges run on the GPU without the host waiting for them")
    sends: dict[Message, End] = {}
    receives: dict[Message, End] = {}
    overlapped = bool(settings.get("overlap_p2p_comm"))
    for call in calls_of(trace):
        inside = [r for r in trace.ranges if call.start <= r.start and r.end <= call.end]
        exchanges = [(r, *_carries(r.name.label, overlapped)) for r in inside if r.name.is_p2p]
        for kind in (ranges.FORWARD, ranges.BACKWARD):
            phases = _phases(inside, kind)
            leaving = [(r.start, r.end) for r, sent, _ in exchanges if kind in sent]
            arriving = sorted((r.end, r.start) for r, _, received in exchanges if kind in received)
            for number, phase in enumerate(phases):
                following = phases[number + 1].start if number + 1 < len(phases) else call.end
                if (target := _consumer(metadata, kind, phase.chunk)) is not None:
                    message = Message(call.label, call.step, call.index, target[0], kind, target[1], phase.microbatch)
                    sends[message] = _send(phase, leaving, following)
                if _consumer(metadata, _OTHER[kind], phase.chunk) is not None:
                    message = Message(
                        call.label, call.step, call.index, metadata.coords.pp, kind, phase.chunk, phase.microbatch
                    )
                    receives[message] = _receive(phase, arriving)
    return Ends(metadata, sends, receives)


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
            link = Link(sender, receiver, [end.sends[m].time for m in messages], [received[m].time for m in messages])
            links.append((link, tuple(messages)))
    return links


class _Phase(NamedTuple):
    start: int
    end: int
    chunk: int
    microbatch: int
    combined: bool


_OTHER = {ranges.FORWARD: ranges.BACKWARD, ranges.BACKWARD: ranges.FORWARD}
_WAITED = {"wait_recv_prev": ranges.FORWARD, "wait_recv_next": ranges.BACKWARD}


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


def _consumer(metadata: Metadata, kind: str, chunk: int) -> tuple[int, int] | None:
    """Stage and chunk that the result of a phase goes to, None behind the last one: Megatron's
    ``get_forward_backward_func`` with interleaving goes round the stages once per chunk."""
    stage, last, last_chunk = metadata.coords.pp, metadata.sizes.pp - 1, max(len(metadata.chunks), 1) - 1
    if kind == ranges.FORWARD:
        if stage < last:
            return stage + 1, chunk
        return (0, chunk + 1) if chunk < last_chunk else None
    if stage > 0:
        return stage - 1, chunk
    return (last, chunk - 1) if chunk > 0 else None


def _send(phase: _Phase, leaving: list[Interval], following: int) -> End:
    """The exchange that took the result of ``phase`` away, before the next phase of its kind; else the phase itself."""
    own = phase.start, phase.end
    if phase.combined:
        return End(own, own)  # sent somewhere inside
    index = bisect_left(leaving, (phase.end, 0))
    if index < len(leaving) and leaving[index][0] <= following:
        return End(leaving[index], leaving[index])
    return End((phase.end, phase.end), own)


def _receive(phase: _Phase, arriving: list[tuple[int, int]]) -> End:
    """The last exchange before ``phase`` that may have brought its input; ``arriving`` holds (end, start) in order."""
    own = phase.start, phase.end
    if phase.combined:
        return End(own, own)
    index = bisect_right(arriving, (phase.start, phase.start)) - 1
    if index >= 0:
        end, start = arriving[index]
        return End((start, end), (start, end))
    return End((phase.start, phase.start), own)
