"""Puts the times of ranks on different hosts on one clock, from the passes that wait for each other.

No pass begins before its input was made: forwards bound the difference of two neighbours' clocks from one side, and
backwards from the other, as in NTP (RFC 5905, section 8, without its assumption about single packets). The tables, what
is drawn beside them, the parts of exchanges and merged timelines are all on this clock.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megaprof.parallel.peers import Floats
from megaprof.parallel.schedules import PipelineSchedule

#: Milliseconds by which times on one clock may contradict each other.
TOLERANCE_MS = 0.1
#: The part of the messages of a direction that counts as its quickest ones.
_QUICK = 0.25


def one_clock(
    hosts: npt.NDArray[np.str_],
    schedule: PipelineSchedule,
    start: Floats,
    end: Floats,
    enter: Floats,
    reduced: Floats,
    *,
    device: bool,
) -> tuple[Floats, bool, float | None]:
    """Returns the milliseconds to add to the times of each rank, [t, d, s, p]; whether that puts all of them on one
    clock; and how uncertain it is, in milliseconds, if neighbours did not share one before.

    ``hosts``, [d, s, p]: a name for what shares a clock, unless passes contradict that. ``start``, ``end``,
    [t, d, s, p, c, k, m]: passes in milliseconds; NaN for a stage that was not recorded, beyond which nothing is known.
    ``enter``, ``reduced``, [t, d, s, p]: when each rank entered the step and had finalised its gradients. ``device``:
    whether these are the clocks of GPUs, of which each rank has its own, in every step.

    Peers wait for each other, so they end their passes together. Pipelines are put next to each other by the end of
    their gradient reduction, which is one collective; without one, each has a clock of its own.
    """
    first_peer, forward_only = (start[:, :, :, 0], end[:, :, :, 0]), "backward" not in schedule.kinds
    recorded = np.asarray(np.isfinite(start).any(axis=(0, 4, 5, 6)))
    each_rank = np.arange(hosts.size).reshape(hosts.shape).astype(str)
    if device:
        hosts, enter = each_rank, np.full_like(enter, np.nan)  # entries are the host's, which is ahead of the GPU
    elif not forward_only:
        hosts = np.where(np.isin(hosts, _of_several(hosts[:, :, 0], *first_peer)), each_rank, hosts)
    shift, uncertain = np.zeros(start.shape[:4]), 0.0
    if len(np.unique(hosts[recorded])) == 1:
        return shift, True, None
    if hosts.shape[2] > 1:
        axes = (4, 5, 6) if device else (0, 4, 5, 6)
        apart_ms = np.nanmedian(end[:, :, :, :1] - end, axis=axes, keepdims=True)[..., 0, 0, 0]
        shift += np.where(hosts == hosts[:, :, :1], 0.0, apart_ms)
    for before, stage in pairwise(np.unique(np.argwhere(recorded)[:, 1]).tolist()):
        if stage > before + 1:
            difference, width = np.full((2, 1, len(hosts)), np.nan)
        elif forward_only:
            difference, width = _one_way(*first_peer, shift[..., 0], stage, each_step=device)
        else:
            difference, width = _both_ways(*first_peer, enter[:, :, :, 0], stage, each_step=device)
        same_host = hosts[:, stage, 0] == hosts[:, before, 0]
        uncertain = max(uncertain, float(np.where(same_host, 0.0, width).max()) / 2)
        shift[:, :, stage] += (shift[:, :, before, 0] + np.where(same_host, 0.0, difference))[..., None]
    if len(hosts) > 1 and not forward_only:  # without gradients, the steps of replicas begin independently
        ends = reduced[:, :, 0, 0] + shift[:, :, 0, 0]
        apart_ms = ends[:, :1] - ends
        apart_ms = apart_ms if device else np.median(apart_ms, axis=0, keepdims=True)
        shift += np.where(hosts[:, 0, 0] == hosts[0, 0, 0], 0.0, apart_ms)[..., None, None]
    if np.isfinite(shift).all():
        return shift, True, uncertain if hosts.shape[1] > 1 else None
    # Without a common clock each rank's step begins when it enters it itself.
    entry_shift = -np.where(np.isfinite(enter), enter, np.fmin.reduce(start, axis=(-3, -2, -1)))
    return entry_shift, False, None


def _of_several(hosts: npt.NDArray[np.str_], start: Floats, end: Floats) -> npt.NDArray[np.str_]:
    """Returns the names in ``hosts``, [d, s], that several machines bear, as containers may: passes contradict a single
    clock, and a clock for each rank resolves that. Calls that do not overlap in time are of different runs."""
    axes, names = (0, 3, 4, 5), []
    begins, ends = np.min(start, axis=axes), np.max(end, axis=axes)  # [d, s]
    for stage in range(1, hosts.shape[1]):
        low, high = (sign * _slack(start, end, stage, kind).min(axis=(0, 2)) for kind, sign in ((0, -1.0), (1, 1.0)))
        contradicted = (np.maximum(low, -high) > TOLERANCE_MS) & (low - high < TOLERANCE_MS)
        at_once = (begins[:, stage] < ends[:, stage - 1]) & (begins[:, stage - 1] < ends[:, stage])
        names.append(hosts[:, stage][contradicted & at_once & (hosts[:, stage] == hosts[:, stage - 1])])
    return np.unique(np.concatenate([hosts[:0, 0], *names]))


def _slack(start: Floats, end: Floats, stage: int, kind: int) -> Floats:
    """Returns how long after their inputs were made the passes of one kind began that a stage and the one before it
    exchange, by their own clocks, [t, d, c * m]."""
    receiver, sender = (stage, stage - 1) if kind == 0 else (stage - 1, stage)
    slack = start[:, :, receiver, :, kind] - end[:, :, sender, :, kind]
    return slack.reshape(*slack.shape[:2], -1)


def _both_ways(start: Floats, end: Floats, enter: Floats, stage: int, *, each_step: bool) -> tuple[Floats, Floats]:
    """Returns by how much the clock of a stage must be moved relative to the stage before, [t or 1, d], and how far
    apart its bounds are. ``start``, ``end``: [t, d, s, c, k, m]; ``enter``: [t, d, s], when each rank enters the
    step, or NaN.

    The quickest message of each direction is a bound. If its receiver was waiting, the bound is off by the transfer
    only; if not, it may be far off. So each bound is weighted by the wait of its receiver, and if both receivers waited
    for the transfers only, the clock is in the middle.
    """
    bounds, waits = list[Floats](), list[Floats]()
    for kind, receiver in ((0, stage), (1, stage - 1)):
        free_since = _free_since(start[:, :, receiver], end[:, :, receiver], enter[:, :, receiver])[:, :, :, kind]
        slack, waited = _slack(start, end, stage, kind), start[:, :, receiver, :, kind] - free_since
        waited = waited.reshape(slack.shape)
        if not each_step:
            slack, waited = (np.moveaxis(array, 0, 1).reshape(1, slack.shape[1], -1) for array in (slack, waited))
        bounds.append(slack.min(axis=2))
        # Several messages are about as quick, and some of them met a receiver that had just arrived.
        slower = (slack - bounds[-1][..., None]).round(3)  # recordings resolve microseconds
        quick = np.sort(slower, axis=2)[..., max(1, round(_QUICK * slack.shape[2])) - 1, None]
        waits.append(np.where(slower <= quick, waited, -np.inf).max(axis=2))
    low, high = -bounds[0], bounds[1]
    width = np.maximum(high - low, 1e-9)
    low_weight, high_weight = (np.clip(wait, 1e-9, width / 2) for wait in waits)
    return np.asarray((low * low_weight + high * high_weight) / (low_weight + high_weight)), np.abs(high - low)


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
