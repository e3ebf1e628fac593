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
from typing import Literal

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined, more_steps
from megaprof.analysis.diagnosis.policy import LEAST, REPLAYED, RERUN
from megaprof.analysis.diagnosis.view import EXCHANGE, View
from megaprof.analysis.samples import LEVEL, Interval
from megaprof.analysis.simulation import Replay
from megaprof.analysis.table.table import Floats

#: How many pipelines of a step are replayed: those that take longest now. After a change, any may be the longest.
_LONGEST = 4

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


def longest(run: Examined) -> Examined:
    """Returns a run with only those pipelines of each step that may be its longest, and without terms: it can be
    pickled."""
    chosen = np.sort(np.argsort(-run.view.pipelines_ms, axis=1, kind="stable")[:, :_LONGEST], axis=1)
    view, draws = (
        steps.at((np.arange(len(replicas))[:, None], replicas))
        for steps, replicas in ((run.view, chosen), (run.drawn, chosen[run.rows]))
    )
    return replace(run, view=view, draws=draws, terms=(), left_out=())


def changed(steps: View, content: Floats, change: Change) -> View:
    """Returns steps with other contents, [s, c, k] or [n, s, c, k], and a change. If the numbers of chunks differ,
    contents are relative to the average chunk of a stage."""
    beside = np.minimum(steps.passes - steps.worked, steps.passes)
    # Communication that names no group may go on between passes, and is then no exchange.
    exchange = np.minimum(steps.held[EXCHANGE], 0.0 if "unknown" in steps.exposed else beside)
    passes, beside, before = steps.passes - beside, beside - exchange, steps.now
    chunks, after = passes.shape[3], change.replay.shape[1]
    if after != chunks:
        # Each pass has an exchange; the rest stays as long.
        passes, exchange, beside = (values.mean(axis=3, keepdims=True) for values in (passes, exchange, beside))
        beside, before = beside * (chunks / after), before.mean(axis=-2, keepdims=True)
    ratio = content / np.maximum(before, 1e-9)
    times = resliced(passes * ratio[:, None, ..., None] + exchange + beside, change.replay.shape[3], change.tokens)
    link = steps.link * change.exchanges if change.p2p_ms is None else np.full_like(steps.link, change.p2p_ms)
    return replace(steps, replay=change.replay, passes=times, link=link)


def gain(steps: View, content: Floats, change: Change) -> Floats:
    """Returns [n]: how many milliseconds shorter steps are with other contents and a change, as `changed` takes
    them."""
    shorter: Floats = steps.pipelines_ms.max(axis=1) - changed(steps, content, change).pipelines_ms.max(axis=1)
    return shorter


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
    run: Examined,
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
    change = change or Change(run.view.replay)
    gains = gain(run.view, content, change)
    # Passes are measured and no estimate. They change as the contents of the same draw do.
    drawn, surely = (
        np.concatenate([gain(run.draws, some, change) - gains[run.rows] for some in np.split(each, ways)])
        for each, ways in ((free, len(free) // len(run.rows)), (sure, 1))
    )
    if change.tokens != 1.0 and change.p2p_ms is None:
        # The data do not say how much of an exchange is in proportion to its size, so it is anything from none to all.
        in_proportion = float((gain(run.view, content, replace(change, exchanges=change.tokens)) - gains).mean())
        drawn = drawn + in_proportion * np.random.default_rng(0).uniform(size=len(free))
    several = gains if len(gains) > 1 else gain(run.view.in_other_blocks(len(run.rows)), content, change)
    of_steps = float(several.std(ddof=1) / math.sqrt(len(gains)))
    return gained(kind, run, gains, of_steps, surely, drawn, unsure)


def gained(
    kind: Kind, run: Examined, gains: Floats, of_steps: float, sure: Floats, free: Floats, unsure: float = 0.0
) -> tuple[Prediction, Floats]:
    """Returns the prediction of a run whose steps get shorter by ``gains`` [n], and by how much they do in every draw
    [draw].

    ``of_steps`` is the standard error of their average. ``sure`` and ``free`` [draw] are how much more a draw gains
    than the estimate does in the same step: ``sure`` has the uncertainty that more steps would remove, ``free`` all.
    ``unsure``, and what the replay misses, are fractions of the step that more steps do not make smaller.
    """
    mean, measured_ms = float(gains.mean()), run.step_ms
    # A change may gain or lose all of the time that the replay misses.
    lasting = (math.hypot(unsure, RERUN) + run.missed) * measured_ms / LEVEL
    gain = Interval.of(mean, math.hypot(of_steps, lasting, REPLAYED * mean), free)
    noise = LEVEL * math.hypot(of_steps, float(np.sqrt(np.mean(sure**2))))
    more, over = 0, mean - LEAST * measured_ms
    if over > 0.0 and gain.low <= LEAST * measured_ms:
        # More steps make `noise` smaller, but not the rest of the interval.
        room = over**2 - max((mean - gain.low) ** 2 - noise**2, 0.0)
        more = more_steps(len(gains), noise, math.sqrt(max(room, 0.0)))
    return Prediction.of(kind, measured_ms, Interval.of(measured_ms) + gain * -1.0, more), mean + free
