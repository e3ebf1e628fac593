"""Ranks and stages that are slower than those beside them for more than a few steps, and from when on.

A rank is compared with the ranks of its stage, which do the same work at the same time: what makes a step long for all
of them (a longer sequence, an evaluation, the first steps of a run) cancels out. It is called slow when it exceeds
their median by more than `slow.EXCESS`, by more than `trends.SIGMAS` standard errors, by more than `SPREAD` times
what ranks of this stage usually differ by, and for `trends.LASTING_STEPS` steps and `trends.LASTING_SECONDS`. Ranks
that wait for each other inside a microbatch slow down together and are named together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from megaprof.analysis.fleet.trends import (
    LASTING_BUCKETS,
    LASTING_SECONDS,
    LASTING_STEPS,
    SIGMAS,
    Floats,
    Integers,
    Level,
    Shift,
    lasting,
    levels,
    logarithms,
    low_median,
    moving_median,
    others_median,
    scatter,
    shifts,
)
from megaprof.analysis.stages.samples import MAD
from megaprof.analysis.stages.slow import EXCESS, exceeds
from megaprof.parallel.topology import DEFAULT_ORDER, ParallelSizes, Place, WorldLayout

#: Standard deviations between the ranks of a stage, where there are enough of them to know it.
SPREAD = 6.0
_ENOUGH = 5
_FEWEST_SPELLS = 3
#: Rows that are looked at closely, the worst first.
_MOST = 256
#: What comes and goes is slow in at least this part of the steps.
RECURRING = 0.10
#: Of two rows alone, the one that comes and goes does so this many times more often than the other, in standard errors,
#: and its slow steps are this many standard deviations from the rest: noise makes one of two slower in half of all
#: steps, and never in two separate heaps.
TWO_SIGMAS = 3.0
TWO_HEAPS = 4.0
#: A stretch in which less than this part is slow is several.
_WHOLE = 0.85
#: A rank that is a little slow and then far slower is two findings, so that the second has its own beginning: when the
#: first excess is less than this part of the highest.
_ALIKE = 0.5


@dataclass(frozen=True)
class Buckets:
    """The stretches of steps that a series has a value for."""

    begin: int
    """The number of the first bucket, counted from step 0."""
    first: Integers
    """The first step of each."""
    last: Integers
    """The last step of each."""
    steps: Integers
    """How many steps there are of each."""
    seconds: Floats
    """How long each took."""

    @property
    def lasting(self) -> int:
        """Buckets that hold `trends.LASTING_STEPS`."""
        per_bucket = max(1.0, float(np.median(self.steps)))
        return int(np.clip(-(-LASTING_STEPS // per_bucket), LASTING_BUCKETS, LASTING_STEPS))

    def took(self, first: int, last: int) -> float:
        """Seconds from bucket ``first`` to ``last``."""
        return float(np.nansum(self.seconds[first : last + 1]))


@dataclass(frozen=True)
class Run:
    """A stretch of buckets in which a row is slower than its peers."""

    row: int
    """Which row."""
    first: int
    """Its first bucket."""
    last: int
    """Its last bucket."""
    factor: float
    """Own time over the peers'."""
    own_ms: float
    """Milliseconds of the row, its median."""
    peers_ms: float
    """Milliseconds of its peers, their median."""
    since_start: bool
    """Whether it is so from the first step on that is known."""
    to_end: bool
    """Whether it is so until the last one."""
    share: float | None = None
    """Where it comes and goes, the fraction of all steps in which the row is slow; None: in all of the stretch."""


def layout_of(places: Iterable[Place], sizes: ParallelSizes) -> WorldLayout | None:
    """The rank order that explains where these ranks stand; None where no order does."""
    places = list(places)
    for order in (DEFAULT_ORDER, *map("-".join, permutations(DEFAULT_ORDER.split("-")))):
        try:
            layout = WorldLayout(sizes, order)
        except ValueError:
            continue
        if all(_stands(layout, place) for place in places):
            return layout
    return None


def coupled(layout: WorldLayout, rank: int) -> frozenset[int]:
    """The ranks that wait for ``rank`` inside a microbatch, itself included: its tensor- and context-parallel peers,
    its expert-parallel group, and theirs in turn."""
    sizes, stride = layout.sizes, layout.strides
    axes = [(stride[axis], getattr(sizes, axis)) for axis in ("tp", "cp", "ep") if getattr(sizes, axis) > 1]
    found, new = {rank}, [rank]
    while new:
        own = new.pop()
        for step, size in axes:
            start = own - own // step % size * step
            peers = set(range(start, start + size * step, step)) - found
            found |= peers
            new += peers
    return frozenset(found)


def groups_of(places: Mapping[int, Place], layout: WorldLayout | None) -> list[tuple[int, ...]]:
    """The given ranks in groups that slow down together. Without a layout those of one pipeline position are."""
    if layout is None:
        by_place: dict[tuple[int, int], list[int]] = {}
        for rank, place in places.items():
            by_place.setdefault((place.pp, place.dp), []).append(rank)
        return [tuple(sorted(ranks)) for ranks in by_place.values()]
    left, groups = set(places), []
    for rank in sorted(places):
        if rank in left:
            members = coupled(layout, rank) & left
            left -= members
            groups.append(tuple(sorted(members)))
    return groups


def slow_rows(
    values: Floats, buckets: Buckets, *, floor_ms: float | Floats = 0.0, against: Floats | None = None
) -> list[Run]:
    """Rows of ``values`` [row, bucket] in milliseconds that are lastingly above the median of the others.

    ``floor_ms``: added to all before they are compared, for times that matter only beside something longer;
    ``against``: what each row is compared with instead.
    """
    if len(values) < 2 and against is None:
        return []
    peers = others_median(values) if against is None else against
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(peers + floor_ms > 0, (values + floor_ms) / (peers + floor_ms), np.nan)
    usual, noise = _usual(relative), noise_of(relative)
    least = max(EXCESS, SPREAD * usual if len(values) >= _ENOUGH else 0.0)
    found: list[Run] = []
    suspects = _suspects(relative, buckets, 1 + 0.9 * least)
    for row in suspects:
        known = np.flatnonzero(np.isfinite(relative[row]))
        slow = [
            level
            for level in levels(relative[row], buckets.steps, noise)
            if level.steps >= LASTING_STEPS and exceeds(level.value, 1.0, error=level.error, errors=SIGMAS, least=least)
        ]
        for first, last in _adjacent(slow, known):
            first = known[
                np.searchsorted(known, first) + _onset(relative[row, known[(known >= first) & (known <= last)]])
            ]
            if buckets.took(first, last) < LASTING_SECONDS:
                continue
            own_ms, peers_ms = _median(values[row, first : last + 1]), _median(peers[row, first : last + 1])
            factor = own_ms / max(peers_ms, 1e-3)
            ends = bool(first == known[0]), bool(last == known[-1])
            found.append(Run(row, first, last, factor, own_ms, peers_ms, *ends))
    return _with_recurring(found, values, peers, relative, least, buckets)


def _shares(relative: Floats, buckets: Buckets, least: float) -> Floats:
    """[row, 2]: the fraction of a row's steps in which it is slower, and quicker, than the others by ``least``."""
    weight = np.where(np.isfinite(relative), buckets.steps, 0)
    every = np.maximum(weight.sum(axis=1), 1)
    with np.errstate(invalid="ignore"):
        counts = [(weight * (relative > 1 + least)).sum(axis=1), (weight * (relative < 1 / (1 + least))).sum(axis=1)]
    shares: Floats = np.stack(counts, axis=1) / every[:, None]
    return shares


def _with_recurring(
    found: list[Run],
    values: Floats,
    peers: Floats,
    relative: Floats,
    least: float,
    buckets: Buckets,
) -> list[Run]:
    """With rows that are slow now and then, again and again, and more often than the others are."""
    shares = _shares(relative, buckets, least)
    slow_in = relative > 1 + least
    whole = [run for run in found if slow_in[run.row, run.first : run.last + 1].mean() >= _WHOLE]
    for row in range(len(values)):
        known = np.flatnonzero(np.isfinite(values[row]))
        slow = slow_in[row] & np.isfinite(values[row])
        for run in whole:
            if run.row == row:
                slow[run.first : run.last + 1] = False
        often = int(buckets.steps[slow].sum())
        total = int(buckets.steps[known].sum())
        spells = int(np.count_nonzero(np.diff(slow[known].astype(np.int8)) > 0)) + int(slow[known[:1]].any())
        usual = float(np.median(np.delete(shares[:, 0], row))) if len(shares) > 1 else 0.0
        expected = total * max(usual, float(shares[row, 1]))
        if often < max(LASTING_STEPS, RECURRING * total) or spells < _FEWEST_SPELLS:
            continue
        if often - expected <= SIGMAS * np.sqrt(expected + 1) or np.nansum(buckets.seconds[slow]) < LASTING_SECONDS:
            continue
        # A rank that is a little slow all the time is at times above the threshold by chance.
        rest = known[~slow_in[row, known]]
        if _median(relative[row, slow]) - _median(relative[row, rest]) < least:
            continue
        own = relative[row]
        if len(values) == 2 and not _unlike(own[known], own[slow], own[rest], least, spells):
            continue
        place = np.flatnonzero(slow)
        own_ms, peers_ms = _median(values[row, slow]), _median(peers[row, slow])
        longest = int(np.diff(place).max())
        whole = [run for run in whole if run.row != row]
        whole.append(
            Run(
                row,
                int(place[0]),
                int(place[-1]),
                own_ms / max(peers_ms, 1e-3),
                own_ms,
                peers_ms,
                bool(place[0] - known[0] <= longest),
                bool(known[-1] - place[-1] <= longest),
                often / total,
            )
        )
    kept = {(run.row, run.first) for run in whole} | {(run.row, -1) for run in whole if run.share is not None}
    return whole + [run for run in found if (run.row, run.first) not in kept and (run.row, -1) not in kept]


def _unlike(all_steps: Floats, slow: Floats, rest: Floats, least: float, spells: int) -> bool:
    """Whether one of two rows has slow steps that noise does not explain: it may last, so that its spells count."""
    others = np.count_nonzero(all_steps < 1 / (1 + least)) * spells / len(slow)
    gap = float(np.median(logarithms(slow)) - np.median(logarithms(rest))) if len(rest) else np.inf
    spread = max(scatter(logarithms(each)) for each in (slow, rest) if len(each))
    return spells - others > TWO_SIGMAS * np.sqrt(others + 1) and gap > TWO_HEAPS * spread


def relative_shifts(values: Floats, buckets: Buckets, floor_ms: float = 0.0) -> list[tuple[Shift, ...]]:
    """When each row of ``values`` [row, bucket] changed its level, beside what changed all rows alike. With one row,
    when that changed. ``floor_ms`` as for `slow_rows`."""
    raised = values + floor_ms
    baseline = np.array([_quickest(row) for row in raised])
    with np.errstate(divide="ignore", invalid="ignore"):
        own = raised / baseline[:, None]
        relative = own / low_median(own) if len(values) > 1 else own
    noise = noise_of(relative)
    out = []
    for row in range(len(values)):
        changes: list[Shift] = []
        since = 0
        found = lasting(levels(relative[row], buckets.steps, noise), buckets.seconds)
        for shift in shifts(found, buckets.first, buckets.last):
            at = int(np.searchsorted(buckets.first, shift.step))
            end = len(buckets.last) if shift.until is None else int(np.searchsorted(buckets.last, shift.until)) + 1
            before, after = _median(values[row, since:at]), _median(values[row, at:end])
            since = at
            if (after > before) == (shift.change > 0):
                changes.append(Shift(shift.step, shift.until, before, after))
        out.append(tuple(changes))
    return out


def _quickest(row: Floats) -> float:
    """The level that a row had when it was quickest, for some buckets."""
    known = row[np.isfinite(row)]
    if len(known) < 2 * LASTING_BUCKETS:
        return _median(known)
    width = min(LASTING_STEPS, len(known) // 2) | 1
    return float(moving_median(known, width).min())


def _stands(layout: WorldLayout, place: Place) -> bool:
    if place.rank >= layout.sizes.world:
        return False
    own = layout.coords(place.rank)
    return (own.pp, own.tp, own.cp, own.ep, own.dp) == (place.pp, place.tp, place.cp, place.ep, place.dp)


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")


def _usual(relative: Floats) -> float:
    """Standard deviation between rows, of their medians over time."""
    rows = relative[np.isfinite(relative).any(axis=1)]
    return scatter(np.nanmedian(rows, axis=1)) if len(rows) else 0.0


def noise_of(relative: Floats) -> float:
    """Standard deviation of the logarithm of one bucket of a row: by differences of neighbours, which a change of level
    does not move."""
    jumps = np.abs(np.diff(logarithms(relative), axis=1))
    return MAD / float(np.sqrt(2)) * float(np.nanmedian(jumps)) if np.isfinite(jumps).any() else 0.0


def _onset(relative: Floats) -> int:
    """How many of a slow stretch's first values are those of a row like others, by the least absolute deviation from
    either: a stretch that stands out on the whole need not be slow from its beginning on."""
    x = logarithms(relative)
    as_slow = np.abs(x - np.median(x))
    cost = np.concatenate(([0.0], np.cumsum(np.abs(x) - as_slow)))
    place = int(np.argmin(cost))
    return place if LASTING_BUCKETS <= place < len(x) else 0


def _suspects(relative: Floats, buckets: Buckets, limit: float) -> list[int]:
    """Rows that are above ``limit`` in the median of some stretch, the worst first."""
    filled = np.where(np.isfinite(relative), relative, 0.0)
    width = min(buckets.lasting, filled.shape[1])
    if width == 0:
        return []
    worst = np.array([np.median(sliding_window_view(row, width), axis=1).max() for row in filled])
    which = np.flatnonzero(worst > limit)
    ordered: list[int] = which[np.argsort(-worst[which], kind="stable")][:_MOST].tolist()
    return ordered


def _adjacent(found: Sequence[Level], known: Integers) -> list[tuple[int, int]]:
    """Levels above 1 that follow each other as one stretch; what leads up to a far higher one is its own."""
    place = {int(bucket): number for number, bucket in enumerate(known)}
    runs: list[list[Level]] = []
    for level in found:
        if runs and place[level.first] == place[runs[-1][-1].last] + 1:
            runs[-1].append(level)
        else:
            runs.append([level])
    joined = []
    for run in runs:
        highest = max(level.value for level in run) - 1
        begin = next(number for number, level in enumerate(run) if level.value - 1 >= _ALIKE * highest)
        joined += [(part[0].first, part[-1].last) for part in (run[:begin], run[begin:]) if part]
    return joined
