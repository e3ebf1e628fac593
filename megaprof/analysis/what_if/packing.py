"""What if the sequences of a step lay otherwise in its microbatches, and in its replicas.

What passes take by tokens and squares of lengths is known (`diagnosis.lengths`), so a microbatch of other sequences has
a time. What makes a rank slow stays. What else disturbs passes is not the packing's; later steps have more of it or
less: a step of other microbatches is longer for it by the same factor. Every step is replayed with its own sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined, Price
from megaprof.analysis.diagnosis.lengths import Fit, fit, taken
from megaprof.analysis.diagnosis.policy import LEVEL, REPLAYED
from megaprof.analysis.simulation.replay import Replay, rescheduled
from megaprof.analysis.table.table import Floats
from megaprof.analysis.what_if.changes import Prediction

#: Packings that a person may ask for by name.
BALANCED, BY_TOKENS, POOLED, LONG_FIRST, LONG_LAST, ALTERNATING, FEWER = PLANS = (
    "balanced",
    "tokens",
    "pooled",
    "long-first",
    "long-last",
    "alternating",
    "fewer",
)
#: Runs of one plan in turns with others differ by as much, as a fraction of the step.
_RERUN = 0.02

#: What has each host deal sequences by their lengths, read in the versions of docs/hosts; N is tokens of a microbatch.
#: Megatron-LM's core_v0.16.1 and Megatron-Bridge 0.6.2 have none.
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
Step = list[list[Microbatch]]
"""Lengths by replica and microbatch."""


@dataclass(frozen=True)
class Packed:
    """A run whose sequences are known, and what they take."""

    run: Examined
    """Its steps."""
    found: Fit
    """What passes take by tokens and squares."""
    work: Floats
    """[t, d, m, 3]: tokens, sequences and squares of its microbatches."""
    steps: tuple[Step, ...]
    """The sequences of each."""
    padding: float
    """How many times the tokens of its sequences a microbatch has."""

    @property
    def most(self) -> int:
        """Tokens of a microbatch, at most, that memory was seen to hold."""
        return max(sum(own) for step in self.steps for replica in step for own in replica)

    def cost(self, length: int) -> float:
        """Milliseconds of a sequence on all stages, beside what a microbatch takes anyway."""
        _, per_token, per_square = self.found.cost.sum(axis=(0, 1, 2)).tolist()
        return float(per_token * length * self.padding + per_square * length * length)


def packed(run: Examined) -> Packed | None:
    """None where the sequences of some microbatch were not captured."""
    table = run.table
    found = fit(run)
    if found is None or table.work is None:
        return None
    t, d, m = table.work.shape[:3]
    if any(place not in table.sequences for place in np.ndindex(t, d, m)):
        return None
    steps = tuple([[table.sequences[i, j, k] for k in range(m)] for j in range(d)] for i in range(t))
    tokens = sum(sum(own) for step in steps for replica in step for own in replica)
    return Packed(run, found, table.work, steps, float(table.work[..., 0].sum()) / tokens)


@dataclass(frozen=True)
class Laid:
    """A run whose sequences lie otherwise."""

    prediction: Prediction
    """Its step."""
    passes: Floats
    """[t, d, s, c, k, m]: what every pass takes."""
    replay: Replay
    """Its schedule."""
    steps: tuple[Step, ...] = ()
    """The sequences of each step."""


def plan(known: Packed, name: str, microbatches: int | None = None) -> Laid | None:
    """One of `PLANS`, in so many microbatches; None where the sequences cannot lie so without more tokens in a
    microbatch than any had, or Megatron refuses their number. `FEWER` without a number takes the fewest."""
    captured = known.run.table.schedule.microbatches
    if name == FEWER and microbatches is None:
        least = max(math.ceil(sum(map(sum, replica)) / known.most) for step in known.steps for replica in step)
        found = (plan(known, name, count) for count in range(max(least, 1), captured))
        return next((each for each in found if each is not None), None)
    count = microbatches or captured
    steps = [_PLANS[name](known, step, count) for step in known.steps]
    laid = [step for step in steps if step is not None and all(len(replica) == count for replica in step)]
    if len(laid) < len(steps):
        return None
    try:
        took = relaid(known, laid)
    except ValueError:
        return None
    named = replace(took.prediction, packing=name, microbatches=None if count == captured else count)
    return replace(took, prediction=named)


def relaid(known: Packed, steps: Sequence[Step]) -> Laid:
    """The run with the sequences of each step as ``steps`` have them, as many microbatches in all of them. Raises
    ValueError where Megatron refuses their number."""
    replay = rescheduled(known.run.replay, known.run.replay.schedule.chunks, len(steps[0][0]))
    return replace(_predicted(known, _work(known, steps), replay), steps=tuple(steps))


def switch_of(framework: str | None, tokens: int) -> tuple[str, ...] | None:
    """The options with which ``framework`` deals sequences by their lengths into microbatches of at most so many tokens
    on a GPU; None where it has none, or is not known."""
    found = _SWITCHES.get(framework or "")
    return None if found is None else tuple(each.format(tokens=tokens) for each in found)


def plans(known: Packed) -> list[Prediction]:
    """Every plan that is possible, the quickest first, and behind them what no packing can beat."""
    several = known.work.shape[1] > 1
    made = [plan(known, name) for name in PLANS if several or name != POOLED]
    found = [each.prediction for each in made if each is not None]
    return [*sorted(found, key=lambda each: each.step_ms), even(known)]


def even(known: Packed) -> Prediction:
    """The lower bound: all microbatches of a step alike."""
    mean = np.broadcast_to(known.work.mean(axis=(1, 2), keepdims=True), known.work.shape)
    return replace(_predicted(known, mean, known.run.replay).prediction, kind="even_packing")


def _predicted(known: Packed, work: Floats, replay: Replay) -> Laid:
    """``work`` [t, d, m, 3] of other microbatches."""
    run, found, state = known.run, known.found, known.run.view.state
    n = len(state.passes)
    slow = (run.view.rank * run.view.pace * run.view.peer.max(axis=3))[..., None, None, None]
    before = known.work
    as_was = run.view.pipelines_ms(run.replay).max(axis=1)

    def replayed(replay: Replay, passes: Floats, rows: np.typing.NDArray[np.intp]) -> Floats:
        own = state.at(rows)
        longest: Floats = replay.step_ms(passes, entry=own.entry, link=own.link).max(axis=1)
        return longest

    def passes(cost: Floats, rows: np.typing.NDArray[np.intp]) -> Floats:
        """What they take with these costs, longer by what disturbs the step."""
        usual = replayed(run.replay, taken(cost, before[rows]) * slow[rows], rows)
        longer = (as_was[rows] / usual)[:, None, None, None, None, None]
        other: Floats = taken(cost, work[rows]) * slow[rows] * longer
        return other

    def gain(cost: Floats, rows: np.typing.NDArray[np.intp]) -> Floats:
        shorter: Floats = as_was[rows] - replayed(replay, passes(cost, rows), rows)
        return shorter

    every = np.arange(n)
    gains = gain(found.cost, every)
    mean = float(gains.mean())
    drawn = zip(found.drawn, run.rows, strict=True)
    of_cost = np.array([float(gain(cost, row[None])[0] - gains[row]) for cost, row in drawn])
    # Other steps have other sequences; one step alone does not say how others differ.
    of_steps = float(gains.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.5 * abs(mean)
    noise = LEVEL * math.hypot(of_steps, float(np.sqrt(np.mean(of_cost**2))))
    error = math.hypot(noise, (run.missed + _RERUN) * run.step_ms, LEVEL * REPLAYED * mean)
    prediction = Prediction.of("packing", run.step_ms, Price(mean, mean - error, mean + error))
    return Laid(prediction, passes(found.cost, every), replay)


def _work(known: Packed, steps: Sequence[Step]) -> Floats:
    """[t, d, m, 3] of laid sequences."""
    rows = [
        [
            [(sum(own) * known.padding, len(own), sum(each * each for each in own)) for own in replica]
            for replica in step
        ]
        for step in steps
    ]
    return np.array(rows, dtype=float)


def _dealt(lengths: Sequence[int], count: int, weight: Callable[[int], float], most: int) -> list[Microbatch] | None:
    """Sequences in ``count`` groups of about the same weight, each of ``most`` tokens at most: the longest first, each
    to the lightest group with room (Graham 1969). None where one finds no room, or a group stays empty."""
    if len(lengths) < count:
        return None
    groups: list[list[int]] = [[] for _ in range(count)]
    loads, tokens = [0.0] * count, [0] * count
    for length in sorted(lengths, reverse=True):
        free = [place for place in range(count) if tokens[place] + length <= most]
        if not free:
            return None
        place = min(free, key=loads.__getitem__)
        groups[place].append(length)
        loads[place] += weight(length)
        tokens[place] += length
    return [tuple(group) for group in groups]


def _balanced(known: Packed, step: Step, count: int) -> Step | None:
    return _each(step, lambda own: _dealt(own, count, known.cost, known.most))


def _by_tokens(known: Packed, step: Step, count: int) -> Step | None:
    return _each(step, lambda own: _dealt(own, count, float, known.most))


def _each(step: Step, deal: Callable[[list[int]], list[Microbatch] | None]) -> Step | None:
    found = []
    for replica in step:
        laid = deal([length for own in replica for length in own])
        if laid is None:
            return None
        found.append(laid)
    return found


def _pooled(known: Packed, step: Step, count: int) -> Step | None:
    """Microbatches of all sequences, dealt to replicas: the longest first, each to the one that has least."""
    laid = _dealt([n for replica in step for own in replica for n in own], count * len(step), known.cost, known.most)
    if laid is None:
        return None

    def takes(own: Microbatch) -> float:
        return sum(map(known.cost, own))

    found: Step = [[] for _ in step]
    for own in sorted(laid, key=takes, reverse=True):
        free = [replica for replica in found if len(replica) < count]
        min(free, key=lambda replica: sum(map(takes, replica))).append(own)
    return found


def _ordered(order: Callable[[list[Microbatch]], list[Microbatch]]) -> Callable[[Packed, Step, int], Step | None]:
    def laid(known: Packed, step: Step, count: int) -> Step | None:
        return [order(sorted(replica, key=lambda own: sum(map(known.cost, own)), reverse=True)) for replica in step]

    return laid


def _in_turns(longest_first: list[Microbatch]) -> list[Microbatch]:
    return list(_alternating(longest_first))


def _alternating(longest_first: list[Microbatch]) -> Iterator[Microbatch]:
    left = list(longest_first)
    while left:
        yield left.pop(0)
        if left:
            yield left.pop()


_PLANS: dict[str, Callable[[Packed, Step, int], Step | None]] = {
    BALANCED: _balanced,
    BY_TOKENS: _by_tokens,
    POOLED: _pooled,
    LONG_FIRST: _ordered(lambda own: own),
    LONG_LAST: _ordered(lambda own: own[::-1]),
    ALTERNATING: _ordered(_in_turns),
    FEWER: _balanced,
}
