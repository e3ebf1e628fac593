"""Matches the sends and receives of a pipeline.

Microbatch and chunk show which ones belong together, so nothing is counted and the schedule's order does not matter.
The output of a forward leaves in the first sending exchange after it. Its input has arrived when it begins, at the end
of a receiving exchange before it.

NCCL's send and receive meet, so the kernel at each end includes waiting for the other, and bytes only move while both
run. If both ends were captured and are on one clock, the later end of each message is known, and a late neighbour is
not mistaken for a slow network (`meetings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.intervals import intersection, intervals, total, union
from megaprof.analysis.trace.steps import Exchanges, TracedStep
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import RECEIVES, SENDS

Interval = tuple[int, int]


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

    time: Interval
    within: Interval


@dataclass(frozen=True)
class Ends:
    """One rank's ends of the messages that it sends and receives."""

    metadata: Metadata
    sends: dict[Message, End]
    receives: dict[Message, End]
    kernels: bool = False
    """True if the ends are NCCL's kernels, which run at both ends at once."""
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
    kernels = any(step.kernels.labels for step in steps)
    settings = metadata.p2p or {}
    blocking = settings.get("batch_p2p_comm") and settings.get("batch_p2p_sync")
    if any(step.has_kernels for step in steps) and not kernels and not blocking:
        # The host returns before the GPU has received: its ranges bound nothing.
        return Ends(
            metadata, {}, {}, unknown="its host does not wait for exchanges on the GPU, whose kernels are not known"
        )
    ends = Ends(metadata, {}, {}, kernels)
    overlapped = not kernels and bool(settings.get("overlap_p2p_comm"))
    for step in steps:
        for kind in (ranges.FORWARD, ranges.BACKWARD):
            _match(step, kind, overlapped, ends)
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


def _match(step: TracedStep, kind: str, overlapped: bool, ends: Ends) -> None:
    """Adds to ``ends`` what the passes of one kind in ``step`` sent and received."""
    placement, passes = step.metadata.placement, step.passes
    exchanges = step.kernels if ends.kernels else step.exchanges
    # An overlapped exchange returns at once: it sends when it is posted, and its inputs have arrived when the wait for
    # it ends.
    sends = _sorted(
        exchanges, lambda label: not label.startswith(ranges.WAIT) and SENDS[kind] in ranges.transfers(label), 0
    )
    receives = _sorted(
        exchanges,
        lambda label: (
            label != ranges.WAIT_ANY
            and RECEIVES[kind] in ranges.transfers(label)
            and (label.startswith(ranges.WAIT) or not overlapped)
        ),
        1,
    )
    number = ranges.PASSES.index(kind)
    of_kind = passes.kind == number  # a combined pass is a forward and a backward
    ids = np.where((passes.kind == 2)[:, None] & (number == 1), passes.ids[:, 2:], passes.ids[:, :2])
    rows = (of_kind | (passes.kind == 2)) & (ids >= 0).all(axis=1)
    hosts = passes.host[rows]
    previous, following = np.append(step.host[0], hosts[:-1, 0]), np.append(hosts[1:, 0], step.host[1])
    # The exchange that sent the result is posted before the next pass of this kind. The last exchange that may have
    # brought the input ends after the previous pass of this kind began.
    sent, received = (
        np.searchsorted(sends[:, 0], hosts[:, 1]),
        np.searchsorted(receives[:, 1], hosts[:, 0], "right") - 1,
    )
    for index, ((chunk, microbatch), (start, end), alone) in enumerate(
        zip(ids[rows].tolist(), hosts.tolist(), of_kind[rows].tolist(), strict=True)
    ):
        send, receive = sends[sent[index] : sent[index] + 1], receives[received[index] : received[index] + 1][:1]
        step_key = step.target, step.step, step.index
        if (consumer := placement.consumer(kind, step.stage, chunk)) is not None:
            message = Message(*step_key, consumer[0], kind, consumer[1], microbatch)
            within = send[send[:, 0] <= following[index], 2:]
            if (point := _end((start, end), alone, within, end, ends.kernels)) is not None:
                ends.sends[message] = point
        if placement.producer(kind, step.stage, chunk) is not None:
            message = Message(*step_key, step.stage, kind, chunk, microbatch)
            within = receive[receive[:, 1] > previous[index], 2:]
            if (point := _end((start, end), alone, within, start, ends.kernels)) is not None:
                ends.receives[message] = point


def _sorted(exchanges: Exchanges, wanted: Callable[[str], bool], by: int) -> npt.NDArray[np.int64]:
    """Returns the times of exchanges with a ``wanted`` label, sorted by one of them."""
    is_wanted = {label: wanted(label) for label in set(exchanges.labels)}
    times = exchanges.times[np.array([is_wanted[label] for label in exchanges.labels], dtype=np.bool_)]
    return times[np.argsort(times[:, by], kind="stable")]


def _end(of_pass: Interval, alone: bool, exchange: npt.NDArray[np.int64], moment: int, kernels: bool) -> End | None:
    """Returns an end in the ``exchange``, [0 or 1, 2]. Without an exchange, the end is in the pass: at ``moment``, or
    anywhere in a combined pass, which is not ``alone``. None if kernels are wanted."""
    if len(exchange) and alone:
        within = int(exchange[0, 0]), int(exchange[0, 1])
        return End(within, within)
    return None if kernels else End((moment, moment) if alone else of_pass, of_pass)


#: Fraction of kernels that may lack their partner.
_UNMATCHED = 0.05


def meetings(steps: Sequence[TracedStep], offset: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Returns for how many nanoseconds bytes moved while nothing computed, and for how many each rank waited for its
    neighbours, by rank: for those whose exchanges all have their other end in ``steps``, one of each rank. ``offset``:
    nanoseconds to add to the times of each rank."""
    by_kernels = [step for step in steps if step.kernels.labels]
    ends = {step.rank: ends_of(step.metadata, [step]) for step in by_kernels}
    # The time at which the later end arrived, by rank and kernel, on the rank's own clock.
    later_end_ns: dict[int, dict[Interval, int]] = {step.rank: {} for step in by_kernels}
    for message, sender, receiver in exchanged(ends):
        send, receive = ends[sender].sends[message].time, ends[receiver].receives[message].time
        by_send, by_receive = later_end_ns[sender], later_end_ns[receiver]
        by_send[send] = max(by_send.get(send, send[0]), receive[0] + offset[receiver] - offset[sender])
        by_receive[receive] = max(by_receive.get(receive, receive[0]), send[0] + offset[sender] - offset[receiver])
    meetings_by_rank = {}
    for step in by_kernels:
        arrived_ns = later_end_ns[step.rank]
        if len(arrived_ns) < (1 - _UNMATCHED) * len(step.kernels.labels):
            continue
        moving = union(intervals((min(arrival_ns, end), end) for (_, end), arrival_ns in arrived_ns.items()))
        transfer_ns = total(intersection(step.pipeline, moving))
        meetings_by_rank[step.rank] = transfer_ns, total(step.pipeline) - transfer_ns
    return meetings_by_rank
