"""Captured steps, replayed as they are and with a change: other contents of chunks, microbatches or exchanges.

The gain of a change is the replay of every captured step minus its replay with the change, both from the same passes:
a pass is scaled as its content is, with its waits for a core, and the time beyond (stalls, garbage collection, waiting
for data) stays as it was. Draws show how certain a gain is: each draw takes other steps and microbatches, and one way
in which contents can be divided (`contents`). The differences between steps, and what the replay misses, make the
interval wider.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.examine import Examined, more_steps
from megaprof.analysis.diagnosis.model import blocks
from megaprof.analysis.diagnosis.policy import DRAWS, LEAST, REPLAYED, RERUN
from megaprof.analysis.diagnosis.view import EXCHANGE
from megaprof.analysis.samples import LEVEL, Interval
from megaprof.analysis.simulation import Replay, Simulation, played
from megaprof.analysis.table.table import Floats

#: How many pipelines of a step are replayed: those that take longest now. After a change, any may be the longest.
_LONGEST = 4

_Rows: TypeAlias = npt.NDArray[np.intp] | slice
Kind = Literal[
    "layout", "chunks", "balanced", "microbatches", "overlap", "packing", "even_packing", "by_hand", "recompute"
]


@dataclass(frozen=True)
class Prediction:
    """One change of the run, and the predicted step."""

    kind: Kind
    """What is changed."""
    step_ms: Interval
    """Predicted step in milliseconds."""
    speedup: Interval
    """Measured step / predicted step; if the number of tokens changes (``step_tokens``), the same per token."""
    layout: str | None = None
    """Layout as in Megatron's ``--pipeline-model-parallel-layout``; None if the change has no layout of its own."""
    layers: tuple[int, ...] = ()
    """Decoder layers of each stage in ``layout``; empty without one."""
    chunks: int | None = None
    """Model chunks per stage, if their number changes; otherwise None."""
    microbatches: int | None = None
    """Microbatches per step, if their number changes; otherwise None."""
    tokens: float = 1.0
    """Tokens of a microbatch / tokens of a captured microbatch."""
    step_tokens: float = 1.0
    """Tokens of the step / tokens of the captured step."""
    p2p_ms: float | None = None
    """Milliseconds of a transfer between stages, if that changes; otherwise None."""
    packing: str | None = None
    """How the same sequences are packed, one of `packing.PLANS`; None: as captured."""
    flags: tuple[str, ...] = ()
    """Megatron's arguments for this change; those of a ``layout`` replace all arguments that place layers. Empty if no
    argument does it."""
    in_flight: tuple[int, ...] | None = None
    """Largest number of layers times microbatches whose activations each stage holds at once; None if unchanged."""
    activations: float = 1.0
    """Activations per microbatch / those of a captured microbatch, held until its backward."""
    fits: bool | None = None
    """True if the devices have enough memory; None if memory was not measured."""
    needed: tuple[int, ...] | None = None
    """Bytes that each stage would allocate at its peak; None if memory was not measured."""
    more_steps: int = 0
    """Number of further steps that would show whether it gains `policy.LEAST`; 0 if that is certain either way, or if
    no number would."""

    @classmethod
    def of(cls, kind: Kind, measured_ms: float, step_ms: Interval, more_steps: int = 0) -> Prediction:
        """Returns the prediction of a step that took ``measured_ms`` and would take ``step_ms``."""
        step_ms = step_ms.clipped(0.01 * measured_ms)
        return cls(kind, step_ms, Interval.of(measured_ms).over(step_ms), more_steps=more_steps)

    def exceeds(self, held: Sequence[int] | None) -> bool:
        """Returns whether some stage holds more activations at once than any stage ``held``, unless memory was measured
        and is enough."""
        if self.fits or not held or not self.in_flight:
            return False
        return max(self.in_flight) * self.activations > max(held)


@dataclass(frozen=True)
class Change:
    """A change of a step, apart from the contents of its chunks.

    ``replay`` has the changed schedule. ``tokens`` are those of a microbatch / those of a captured one. Every exchange
    takes ``p2p_ms`` milliseconds, or ``exchanges`` times as long as before for None.
    """

    replay: Replay
    tokens: float = 1.0
    p2p_ms: float | None = None
    exchanges: float = 1.0


@dataclass(frozen=True)
class Baseline:
    """The captured steps that changes are compared with: ``n`` steps, each with the ``r`` pipelines that may be its
    longest. Times are in milliseconds.

    A pass takes ``passes`` for its content, ``exchange`` for what its stage exchanged before it beyond ``link``, and
    ``beside`` for the rest [n, r, s, c, k, m]. Each stage enters a step at ``entry``, and exchanges with the next one
    in ``link`` [n, r, s]. ``length`` [n] is the measured step, and ``missed`` the fraction by which the replay misses
    the average step. ``content`` [s, c, k] is the time of chunks in the quicker passes, their lower quartile, ``drawn``
    [draw, s, c, k] the same in every draw, and ``rows`` [draw] the step of each draw.
    """

    replay: Replay
    passes: Floats
    exchange: Floats
    beside: Floats
    entry: Floats
    link: Floats
    length: Floats
    missed: float
    content: Floats
    drawn: Floats
    rows: npt.NDArray[np.intp]

    @property
    def measured_ms(self) -> float:
        """The average step."""
        return float(self.length.mean())

    @property
    def p2p_ms(self) -> float:
        """Milliseconds of an exchange: the median of all links."""
        return float(np.median(self.link)) if self.link.shape[-1] > 1 else 0.0

    @cached_property
    def pipelines_ms(self) -> Floats:
        """[n]: the longest pipeline of every step, replayed."""
        return self._longest(slice(None), np.ones_like(self.content)[None], Change(self.replay))

    def gain(self, content: Floats, change: Change, rows: _Rows = slice(None), before: Floats | None = None) -> Floats:
        """Returns [n]: how many milliseconds shorter steps are with other contents [s, c, k] and a change. ``rows``: of
        these steps, whose contents [row, s, c, k] change from what they were ``before``."""
        took = self._longest(rows, self._ratio(content, before), change)
        return self.pipelines_ms[rows] - took

    @cached_property
    def as_several(self) -> Baseline:
        """A single step as several that might as well have run: with other blocks of its microbatches. They are blocks
        because what disturbs one microbatch disturbs its neighbours, too."""
        chosen = blocks(len(self.rows), self.passes.shape[-1], np.random.default_rng(0))
        passes, exchange, beside = (
            np.stack([values[0][..., block] for block in chosen])
            for values in (self.passes, self.exchange, self.beside)
        )
        entry, link = (np.repeat(values[:1], len(chosen), axis=0) for values in (self.entry, self.link))
        return replace(self, passes=passes, exchange=exchange, beside=beside, entry=entry, link=link)

    def _ratio(self, content: Floats, before: Floats | None = None) -> Floats:
        """Returns the factor of contents, [n, s, c, k]. If the numbers of chunks differ, it is relative to the average
        chunk of a stage."""
        content, before = (content[None], self.content[None]) if before is None else (content, before)
        if before.shape[-2] != content.shape[-2]:
            before = before.mean(axis=-2, keepdims=True)
        return content / np.maximum(before, 1e-9)

    def _longest(self, rows: _Rows, ratio: Floats, change: Change) -> Floats:
        times, entry, link = self._times(rows, ratio, change)
        longest: Floats = change.replay.step_ms(times, entry=entry, link=link).max(axis=1)
        return longest

    def _times(self, rows: _Rows, ratio: Floats, change: Change) -> tuple[Floats, Floats, Floats]:
        """Returns the passes, entries and exchanges that the schedule of ``change`` replays. ``ratio`` [n, s, c, k]:
        the factor of contents."""
        passes, exchange, beside = self.passes[rows], self.exchange[rows], self.beside[rows]
        before, after = passes.shape[3], change.replay.shape[1]
        if after != before:
            # Each pass has an exchange; the rest stays as long.
            passes, exchange, beside = (values.mean(axis=3, keepdims=True) for values in (passes, exchange, beside))
            beside *= before / after
        times = passes * ratio[:, None, ..., None] + exchange + beside
        entry, link = self.entry[rows], self.link[rows]
        times = resliced(times, change.replay.shape[3], change.tokens)
        link = link * change.exchanges if change.p2p_ms is None else np.full_like(link, change.p2p_ms)
        return times, entry, link

    def stages_ms(self, content: Floats, change: Change) -> Floats:
        """Returns [s]: milliseconds of all passes of a stage in the average step, with other contents [s, c, k] and a
        change."""
        times, _, _ = self._times(slice(None), self._ratio(content), change)
        whole: Floats = times.sum(axis=(3, 4, 5)).mean(axis=(0, 1))
        return whole

    def simulated(self, content: Floats, change: Change) -> Simulation:
        """Returns the longest pipeline of the step whose replay is nearest to the average one, with other contents
        [s, c, k]."""
        row = np.array([np.abs(self.pipelines_ms - self.pipelines_ms.mean()).argmin()])
        times, entry, link = self._times(row, self._ratio(content), change)
        longest = int(change.replay.step_ms(times, entry=entry, link=link)[0].argmax())
        return played(change.replay, times[0, longest], entry=entry[0, longest], link=link[0, longest])


def baseline(run: Examined, passes: Floats | None = None, replay: Replay | None = None) -> Baseline:
    """Returns the steps of a run as they were examined, or as they would be if their passes had taken ``passes``
    [n, d, s, c, k, m] in the schedule of ``replay``."""
    view, beside = run.view, np.minimum(run.view.passes - run.view.worked, run.view.passes)
    # Communication that names no group may go on between passes, and is then no exchange.
    exchange = np.minimum(view.held[EXCHANGE], 0.0 if "unknown" in view.exposed else beside)
    if passes is not None:
        view, beside = replace(view, passes=passes, replay=replay or view.replay), np.zeros_like(passes)
        exchange = beside
    shorter = run.view.step_ms - view.step_ms
    length = run.table.length - shorter
    chosen = np.sort(np.argsort(-view.pipelines_ms, axis=1, kind="stable")[:, :_LONGEST], axis=1)

    # The factor of work [draw, s] that a stage might have had with other microbatches by chance.
    own_work, random = np.moveaxis(run.view.own.mean(axis=1), 1, 2), np.random.default_rng(0)  # [t, m, s]
    steps = random.integers(0, len(own_work), (DRAWS, len(own_work)))
    microbatches = random.integers(0, own_work.shape[1], (len(steps), own_work.shape[1]))
    luck = own_work[steps[:, :, None], microbatches[:, None]].mean(axis=(1, 2))

    def of_chosen(values: Floats) -> Floats:
        return np.take_along_axis(values, chosen.reshape(*chosen.shape, *(1,) * (values.ndim - 2)), axis=1)

    return Baseline(
        replay=view.replay,
        passes=of_chosen(view.passes - beside),
        exchange=of_chosen(exchange),
        beside=of_chosen(beside - exchange),
        entry=of_chosen(view.entry),
        link=of_chosen(view.link),
        length=length,
        missed=abs((run.replayed_ms - float(shorter.mean())) / float(length.mean()) - 1.0),
        content=view.now[0],
        drawn=run.draws.content.whole * luck[..., None, None],
        rows=run.rows,
    )


def resliced(times: Floats, count: int, larger: float) -> Floats:
    """Returns the times [..., m] of ``count`` other microbatches, each with ``larger`` times the tokens. They take the
    captured tokens in order, and start again from the first token after the last one."""
    before = times.shape[-1]
    if count == before and larger == 1.0:
        return times
    ends = np.concatenate((np.zeros((*times.shape[:-1], 1)), np.cumsum(times, axis=-1)), axis=-1)

    def until(tokens: Floats) -> Floats:
        """Returns the time of everything up to ``tokens``, which is counted in captured microbatches."""
        around, left = np.divmod(tokens, before)
        place = np.minimum(left.astype(np.intp), before - 1)
        total: Floats = ends[..., place] + times[..., place] * (left - place) + around * ends[..., -1:]
        return total

    cuts = np.arange(count + 1) * larger
    return np.diff(until(np.where(np.abs(cuts - np.rint(cuts)) < 1e-9, np.rint(cuts), cuts)), axis=-1)


def priced(
    run: Baseline,
    kind: Kind,
    content: Floats,
    sure: Floats,
    free: Floats,
    change: Change | None = None,
    unsure: float = 0.0,
) -> tuple[Prediction, Floats]:
    """Returns what a run gains by a change, and the milliseconds of that in every draw [draw]. The contents of chunks
    [s, c, k] are given as estimated (``content``), in every draw of steps and microbatches (``sure``), and in draws
    that also vary what the data leave open (``free``). ``unsure``: any further uncertainty besides `policy.RERUN`, as a
    fraction of the step."""
    change = change or Change(run.replay)
    gains = run.gain(content, change)
    of_same_step = gains[run.rows]
    # Passes are measured and no estimate. They change as the contents of the same draw do.
    both = np.concatenate((free, sure))
    rows, before = np.resize(run.rows, len(both)), np.resize(run.drawn, (len(both), *run.drawn.shape[1:]))
    of_draws = run.gain(both, change, rows, before) - np.resize(of_same_step, len(both))
    drawn, surely = np.split(of_draws, [len(free)])
    if change.tokens != 1.0 and change.p2p_ms is None:
        # The data do not say how much of an exchange is in proportion to its size, so it is anything from none to all.
        in_proportion = float((run.gain(content, replace(change, exchanges=change.tokens)) - gains).mean())
        drawn = drawn + in_proportion * np.random.default_rng(0).uniform(size=len(free))
    several = gains if len(gains) > 1 else run.as_several.gain(content, change)
    of_steps = float(several.std(ddof=1) / math.sqrt(len(gains)))
    return gained(kind, run.measured_ms, gains, of_steps, surely, drawn, run.missed, unsure)


def gained(
    kind: Kind,
    measured_ms: float,
    gains: Floats,
    of_steps: float,
    sure: Floats,
    free: Floats,
    missed: float,
    unsure: float = 0.0,
) -> tuple[Prediction, Floats]:
    """Returns the prediction of a step of ``measured_ms`` that gets shorter by ``gains`` [n], and by how much it does
    in every draw [draw].

    ``of_steps`` is the standard error of their average. ``sure`` and ``free`` [draw] are how much more a draw gains
    than the estimate does in the same step: ``sure`` has the uncertainty that more steps would remove, ``free`` all.
    ``missed`` (by the replay) and ``unsure`` are fractions of the step that more steps do not make smaller.
    """
    mean = float(gains.mean())
    # A change may gain or lose all of the time that the replay misses.
    lasting = (math.hypot(unsure, RERUN) + missed) * measured_ms / LEVEL
    gain = Interval.of(mean, math.hypot(of_steps, lasting, REPLAYED * mean), free)
    noise = LEVEL * math.hypot(of_steps, float(np.sqrt(np.mean(sure**2))))
    more, over = 0, mean - LEAST * measured_ms
    if over > 0.0 and gain.low <= LEAST * measured_ms:
        # More steps make `noise` smaller, but not the rest of the interval.
        room = over**2 - max((mean - gain.low) ** 2 - noise**2, 0.0)
        more = more_steps(len(gains), noise, math.sqrt(max(room, 0.0)))
    return Prediction.of(kind, measured_ms, Interval.of(measured_ms) + gain * -1.0, more), mean + free
