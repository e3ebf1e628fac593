"""Some steps of a run with the model of their passes: what terms change, and what a replay evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.model import Content
from megaprof.analysis.diagnosis.policy import MOST
from megaprof.analysis.diagnosis.state import measured, receivers
from megaprof.analysis.simulation import Replay
from megaprof.analysis.table.table import DATA, QUARTILE, WAIT, Floats, Table
from megaprof.parallel.peers import of_others

#: Among what held passes up: what their stages exchanged before them (`View.passes`).
EXCHANGE = "exchange"


@dataclass(frozen=True)
class View:
    """Some steps of a run, with the factors of their passes, which are 1 where nothing is special. Arrays have ``n``
    steps as their first axis, and most have replicas as the second one. See `Table` for fields without a docstring."""

    replay: Replay
    """The schedule, with the model of exchanges that fits these steps best."""
    passes: Floats
    """[n, d, s, c, k, m]: milliseconds of each pass, with what its stage exchanged before it, apart from ``link``."""
    entry: Floats
    """[n, d, s]: when each rank enters the step, in milliseconds."""
    link: Floats
    """[n, d, s]: milliseconds of an exchange between each stage and the next one."""
    tail: Floats
    """[n]: how long the step goes on for gradients after the last pass."""
    now: Floats
    """[n, s, c, k]: contents, without the terms that have been made neutral."""
    slow: Floats
    """[n, s, c, k]: factor by which stages and chunks are slow, without the terms that have been made neutral."""
    content: Content
    """Contents as they were, with all terms."""
    level: Floats
    """[n, d]: work of a replica in a step, relative to the other replicas."""
    work: Floats
    """[n, d, m]: work of a microbatch, relative to the others of its replica and step."""
    rank: Floats
    """[n, d, s]: how much longer a rank works than those of the same stage in other replicas; at least 1."""
    pace: Floats
    """[n, d, s]: how much slower a stage is in a step, on all replicas, than in its quicker steps; at least 1."""
    peers: Floats
    """[n, d, s, p]: milliseconds that each peer works in the passes of a step, without waiting for others."""
    lasting: Floats
    """[n, d, s]: how much longer whole passes were because of slow ranks, peers and steps; at least 1."""
    own: Floats
    """[n, d, s, m]: additional work of a microbatch on this stage only."""
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
    """[n, d, link]: what a usual exchange of each link takes in addition to ``link``, as one in both directions at
    once takes longer than one alone."""
    least: Floats
    """[n, d, s, c, k, m]: milliseconds that the quickest peer computes, which stay when all delays are gone."""
    exposed: Mapping[str, Floats]
    idle: Floats
    held: Mapping[str, Floats]

    def at(self, rows: npt.NDArray[np.intp], content: Content) -> View:
        """Returns these steps, as they were, with other contents."""
        slow, tail = content.stage * content.chunk, self.tail[rows]
        return replace(self, tail=tail, now=content.whole, slow=slow, content=content, **self._at(rows))

    def of(self, replica: int) -> View:
        """Returns only one replica."""
        return replace(self, **self._at(np.s_[:, replica : replica + 1]))

    def _at(self, some: Any) -> dict[str, Any]:
        """Returns the fields that have an axis of steps and one of replicas, for some of them."""
        parts = {of: {name: ms[some] for name, ms in getattr(self, of).items()} for of in ("exposed", "held")}
        return {**parts, **{name: getattr(self, name)[some] for name in _PER_STEP}}

    def joined(self, replica: int, other: View) -> View:
        """Returns the view with one replica replaced by another view of it."""
        per_step = {name: (getattr(self, name), getattr(other, name)) for name in _PER_STEP}
        changed = {name: ms.copy() for name, (ms, new) in per_step.items() if not np.shares_memory(ms, new)}
        for name, ms in changed.items():
            ms[:, replica] = per_step[name][1][:, 0]
        return replace(self, **changed)

    def scaled(self, factor: Floats, *, only_own: bool = False, **neutral: Any) -> View:
        """Returns the view with passes that take ``factor`` times as long, apart from what single passes stalled or
        waited for anything but a core and, with ``only_own``, from exposed communication. ``neutral``: the fields that
        change with it."""
        if (factor == 1.0).all():
            return replace(self, **neutral)
        steady = self.worked - sum(self.exposed.values()) if only_own and self.exposed else self.worked
        longer = steady * (factor - 1.0)
        of_stages = 1.0 + longer.sum(axis=(3, 4, 5)) / np.maximum(steady.sum(axis=(3, 4, 5)), 1e-9)
        exposed = self.exposed if only_own else {group: ms * factor for group, ms in self.exposed.items()}
        parts = {"peers": self.peers * of_stages[..., None], "least": self.least * factor, "idle": self.idle * factor}
        parts |= {"held": {**self.held, WAIT: self.held[WAIT] * factor}} if WAIT in self.held else {}
        longer += self.passes
        return replace(self, passes=longer, **{"exposed": exposed, **parts, **neutral})

    def first_waits(self) -> Floats:
        """Returns how long passes seem to have waited for data, [n, d, s, c, k, m], if that is not recorded."""
        waits = np.zeros_like(self.passes)
        waits[:, :, 0, 0, 0, 0] = self.first
        return waits

    def stalls(self) -> Floats:
        """Returns how long passes stalled, [n, d, s, c, k, m]."""
        stalls = np.zeros_like(self.passes)
        np.put_along_axis(
            stalls.reshape(*self.stalling.shape, -1), self.stalling[..., None], self.stalled[..., None], axis=-1
        )
        return stalls

    @cached_property
    def beside(self) -> Floats:
        """What passes took in addition to what the model explains, [n, d, s, c, k, m]."""
        return self.first_waits() + self.stalls() + sum(self.held.values())

    @cached_property
    def steady(self) -> Floats:
        """Passes without that."""
        return self.passes - self.beside

    @property
    def worked(self) -> Floats:
        """What of passes is as much longer as there is more to compute: a thread that computes for longer waits longer
        for a core, too."""
        return self.steady + self.held[WAIT] if WAIT in self.held else self.steady

    def alone(self) -> Floats:
        """Returns what is a rank's own in passes, [n, d, s, c, k, m]: all but exposed communication and `beside`."""
        return np.maximum(self.steady - sum(self.exposed.values()), 0.0)

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
        return replace(self, passes=np.maximum(self.passes - passes, np.minimum(self.passes, self.least)), **neutral)

    @cached_property
    def pipelines_ms(self) -> Floats:
        """How long every replica takes until gradients are reduced, replayed, [n, d]."""
        return self.replay.step_ms(self.passes, entry=self.entry, link=self.link)

    @property
    def step_ms(self) -> Floats:
        """The length of every step, replayed, [n]. All replicas wait for the slowest before they reduce gradients."""
        length: Floats = self.pipelines_ms.max(axis=1) + self.tail
        return length


_FACTORS = ("level", "work", "rank", "pace", "peers", "lasting", "own", "least")
_PER_STEP = (*_FACTORS, "passes", "entry", "link", "timely", "first", "stalled", "stalling", "exchange", "idle")


def viewed(table: Table, content: Content, factors: Mapping[str, Floats], expected: Floats) -> View:
    """Returns the view of the whole run by its model (`model.fit`)."""
    replay, passes, entry, link = measured(table)
    n, d, s = entry.shape
    late = np.zeros((n, d, s))
    if d * s > 1:
        late = np.maximum(entry - of_others(entry.reshape(n, -1), 1).reshape(n, d, s), 0.0)
    took = table.passes - sum(table.held.values())
    over = np.minimum(took - expected, took - factors["least"] - sum(table.exposed.values()))
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
    exchanged, exchange = passes - table.passes, np.zeros((n, d, s))
    for number, received in enumerate(receivers(table.schedule)):
        if received.any():
            exchange[..., number] = np.median(exchanged[:, :, received], axis=(2, 3))
    flat = over.reshape(n, d, s, -1)
    stalling = flat.argmax(axis=-1)
    longest = np.take_along_axis(flat, stalling[..., None], axis=-1)[..., 0]
    usual = np.maximum(np.quantile(longest, 1.0 - QUARTILE, axis=0, method="higher"), 0.0)
    whole = Content._make(np.repeat(part[None], n, axis=0) for part in content)
    return View(
        replay,
        passes,
        entry,
        link,
        table.reduction,
        whole.whole,
        whole.stage * whole.chunk,
        whole,
        **factors,
        timely=entry - late,
        first=np.maximum(first, 0.0),
        stalled=np.maximum(np.where(usual < MOST * longest, longest, longest - usual), 0.0),
        stalling=stalling,
        exchange=exchange,
        exposed=table.exposed,
        idle=table.idle,
        held={**table.held, EXCHANGE: exchanged},
    )
