"""Matches the sends and receives of a pipeline.

Microbatch and chunk show which ones belong together, so nothing is counted and the schedule's order does not matter.
The output of a forward leaves in the first sending exchange after it. Its input has arrived when it begins, at the end
of a receiving exchange before it.

NCCL's send and receive meet, so the kernel at each end includes waiting for the other, and bytes only move while both
run. If both ends were captured and are on one clock, the later end of each message is known, and a late neighbour is
not mistaken for a slow network (`meetings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.trace.intervals import intersection, intervals, total, union
from megaprof.analysis.trace.steps import TracedStep, grouped
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import RECEIVES, SENDS

#: Fraction of kernels that may lack their partner.
_UNMATCHED = 0.05
_NEVER = np.iinfo(np.int64).max


class Message(NamedTuple):
    """The input of a pass in one call of a step (target, step, index): the stage that receives it, and kind, chunk and
    microbatch of the pass that needs it."""

    label: str
    step: int
    call: int
    stage: int
    kind: str
    chunk: int
    microbatch: int


class End(NamedTuple):
    """One end of a message, in nanoseconds on its rank's clock: an interval that contains the moment when it happened,
    and the range or kernel of the trace in which it happened."""

    time: tuple[int, int]
    within: tuple[int, int]


@dataclass(frozen=True)
class Ends:
    """One rank's ends of the messages that it sends and receives."""

    metadata: Metadata
    sends: dict[Message, End]
    receives: dict[Message, End]
    unknown: str | None = None
    """Why there are none; None if there are some."""


def ends_of(metadata: Metadata, steps: Sequence[TracedStep]) -> Ends:
    """Returns the messages that one rank exchanged with neighbouring stages in ``steps``, as kernels if those were
    captured.

    On the host, the interval of a send begins no later than the send, and that of a receive ends no earlier, so bounds
    from them are valid.
    """
    if metadata.sizes.pp == 1:
        return Ends(metadata, {}, {}, unknown="there is no pipeline to send along")
    kernels = any(step.kernels for step in steps)
    settings = metadata.p2p or {}
    blocking = settings.get("batch_p2p_comm") and settings.get("batch_p2p_sync")
    if any(step.has_kernels for step in steps) and not kernels and not blocking:
        # The host returns before the GPU has received: its ranges bound nothing.
        return Ends(
            metadata, {}, {}, unknown="its host does not wait for exchanges on the GPU, whose kernels are not known"
        )
    ends = Ends(metadata, {}, {})
    overlapped = not kernels and bool(settings.get("overlap_p2p_comm"))
    for step in steps:
        for kind in (ranges.FORWARD, ranges.BACKWARD):
            _match(step, kind, kernels, overlapped, ends)
    return ends


def exchanged(ends: Mapping[int, Ends]) -> Iterator[tuple[Message, int, int]]:
    """Yields the messages between neighbours of one pipeline that were seen at both ends, each with the ranks of its
    sender and its receiver. ``ends``: by rank."""
    coords = {rank: of_rank.metadata.coords for rank, of_rank in ends.items()}
    rank_at = {(at.tp, at.cp, at.dp, at.pp): rank for rank, at in coords.items()}
    for sender, of_sender in sorted(ends.items()):
        at = coords[sender]
        for message in of_sender.sends:
            receiver = rank_at.get((at.tp, at.cp, at.dp, message.stage))
            if receiver is not None and message in ends[receiver].receives:
                yield message, sender, receiver


def _match(step: TracedStep, kind: str, kernels: bool, overlapped: bool, ends: Ends) -> None:
    """Adds to ``ends`` what the passes of one kind in ``step`` sent and received. ``kernels``: the ends are NCCL's
    kernels, which run at both ends at once."""
    placement, passes = step.metadata.placement, step.passes
    exchanges = step.kernels if kernels else step.exchanges
    # An overlapped exchange returns at once: it sends when it is posted, and its inputs have arrived when the wait for
    # it ends.
    waits = {label for label in exchanges if label.startswith(ranges.WAIT)}
    sending = {label for label in exchanges if SENDS[kind] in ranges.transfers(label)} - waits
    receiving = {label for label in exchanges if RECEIVES[kind] in ranges.transfers(label)} - {ranges.WAIT_ANY}
    receiving = receiving & waits if overlapped else receiving
    sends, receives = (
        np.concatenate((np.empty((0, 4), np.int64), *(times for label, times in exchanges.items() if label in wanted)))
        for wanted in (sending, receiving)
    )
    sends, receives = sends[np.argsort(sends[:, 0], kind="stable")], receives[np.argsort(receives[:, 1], kind="stable")]
    number = ranges.PASSES.index(kind)
    ids = np.where((passes.kind == 2)[:, None] & (number == 1), passes.ids[:, 2:], passes.ids[:, :2])
    rows = np.isin(passes.kind, (number, 2)) & (ids >= 0).all(axis=1)  # a combined pass is a forward and a backward
    ids, hosts, alone = ids[rows], passes.host[rows], passes.kind[rows] == number
    previous, following = np.append(step.host[0], hosts[:-1, 0]), np.append(hosts[1:, 0], step.host[1])
    # The exchange that sent the result is posted before the next pass of this kind. The last exchange that may have
    # brought the input ends after the previous pass of this kind began.
    sent = np.searchsorted(sends[:, 0], hosts[:, 1])
    received = np.searchsorted(receives[:, 1], hosts[:, 0], "right") - 1
    sends, receives = (np.append(times, [4 * [none]], axis=0) for times, none in ((sends, _NEVER), (receives, -_NEVER)))
    chunks, stage = ids[:, 0].tolist(), step.stage
    consumers = [placement.consumer(kind, stage, chunk) for chunk in chunks]
    own = [None if placement.producer(kind, stage, chunk) is None else (stage, chunk) for chunk in chunks]
    for found, places, exchange, is_known, moment in (
        (ends.sends, consumers, sends[sent, 2:], alone & (sends[sent, 0] <= following), hosts[:, 1:]),
        (ends.receives, own, receives[received, 2:], alone & (receives[received, 1] > previous), hosts[:, :1]),
    ):
        # Without an exchange, the end is in the pass: at its begin or end, or anywhere in a combined pass.
        within = np.where(is_known[:, None], exchange, hosts)
        time = np.where((alone & ~is_known)[:, None], moment, within)
        wanted = is_known | (not kernels)
        for index in np.flatnonzero(wanted).tolist():
            if (place := places[index]) is not None:
                message = Message(step.target, step.step, step.index, place[0], kind, place[1], int(ids[index, 1]))
                found[message] = End(*(tuple(times[index].tolist()) for times in (time, within)))


def meetings(table: Table, steps: Sequence[TracedStep]) -> Floats:
    """Returns for how many milliseconds bytes moved while nothing computed, and for how many each rank waited for its
    neighbours, [2, t, d, s, p], on the clock of the table: NaN for a rank if its exchanges do not all have their other
    end in ``steps``."""
    found = np.full((2, *table.offset_ns.shape), np.nan)
    places = {int(rank): place for place, rank in np.ndenumerate(table.ranks)}
    by_call = grouped((step for step in steps if step.rank in places and step.kernels), lambda step: step.key)
    for t, call in enumerate(zip(table.steps.tolist(), table.calls.tolist(), strict=True)):
        by_rank = {step.rank: step for step in by_call.get(call, ())}
        offset = {rank: int(table.offset_ns[(t, *places[rank])]) for rank in by_rank}
        ends = {rank: ends_of(step.metadata, [step]) for rank, step in by_rank.items()}
        # The time at which the later end arrived, by rank and kernel, on the rank's own clock.
        later_end_ns: dict[int, dict[tuple[int, int], int]] = {rank: {} for rank in by_rank}
        for message, sender, receiver in exchanged(ends):
            send, receive = ends[sender].sends[message].time, ends[receiver].receives[message].time
            by_send, by_receive = later_end_ns[sender], later_end_ns[receiver]
            by_send[send] = max(by_send.get(send, send[0]), receive[0] + offset[receiver] - offset[sender])
            by_receive[receive] = max(by_receive.get(receive, receive[0]), send[0] + offset[sender] - offset[receiver])
        for rank, step in by_rank.items():
            arrived_ns = later_end_ns[rank]
            if len(arrived_ns) >= (1 - _UNMATCHED) * sum(map(len, step.kernels.values())):
                moving = union(intervals((min(arrival_ns, end), end) for (_, end), arrival_ns in arrived_ns.items()))
                transfer_ns = total(intersection(step.pipeline, moving))
                found[(slice(None), t, *places[rank])] = transfer_ns, total(step.pipeline) - transfer_ns
    return found * 1e-6
