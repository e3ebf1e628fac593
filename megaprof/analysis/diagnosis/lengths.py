"""Explains the time of microbatches by their sequences: a + b * tokens + c * the sum of squared lengths.

Matrix products take time in proportion to tokens, attention in proportion to the square of a sequence (Megatron-LM's
FLOP formula has both). The three numbers are fitted for each stage, chunk and kind of pass, and none may be negative.
Differences between microbatches that then remain are not explained by the data.

The fit uses medians, because disturbances only add, and sometimes much: with least squares, the few disturbed passes
would decide the time of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined
from megaprof.analysis.diagnosis.policy import DRAWS
from megaprof.analysis.diagnosis.view import EXCHANGE
from megaprof.analysis.samples import Interval
from megaprof.analysis.table.table import Floats

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


def features(work: Floats) -> Floats:
    """Returns 1, tokens and squares, [..., 3], from tokens, sequences and squares."""
    return np.stack((np.ones_like(work[..., 0]), work[..., 0], work[..., 2]), axis=-1)


def fit(run: Examined) -> tuple[Floats, Floats] | None:
    """Returns the costs of sequences, [1 + draw, s, c, k, 3]: milliseconds per microbatch, per token and per squared
    token, first as estimated and then in draws of microbatches; and the milliseconds of passes as estimated by these,
    [t, d, s, c, k, m]. None unless all lengths are known."""
    work = run.table.work
    if work is None or not np.isfinite(work).all():
        return None
    view = run.view
    # Slowness of ranks applies to all microbatches alike, so it is not part of their content.
    passes = (view.passes - view.delays[EXCHANGE]) / view.lasting[..., None, None, None]
    _, _, s, c, k, _ = passes.shape
    y = np.moveaxis(passes, 5, 2).reshape(-1, s * c * k)
    some = slice(None, None, -(-len(y) // _TELLING))
    x, y = features(work).reshape(-1, 3)[some], y[some]
    random = np.random.default_rng(0)
    drawn = random.multinomial(len(x), np.full(len(x), 1.0 / len(x)), size=DRAWS).astype(float)
    costs = _medians(x, y, np.concatenate((np.ones((1, len(x))), drawn))).reshape(1 + DRAWS, s, c, k, 3)
    return costs, taken(costs[0], work)


def taken(cost: Floats, work: Floats) -> Floats:
    """Returns the time of passes, [t, d, s, c, k, m], given the ``work`` of microbatches and ``cost`` [s, c, k, 3], or
    [t, s, c, k, 3]."""
    cost = np.broadcast_to(cost, (len(work), *cost.shape[-4:]))
    times_ms: Floats = np.einsum("tdmf,tsckf->tdsckm", features(work), cost)
    return np.maximum(times_ms, 1e-9)


def explain(run: Examined, costs: Floats, by_work: Floats) -> Lengths | None:
    """Returns what sequence lengths explain of a run, as `fit` found."""
    table, work = run.table, run.table.work
    if work is None or table.lengths_from is None:
        return None
    scale = np.array([1.0, 1024.0, 1024.0**2])
    scaled, errors = costs[0] * scale, costs[1:].std(axis=0, ddof=1) * scale
    of_passes = tuple(
        PassCost(s, c, table.schedule.kinds[k], fixed_ms, tokens_ms, squares_ms, tuple(errors[s, c, k].tolist()))
        for s, c, k in np.ndindex(scaled.shape[:3])
        for fixed_ms, tokens_ms, squares_ms in [scaled[s, c, k].tolist()]
    )
    squares, tokens = work[..., 2], work[..., 0]
    measured = table.passes.mean(axis=2).sum(axis=(2, 3)).reshape(-1)
    predicted = by_work.mean(axis=2).sum(axis=(2, 3)).reshape(-1)
    shown = np.unique(np.linspace(0, len(measured) - 1, min(len(measured), _SHOWN)).round().astype(int))
    return Lengths(
        source=table.lengths_from,
        tokens=(float(tokens.min()), float(tokens.max())),
        sequences=(float(work[..., 1].min()), float(work[..., 1].max())),
        # The largest microbatch of a step / the mean over all replicas, averaged over steps.
        squares=float((squares.max(axis=(1, 2)) / squares.mean(axis=(1, 2))).mean()),
        tokens_ratio=float((tokens.max(axis=(1, 2)) / tokens.mean(axis=(1, 2))).mean()),
        explained=explained(run, by_work),
        costs=of_passes,
        drawn=tuple(
            zip(squares.reshape(-1)[shown].tolist(), measured[shown].tolist(), predicted[shown].tolist(), strict=True)
        ),
    )


def explained(run: Examined, by_work: Floats, stage: int | None = None, *, replicas: bool = False) -> Interval:
    """Returns which fraction of a variance lengths explain, if passes take ``by_work`` for these (`fit`): that of the
    microbatches of a step, on all stages or on one, or that of its ``replicas``."""
    parts = []
    for times_ms in (run.table.passes, by_work):
        logs = np.log(np.maximum(times_ms, 1e-9))
        logs -= np.median(logs, axis=(0, 1, 5), keepdims=True)  # relative to the median of its stage, chunk and kind
        if stage is None:
            of_each = np.median(logs, axis=(2, 3, 4, 5) if replicas else (2, 3, 4))
        else:
            of_each = logs[:, :, stage].mean(axis=(2, 3))
        parts.append(of_each - of_each.mean(axis=1 if replicas else -1, keepdims=True))
    measured, predicted = parts
    whole, left = (measured**2).reshape(-1), ((measured - predicted) ** 2).reshape(-1)
    n = len(whole)
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), size=10 * DRAWS)
    # Three fitted numbers explain some of any variance, even of pure noise. The first row counts every sample once.
    weights, chance = np.concatenate((np.ones((1, n)), weights)), (n - 1) / max(n - 4, 1)
    shares = np.clip(1.0 - chance * (weights @ left) / np.maximum(weights @ whole, 1e-18), 0.0, 1.0)
    return Interval.of(float(shares[0]), draws=shares[1:] - shares[0])


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
    for columns in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
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
