"""The run as it is, which every change is compared with: robust costs, what varied around them, and what stalled.

A cost is the median of one pass (a stage's chunk, forward or backward) over steps and microbatches. Around it a pass
varies with its microbatch, on all stages alike (sequence lengths), and by noise. Both go with the cost: a stage that
gets half as many layers varies half as much. Two things do not: a pass that took far longer than its microbatch
explains (a stall), and a stage that was slower in one step than in the others. A step that lost time to them would have
lost it with any layout, so this time is added to a prediction, not scaled.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.what_if.replay import CapturedRun, CapturedStep, Times

__all__ = ["Baseline", "Sample", "Stall", "Typical"]

#: Uncertainties cover this many standard errors.
ERRORS = 2.0
#: A pass is a stall when it takes this much longer than its microbatch explains, as a fraction ...
_STALL = 0.5
#: ... and this many standard deviations of what such passes vary by.
_STALL_SIGMAS = 5.0
_SIGMA = 1.4826  # the standard deviation over the median absolute deviation, of normal samples
#: Bootstrap samples: so many, fewer where they would simulate more passes than this, ...
_SAMPLES, _MOST_PASSES = 40, 2_000_000
#: ... and never fewer than this.
_FEWEST_SAMPLES = 8

_Array = npt.NDArray[np.float64]
Typical = tuple[list[list[float]], list[list[float]]]
"""Forward and backward milliseconds of one microbatch as ``[stage][chunk]``."""


@dataclass(frozen=True)
class Stall:
    """One pass that took far longer than its microbatch explains."""

    kind: str
    """``forward`` or ``backward``."""
    stage: int
    """Its pipeline rank."""
    step: int
    """In which step."""
    factor: float
    """How many times the median of such passes it took."""


@dataclass(frozen=True)
class Sample:
    """The run as it might as well have been captured: one draw of its steps, and of their microbatches."""

    typical: Typical
    """The costs that this draw gives."""
    measured_ms: float
    """Milliseconds of its mean step."""


class Baseline:
    """The run as it is. ``measured_ms``: its step, as it is printed."""

    def __init__(self, run: CapturedRun, steps: Sequence[CapturedStep], measured_ms: float) -> None:
        self.run, self.steps, self.measured_ms = run, steps, measured_ms
        self.microbatches = steps[0].microbatches
        self._times = [_array(step) for step in steps]
        self._typical = np.median(np.concatenate(self._times, axis=-1), axis=-1)
        self.typical: Typical = _as_typical(self._typical)
        #: Of every step and pass, [kind, stage, chunk, microbatch]: how many times the cost it took, without stalls.
        self._shapes, self.stalls = self._shaped()
        replays = [self.replay(at, self.typical, run) for at in range(len(steps))]
        # What every replay misses scales with the pipeline; what single steps lost does not.
        error = statistics.median((s.pipeline_ms - s.replay_ms) / r for s, r in zip(steps, replays, strict=True))
        self._scaled_ms = [(1.0 + error) * replay for replay in replays]
        self.replay_error = statistics.median(abs(step.replay_error) for step in steps)
        self.peers = self._peers()

    def replay(self, at: int, typical: Typical, run: CapturedRun, resize: Any = None) -> float:
        """Milliseconds of the pipeline of the captured step number ``at`` with other costs, varying as its own did.

        ``run`` may have another number of chunks; ``resize`` changes the microbatches of `Times`.
        """
        wanted = np.array(typical[: 1 if run.forward_only else 2])
        shape = self._shapes[at]
        if wanted.shape[2] != shape.shape[2]:
            shape = shape.mean(axis=2, keepdims=True)
        return _simulated(run, wanted[..., None] * shape, resize)

    def lasting(self, after: Typical, before: Typical, run: CapturedRun, resize: Any = None) -> float:
        """Milliseconds of the mean step with other costs: ``before`` are those that stand for the run as it is."""
        gains = []
        for at, scaled in enumerate(self._scaled_ms):
            now = self.replay(at, before, self.run)
            gains.append(scaled * (1.0 - self.replay(at, after, run, resize) / now) if now else 0.0)
        return max(self.measured_ms - statistics.fmean(gains), 0.0)

    @cached_property
    def samples(self) -> list[Sample]:
        """Draws with replacement: first of steps, then of the microbatches in each; a microbatch is drawn on all stages
        at once, because what they have in common cancels out."""
        rng = random.Random(0)
        passes = self._typical.size * self.microbatches
        count = max(_FEWEST_SAMPLES, min(_SAMPLES, _MOST_PASSES // max(1, passes)))
        mean_ms = statistics.fmean(step.pipeline_ms + step.outside_ms for step in self.steps)
        samples = []
        for _ in range(count):
            chosen = _drawn(rng, len(self.steps))
            times = [each[..., _drawn(rng, each.shape[-1])] for each in (self._times[at] for at in chosen)]
            drawn = statistics.fmean(self.steps[at].pipeline_ms + self.steps[at].outside_ms for at in chosen)
            typical = _as_typical(np.median(np.concatenate(times, axis=-1), axis=-1))
            samples.append(Sample(typical, self.measured_ms * drawn / mean_ms))
        return samples

    @property
    def cost_error(self) -> float:
        """Standard error of a chunk's cost, as a fraction of it: of the least certain chunk."""
        costs = np.array([np.sum(sample.typical, axis=0) for sample in self.samples])
        mean = costs.mean(axis=0)
        return float((self._few * costs.std(axis=0) / np.where(mean > 0, mean, 1.0)).max())

    def uncertainty(
        self,
        after: Sequence[Typical],
        before: Sequence[Typical],
        chosen: Sequence[Sample],
        run: CapturedRun,
        resize: Any,
    ) -> float:
        """Plus or minus, as a fraction of the speedup, by how it differs between draws (``chosen``, with their costs
        as they are and as they would be), by the steps that a re-run would have, and by what the replay misses."""
        scaled = statistics.fmean(self._scaled_ms)
        speedups, ratios = [], []
        for then, now, sample in zip(after, before, chosen, strict=True):
            as_is = self._flat(self.run, now, None)
            ratio = self._flat(run, then, resize) / as_is if as_is else 1.0
            left = sample.measured_ms - scaled * (1.0 - ratio)
            ratios.append(ratio)
            speedups.append(sample.measured_ms / left if left > 0 else 1.0)
        own = self._few * statistics.pstdev(speedups) / statistics.fmean(speedups) if speedups else 0.0
        changed = abs(1.0 - statistics.fmean(ratios)) if ratios else 0.0
        return math.hypot(ERRORS * own, ERRORS * self._step_error, self.replay_error * changed)

    def _peers(self) -> tuple[list[list[float]], list[list[float]]] | None:
        """What a stage's ranks have in common over what the replayed ones cost, at most 1, as ``[stage][chunk]``
        forward and backward; None where no stage has two ranks."""
        each = [
            np.array([kind for kind in (step.peers_forward_ms, step.peers_backward_ms) if kind is not None])
            for step in self.steps
        ]
        if any(len(peers) != len(own) for peers, own in zip(each, self._times, strict=True)):
            return None
        usual = np.median(np.concatenate(each, axis=-1), axis=-1)
        return _as_typical(np.minimum(np.where(self._typical > 0, usual / np.maximum(self._typical, 1e-9), 1.0), 1.0))

    def _flat(self, run: CapturedRun, typical: Typical, resize: Any) -> float:
        wanted = np.array(typical[: 1 if run.forward_only else 2])
        return _simulated(run, np.repeat(wanted[..., None], self.microbatches, axis=-1), resize)

    @property
    def _few(self) -> float:
        """Draws from few steps differ too little from each other."""
        n = len(self.steps)
        return math.sqrt(n / (n - 1)) if n > 1 else 1.0

    @property
    def _step_error(self) -> float:
        """Relative standard error of the mean step; 0 for one step, which cannot say."""
        times = [step.pipeline_ms + step.outside_ms for step in self.steps]
        if len(times) < 2:
            return 0.0
        return statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)

    def _shaped(self) -> tuple[list[_Array], list[Stall]]:
        usual = self._typical[..., None]
        factors = [np.where(usual > 0, each / np.where(usual > 0, usual, 1.0), 1.0) for each in self._times]
        common = [_lower_median(each) for each in factors]
        levels = np.array(
            [np.median(each, axis=-1) / max(np.median(c), 1e-9) for each, c in zip(factors, common, strict=True)]
        )
        middle = np.median(levels, axis=0)
        levels = np.where(levels > 0, levels / np.where(middle > 0, middle, 1.0), 1.0)
        clean = [each / level[..., None] for each, level in zip(factors, levels, strict=True)]
        beyond = [each / np.maximum(c, 1e-9) for each, c in zip(clean, common, strict=True)]
        every = np.concatenate(beyond, axis=-1)
        center = np.median(every, axis=-1)[..., None]
        center = np.where(center > 0, center, 1.0)
        sigma = _SIGMA * np.median(np.abs(every / center - 1.0), axis=-1)[..., None]
        limit = 1.0 + np.maximum(_STALL, _STALL_SIGMAS * sigma)
        shapes, stalls = [], []
        for at, (own, excess, shared) in enumerate(zip(clean, beyond, common, strict=True)):
            stalled = excess / center > limit
            shapes.append(np.where(stalled, shared * center, own))
            for kind, stage, chunk, microbatch in np.argwhere(stalled).tolist():
                factor = float(factors[at][kind, stage, chunk, microbatch])
                stalls.append(Stall(("forward", "backward")[kind], stage, self.steps[at].step, factor))
        return shapes, sorted(stalls, key=lambda stall: -stall.factor)


def _drawn(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(count), k=count)


def _array(step: CapturedStep) -> _Array:
    """A step's passes as [kind, stage, chunk, microbatch]."""
    return np.array([step.forward_ms] if step.backward_ms is None else [step.forward_ms, step.backward_ms])


def _as_typical(costs: _Array) -> Typical:
    plain = costs.tolist()
    return plain[0], plain[1] if len(plain) > 1 else np.zeros_like(costs[0]).tolist()


def _lower_median(factors: _Array) -> _Array:
    """Of every microbatch the factor that half of its passes exceed; of two passes the smaller one."""
    passes = factors.reshape(-1, factors.shape[-1])
    found: _Array = np.sort(passes, axis=0)[(len(passes) - 1) // 2]
    return found


def _simulated(run: CapturedRun, times: _Array, resize: Any) -> float:
    kinds: list[Times] = times.tolist()
    if resize is not None:
        kinds = [resize(each) for each in kinds]
    return run.simulate(kinds[0], None if run.forward_only else kinds[1]).step_ms
