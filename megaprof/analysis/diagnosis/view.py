"""Some steps of a run with the model of their passes: what terms change one by one, and what a replay evaluates.

The passes around an exchange show how long it took once both sides were ready: a rendezvous when both stages had begun
it, a buffered message when its sender had. They began it after a pass, or after an earlier exchange, which was complete
when the pass of its receiver began. A stage that waited for it before it was ready waited only for the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.model import Content, blocks
from megaprof.analysis.diagnosis.policy import MOST
from megaprof.analysis.simulation import Replay, compiled
from megaprof.analysis.table.table import DATA, QUARTILE, WAIT, Floats, Table
from megaprof.parallel.peers import of_others
from megaprof.parallel.schedules import PassId, PipelineSchedule, Wait, stage_program

#: Among what held passes up: what their stages exchanged before them (`View.passes`), and how much longer one pass of a
#: stage and step took than the longest one of a usual step.
EXCHANGE, STALLS = "exchange", "stalls"


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
    exchange: Floats
    """[n, d, link]: what a usual exchange of each link takes in addition to ``link``, as one in both directions at
    once takes longer than one alone."""
    least: Floats
    """[n, d, s, c, k, m]: milliseconds that the quickest peer computes, which stay when all delays are gone."""
    exposed: Mapping[str, Floats]
    idle: Floats
    delays: Mapping[str, Floats]
    """As in the table, and `EXCHANGE` and `STALLS`. If no file says how long passes waited for data, the first pass of
    the first stage waited for as long as it took longer than expected, beyond the same excess of other stages."""

    def at(self, some: Any, **fields: Any) -> View:
        """Returns the view of some steps and replicas, an index of these axes. ``fields``: those that have no axis of
        replicas, if the steps are others."""
        parts: dict[str, Any] = {
            of: {name: ms[some] for name, ms in getattr(self, of).items()} for of in ("exposed", "delays")
        }
        return replace(self, **parts, **{name: getattr(self, name)[some] for name in _PER_STEP}, **fields)

    def of(self, replica: int) -> View:
        """Returns only one replica."""
        return self.at(np.s_[:, replica : replica + 1])

    def in_other_blocks(self, count: int) -> View:
        """Returns a single step as ``count`` steps that might as well have run, with other blocks of its microbatches
        (`blocks`)."""
        columns = blocks(count, self.passes.shape[-1], np.random.default_rng(0))
        passes, *delays = (np.moveaxis(ms[0][..., columns], -2, 0) for ms in (self.passes, *self.delays.values()))
        entry, link = (np.repeat(ms, count, axis=0) for ms in (self.entry, self.link))
        return replace(self, passes=passes, delays=dict(zip(self.delays, delays, strict=True)), entry=entry, link=link)

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
        parts |= {"delays": {**self.delays, WAIT: self.delays[WAIT] * factor}} if WAIT in self.delays else {}
        longer += self.passes
        return replace(self, passes=longer, **{"exposed": exposed, **parts, **neutral})

    @cached_property
    def steady(self) -> Floats:
        """Passes without what held them up, in addition to what the model explains."""
        return self.passes - sum(self.delays.values())

    @property
    def worked(self) -> Floats:
        """What of passes is as much longer as there is more to compute: a thread that computes for longer waits longer
        for a core, too."""
        return self.steady + self.delays[WAIT] if WAIT in self.delays else self.steady

    def alone(self) -> Floats:
        """Returns what is a rank's own in passes, [n, d, s, c, k, m]: what is `steady` but exposed communication."""
        return np.maximum(self.steady - sum(self.exposed.values()), 0.0)

    def holding(self, now: Floats) -> View:
        """Returns the view with other contents."""
        now = np.maximum(now, 0.0)
        return self.scaled((now / np.maximum(self.now, 1e-9))[:, None, ..., None], now=now)

    def usual(self, kind: str, place: tuple[int, ...]) -> View:
        """Returns the view without the factor by which the contents of a stage or chunk are slow, the field ``kind`` of
        `Content`."""
        now, slow = self.now.copy(), self.slow.copy()
        where: Any = (slice(None), *place)
        for each in (now, slow):
            each[where] /= getattr(self.content, kind)[where]
        return replace(self.holding(now), slow=slow)

    def quick(self, factor: str, stage: int, *, only_own: bool = False) -> View:
        """Returns the view without the ``factor`` (``rank`` or ``pace``) by which a stage is slow, as `scaled` does."""
        values = getattr(self, factor)
        less = np.ones_like(values)
        less[:, :, stage] = 1.0 / values[:, :, stage]
        return self.scaled(less[..., None, None, None], only_own=only_own)

    def less(self, passes: Floats, **neutral: Any) -> View:
        """Returns the view with shorter passes. ``neutral``: the fields that change with it."""
        return replace(self, passes=np.maximum(self.passes - passes, np.minimum(self.passes, self.least)), **neutral)

    def released(self, kind: str, stage: int | slice = slice(None)) -> View:
        """Returns the view without what held passes up, on one stage or on all."""
        gone = np.zeros_like(self.delays[kind])
        gone[:, :, stage] = self.delays[kind][:, :, stage]
        return self.less(gone, delays={**self.delays, kind: self.delays[kind] - gone})

    @cached_property
    def pipelines_ms(self) -> Floats:
        """How long every replica takes until gradients are reduced, replayed, [n, d]."""
        return self.replay.step_ms(self.passes, entry=self.entry, link=self.link)

    @property
    def p2p_ms(self) -> float:
        """Milliseconds of an exchange: the median of all links."""
        return float(np.median(self.link)) if self.link.shape[-1] > 1 else 0.0

    @property
    def step_ms(self) -> Floats:
        """The length of every step, replayed, [n]. All replicas wait for the slowest before they reduce gradients."""
        length: Floats = self.pipelines_ms.max(axis=1) + self.tail
        return length


_FACTORS = ("level", "work", "rank", "pace", "peers", "lasting", "own", "least")
_PER_STEP = (*_FACTORS, "passes", "entry", "link", "timely", "exchange", "idle")


def viewed(table: Table, content: Content, factors: Mapping[str, Floats], expected: Floats) -> View:
    """Returns the view of the whole run by its model (`model.fit`)."""
    replay, passes, entry, link = measured(table)
    n, d, s = entry.shape
    timely = entry
    if d * s > 1:
        timely = np.minimum(entry, np.maximum(of_others(entry.reshape(n, -1), 1).reshape(n, d, s), table.left))
    took = table.passes - sum(table.delays.values())
    over = np.minimum(took - expected, took - factors["least"] - sum(table.exposed.values()))
    exchanged, exchange = passes - table.passes, np.zeros((n, d, s))
    delays = {**table.delays, EXCHANGE: exchanged, STALLS: np.zeros(passes.shape)}
    if DATA not in table.delays:
        first = over[:, :, 0, 0, 0, 0]
        others = np.median(over[:, :, 1:, 0, 0, 0], axis=2) if s > 1 else 0.0
        delays[DATA] = np.zeros_like(passes)
        # If a peer arrives late because it had no core, the first pass waits for it and not for data.
        delays[DATA][:, :, 0, 0, 0, 0] = np.maximum(first - others - table.core_waits_beside[:, :, 0].max(axis=2), 0.0)
        over = over.copy()
        over[:, :, 0, 0, 0, 0] = 0.0
    for number, received in enumerate(receivers(table.schedule)):
        if received.any():
            exchange[..., number] = np.median(exchanged[:, :, received], axis=(2, 3))
    flat = over.reshape(n, d, s, -1)
    stalling = flat.argmax(axis=-1)
    longest = np.take_along_axis(flat, stalling[..., None], axis=-1)[..., 0]
    usual = np.maximum(np.quantile(longest, 1.0 - QUARTILE, axis=0, method="higher"), 0.0)
    # If it is more than twice as long as the longest one of a usual step, that is another pass.
    stalled = np.maximum(np.where(usual < MOST * longest, longest, longest - usual), 0.0)
    np.put_along_axis(delays[STALLS].reshape(flat.shape), stalling[..., None], stalled[..., None], axis=-1)
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
        timely=timely,
        exchange=exchange,
        exposed=table.exposed,
        idle=table.idle,
        delays=delays,
    )


def measured(table: Table) -> tuple[Replay, Floats, Floats, Floats]:
    """Returns the replay whose model of exchanges fits the measured passes best, and the measured times of passes,
    entries and links (see `View`)."""
    entry = np.nan_to_num(table.entry)
    # The first stage waits for nobody. If its first pass is late, this may delay the first pass of any rank.
    entry += np.maximum(table.start[:, :, 0, 0, 0, 0] - entry[:, :, 0], 0.0)[..., None]
    tried = []
    # Without a common clock, the ends of passes say nothing about exchanges.
    for rendezvous in (True, False) if table.clocks else (True,):
        replay = compiled(table.schedule, rendezvous)
        link = links(table, replay)
        apart = table.start - replay.starts(table.end, entry=entry, link=link, ended=True)
        # No timeline resolves less than a microsecond. Of models that differ by less, it is the rendezvous.
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
    for link, kind, took in _met(table, replay.rendezvous) if table.clocks else ():
        samples[link].setdefault(kind, []).append(took)
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
        if (link := schedule.placement.link(schedule.kinds[kind], stage, chunk)) is not None:
            received[link, stage, chunk, kind] = True
    return received


_Transfer = tuple[int, int, PassId]
"""Sender, receiver, and the pass there that needs what is sent."""


def _met(table: Table, rendezvous: bool) -> Iterator[tuple[int, str, Floats]]:
    """Yields a link, a kind of pass that gets its input over it, and what an exchange took there in milliseconds,
    [t, d]; NaN where the receiver waited for something else. ``rendezvous``: see `Replay`."""
    stages, kinds, placement = table.schedule.stages, table.schedule.kinds, table.schedule.placement

    def of(times: Floats, stage: int, which: PassId) -> Floats:
        """Returns the times of a pass, [t, d]."""
        return times[:, :, stage, which.chunk, kinds.index(which.kind), which.microbatch]

    came: dict[_Transfer, dict[int, Floats]] = {}
    waits: list[tuple[int, PassId, Floats, list[_Transfer]]] = []  # stage, its pass, since when it waited, for which
    for stage in range(stages):
        there, awaited = table.entry[:, :, stage], list[_Transfer]()
        for step in stage_program(table.schedule, stage):
            if isinstance(step, PassId):
                waits.append((stage, step, there, awaited))
                there, awaited = of(table.end, stage, step), []
            elif isinstance(step, Wait):
                awaited += step.transfers.transfers(stage, stages)
            else:
                for _, receiver, which in awaited:
                    if rendezvous and receiver != stage:
                        there = np.maximum(there, of(table.start, receiver, which))
                awaited = [transfer for transfer in awaited if transfer[1] == stage]
                for transfer in step.transfers(stage, stages):
                    came.setdefault(transfer, {})[stage] = there
    for stage, following, since, awaited in waits:
        link = placement.link(following.kind, stage, following.chunk)
        # An input for a later pass is of no use here: that pass began some time after the exchange.
        has_own = any(transfer[1:] == (stage, following) for transfer in awaited)
        if link is None or not has_own:
            continue
        if rendezvous:
            later = {transfer: np.maximum(*came[transfer].values()) for transfer in awaited}
        else:
            later = {transfer: came[transfer][transfer[0]] for transfer in awaited if transfer[1] == stage}
        # The exchange ended with the last of its transfers, which may have been that of another link.
        last = reduce(np.maximum, later.values())
        waited = last >= since
        for (_, receiver, which), ends in later.items():
            if placement.link(which.kind, receiver, which.chunk) != link:
                waited &= last > ends
        took = np.maximum(of(table.start, stage, following) - last, 0.0)
        yield link, following.kind, np.where(waited, took, np.nan)
