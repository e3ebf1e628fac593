"""A run in the form that a replay takes: the times of passes, entries and links, which terms change one by one.

The passes around an exchange show how long it took once both sides were ready. A buffered message travels by itself. A
stage that was free before its input was made waited only for the exchange; if messages are received in turn, so did a
stage that reached the exchange before its input was made. A rendezvous begins when both stages have reached the
exchange: after their passes, or after an earlier exchange, which was complete when the pass of its receiver began.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megaprof.analysis.simulation import Replay, compiled
from megaprof.analysis.table.table import Floats, Table
from megaprof.parallel.schedules import PassId, PipelineSchedule, SendReceive, phase_order, producer, stage_program

#: Milliseconds that no timeline resolves. If models differ by less, the one that the metadata name is used.
_RESOLUTION = 1e-3


def measured(table: Table) -> tuple[Replay, Floats, Floats, Floats]:
    """Returns the replay whose model of exchanges fits the measured passes best, and the measured times of passes,
    entries and links (see `View`)."""
    entry = np.nan_to_num(table.entry)
    # The first stage waits for nobody. If its first pass is late, this may delay the first pass of any rank.
    entry += np.maximum(table.start[:, :, 0, 0, 0, 0] - entry[:, :, 0], 0.0)[..., None]
    schedule = table.schedule
    buffered, rendezvous, in_turn = (False, False), (True, False), (False, True)
    models = [buffered] if schedule.stages == 1 else [rendezvous, buffered]
    if schedule.name == "interleaved":
        models = [buffered] if schedule.stages == 2 else [rendezvous, buffered, in_turn]
    models.sort(key=lambda model: model[0] != table.rendezvous)
    if not table.clocks:
        # Without a common clock, the ends of passes say nothing about exchanges, so the metadata decide.
        models = models[:1]
    best: tuple[float, Replay, Floats, Floats, Floats] | None = None
    for model in models:
        replay = compiled(schedule, *model)
        link = links(table, replay)
        apart = table.start - replay.starts(table.end, entry=entry, link=link, ended=True)
        missed = float(np.mean(np.abs(apart)))
        if best is None or missed < best[0] - _RESOLUTION:
            between = _between(apart) if table.clocks else 0.0
            best = missed, replay, table.passes + between, entry, link
    if best is None:
        raise RuntimeError("no model of exchanges was tried")
    return best[1:]


def _between(apart: Floats) -> Floats:
    """Returns how long each pass began after it could, with a usual exchange, [t, d, s, c, k, m]: what its stage took
    to exchange, although it had nothing to wait for, and what the exchange took beyond a usual one. The longest
    of a stage in a step counts no more than the second longest, or than the longest of half of the steps: a stage that
    stands still once does not exchange."""
    late = np.maximum(apart, 0.0)
    ordered = np.sort(late.reshape(*late.shape[:3], -1), axis=3)
    most = ordered[..., -2:].min(axis=3)
    if len(late) > 1:
        most = np.maximum(most, np.quantile(ordered[..., -1], 0.5, axis=0, method="lower"))
    between: Floats = np.minimum(late, most[..., None, None, None])
    return between


def links(table: Table, replay: Replay) -> Floats:
    """Returns the milliseconds of an exchange between each stage and the next one, [t, d, s].

    This is the lower quartile of a step, averaged over both directions so that differences of clocks cancel out. A step
    without a sample gets the median of its link, and a link without samples that of the other links.
    """
    t, d, s = table.entry.shape
    samples: list[dict[str, list[Floats]]] = [{} for _ in range(s)]
    ran, by_exchange = _Ran(table), replay.rendezvous or replay.in_turn
    exchanges = iter(()) if not table.clocks else _met(table, ran, replay.rendezvous) if by_exchange else _arrived(ran)
    for sender, receiver, kind, took in exchanges:
        samples[_link(sender, receiver, s)].setdefault(kind, []).append(took)
    return _filled(
        np.stack([_mean([_quartile(times) for times in by_kind.values()], (t, d)) for by_kind in samples], axis=-1)
    )


def receivers(schedule: PipelineSchedule) -> npt.NDArray[np.bool_]:
    """Returns which passes get their input over each link, [link, s, c, k]."""
    received = np.zeros((schedule.stages, schedule.stages, schedule.chunks, len(schedule.kinds)), dtype=bool)
    for stage, chunk, kind in np.ndindex(received.shape[1:]):
        source = schedule.placement.producer(schedule.kinds[kind], stage, chunk)
        if source is not None and source[0] != stage:
            received[_link(source[0], stage, schedule.stages), stage, chunk, kind] = True
    return received


_Sample = tuple[int, int, str, Floats]
"""Sender, receiver, kind of pass, and milliseconds [t, d]; NaN if the receiver waited for something else."""


class _Ran:
    """Start and end of single passes, [t, d] each."""

    def __init__(self, table: Table) -> None:
        self.schedule = table.schedule
        self.placement = table.schedule.placement
        self._kind = {kind: number for number, kind in enumerate(table.schedule.kinds)}
        self.start, self._end = (np.moveaxis(times, (0, 1), (-2, -1)).copy() for times in (table.start, table.end))

    def begun(self, stage: int, which: PassId) -> Floats:
        times: Floats = self.start[stage, which.chunk, self._kind[which.kind], which.microbatch]
        return times

    def ended(self, stage: int, which: PassId) -> Floats:
        times: Floats = self._end[stage, which.chunk, self._kind[which.kind], which.microbatch]
        return times

    def sender(self, receiver: int, which: PassId) -> int:
        """Returns the stage that makes the input of a pass, or the receiver itself if it has no input."""
        source = self.placement.producer(which.kind, receiver, which.chunk)
        return receiver if source is None else source[0]


def _arrived(ran: _Ran) -> Iterator[_Sample]:
    for stage in range(ran.schedule.stages):
        free = ran.start[stage].min(axis=(0, 1, 2))
        for which in phase_order(ran.schedule, stage):
            source = producer(ran.schedule, stage, which)
            begun = ran.begun(stage, which)
            if source is not None and source[0] != stage:
                made = ran.ended(*source)
                yield source[0], stage, which.kind, np.where(free <= made, np.maximum(begun - made, 0.0), np.nan)
            free = ran.ended(stage, which)


def _met(table: Table, ran: _Ran, held: bool) -> Iterator[_Sample]:
    """Yields the samples of stages that meet to exchange. ``held``: whether a sender waits for its receiver."""
    stages = table.schedule.stages
    programs = [stage_program(table.schedule, stage) for stage in range(stages)]
    came: dict[tuple[int, PassId], dict[int, Floats]] = {}
    for stage, program in enumerate(programs):
        there = np.fmin(ran.start[stage].min(axis=(0, 1, 2)), np.inf)
        if not np.isnan(table.entry).any():
            there = table.entry[:, :, stage]
        for place, step in enumerate(program):
            if isinstance(step, PassId):
                there = ran.ended(stage, step)
                continue
            for receiver, which in _transfers(step, stage, stages):
                came.setdefault((receiver, which), {})[stage] = there
            if place + 1 < len(program) and not isinstance(program[place + 1], PassId):
                for receiver, which in _transfers(step, stage, stages):
                    if receiver != stage and held:
                        there = np.maximum(there, ran.begun(receiver, which))
    for stage, program in enumerate(programs):
        for step, following in pairwise(program):
            if not isinstance(step, SendReceive) or not isinstance(following, PassId):
                continue
            source = ran.sender(stage, following)
            # An input for a later pass is of no use here: that pass began some time after the exchange.
            if source == stage or following not in (step.recv_prev, step.recv_next):
                continue
            ready = {transfer: came[transfer] for transfer in _transfers(step, stage, stages)}
            if any(len(both) != 2 for both in ready.values()):
                continue
            if held:
                later = {transfer: np.maximum(*both.values()) for transfer, both in ready.items()}
            else:
                later = {
                    transfer: both[ran.sender(*transfer)] for transfer, both in ready.items() if transfer[0] == stage
                }
            # The exchange ended with the last of its transfers, which may have been that of another link.
            last = reduce(np.maximum, later.values())
            waited = last >= came[stage, following][stage]
            for transfer, ends in later.items():
                if _link(ran.sender(*transfer), transfer[0], stages) != _link(source, stage, stages):
                    waited &= last > ends
            took = np.maximum(ran.begun(stage, following) - last, 0.0)
            yield source, stage, following.kind, np.where(waited, took, np.nan)


def _link(sender: int, receiver: int, stages: int) -> int:
    """Returns the number of the link between two stages: the lower stage, or the last one if it leads to the first."""
    low, high = sorted((sender, receiver))
    return low if high == low + 1 else stages - 1


def _transfers(step: SendReceive, stage: int, stages: int) -> Iterator[tuple[int, PassId]]:
    """Yields the receiving stage of every transfer, and the pass there that needs it."""
    for receiver, which in (
        ((stage + 1) % stages, step.send_next),
        (stage, step.recv_prev),
        ((stage - 1) % stages, step.send_prev),
        (stage, step.recv_next),
    ):
        if which is not None:
            yield receiver, which


def _mean(values: list[Floats], shape: tuple[int, int]) -> Floats:
    """Returns the mean of the values that are known."""
    if not values:
        return np.full(shape, np.nan)
    stacked = np.stack(values)
    is_known = np.isfinite(stacked)
    return np.where(is_known.any(axis=0), np.nansum(stacked, axis=0) / np.maximum(is_known.sum(axis=0), 1), np.nan)


def _quartile(samples: list[Floats]) -> Floats:
    ordered = np.sort(np.stack(samples), axis=0)  # NaN last
    count = np.isfinite(ordered).sum(axis=0)
    place = np.maximum((count - 1) // 4, 0)
    return np.where(count > 0, np.take_along_axis(ordered, place[None], axis=0)[0], np.nan)


def _filled(values: Floats) -> Floats:
    """Fills in missing values: the median of the link, or else of the others."""
    for axis in (0, 1, 2):
        has_sample = np.isfinite(values).any(axis=axis, keepdims=True)
        usual = np.nanmedian(np.where(has_sample, values, 0.0), axis=axis, keepdims=True)
        values = np.where(np.isfinite(values), values, np.where(has_sample, usual, np.nan))
    return np.nan_to_num(values)
