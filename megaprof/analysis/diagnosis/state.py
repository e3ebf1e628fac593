"""A run in the form that a replay takes: the times of passes, entries and links, which terms change one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.exchanges import links
from megaprof.analysis.simulation.replay import Replay, compiled
from megaprof.analysis.table.table import Floats, Table

#: How many steps are replayed to compare the models of exchanges.
_COMPARED = 8
#: Milliseconds that no timeline resolves. If models differ by less, the one that the metadata name is used.
_RESOLUTION = 1e-3


@dataclass(frozen=True)
class State:
    """Times in milliseconds: ``passes`` [..., d, s, c, k, m], ``entry`` and ``link`` [..., d, s], ``tail`` [...]. The
    leading axes are draws or steps."""

    passes: Floats
    entry: Floats
    link: Floats
    tail: Floats

    def at(self, steps: npt.NDArray[np.intp]) -> State:
        """Returns only those steps."""
        return State(self.passes[steps], self.entry[steps], self.link[steps], self.tail[steps])

    def step_ms(self, replay: Replay) -> Floats:
        """Returns the length of every step [...]. All replicas wait for the slowest before they reduce gradients."""
        longest: Floats = replay.step_ms(self.passes, entry=self.entry, link=self.link).max(axis=-1)
        return longest + self.tail


def measured(table: Table) -> tuple[State, Replay]:
    """Returns the measured times, and the replay whose model of exchanges fits the measured passes best."""
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
    best: tuple[float, State, Replay] | None = None
    for model in models:
        replay = compiled(schedule, *model)
        state = State(table.passes, entry, links(table, replay), table.reduction)
        missed = _missed(table, state, replay)
        if best is None or missed < best[0] - _RESOLUTION:
            best = missed, state, replay
    if best is None:
        raise RuntimeError("no model of exchanges was tried")
    return best[1:]


def _missed(table: Table, state: State, replay: Replay) -> float:
    """Returns how far the ends of passes in a replay are off, on average, in milliseconds."""
    some = state.at(np.arange(min(_COMPARED, len(table.steps))))
    ends = replay.ends(some.passes, entry=some.entry, link=some.link)
    return float(np.mean(np.abs(ends - table.end[: len(ends)])))
