"""A run in the form that a replay takes: the times of passes, entries and links, which terms change one by one.

The passes around an exchange show how long it took once both sides were ready. A buffered message travels by itself. A
stage that was free before its input was made waited only for the exchange; if messages are received in turn, so did a
stage that reached the exchange before its input was made. A rendezvous begins when both stages have reached the
exchange: after their passes, or after an earlier exchange, which was complete when the pass of its receiver began.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise, zip_longest

import numpy as np
import numpy.typing as npt

from megaprof.analysis.simulation import Replay, compiled
from megaprof.analysis.table.table import Floats, Table
from megaprof.parallel.schedules import PassId, PipelineSchedule, SendReceive, phase_order, producer, stage_program


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
    tried = []
    for model in models:
        replay = compiled(schedule, *model)
        link = links(table, replay)
        apart = table.start - replay.starts(table.end, entry=entry, link=link, ended=True)
        # No timeline resolves less than a microsecond. Of models that differ by less, the metadata's comes first.
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
    found = _met if replay.rendezvous or replay.in_turn else _arrived
    for sender, receiver, kind, took in found(table, replay.rendezvous) if table.clocks else ():
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


def _arrived(table: Table, held: bool) -> Iterator[_Sample]:
    """Yields the samples of messages that travel by themselves; then no sender is ``held``."""
    begun, ended = (_by_pass(table.schedule, times) for times in (table.start, table.end))
    for stage in range(table.schedule.stages):
        free = table.start[:, :, stage].min(axis=(2, 3, 4))
        for which in phase_order(table.schedule, stage):
            source = producer(table.schedule, stage, which)
            if source is not None and source[0] != stage:
                made = ended[source]
                waited = np.maximum(begun[stage, which] - made, 0.0)
                yield source[0], stage, which.kind, np.where(free <= made, waited, np.nan)
            free = ended[stage, which]


def _met(table: Table, held: bool) -> Iterator[_Sample]:
    """Yields the samples of stages that meet to exchange. ``held``: whether a sender waits for its receiver."""
    stages = table.schedule.stages
    begun, ended = (_by_pass(table.schedule, times) for times in (table.start, table.end))
    programs = [stage_program(table.schedule, stage) for stage in range(stages)]
    came: dict[_Transfer, dict[int, Floats]] = {}
    for stage, program in enumerate(programs):
        there = np.fmin(table.start[:, :, stage].min(axis=(2, 3, 4)), np.inf)
        if not np.isnan(table.entry).any():
            there = table.entry[:, :, stage]
        for step, following in zip_longest(program, program[1:]):
            if isinstance(step, PassId):
                there = ended[stage, step]
                continue
            for transfer in _transfers(step, stage, stages):
                came.setdefault(transfer, {})[stage] = there
            if held and isinstance(following, SendReceive):
                for _, receiver, which in _transfers(step, stage, stages):
                    if receiver != stage:
                        there = np.maximum(there, begun[receiver, which])
    for stage, program in enumerate(programs):
        for step, following in pairwise(program):
            # An input for a later pass is of no use here: that pass began some time after the exchange.
            if isinstance(step, PassId) or following not in (step.recv_prev, step.recv_next):
                continue
            ready = {transfer: came[transfer] for transfer in _transfers(step, stage, stages)}
            if any(len(both) != 2 for both in ready.values()):
                continue
            own = next(transfer for transfer in ready if transfer[1:] == (stage, following))
            if held:
                later = {transfer: np.maximum(*both.values()) for transfer, both in ready.items()}
            else:
                later = {transfer: both[transfer[0]] for transfer, both in ready.items() if transfer[1] == stage}
            # The exchange ended with the last of its transfers, which may have been that of another link.
            last = reduce(np.maximum, later.values())
            waited = last >= came[own][stage]
            for (sender, receiver, _), ends in later.items():
                if _link(sender, receiver, stages) != _link(own[0], stage, stages):
                    waited &= last > ends
            took = np.maximum(begun[own[1:]] - last, 0.0)
            yield own[0], stage, own[2].kind, np.where(waited, took, np.nan)


def _link(sender: int, receiver: int, stages: int) -> int:
    """Returns the number of the link between two stages: the lower stage, or the last one if it leads to the first."""
    low, high = sorted((sender, receiver))
    return low if high == low + 1 else stages - 1


def _transfers(step: SendReceive, stage: int, stages: int) -> Iterator[_Transfer]:
    """Yields every transfer of an exchange."""
    following, previous = (stage + 1) % stages, (stage - 1) % stages
    for sender, receiver, which in (
        (stage, following, step.send_next),
        (previous, stage, step.recv_prev),
        (stage, previous, step.send_prev),
        (following, stage, step.recv_next),
    ):
        if which is not None:
            yield sender, receiver, which
