"""The run as it is, which every change is compared with: robust costs, and what came on top of them.

A cost is what one pass (a stage's chunk, forward or backward) takes when nothing disturbs it: the lower quartile over
all steps and microbatches. A microbatch takes a multiple of it, on all stages alike, for its sequences are longer or
shorter: that goes with the cost, so a stage that gets half as many layers varies half as much. Whatever else a pass
took (a stall, a step in which one stage was slow, other load on the machine) is no cost. A step that lost time to it
would have lost it with any layout, so this time is added to a prediction where it was, not scaled.
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

from megaprof.analysis.stages.samples import MAD
from megaprof.analysis.what_if.replay import CapturedRun, CapturedStep, Times

#: Uncertainties cover this many standard errors, ...
ERRORS = 2.0
#: ... and more of the mean of few steps: 9 means of so many in 10 are within this many of their own (Student's t).
_OF_FEW_STEPS = {2: 6.3, 3: 2.9, 4: 2.4, 5: 2.1}
#: A pass is a stall when it takes this much longer than its microbatch explains, as a fraction ...
_STALL = 0.5
#: ... and this many standard deviations of what such passes vary by.
_STALL_SIGMAS = 5.0
#: Disturbances only add time, so of many passes the quicker ones say what one costs.
_COST = 0.25
#: However quick a disturbed pass was: what is left of it with other costs is at least this part of them.
_LEAST = 0.5
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
        self._times = [np.array(step.passes) for step in steps]
        self._costs = _costs(self._times)
        self.typical: Typical = _as_typical(self._costs)
        #: Of every step and microbatch: how many times the usual work it has.
        self._sizes = [_common(_relative(each, self._costs)) for each in self._times]
        #: Of every step and pass, [kind, stage, chunk, microbatch]: milliseconds beyond its work.
        self._beyond = [t - self._costs[..., None] * size for t, size in zip(self._times, self._sizes, strict=True)]
        # What every replay misses scales with the pipeline; what single steps lost does not.
        error = statistics.median(step.pipeline_ms / step.replay_ms - 1.0 for step in steps)
        self._scaled_ms = [(1.0 + error) * step.replay_ms for step in steps]
        self.replay_error = statistics.median(abs(step.replay_error) for step in steps)
        self.peers = self._peers()
        #: What replays of the run as it is took, which every change is compared with, with the costs they belong to.
        self._known: dict[tuple[int | None, int], tuple[Typical, float]] = {}

    def replay(self, at: int, typical: Typical, run: CapturedRun, resize: Any = None) -> float:
        """Milliseconds of the pipeline of the captured step number ``at`` with other costs, disturbed as its own was.

        ``run`` may have another number of chunks; ``resize`` changes the microbatches of `Times`.
        """
        wanted = np.array(typical[: 1 if run.forward_only else 2])[..., None] * self._sizes[at]
        beyond = self._beyond[at]
        if wanted.shape[2] != beyond.shape[2]:
            beyond = beyond.sum(axis=2, keepdims=True) / wanted.shape[2]
        return _simulated(run, np.maximum(wanted + beyond, _LEAST * wanted), resize)

    @cached_property
    def stalls(self) -> list[Stall]:
        """Passes that took far longer than others of their kind, the worst first."""
        every = np.concatenate(
            [_relative(t, self._costs) / size for t, size in zip(self._times, self._sizes, strict=True)], axis=-1
        )
        middle = np.median(every, axis=-1)[..., None]
        sigma = MAD * np.median(np.abs(every - middle), axis=-1)[..., None]
        limit = middle + np.maximum(_STALL * middle, _STALL_SIGMAS * sigma)
        found, first = [], 0
        for step in self.steps:
            own = every[..., first : first + step.microbatches]
            first += step.microbatches
            for kind, stage, chunk, microbatch in np.argwhere(own > limit).tolist():
                factor = float(own[kind, stage, chunk, microbatch] / middle[kind, stage, chunk, 0])
                found.append(Stall(("forward", "backward")[kind], stage, step.step, factor))
        return sorted(found, key=lambda stall: -stall.factor)

    def lasting(self, after: Typical, before: Typical, run: CapturedRun, resize: Any = None) -> float:
        """Milliseconds of the mean step with other costs: ``before`` are those that stand for the run as it is."""
        gains = []
        for at, scaled in enumerate(self._scaled_ms):
            now = self._as_is(at, before)
            gains.append(scaled * (1.0 - self.replay(at, after, run, resize) / now) if now else 0.0)
        return max(self.measured_ms - statistics.fmean(gains), 0.0)

    @cached_property
    def samples(self) -> list[Sample]:
        """Draws with replacement: first of steps, then of the microbatches in each; a microbatch is drawn on all stages
        at once, because what they have in common cancels out."""
        rng = random.Random(0)
        passes = self._costs.size * self.microbatches
        count = max(_FEWEST_SAMPLES, min(_SAMPLES, _MOST_PASSES // max(1, passes)))
        mean_ms = statistics.fmean(step.pipeline_ms + step.outside_ms for step in self.steps)
        samples = []
        for _ in range(count):
            chosen = rng.choices(range(len(self.steps)), k=len(self.steps))
            every = [self._times[at] for at in chosen]
            times = [each[..., rng.choices(range(each.shape[-1]), k=each.shape[-1])] for each in every]
            drawn = statistics.fmean(self.steps[at].pipeline_ms + self.steps[at].outside_ms for at in chosen)
            typical = _as_typical(_costs(times))
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
            as_is = self._as_is(None, now)
            ratio = self._flat(run, then, resize) / as_is if as_is else 1.0
            left = sample.measured_ms - scaled * (1.0 - ratio)
            ratios.append(ratio)
            speedups.append(sample.measured_ms / left if left > 0 else 1.0)
        own = self._few * statistics.pstdev(speedups) / statistics.fmean(speedups) if speedups else 0.0
        changed = abs(1.0 - statistics.fmean(ratios)) if ratios else 0.0
        return math.hypot(ERRORS * own, self._step_error, self.replay_error * changed)

    def _peers(self) -> tuple[list[list[float]], list[list[float]]] | None:
        """What a stage's ranks have in common over what the replayed ones cost, at most 1, as ``[stage][chunk]``
        forward and backward; None where no stage has two ranks."""
        each = [
            np.array([kind for kind in (step.peers_forward_ms, step.peers_backward_ms) if kind is not None])
            for step in self.steps
        ]
        if any(len(peers) != len(own) for peers, own in zip(each, self._times, strict=True)):
            return None
        return _as_typical(np.minimum(_relative(_costs(each)[..., None], self._costs)[..., 0], 1.0))

    def _as_is(self, at: int | None, typical: Typical) -> float:
        """Milliseconds of the run as it is with these costs: its captured step number ``at``, or None: undisturbed."""
        known = self._known.get((at, id(typical)))
        if known is None or known[0] is not typical:
            ms = self._flat(self.run, typical, None) if at is None else self.replay(at, typical, self.run)
            known = self._known[at, id(typical)] = typical, ms
        return known[1]

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
        """Plus or minus of the mean step, as a fraction of it; 0 for one step, which cannot say."""
        times = [step.pipeline_ms + step.outside_ms for step in self.steps]
        if len(times) < 2:
            return 0.0
        error = statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)
        return _OF_FEW_STEPS.get(len(times), ERRORS) * error


def _costs(times: Sequence[_Array]) -> _Array:
    """Milliseconds by [kind, stage, chunk], of several steps."""
    found: _Array = np.quantile(np.concatenate(times, axis=-1), _COST, axis=-1)
    return found


def _relative(times: _Array, costs: _Array) -> _Array:
    """Every pass over its cost; 1 where there is none."""
    usual = costs[..., None]
    found: _Array = np.where(usual > 0, times / np.where(usual > 0, usual, 1.0), 1.0)
    return found


def _as_typical(costs: _Array) -> Typical:
    plain = costs.tolist()
    return plain[0], plain[1] if len(plain) > 1 else np.zeros_like(costs[0]).tolist()


def _common(factors: _Array) -> _Array:
    """Of every microbatch the factor that half of its passes exceed; of two passes the smaller one."""
    found: _Array = np.quantile(factors.reshape(-1, factors.shape[-1]), 0.5, axis=0, method="lower")
    return found


def _simulated(run: CapturedRun, times: _Array, resize: Any) -> float:
    kinds: list[Times] = times.tolist()
    if resize is not None:
        kinds = [resize(each) for each in kinds]
    return run.simulate(kinds[0], None if run.forward_only else kinds[1]).step_ms
