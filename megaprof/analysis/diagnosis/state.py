"""A run as a replay takes it: what passes, entries and links take, which terms change one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.table import Floats, Table
from megaprof.analysis.simulation.replay import Replay, compiled
from megaprof.parallel.schedules import phase_order, producer


@dataclass(frozen=True)
class State:
    """``passes`` [..., d, s, c, k, m], ``entry`` and ``link`` [..., d, s], ``tail`` [...]: milliseconds; the leading axes
    are draws and steps."""

    passes: Floats
    entry: Floats
    link: Floats
    tail: Floats

    def at(self, steps: npt.NDArray[np.intp]) -> State:
        """Those steps alone."""
        return State(self.passes[steps], self.entry[steps], self.link[steps], self.tail[steps])

    def step_ms(self, replay: Replay) -> Floats:
        """Returns the length of every step [...]: all replicas wait for the longest before they reduce gradients."""
        longest: Floats = replay.step_ms(self.passes, entry=self.entry, link=self.link).max(axis=-1)
        return longest + self.tail


def measured(table: Table) -> tuple[State, Replay]:
    """What was measured, and the replay whose model of exchanges comes closer to the measured steps."""
    entry = np.nan_to_num(table.entry)
    modes = [False] if table.schedule.stages == 1 else [True, False]
    if table.schedule.name == "interleaved" and table.schedule.stages == 2:
        modes = [False]
    if table.rendezvous in modes:
        modes.sort(key=lambda mode: mode != table.rendezvous)
    state = State(table.passes, entry, links(table), table.reduction)
    best: tuple[float, Replay] | None = None
    for mode in modes:
        replay = compiled(table.schedule, mode)
        missed = float(np.median(np.abs(state.step_ms(replay) - table.length)))
        if best is None or missed < best[0]:
            best = missed, replay
    if best is None:
        raise RuntimeError("no model of exchanges was tried")
    return state, best[1]


def links(table: Table) -> Floats:
    """Returns [t, d, s]: what exchanges between a stage and the next one took once both were there.

    A stage that was free before its input was made waited for nothing but the exchange. The lower quartile of those
    counts; a step without any takes the usual one of the link, a link without any that of the others.
    """
    t, d, s = table.entry.shape
    samples: list[list[Floats]] = [[] for _ in range(s)]
    for stage in range(s) if table.clocks else ():
        before = None
        for which in phase_order(table.schedule, stage):
            kind = table.schedule.kinds.index(which.kind)
            begun = table.start[:, :, stage, which.chunk, kind, which.microbatch]
            source = producer(table.schedule, stage, which)
            if source is not None and source[0] != stage:
                made = table.end[:, :, source[0], source[1].chunk, kind, source[1].microbatch]
                free = table.start[:, :, stage].min(axis=(2, 3, 4)) if before is None else before
                low, high = sorted((stage, source[0]))
                where = low if high == low + 1 else high
                samples[where].append(np.where(free <= made, np.maximum(begun - made, 0.0), np.nan))
            before = table.end[:, :, stage, which.chunk, kind, which.microbatch]
    return _filled(np.stack([_quartile(own, (t, d)) for own in samples], axis=-1))


def _quartile(samples: list[Floats], shape: tuple[int, int]) -> Floats:
    if not samples:
        return np.full(shape, np.nan)
    ordered = np.sort(np.stack(samples), axis=0)  # NaN last
    count = np.isfinite(ordered).sum(axis=0)
    place = np.maximum((count - 1) // 4, 0)
    return np.where(count > 0, np.take_along_axis(ordered, place[None], axis=0)[0], np.nan)


def _filled(values: Floats) -> Floats:
    """Missing links of a step as they usually are."""
    for axis in (0, 1, 2):
        known = np.isfinite(values).any(axis=axis, keepdims=True)
        usual = np.nanmedian(np.where(known, values, 0.0), axis=axis, keepdims=True)
        values = np.where(np.isfinite(values), values, np.where(known, usual, np.nan))
    return np.nan_to_num(values)
