"""A run as a replay takes it: what passes, entries and links take, which terms change one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.exchanges import links
from megaprof.analysis.diagnosis.table import Floats, Table
from megaprof.analysis.simulation.replay import Replay, compiled


@dataclass(frozen=True)
class State:
    """Milliseconds: ``passes`` [..., d, s, c, k, m], ``entry`` and ``link`` [..., d, s], ``tail`` [...]. The
    leading axes are draws or steps."""

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
    best: tuple[float, State, Replay] | None = None
    for mode in modes:
        replay = compiled(table.schedule, mode)
        state = State(table.passes, entry, links(table, mode), table.reduction)
        missed = float(np.median(np.abs(state.step_ms(replay) - table.length)))
        if best is None or missed < best[0]:
            best = missed, state, replay
    if best is None:
        raise RuntimeError("no model of exchanges was tried")
    return best[1:]
