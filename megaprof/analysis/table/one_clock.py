"""Puts the times of ranks on different hosts on one clock, from the passes that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaprof.analysis.table.table import QUARTILE, Floats, RankSteps
from megaprof.parallel.schedules import PipelineSchedule


def one_clock(
    ranks: Sequence[RankSteps],
    shape: tuple[int, int, int],
    schedule: PipelineSchedule,
    start: Floats,
    end: Floats,
    enter: Floats,
    reduced: Floats,
) -> tuple[Floats, bool, float | None]:
    """Returns what to add to the times of each rank, [t, d, s, p]; whether that puts all of them on one clock; and how
    uncertain it is, in milliseconds, if they did not share one before.

    No pass begins before its input was made: forwards bound the difference of two neighbours' clocks from one side,
    backwards from the other, or, without backwards, senders that wait for their receivers. Pipelines are put next
    to each other by the end of their gradient reduction, which is one collective; without one, each has a clock of its
    own.
    """
    d, s, p = shape
    shift = np.zeros((len(start), d, s, p))
    device = any(rank.device for rank in ranks)
    enter = np.full_like(enter, np.nan) if device else enter  # entries are the host's, which is ahead of the GPU
    names = [rank.names[0] for rank in ranks]
    hosts = np.array([f"rank {rank}" if host is None else host for rank, host in names], dtype=object).reshape(shape)
    is_recorded = np.array([rank.metadata is not None for rank in ranks]).reshape(shape)
    if not device and len(set(hosts[is_recorded])) == 1:
        return shift, True, None
    if p > 1:  # peers wait for each other, so they end their passes together
        axes = (4, 5, 6) if device else (0, 4, 5, 6)
        difference_ms = np.nanmedian(end[:, :, :, :1] - end, axis=axes, keepdims=True)[..., 0, 0, 0]
        shift += np.where((hosts == hosts[:, :, :1]) & (not device), 0.0, difference_ms)
    uncertain = 0.0
    one_way = "backward" not in schedule.kinds
    for stage in range(1, s):
        first_peer = start[:, :, :, 0], end[:, :, :, 0]
        if one_way:
            difference, width = _one_way(*first_peer, shift[..., 0], stage, each_step=device)
        else:
            difference, width = _both_ways(*first_peer, enter[:, :, :, 0], stage, each_step=device)
        same_host = (hosts[:, stage, 0] == hosts[:, stage - 1, 0]) & (not device)
        uncertain = max(uncertain, float(np.where(same_host[None, :], 0.0, width).max()) / 2)
        shift[:, :, stage] += (shift[:, :, stage - 1, 0] + np.where(same_host[None, :], 0.0, difference))[..., None]
    if d > 1 and not one_way:  # without gradients, the steps of replicas begin independently
        ends = reduced[:, :, 0, 0] + shift[:, :, 0, 0]
        difference_ms = ends[:, :1] - ends
        difference_ms = difference_ms if device else np.median(difference_ms, axis=0, keepdims=True)
        same_host = (hosts[:, 0, 0] == hosts[0, 0, 0]) & (not device)
        shift += np.where(same_host[None, :], 0.0, difference_ms)[..., None, None]
    if np.isfinite(shift).all():
        return shift, True, uncertain if s > 1 else None
    # Without a common clock each rank's step begins when it enters it itself.
    entry_shift = -np.where(np.isfinite(enter), enter, np.fmin.reduce(start, axis=(-3, -2, -1)))
    return entry_shift, False, None


def _both_ways(start: Floats, end: Floats, enter: Floats, stage: int, *, each_step: bool) -> tuple[Floats, Floats]:
    """Returns by how much the clock of a stage must be moved relative to the stage before, [t or 1, d], and how far
    apart its bounds are. ``start``, ``end``: [t, d, s, c, k, m]; ``enter``: [t, d, s], when each rank enters the
    step, or NaN.

    The quickest message of each direction is a bound. If its receiver was waiting, the bound is off by the transfer
    only; if not, it may be far off. So each bound is weighted by the wait of its receiver, and if both receivers waited
    for the transfers only, the clock is in the middle.
    """
    bounds, waits = [], []
    for kind, receiver, sender in ((0, stage, stage - 1), (1, stage - 1, stage)):
        slack = start[:, :, receiver, :, kind] - end[:, :, sender, :, kind]
        free_since = _free_since(start[:, :, receiver], end[:, :, receiver], enter[:, :, receiver])[:, :, :, kind]
        t, d = slack.shape[:2]
        slack, waited = slack.reshape(t, d, -1), (start[:, :, receiver, :, kind] - free_since).reshape(t, d, -1)
        if not each_step:
            slack, waited = (np.moveaxis(array, 0, 1).reshape(1, d, -1) for array in (slack, waited))
        bounds.append(slack.min(axis=2))
        # Several messages are about as quick, and some of them met a receiver that had just arrived.
        slower = (slack - bounds[-1][..., None]).round(3)  # recordings resolve microseconds
        quick = np.sort(slower, axis=2)[..., max(1, round(QUARTILE * slack.shape[2])) - 1, None]
        waits.append(np.where(slower <= quick, waited, -np.inf).max(axis=2))
    low, high = -bounds[0], bounds[1]
    width = np.maximum(high - low, 1e-9)
    low_weight, high_weight = (np.clip(wait, 1e-9, width / 2) for wait in waits)
    difference: Floats = (low * low_weight + high * high_weight) / (low_weight + high_weight)
    return difference, np.abs(high - low)


def _one_way(start: Floats, end: Floats, shift: Floats, stage: int, *, each_step: bool) -> tuple[Floats, Floats]:
    """Returns what `_both_ways` does, for passes that go one way only. ``shift``: shifts of the stages before,
    [t, d, s].

    A sender that waits for its receiver leaves the exchange together with it, and then receives the input of its next
    pass. How long that takes is known from the stage before, if the input was ready. The clock is NaN if nothing shows
    that: the next pass of a sender that does not wait begins before the message arrives, so that the bounds contradict
    each other; and with model chunks, a sender exchanges with several stages at once.
    """
    t, d, _, chunks, _, microbatches = start.shape
    if chunks > 1 or microbatches == 1:
        return np.full((1, d), np.nan), np.zeros((1, d))
    start, end = start[:, :, :, 0, 0], end[:, :, :, 0, 0]
    low = -(start[:, :, stage] - end[:, :, stage - 1]).min(axis=2)
    leaves_after, receiving_ms = start[:, :, stage - 1, 1:] - start[:, :, stage, :-1], np.zeros((t, d))
    if stage > 1:
        input_made = end[:, :, stage - 2] + (shift[:, :, stage - 2] - shift[:, :, stage - 1])[..., None]
        receiving_ms = (start[:, :, stage - 1] - input_made).min(axis=2)
        leaves_after = np.where(input_made[..., 1:] <= end[:, :, stage - 1, :-1], leaves_after, np.inf)
    high = leaves_after.min(axis=2) - receiving_ms
    if not each_step:
        low, high = low.max(axis=0, keepdims=True), np.median(high, axis=0, keepdims=True)
    consistent = np.isfinite(high) & (high >= low)
    return np.where(consistent, high, np.nan), np.where(consistent, high - low, 0.0)


def _free_since(start: Floats, end: Floats, enter: Floats) -> Floats:
    """Returns the time from which a rank had nothing to do before every pass, [t, d, c, k, m]. It is the end of the
    pass before or, for the first pass, the beginning of the step (or of the pass itself, if that is not known)."""
    t, d = start.shape[:2]
    starts, ends = start.reshape(t, d, -1), end.reshape(t, d, -1)
    order = np.argsort(starts, axis=2)
    first = np.take_along_axis(starts, order[..., :1], axis=2)
    shifted = np.take_along_axis(ends, order, axis=2)
    shifted = np.concatenate((np.fmin(first, enter[..., None]), shifted[..., :-1]), axis=2)
    free_since = np.empty_like(starts)
    np.put_along_axis(free_since, order, shifted, axis=2)
    return free_since.reshape(start.shape)
