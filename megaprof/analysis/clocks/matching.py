"""Matches the sends and receives of a pipeline.

Microbatch and chunk show which ones belong together, so nothing is counted and the schedule's order does not matter.
The output of a forward leaves in the first sending exchange after it. Its input has arrived when it begins, at the end
of a receiving exchange before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from megaprof.analysis.trace.calls import Call
from megaprof.analysis.trace.passes import Exchange
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import RECEIVES, SENDS

Interval = tuple[int, int]


class Message(NamedTuple):
    """The input of one pass on the stage that receives it."""

    label: str
    """Target of the schedule call."""
    step: int
    """Step of that call."""
    call: int
    """Number of the call within the step."""
    stage: int
    """Stage that receives."""
    kind: str
    """``forward`` or ``backward``, of the pass that needs it."""
    chunk: int
    """Model chunk of that pass."""
    microbatch: int
    """Microbatch of that pass."""


class End(NamedTuple):
    """One end of a message; nanoseconds on its rank's clock."""

    time: Interval
    """An interval that contains the moment when it happened."""
    within: Interval
    """The range or kernel of the trace in which it happened."""


@dataclass(frozen=True)
class Ends:
    """One rank's ends of messages."""

    metadata: Metadata
    """The rank's metadata."""
    sends: dict[Message, End]
    """Sending ends, by message."""
    receives: dict[Message, End]
    """Receiving ends, by message."""
    kernels: bool = False
    """True if the ends are NCCL's kernels, which run at both ends at once."""
    unknown: str | None = None
    """Why there are none; None if there are some."""


def ends_of(metadata: Metadata, calls: Sequence[Call]) -> Ends:
    """Returns the messages that one rank's ``calls`` exchanged with neighbouring stages, as kernels if those were
    captured.

    On the host, the interval of a send begins no later than the send, and that of a receive ends no earlier, so bounds
    from them are valid.
    """
    if metadata.sizes.pp == 1:
        return Ends(metadata, {}, {}, unknown="there is no pipeline to send along")
    kernels = any(call.gpu is not None and call.gpu.exchanges for call in calls)
    settings = metadata.p2p or {}
    blocking = settings.get("batch_p2p_comm") and settings.get("batch_p2p_sync")
    if any(call.has_kernels for call in calls) and not kernels and not blocking:
        # The host returns before the GPU has received: its ranges bound nothing.
        return Ends(
            metadata, {}, {}, unknown="its host does not wait for exchanges on the GPU, whose kernels are not known"
        )
    ends = Ends(metadata, {}, {}, kernels)
    overlapped = not kernels and bool(settings.get("overlap_p2p_comm"))
    for call in calls:
        exchanges = call.exchanges if not kernels else call.gpu.exchanges if call.gpu else ()
        for kind in (ranges.FORWARD, ranges.BACKWARD):
            _match(call, kind, exchanges, overlapped, ends)
    return ends


@dataclass(frozen=True)
class Link:
    """Messages from one rank to another."""

    sender: int
    """Rank that sends."""
    receiver: int
    """Rank that receives."""
    sends: Sequence[Interval]
    """When each message was sent, in nanoseconds on the sender's clock."""
    receives: Sequence[Interval]
    """When each message was received, in the same order, in nanoseconds on the receiver's clock."""
    rendezvous: bool = False
    """True if a send ends only after its receive began (NCCL kernels; gloo buffers sends)."""
    messages: Sequence[Message] = ()
    """The messages, in the same order."""


def links_of(calls: Iterable[Call]) -> list[Link]:
    """Returns the links between ranks, from their calls of one step."""
    return links_between({call.rank: ends_of(call.metadata, [call]) for call in calls})


def links_between(ends: Mapping[int, Ends]) -> list[Link]:
    """Returns the links between neighbours of one pipeline, with the messages seen at both ends. ``ends``: by rank."""
    column_of = {
        rank: (rank_ends.metadata.coords.tp, rank_ends.metadata.coords.cp, rank_ends.metadata.coords.dp)
        for rank, rank_ends in ends.items()
    }
    rank_at = {(column_of[rank], rank_ends.metadata.coords.pp): rank for rank, rank_ends in ends.items()}
    links = []
    for sender, sender_ends in sorted(ends.items()):
        by_receiver: dict[int, list[Message]] = {}
        for message in sender_ends.sends:
            receiver = rank_at.get((column_of[sender], message.stage))
            if receiver is not None and message in ends[receiver].receives:
                by_receiver.setdefault(receiver, []).append(message)
        for receiver, messages in sorted(by_receiver.items()):
            receiver_ends = ends[receiver]
            sent = [sender_ends.sends[message].time for message in messages]
            received = [receiver_ends.receives[message].time for message in messages]
            kernels = sender_ends.kernels and receiver_ends.kernels
            links.append(Link(sender, receiver, sent, received, kernels, messages))
    return links


class _Turn(NamedTuple):
    """One pass on the host, with a known chunk and microbatch."""

    start: int
    end: int
    chunk: int
    microbatch: int
    combined: bool


def _match(call: Call, kind: str, exchanges: Sequence[Exchange], overlapped: bool, ends: Ends) -> None:
    """Adds to ``ends`` what the passes of one kind in ``call`` sent and received."""
    placement = call.metadata.placement
    labels = {exchange.label for exchange in exchanges}
    sending_labels = {label for label in labels if _sends(label, kind)}
    receiving_labels = {label for label in labels if _received(label, kind, overlapped)}
    sends = sorted((exchange for exchange in exchanges if exchange.label in sending_labels), key=attrgetter("posted"))
    receives = sorted(
        (exchange for exchange in exchanges if exchange.label in receiving_labels), key=attrgetter("done")
    )
    turns = list(_turns(call, kind))
    for number, turn in enumerate(turns):
        previous_start = turns[number - 1].start if number else call.start
        next_start = turns[number + 1].start if number + 1 < len(turns) else call.end
        call_key = call.label, call.step, call.index
        # The exchange that sent the result, posted before the next pass of this kind.
        index = bisect_left(sends, turn.end, key=attrgetter("posted"))
        send = sends[index] if index < len(sends) and sends[index].posted <= next_start else None
        if (consumer := placement.consumer(kind, call.stage, turn.chunk)) is not None:
            message = Message(*call_key, consumer[0], kind, consumer[1], turn.microbatch)
            if (end := _end(turn, send, turn.end, ends.kernels)) is not None:
                ends.sends[message] = end
        # The last exchange that may have brought the input, after the previous pass of this kind began.
        index = bisect_right(receives, turn.start, key=attrgetter("done")) - 1
        receive = receives[index] if index >= 0 and receives[index].done > previous_start else None
        if placement.producer(kind, call.stage, turn.chunk) is not None:
            message = Message(*call_key, call.stage, kind, turn.chunk, turn.microbatch)
            if (end := _end(turn, receive, turn.start, ends.kernels)) is not None:
                ends.receives[message] = end


def _sends(label: str, kind: str) -> bool:
    """Returns whether an exchange sends results of passes of one kind. An overlapped exchange sends when it is posted,
    not when it is waited for."""
    return not label.startswith(ranges.WAIT) and SENDS[kind] in ranges.transfers(label)


def _received(label: str, kind: str, overlapped: bool) -> bool:
    """Returns whether inputs of passes of one kind have arrived when an exchange ends. An overlapped exchange
    returns at once; its inputs have arrived when the wait for it ends."""
    named = label != ranges.WAIT_ANY and RECEIVES[kind] in ranges.transfers(label)
    return named and (label.startswith(ranges.WAIT) or not overlapped)


def _turns(call: Call, kind: str) -> Iterator[_Turn]:
    for phase in call.phases:
        combined = phase.kind == ranges.COMBINED
        if combined and kind == ranges.BACKWARD:
            if phase.backward is not None:
                yield _Turn(*phase.host, phase.backward.chunk, phase.backward.microbatch, combined)
        elif (phase.kind == kind or combined) and phase.chunk is not None and phase.microbatch is not None:
            yield _Turn(*phase.host, phase.chunk, phase.microbatch, combined)


def _end(turn: _Turn, exchange: Exchange | None, moment: int, kernels: bool) -> End | None:
    """Returns an end in the exchange. Without an exchange, the end is in the pass: at ``moment``, or anywhere in a
    combined pass. None if kernels are wanted."""
    if exchange is not None and not turn.combined:
        return End((exchange.start, exchange.end), (exchange.start, exchange.end))
    pass_interval = turn.start, turn.end
    return None if kernels else End(pass_interval if turn.combined else (moment, moment), pass_interval)
