"""A run in the form that a replay takes: the times of passes, entries and links, which terms change one by one.

The passes around an exchange show how long it took once both sides were ready: a rendezvous when both stages had begun
it, a buffered message when its sender had. They began it after a pass, or after an earlier exchange, which was complete
when the pass of its receiver began. A stage that waited for it before it was ready waited only for the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import numpy as np
import numpy.typing as npt

from megaprof.analysis.simulation import Replay, compiled
from megaprof.analysis.table.table import Floats, Table
from megaprof.parallel.schedules import PassId, PipelineSchedule, Wait, phase_order, stage_program


def measured(table: Table) -> tuple[Replay, Floats, Floats, Floats]:
    """Returns the replay whose model of exchanges fits the measured passes best, and the measured times of passes,
    entries and links (see `View`)."""
    entry = np.nan_to_num(table.entry)
    # The first stage waits for nobody. If its first pass is late, this may delay the first pass of any rank.
    entry += np.maximum(table.start[:, :, 0, 0, 0, 0] - entry[:, :, 0], 0.0)[..., None]
    tried = []
    # Without a common clock, the ends of passes say nothing about exchanges.
    for rendezvous in (True, False) if table.clocks else (True,):
        replay = compiled(table.schedule, rendezvous)
        link = links(table, replay)
        apart = table.start - replay.starts(table.end, entry=entry, link=link, ended=True)
        # No timeline resolves less than a microsecond. Of models that differ by less, it is the rendezvous.
        tried.append((round(float(np.mean(np.abs(apart))), 3), replay, link, apart))
    _, replay, link, apart = min(tried, key=lambda each: each[0])
    return replay, table.passes + _between(apart) if table.clocks else table.passes, entry, link


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
    for sender, receiver, kind, took in _met(table, replay.rendezvous) if table.clocks else ():
        samples[_link(sender, receiver, s)].setdefault(kind, []).append(took)
    values = np.full((t, d, s), np.nan)
    for number, by_kind in enumerate(samples):
        quartiles = []
        for times in by_kind.values():
            ordered = np.sort(np.stack(times), axis=0)  # NaN last
            place = np.maximum((np.isfinite(ordered).sum(axis=0) - 1) // 4, 0)
            quartiles.append(np.take_along_axis(ordered, place[None], axis=0)[0])
        if quartiles:
            known = np.isfinite(quartiles).sum(axis=0)
            values[..., number] = np.where(known > 0, np.nansum(quartiles, axis=0) / np.maximum(known, 1), np.nan)
    for axis in (0, 1, 2):
        has_sample = np.isfinite(values).any(axis=axis, keepdims=True)
        usual = np.nanmedian(np.where(has_sample, values, 0.0), axis=axis, keepdims=True)
        values = np.where(np.isfinite(values), values, np.where(has_sample, usual, np.nan))
    return np.asarray(np.nan_to_num(values))


def receivers(schedule: PipelineSchedule) -> npt.NDArray[np.bool_]:
    """Returns which passes get their input over each link, [link, s, c, k]."""
    received = np.zeros((schedule.stages, schedule.stages, schedule.chunks, len(schedule.kinds)), dtype=bool)
    for stage, chunk, kind in np.ndindex(received.shape[1:]):
        source = schedule.placement.producer(schedule.kinds[kind], stage, chunk)
        if source is not None and source[0] != stage:
            received[_link(source[0], stage, schedule.stages), stage, chunk, kind] = True
    return received


_Transfer = tuple[int, int, PassId]
"""Sender, receiver, and the pass there that needs what is sent."""
_Sample = tuple[int, int, str, Floats]
"""Sender, receiver, kind of pass, and milliseconds [t, d]; NaN if the receiver waited for something else."""


def _by_pass(schedule: PipelineSchedule, times: Floats) -> dict[tuple[int, PassId], Floats]:
    """Returns the times of single passes, [t, d] each, by stage and pass."""
    return {
        (stage, which): times[:, :, stage, which.chunk, schedule.kinds.index(which.kind), which.microbatch]
        for stage in range(schedule.stages)
        for which in phase_order(schedule, stage)
    }


def _met(table: Table, held: bool) -> Iterator[_Sample]:
    """Yields the samples of stages that exchange. ``held``: whether a sender waits for its receiver."""
    stages = table.schedule.stages
    begun, ended = (_by_pass(table.schedule, times) for times in (table.start, table.end))
    came: dict[_Transfer, dict[int, Floats]] = {}
    waits: list[tuple[int, PassId, Floats, list[_Transfer]]] = []  # stage, its pass, since when it waited, for which
    for stage in range(stages):
        there = np.fmin(table.start[:, :, stage].min(axis=(2, 3, 4)), np.inf)
        if not np.isnan(table.entry).any():
            there = table.entry[:, :, stage]
        awaited: list[_Transfer] = []
        for step in stage_program(table.schedule, stage):
            if isinstance(step, PassId):
                waits.append((stage, step, there, awaited))
                there, awaited = ended[stage, step], []
            elif isinstance(step, Wait):
                awaited += step.transfers.transfers(stage, stages)
            else:
                for _, receiver, which in awaited:
                    if held and receiver != stage:
                        there = np.maximum(there, begun[receiver, which])
                awaited = [transfer for transfer in awaited if transfer[1] == stage]
                for transfer in step.transfers(stage, stages):
                    came.setdefault(transfer, {})[stage] = there
    for stage, following, since, awaited in waits:
        # An input for a later pass is of no use here: that pass began some time after the exchange.
        own = next((transfer for transfer in awaited if transfer[1:] == (stage, following)), None)
        if own is None or any(len(came[transfer]) != 2 for transfer in awaited):
            continue
        if held:
            later = {transfer: np.maximum(*came[transfer].values()) for transfer in awaited}
        else:
            later = {transfer: came[transfer][transfer[0]] for transfer in awaited if transfer[1] == stage}
        # The exchange ended with the last of its transfers, which may have been that of another link.
        last = reduce(np.maximum, later.values())
        waited = last >= since
        for (sender, receiver, _), ends in later.items():
            if _link(sender, receiver, stages) != _link(own[0], stage, stages):
                waited &= last > ends
        took = np.maximum(begun[own[1:]] - last, 0.0)
        yield own[0], stage, own[2].kind, np.where(waited, took, np.nan)


def _link(sender: int, receiver: int, stages: int) -> int:
    """Returns the number of the link between two stages: the lower stage, or the last one if it leads to the first."""
    low, high = sorted((sender, receiver))
    return low if high == low + 1 else stages - 1
