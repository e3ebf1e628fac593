"""Predicts a step whose sequences are in other microbatches, or in other replicas.

The time of passes by tokens and squares of lengths is known (`diagnosis.lengths`), so the time of a microbatch with
other sequences is known, too. Slow ranks stay slow. Other disturbances do not depend on the packing, and differ from
step to step: they make a step with other microbatches longer by the same factor. Every step is replayed with its own
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined
from megaprof.analysis.diagnosis.lengths import fit, taken
from megaprof.analysis.diagnosis.policy import OTHER_SEQUENCES
from megaprof.analysis.diagnosis.view import EXCHANGE, View
from megaprof.analysis.simulation import Replay, rescheduled
from megaprof.analysis.table.table import Floats
from megaprof.analysis.what_if.changes import Kind, Prediction, gained

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
    """The sequences of each step of a run, and the time of passes by them. ``work`` [t, d, m, 3] has the tokens,
    sequences and squares of its microbatches; ``padding`` is tokens of a microbatch / tokens of its sequences."""

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
    """Returns a run with its sequences; None if those of some microbatch were not captured."""
    table = run.table
    fitted = fit(run)
    if fitted is None or table.work is None:
        return None
    t, d, m = table.work.shape[:3]
    if any(place not in table.sequences for place in np.ndindex(t, d, m)):
        return None
    steps = tuple([[table.sequences[i, j, k] for k in range(m)] for j in range(d)] for i in range(t))
    tokens = sum(sum(microbatch) for step in steps for replica in step for microbatch in replica)
    return Sequences(replace(run, terms=()), fitted[0], table.work, steps, float(table.work[..., 0].sum()) / tokens)


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


def repacked(sequences: Sequences, steps: Sequence[Step], name: str | None = None) -> tuple[Prediction, Examined]:
    """Predicts the run with the sequences of each step packed as in ``steps`` (by the plan with this ``name``), which
    all have equally many microbatches. Returns these steps, too. Raises ValueError if Megatron refuses that number."""
    captured, count = sequences.run.view.replay, len(steps[0][0])
    replay = rescheduled(captured, captured.schedule.chunks, count)
    work = [
        [
            [
                (sum(microbatch) * sequences.padding, len(microbatch), sum(length * length for length in microbatch))
                for microbatch in replica
            ]
            for replica in step
        ]
        for step in steps
    ]
    prediction, run = _predicted(sequences, "packing", np.array(work, dtype=float), replay)
    changed = None if count == captured.schedule.microbatches else count
    return replace(prediction, packing=name, microbatches=changed), run


def switch_of(framework: str | None, tokens: int) -> tuple[str, ...] | None:
    """Returns the options with which ``framework`` packs sequences by length, into microbatches of at most ``tokens``
    on a GPU; None if it has no such options or is not known."""
    options = _SWITCHES.get(framework or "")
    return None if options is None else tuple(option.format(tokens=tokens) for option in options)


def plans(sequences: Sequences) -> list[Prediction]:
    """Returns every plan that is possible, the quickest first, followed by the bound that no packing can beat."""
    several = sequences.work.shape[1] > 1
    possible = {name: plan(sequences, name) for name in PLANS if several or name != "pooled"}
    predictions = [repacked(sequences, steps, name)[0] for name, steps in possible.items() if steps is not None]
    # The bound: all microbatches of a step take equally long.
    mean = np.broadcast_to(sequences.work.mean(axis=(1, 2), keepdims=True), sequences.work.shape)
    even, _ = _predicted(sequences, "even_packing", mean, sequences.run.view.replay)
    return [*sorted(predictions, key=lambda prediction: prediction.step_ms.value), even]


def _predicted(sequences: Sequences, kind: Kind, work: Floats, replay: Replay) -> tuple[Prediction, Examined]:
    """Returns the prediction for microbatches of other ``work`` [t, d, m, 3], and the steps with these."""
    run, every = sequences.run, np.arange(len(work))

    def laid(steps: View, costs: Floats, rows: np.typing.NDArray[np.intp]) -> View:
        """Returns the steps whose work is in ``rows``, with other passes by these costs [s, c, k, 3] or [row, s, c, k,
        3], longer by the disturbances of the step."""
        slow = steps.lasting[..., None, None, None]
        usual = replace(steps, passes=taken(costs, sequences.work[rows]) * slow)
        longer = steps.pipelines_ms.max(axis=1) / usual.pipelines_ms.max(axis=1)
        passes = taken(costs, work[rows]) * slow * longer[:, None, None, None, None, None]
        return replace(steps, replay=replay, passes=passes, exposed={}, held={EXCHANGE: np.zeros_like(passes)})

    estimated, drawn = sequences.costs[0], sequences.costs[1:]
    view, draws = laid(run.view, estimated, every), laid(run.draws, estimated, run.rows)
    gains = run.view.step_ms - view.step_ms
    of_cost = draws.step_ms - laid(run.draws, drawn, run.rows).step_ms
    n, mean = len(gains), float(gains.mean())
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
