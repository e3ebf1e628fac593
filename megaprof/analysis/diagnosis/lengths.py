"""Explains the time of microbatches by their sequences: a + b * tokens + c * the sum of squared lengths.

Matrix products take time in proportion to tokens, attention in proportion to the square of a sequence (Megatron-LM's
FLOP formula has both). The three numbers are fitted for each stage, chunk and kind of pass, and none may be negative.
Differences between microbatches that then remain are not explained by the data.

The fit uses medians, because disturbances only add, and sometimes much: with least squares, the few disturbed passes
would decide the time of tokens.

The time of experts is at most proportional to their tokens: a rank with 1.1 times the tokens of its peers is at most
1.1 times as slow for that reason.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined
from megaprof.analysis.diagnosis.policy import DRAWS, MOST
from megaprof.analysis.diagnosis.view import EXCHANGE
from megaprof.analysis.samples import Interval
from megaprof.analysis.table.table import Floats, Table

#: The most microbatches in a picture.
_SHOWN = 400
#: The most microbatches that the fit uses.
_TELLING = 1000
#: Rounds of the fit, and the smallest deviation that it distinguishes, as a fraction of a usual pass.
_ROUNDS, _ALIKE = 12, 1e-3


@dataclass(frozen=True)
class PassCost:
    """The time of one kind of pass on one chunk: a sum of three parts, each with its standard error."""

    stage: int
    """Stage."""
    chunk: int
    """Model chunk on that stage."""
    kind: str
    """``forward`` or ``backward``."""
    fixed_ms: float
    """Milliseconds per microbatch."""
    tokens_ms: float
    """Milliseconds per 1,024 tokens."""
    squares_ms: float
    """Additional milliseconds for the square of a sequence of 1,024 tokens."""
    errors_ms: tuple[float, float, float]
    """Standard errors of these three."""


@dataclass(frozen=True)
class Lengths:
    """Sequence lengths of a run's microbatches, and what they explain."""

    source: str
    """Source of the lengths, one of `megaprof.formats.facts.SOURCES`."""
    tokens: tuple[float, float]
    """Smallest and largest number of tokens in a microbatch."""
    sequences: tuple[float, float]
    """Smallest and largest number of sequences in a microbatch."""
    squares: float
    """Sum of squared lengths in the longest microbatch of a step / the mean, averaged over steps."""
    tokens_ratio: float
    """Most tokens in a microbatch of a step / the mean, averaged over steps."""
    explained: Interval
    """The fraction of the variance between microbatches of a step that they explain."""
    costs: tuple[PassCost, ...]
    """The time of passes by tokens and sequences, for each stage, chunk and kind of pass."""
    drawn: tuple[tuple[float, float, float], ...]
    """Some microbatches: sum of squared lengths, milliseconds of their passes averaged over stages, and the
    milliseconds predicted from their lengths."""


@dataclass(frozen=True)
class Fit:
    """The time of passes by their sequences, as arrays that can predict other microbatches."""

    cost: Floats
    """[s, c, k, 3]: milliseconds per microbatch, per token, and per squared token."""
    drawn: Floats
    """[draw, s, c, k, 3]: ``cost`` from draws of microbatches."""
    of_work: Floats
    """[t, d, s, c, k, m]: milliseconds of passes according to ``cost``."""


def features(work: Floats) -> Floats:
    """Returns 1, tokens and squares, [..., 3], from tokens, sequences and squares."""
    return np.stack((np.ones_like(work[..., 0]), work[..., 0], work[..., 2]), axis=-1)


def fit(run: Examined) -> Fit | None:
    """Fits the time of passes by their sequences. Returns None unless the lengths of all microbatches are known."""
    work = run.table.work
    if work is None or not np.isfinite(work).all():
        return None
    view = run.view
    # Slowness of ranks applies to all microbatches alike, so it is not part of their content.
    passes = (view.passes - view.held[EXCHANGE]) / run.model.slow[..., None, None, None]
    _, _, s, c, k, _ = passes.shape
    y = np.moveaxis(passes, 5, 2).reshape(-1, s * c * k)
    some = slice(None, None, -(-len(y) // _TELLING))
    x, y = features(work).reshape(-1, 3)[some], y[some]
    random = np.random.default_rng(0)
    drawn = random.multinomial(len(x), np.full(len(x), 1.0 / len(x)), size=DRAWS).astype(float)
    costs = _medians(x, y, np.concatenate((np.ones((1, len(x))), drawn))).reshape(1 + DRAWS, s, c, k, 3)
    return Fit(costs[0], costs[1:], taken(costs[0], work))


def taken(cost: Floats, work: Floats) -> Floats:
    """Returns the time of passes, [t, d, s, c, k, m], given the ``work`` of microbatches and ``cost`` [s, c, k, 3]."""
    times_ms: Floats = np.einsum("tdmf,sckf->tdsckm", features(work), cost)
    return np.maximum(times_ms, 1e-9)


def explain(run: Examined, fitted: Fit) -> Lengths | None:
    """Returns what sequence lengths explain of a run."""
    table, work = run.table, run.table.work
    if work is None or table.lengths_from is None:
        return None
    cost, kinds = fitted.cost, table.schedule.kinds
    scale = np.array([1.0, 1024.0, 1024.0**2])
    scaled, errors = cost * scale, fitted.drawn.std(axis=0, ddof=1) * scale
    numbers = np.ndindex(cost.shape[:3]), scaled.reshape(-1, 3).tolist(), errors.reshape(-1, 3).tolist()
    costs = tuple(
        PassCost(stage, chunk, kinds[k], fixed_ms, tokens_ms, squares_ms, tuple(errors_ms))
        for (stage, chunk, k), (fixed_ms, tokens_ms, squares_ms), errors_ms in zip(*numbers, strict=True)
    )
    squares, tokens = work[..., 2], work[..., 0]
    measured = table.passes.mean(axis=2).sum(axis=(2, 3)).reshape(-1)
    by_work = fitted.of_work.mean(axis=2).sum(axis=(2, 3)).reshape(-1)
    shown = np.unique(np.linspace(0, len(measured) - 1, min(len(measured), _SHOWN)).round().astype(int))
    return Lengths(
        source=table.lengths_from,
        tokens=(float(tokens.min()), float(tokens.max())),
        sequences=(float(work[..., 1].min()), float(work[..., 1].max())),
        squares=_longest(squares),
        tokens_ratio=_longest(tokens),
        explained=of_microbatches(run, fitted),
        costs=costs,
        drawn=tuple(
            zip(squares.reshape(-1)[shown].tolist(), measured[shown].tolist(), by_work[shown].tolist(), strict=True)
        ),
    )


def _longest(work: Floats) -> float:
    """Returns the largest microbatch of a step / the mean over all replicas, averaged over steps."""
    return float((work.max(axis=(1, 2)) / work.mean(axis=(1, 2))).mean())


def reason(explained: Interval) -> str | None:
    """Returns ``data`` if lengths explain most of a difference, ``machine`` if they do not, None if that is not
    certain."""
    return "data" if explained.low >= MOST else "machine" if explained.high < MOST else None


def of_microbatches(run: Examined, fitted: Fit, stage: int | None = None) -> Interval:
    """Returns how much lengths explain of the differences between microbatches of a step, on all stages or on one."""
    ratio, by_work = _logs(run, fitted)
    if stage is None:
        measured, predicted = np.median(ratio, axis=(2, 3, 4)), np.median(by_work, axis=(2, 3, 4))
    else:
        measured, predicted = (logs[:, :, stage].mean(axis=(2, 3)) for logs in (ratio, by_work))
    return _explained(
        measured - measured.mean(axis=-1, keepdims=True), predicted - predicted.mean(axis=-1, keepdims=True)
    )


def of_replicas(run: Examined, fitted: Fit) -> Interval:
    """Returns how much lengths explain of the differences between replicas of a step."""
    ratio, by_work = (np.median(logs, axis=(2, 3, 4, 5)) for logs in _logs(run, fitted))
    return _explained(ratio - ratio.mean(axis=1, keepdims=True), by_work - by_work.mean(axis=1, keepdims=True))


def _logs(run: Examined, fitted: Fit) -> tuple[Floats, Floats]:
    """Returns logarithms of passes, measured and predicted by their work, each relative to the median of its stage,
    chunk and kind."""
    both = (np.log(np.maximum(run.table.passes, 1e-9)), np.log(fitted.of_work))
    measured, predicted = (logs - np.median(logs, axis=(0, 1, 5), keepdims=True) for logs in both)
    return measured, predicted


def _explained(measured: Floats, predicted: Floats) -> Interval:
    """Returns which fraction of a variance is explained."""
    whole, left = (measured**2).reshape(-1), ((measured - predicted) ** 2).reshape(-1)
    n = len(whole)
    random = np.random.default_rng(0)
    weights = random.multinomial(n, np.full(n, 1.0 / n), size=10 * DRAWS)
    # Three fitted numbers explain some of any variance, even of pure noise.
    chance = (n - 1) / max(n - 4, 1)

    def share(whole: float, left: float) -> float:
        return float(np.clip(1.0 - chance * left / max(whole, 1e-18), 0.0, 1.0))

    drawn = [share(float(weight @ whole), float(weight @ left)) for weight in weights]
    at = share(float(whole.sum()), float(left.sum()))
    return Interval.of(at, draws=np.array(drawn) - at)


def _medians(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Returns the coefficients [draw, q, 3], none below 0, that fit ``y`` [n, q] by ``x`` [n, 3] with weights [draw, n]
    and the least absolute deviations. Every round is a fit by least squares whose weights are divided by the deviations
    of the round before (Schlossmacher 1973)."""
    alike = _ALIKE * np.maximum(np.median(y, axis=0), 1e-9)
    of_passes = np.broadcast_to(weights[..., None], (*weights.shape, y.shape[1]))
    coefficients = _not_negative(x, y, of_passes)
    for _ in range(_ROUNDS):
        off = np.abs(y - np.einsum("nf,wqf->wnq", x, coefficients))
        coefficients = _not_negative(x, y, of_passes / np.maximum(off, alike))
    return coefficients


def _not_negative(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Returns the coefficients [draw, q, 3], none below 0, that fit ``y`` [n, q] by ``x`` [n, 3] with weights
    [draw, n, q] and the least squares.

    There are seven ways to choose which of the three coefficients are not 0. All are solved, and the best solution
    without a negative number is taken. It is the one that Lawson and Hanson's algorithm finds.
    """
    x, scale = x / (size := np.maximum(np.abs(x).max(axis=0), 1e-18)), size
    by_pass = weights.swapaxes(1, 2)  # [draw, q, n]
    gram = (by_pass @ (x[:, :, None] * x[:, None]).reshape(len(x), -1)).reshape(*by_pass.shape[:2], 3, 3)
    right = (by_pass * y.T) @ x
    best = np.zeros((len(weights), y.shape[1], 3))
    gained = np.zeros((len(weights), y.shape[1]))
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(3), count):
            columns = list(chosen)
            # Features that say the same share the effect. Tokens and the constant do if all microbatches are equal.
            inverse = np.linalg.pinv(gram[..., columns, :][..., columns], hermitian=True, rcond=1e-9)
            solved = (inverse @ right[..., columns, None])[..., 0]
            gain = (solved * right[..., columns]).sum(axis=-1)
            better = (solved >= 0.0).all(axis=-1) & (gain > gained * (1.0 + 1e-9))
            candidate = np.zeros_like(best)
            candidate[..., columns] = solved
            best = np.where(better[..., None], candidate, best)
            gained = np.where(better, gain, gained)
    coefficients: Floats = best / scale
    return coefficients


@dataclass(frozen=True)
class ExpertLoad:
    """The tokens of some experts compared with those of others."""

    tokens: float
    """Tokens that the experts of the slow rank got in a captured step; for a stage, those of its busiest rank."""
    usual: float
    """Average over its peers; for a stage, the median of the other stages."""
    ranks: int | None = None
    """Number of ranks that share the tokens, with the slow one; None for stages, each of which has its own tokens."""

    def explains(self, factor: float) -> float:
        """Returns how much of being ``factor`` times as slow the tokens can explain at most."""
        return float(np.clip((self.tokens / max(self.usual, 1.0) - 1.0) / max(factor - 1.0, 1e-9), 0.0, 1.0))

    @property
    def evened(self) -> float:
        """The gain from evening out the experts, as a fraction of the gain if the rank became as quick as its peers are
        now. It is less than 1 because the peers get the tokens that the rank loses."""
        return 1.0 if self.ranks is None else 1.0 - 1.0 / self.ranks


def load_of_rank(table: Table, ranks: tuple[int, ...]) -> ExpertLoad | None:
    """Returns the load of one rank compared with its peers, or of ranks that wait for each other compared with those of
    other replicas. None if tokens were not counted, or if there are no others."""
    if table.experts is None:
        return None
    named = table.ranks[..., : table.experts.shape[2]]
    d, s, p = (int(indices[0]) for indices in np.nonzero(np.isin(named, ranks)))
    if len(ranks) == 1 and table.experts.shape[2] > 1:
        tokens, others = table.experts[d, s, p], np.delete(table.experts[d, s], p)
    else:
        most = table.experts.max(axis=2)[:, s]
        tokens, others = most[d], np.delete(most, d)
    return ExpertLoad(float(tokens), float(others.mean()), 1 + len(others)) if len(others) else None


def load_of_stage(table: Table, stage: int) -> ExpertLoad | None:
    """Returns the load of the busiest rank of a stage, which the others wait for, compared with other stages."""
    if table.experts is None or table.experts.shape[1] == 1:
        return None
    most = table.experts.max(axis=2).mean(axis=0)
    return ExpertLoad(float(most[stage]), float(np.median(np.delete(most, stage))))
