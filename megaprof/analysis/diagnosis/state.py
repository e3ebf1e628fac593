"""A run in the form that a replay takes: the times of passes, entries and links, which terms change one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.exchanges import links
from megaprof.analysis.simulation.replay import Replay, compiled
from megaprof.analysis.table.table import Floats, Table

#: Milliseconds that no timeline resolves. If models differ by less, the one that the metadata name is used.
_RESOLUTION = 1e-3


@dataclass(frozen=True)
class State:
    """Times in milliseconds: ``passes`` [..., d, s, c, k, m], ``entry`` and ``link`` [..., d, s], ``tail`` [...]. The
    leading axes are draws or steps. A pass contains what its stage exchanged before it, apart from ``link``."""

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
        link = links(table, replay)
        apart = table.start - replay.earliest(table.end, entry=entry, link=link)
        missed = float(np.mean(np.abs(apart)))
        if best is None or missed < best[0] - _RESOLUTION:
            between = _between(apart) if table.clocks else 0.0
            best = missed, State(table.passes + between, entry, link, table.reduction), replay
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
