"""Some steps of a run with the model of their passes: what terms change, and what a replay evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.model import Content, Model
from megaprof.analysis.diagnosis.policy import MOST
from megaprof.analysis.diagnosis.state import State, receivers
from megaprof.analysis.simulation.replay import Replay
from megaprof.analysis.table.table import DATA, QUARTILE, Floats, Table
from megaprof.parallel.peers import of_others

#: Among what held passes up: what their stages exchanged before them (`State`).
EXCHANGE = "exchange"


@dataclass(frozen=True)
class View:
    """Some steps of a run, with the factors of their passes. Arrays have ``n`` steps as their first axis, and most have
    replicas as the second one. See `State`, `Model` and `Table` for fields without a docstring."""

    state: State
    now: Floats
    """[n, s, c, k]: contents, without the terms that have been made neutral."""
    slow: Floats
    """[n, s, c, k]: factor by which stages and chunks are slow, without the terms that have been made neutral."""
    content: Content
    """Contents as they were, with all terms."""
    level: Floats
    work: Floats
    rank: Floats
    pace: Floats
    peers: Floats
    own: Floats
    timely: Floats
    """[n, d, s]: when each rank would have entered the step if it had not been late."""
    first: Floats
    """[n, d]: how much longer the first pass of the first stage is than expected, beyond the same excess of others; 0
    if it is recorded how long passes waited for data."""
    stalled: Floats
    """[n, d, s]: how much longer one pass of a step is than the longest one of a usual step; than its own pass in
    such a step, if that is more than twice as much, because the longest one of a usual step is another pass."""
    stalling: npt.NDArray[np.intp]
    """[n, d, s]: which pass that is, in a flattened [c, k, m]."""
    exchange: Floats
    """[n, d, link]: what a usual exchange of each link takes in addition to `State.link`, as one in both directions at
    once takes longer than one alone."""
    least: Floats
    exposed: Mapping[str, Floats]
    idle: Floats
    held: Mapping[str, Floats]

    def at(self, rows: npt.NDArray[np.intp], content: Content | None = None) -> View:
        """Returns only these steps, with their own contents or the given ones."""
        contents = _rows(self.content, rows) if content is None else content
        ratio = self.now[rows] / self.content.whole[rows]
        slow = contents.stage * contents.chunk * self.slow[rows] / (self.content.stage * self.content.chunk)[rows]
        return View(self.state.at(rows), contents.whole * ratio, slow, contents, **self._at(rows))

    def of(self, replica: int) -> View:
        """Returns only one replica."""
        one = np.s_[:, replica : replica + 1]
        state = State(self.state.passes[one], self.state.entry[one], self.state.link[one], self.state.tail)
        return View(state, self.now, self.slow, self.content, **self._at(one))

    def _at(self, some: Any) -> dict[str, Any]:
        """Returns the fields that have an axis of steps and one of replicas, for some of them."""
        parts = {of: {name: ms[some] for name, ms in getattr(self, of).items()} for of in ("exposed", "held")}
        return {**parts, **{name: getattr(self, name)[some] for name in _PER_STEP}}

    def joined(self, replica: int, other: View) -> View:
        """Returns the view with one replica replaced by another view of it."""
        one = slice(replica, replica + 1)
        state = State(
            _put(self.state.passes, one, other.state.passes),
            _put(self.state.entry, one, other.state.entry),
            _put(self.state.link, one, other.state.link),
            self.state.tail,
        )
        per_step: dict[str, Any] = {name: _put(getattr(self, name), one, getattr(other, name)) for name in _PER_STEP}
        return replace(self, state=state, **per_step)

    def scaled(self, factor: Floats, *, only_own: bool = False, **neutral: Any) -> View:
        """Returns the view with passes that take ``factor`` times as long, apart from what single passes waited or
        stalled and, with ``only_own``, from exposed communication. ``neutral``: the fields that change with it."""
        if (factor == 1.0).all():
            return replace(self, **neutral)
        apart = self.beside + (sum(self.exposed.values()) if only_own else 0.0)
        steady = self.state.passes - apart
        other = steady * factor
        of_stages = other.sum(axis=(3, 4, 5)) / np.maximum(steady.sum(axis=(3, 4, 5)), 1e-9)
        exposed = self.exposed if only_own else {group: ms * factor for group, ms in self.exposed.items()}
        parts = {"peers": self.peers * of_stages[..., None], "least": self.least * factor, "idle": self.idle * factor}
        return replace(
            self, state=replace(self.state, passes=other + apart), **{"exposed": exposed, **parts, **neutral}
        )

    def first_waits(self) -> Floats:
        """Returns how long passes seem to have waited for data, [n, d, s, c, k, m], if that is not recorded."""
        waits = np.zeros_like(self.state.passes)
        waits[:, :, 0, 0, 0, 0] = self.first
        return waits

    def stalls(self) -> Floats:
        """Returns how long passes stalled, [n, d, s, c, k, m]."""
        stalls = np.zeros_like(self.state.passes)
        np.put_along_axis(
            stalls.reshape(*self.stalling.shape, -1), self.stalling[..., None], self.stalled[..., None], axis=-1
        )
        return stalls

    @cached_property
    def beside(self) -> Floats:
        """What passes took in addition to what the model explains, [n, d, s, c, k, m]."""
        return self.first_waits() + self.stalls() + sum(self.held.values())

    def alone(self) -> Floats:
        """Returns what is a rank's own in passes, [n, d, s, c, k, m]: all but exposed communication and `beside`."""
        return np.maximum(self.state.passes - self.beside - sum(self.exposed.values()), 0.0)

    def holding(self, now: Floats) -> View:
        """Returns the view with other contents."""
        now = np.maximum(now, 0.0)
        return self.scaled((now / np.maximum(self.now, 1e-9))[:, None, ..., None], now=now)

    def quick(self, where: Any, factor: Floats) -> View:
        """Returns the view without a factor by which some contents are slow."""
        now, slow = self.now.copy(), self.slow.copy()
        now[where] /= factor
        slow[where] /= factor
        return replace(self.holding(now), slow=slow)

    def less(self, passes: Floats, **neutral: Any) -> View:
        """Returns the view with shorter passes. ``neutral``: the fields that change with it."""
        left = np.maximum(self.state.passes - passes, np.minimum(self.state.passes, self.least))
        return replace(self, state=replace(self.state, passes=left), **neutral)

    def waiting(self, **changes: Any) -> View:
        """Returns the view with other entries, links or tails."""
        return replace(self, state=replace(self.state, **changes))

    def pipelines_ms(self, replay: Replay) -> Floats:
        """Returns how long every replica takes until gradients are reduced, [n, d]."""
        return replay.step_ms(self.state.passes, entry=self.state.entry, link=self.state.link)


_FACTORS = ("level", "work", "rank", "pace", "peers", "own", "least")
_PER_STEP = (*_FACTORS, "timely", "first", "stalled", "stalling", "exchange", "idle")


def _put(values: Floats, where: slice, new: Floats) -> Floats:
    """Returns a copy with the values of some replicas replaced, or the same array if they did not change."""
    if np.shares_memory(values, new):
        return values
    changed = values.copy()
    changed[:, where] = new
    return changed


def viewed(table: Table, state: State, model: Model) -> View:
    """Returns the view of the whole run."""
    n, d, s = state.entry.shape
    late = np.zeros((n, d, s))
    if d * s > 1:
        late = np.maximum(state.entry - of_others(state.entry.reshape(n, -1), 1).reshape(n, d, s), 0.0)
    took = table.passes - sum(table.held.values())
    over = np.minimum(took - model.expected, took - model.least - sum(table.exposed.values()))
    first = over[:, :, 0, 0, 0, 0]
    # With one stage, the opening may explain all of it.
    others = np.median(over[:, :, 1:, 0, 0, 0], axis=2) if s > 1 else first
    # If a peer arrives late because it had no core, the first pass waits for it and not for data.
    first = (first - others if s > 1 else first) - table.core_waits_beside[:, :, 0].max(axis=2)
    if DATA in table.held:
        first = np.zeros_like(first)
    else:
        over = over.copy()
        over[:, :, 0, 0, 0, 0] = 0.0
    exchanged, exchange = state.passes - table.passes, np.zeros((n, d, s))
    for link, passes in enumerate(receivers(table.schedule)):
        if passes.any():
            exchange[..., link] = np.median(exchanged[:, :, passes], axis=(2, 3))
    flat = over.reshape(n, d, s, -1)
    stalling = flat.argmax(axis=-1)
    longest = np.take_along_axis(flat, stalling[..., None], axis=-1)[..., 0]
    usual = np.maximum(np.quantile(longest, 1.0 - QUARTILE, axis=0, method="higher"), 0.0)
    rows = np.zeros(n, dtype=np.intp)
    whole = _rows(Content(**{name: getattr(model.content, name)[None] for name in _PARTS}), rows)
    return View(
        state,
        whole.whole,
        whole.stage * whole.chunk,
        whole,
        **{name: getattr(model, name) for name in _FACTORS},
        timely=state.entry - late,
        first=np.maximum(first, 0.0),
        stalled=np.maximum(np.where(usual < MOST * longest, longest, longest - usual), 0.0),
        stalling=stalling,
        exchange=exchange,
        exposed=table.exposed,
        idle=table.idle,
        held={**table.held, EXCHANGE: exchanged},
    )


_PARTS = ("whole", "unit", "fixed", "ends", "stage", "chunk")


def _rows(content: Content, rows: npt.NDArray[np.intp]) -> Content:
    return Content(**{name: getattr(content, name)[rows] for name in _PARTS})
