"""Captured steps, replayed as they are and with a change of contents, microbatches, exchanges or packings.

The gain of a change is the replay of every captured step minus its replay with the change, both from the same passes:
a pass is scaled as its content is, with its waits for a core, and the time beyond (stalls, garbage collection, waiting
for data) stays as it was. Draws show how certain a gain is: each draw takes other steps and microbatches, and one way
in which contents can be divided (`contents`). The differences between steps, and what the replay misses, make the
interval wider.

A packing puts sequences into other microbatches, or into other replicas. The time of passes by tokens and squares of
lengths is known (`diagnosis.lengths`), so the time of a microbatch with other sequences is known, too. Slow ranks stay
slow. Other disturbances do not depend on the packing, and differ from step to step: they make a step with other
microbatches longer by the same factor. Every step is replayed with its own sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined, more_steps
from megaprof.analysis.diagnosis.lengths import fit, taken
from megaprof.analysis.diagnosis.policy import LEAST, OTHER_SEQUENCES, REPLAYED, RERUN
from megaprof.analysis.diagnosis.view import EXCHANGE, View
from megaprof.analysis.samples import LEVEL, Interval
from megaprof.analysis.simulation import Replay, rescheduled
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
    """How the same sequences are packed, one of `changes.PLANS`; None: as captured."""
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
    exchange = np.minimum(steps.delays[EXCHANGE], 0.0 if "unknown" in steps.exposed else beside)
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
    cuts = np.arange(count + 1) * larger  # in captured microbatches
    cuts = np.where(np.abs(cuts - np.rint(cuts)) < 1e-9, np.rint(cuts), cuts)
    around, left = np.divmod(cuts, before)
    place = np.minimum(left.astype(np.intp), before - 1)
    until_cuts = ends[..., place] + times[..., place] * (left - place) + around * ends[..., -1:]
    return np.diff(until_cuts, axis=-1)


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


#: The options with which each host deals sequences by their lengths, read in the versions of docs/hosts. Megatron-LM's
#: core_v0.16.1 and Megatron-Bridge 0.6.2 have none.
_SWITCHES = {
    "verl": (
        "trainer.balance_batch=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
    ),
    "slime": ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "{tokens}", "--balance-by-flops"),
    "skyrl": ("trainer.max_tokens_per_microbatch={tokens}",),
    "ms-swift": ("--sequence_packing_scheduler", "dp_balanced"),
}

Microbatch = tuple[int, ...]
"""The lengths of its sequences."""
Step = list[list[Microbatch]]
"""Microbatches by replica."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of some steps of a run, and the time of passes by them. ``work`` [n, d, m, 3] has the tokens,
    sequences and squares of their microbatches; ``padding`` is tokens of a microbatch / tokens of its sequences."""

    run: Examined
    costs: Floats
    work: Floats
    steps: tuple[Step, ...]
    padding: float

    @property
    def most(self) -> int:
        """The most tokens in a captured microbatch: memory is known to hold as many."""
        return max(sum(microbatch) for step in self.steps for replica in step for microbatch in replica)

    def cost(self, length: int) -> float:
        """Returns the milliseconds of a sequence on all stages, without the fixed time of a microbatch."""
        _, per_token, per_square = self.costs[0].sum(axis=(0, 1, 2)).tolist()
        return float(per_token * length * self.padding + per_square * length * length)


def sequences_of(run: Examined) -> Sequences | None:
    """Returns a run with its sequences; None if they were captured in no step."""
    fitted = fit(run)
    if fitted is None or not run.table.sequences:
        return None
    of_each, steps = zip(*run.table.sequences, strict=True)
    work = np.stack(of_each)
    tokens = sum(sum(microbatch) for step in steps for replica in step for microbatch in replica)
    return Sequences(replace(run, terms=()), fitted[0], work, steps, float(work[..., 0].sum()) / tokens)


def plan(sequences: Sequences, name: str, microbatches: int | None = None) -> list[Step] | None:
    """Returns the sequences of each step, packed by one of `PLANS` into this number of microbatches. None if some
    microbatch would have more tokens than any captured one, or if Megatron refuses the number. ``fewer`` without a
    number takes the fewest."""
    replay = sequences.run.view.replay
    captured = replay.schedule.microbatches
    if name == "fewer" and microbatches is None:
        least = max(math.ceil(sum(map(sum, replica)) / sequences.most) for step in sequences.steps for replica in step)
        fewer = (plan(sequences, name, count) for count in range(max(least, 1), captured))
        return next((laid for laid in fewer if laid is not None), None)
    count = microbatches or captured
    steps = [PLANS[name](sequences, step, count) for step in sequences.steps]
    laid = [step for step in steps if step is not None and all(len(replica) == count for replica in step)]
    try:
        rescheduled(replay, replay.schedule.chunks, count)
    except ValueError:
        return None
    return laid if len(laid) == len(steps) else None


def repacked(sequences: Sequences, steps: Sequence[Step]) -> tuple[Prediction, Examined]:
    """Predicts the run with the sequences of each step packed as in ``steps``, which all have equally many
    microbatches. Returns these steps, too. Raises ValueError if Megatron refuses that number."""
    captured, count = sequences.run.view.replay, len(steps[0][0])
    replay = rescheduled(captured, captured.schedule.chunks, count)
    work = [
        [[(sum(own) * sequences.padding, len(own), sum(n * n for n in own)) for own in replica] for replica in step]
        for step in steps
    ]
    prediction, run = _predicted(sequences, "packing", np.array(work, dtype=float), replay)
    changed = None if count == captured.schedule.microbatches else count
    return replace(prediction, microbatches=changed), run


def switch_of(framework: str | None, tokens: int) -> tuple[str, ...] | None:
    """Returns the options with which ``framework`` packs sequences by length, into microbatches of at most ``tokens``
    on a GPU; None if it has no such options or is not known."""
    options = _SWITCHES.get(framework or "")
    return None if options is None else tuple(option.format(tokens=tokens) for option in options)


def plans(sequences: Sequences) -> list[Prediction]:
    """Returns every plan that is possible, the quickest first, followed by the bound that no packing can beat."""
    several = sequences.work.shape[1] > 1
    possible = {name: plan(sequences, name) for name in PLANS if several or name != "pooled"}
    predictions = [
        replace(repacked(sequences, steps)[0], packing=name) for name, steps in possible.items() if steps is not None
    ]
    # The bound: all microbatches of a step take equally long.
    mean = np.broadcast_to(sequences.work.mean(axis=(1, 2), keepdims=True), sequences.work.shape)
    even, _ = _predicted(sequences, "even_packing", mean, sequences.run.view.replay)
    return [*sorted(predictions, key=lambda prediction: prediction.step_ms.value), even]


def _predicted(sequences: Sequences, kind: Kind, work: Floats, replay: Replay) -> tuple[Prediction, Examined]:
    """Returns the prediction for microbatches of other ``work`` [n, d, m, 3], and the steps with these. Every step of
    the run gets the sequences of one whose sequences are known, as they were and packed anew."""
    run, own = sequences.run, np.asarray(sequences.run.table.work)  # to which the costs were fitted

    def laid(steps: View, costs: Floats, rows: np.typing.NDArray[np.intp], work: Floats, replay: Replay) -> View:
        """Returns the steps in ``rows`` with other passes by these costs [s, c, k, 3] or [row, s, c, k, 3], longer by
        the disturbances of the step."""
        slow = steps.lasting[..., None, None, None]
        usual = replace(steps, passes=taken(costs, own[rows]) * slow)
        longer = steps.pipelines_ms.max(axis=1) / usual.pipelines_ms.max(axis=1)
        passes = taken(costs, work[rows % len(work)]) * slow * longer[:, None, None, None, None, None]
        return replace(steps, replay=replay, passes=passes, exposed={}, delays={EXCHANGE: np.zeros_like(passes)})

    def as_captured(steps: View, costs: Floats, rows: np.typing.NDArray[np.intp]) -> Floats:
        return laid(steps, costs, rows, sequences.work, steps.replay).step_ms

    estimated, drawn, every = sequences.costs[0], sequences.costs[1:], np.arange(len(run.table.length))
    view = laid(run.view, estimated, every, work, replay)
    draws = laid(run.draws, estimated, run.rows, work, replay)
    gains = as_captured(run.view, estimated, every) - view.step_ms
    of_estimate = as_captured(run.draws, estimated, run.rows) - draws.step_ms
    of_drawn = as_captured(run.draws, drawn, run.rows) - laid(run.draws, drawn, run.rows, work, replay).step_ms
    of_cost = of_drawn - of_estimate
    n, mean = min(len(gains), len(work)), float(gains.mean())
    of_steps = float(gains.std(ddof=1)) / math.sqrt(n) if n > 1 else OTHER_SEQUENCES * abs(mean)
    prediction, _ = gained(kind, run, gains, of_steps, of_cost, of_cost)
    shorter = replace(run.table, length=run.table.length - gains)
    return prediction, replace(run, table=shorter, view=view, draws=draws, replayed_ms=float(view.step_ms.mean()))


def _dealt(lengths: Sequence[int], count: int, weight: Callable[[int], float], most: int) -> list[Microbatch] | None:
    """Returns the sequences in ``count`` groups of about the same weight, with at most ``most`` tokens each. The
    longest are dealt first, each to the lightest group with room (Graham 1969). None if a sequence finds no room, or if
    a group stays empty."""
    if len(lengths) < count:
        return None
    groups: list[list[int]] = [[] for _ in range(count)]
    weights, tokens = [0.0] * count, [0] * count
    for length in sorted(lengths, reverse=True):
        free = [place for place in range(count) if tokens[place] + length <= most]
        if not free:
            return None
        place = min(free, key=weights.__getitem__)
        groups[place].append(length)
        weights[place] += weight(length)
        tokens[place] += length
    return [tuple(group) for group in groups]


def _balanced(
    sequences: Sequences, step: Step, count: int, weight: Callable[[int], float] | None = None
) -> Step | None:
    """Returns the sequences of each replica in microbatches of about the same weight: what they take, unless given."""
    lengths = [[n for microbatch in replica for n in microbatch] for replica in step]
    laid = [_dealt(of_replica, count, weight or sequences.cost, sequences.most) for of_replica in lengths]
    whole = [replica for replica in laid if replica is not None]
    return whole if len(whole) == len(laid) else None


def _pooled(sequences: Sequences, step: Step, count: int) -> Step | None:
    """Returns microbatches made from the sequences of all replicas. They are dealt to replicas, the longest first, each
    to the replica with the least work."""
    lengths = [n for replica in step for microbatch in replica for n in microbatch]
    laid = _dealt(lengths, count * len(step), sequences.cost, sequences.most)
    if laid is None:
        return None
    replicas: Step = [[] for _ in step]
    for microbatch in _longest_first(sequences, laid):
        free = [replica for replica in replicas if len(replica) < count]
        min(free, key=lambda replica: sum(sequences.cost(n) for dealt in replica for n in dealt)).append(microbatch)
    return replicas


def _longest_first(sequences: Sequences, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    return sorted(microbatches, key=lambda microbatch: sum(map(sequences.cost, microbatch)), reverse=True)


def _ordered(order: Callable[[list[Microbatch]], list[Microbatch]]) -> Callable[[Sequences, Step, int], Step | None]:
    """Returns a plan that keeps the microbatches and changes their order. ``order`` takes them longest first."""
    return lambda sequences, step, count: [order(_longest_first(sequences, replica)) for replica in step]


#: Packings that a person may ask for by name.
PLANS: dict[str, Callable[[Sequences, Step, int], Step | None]] = {
    "balanced": _balanced,
    "tokens": lambda sequences, step, count: _balanced(sequences, step, count, float),
    "pooled": _pooled,
    "long-first": _ordered(list),
    "long-last": _ordered(lambda longest_first: longest_first[::-1]),
    # The longest, the shortest, the second longest, the second shortest, and so on.
    "alternating": _ordered(lambda longest: [longest[-(i + 1) // 2 if i % 2 else i // 2] for i in range(len(longest))]),
    "fewer": _balanced,
}
