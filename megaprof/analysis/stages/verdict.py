"""Which stages are slow, if any, and why time is lost: every verdict with its evidence and its threshold, none without.

A stage is called slow when a microbatch computes longer on it than on average over the stages, in the median and in the
quickest microbatch (`slow.exceeds`). The median ignores a few disturbed microbatches, the quickest one a disturbance
that lasts for most of them: other load on the node only ever adds time, and it comes in bursts, whose samples are not
independent, so that standard errors understate it. Causes are reckoned from the quickest microbatches, for the same
reason. Where microbatches differ in work alike on all stages, each is compared as if it had the usual work.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megaprof.analysis.stages.causes import pipeline_causes, sizes_of, slow_ranks
from megaprof.analysis.stages.excess import explain
from megaprof.analysis.stages.loads import FEWEST, NOISE, Cause, Load, Sizes, slowest
from megaprof.analysis.stages.slow import exceeds
from megaprof.analysis.stages.stages import Stage, TargetStages

Outcome = Literal["slow", "within", "chance", "some_microbatches"]


@dataclass(frozen=True)
class Comparison:
    """One stage against the average over stages, by what it computes for one microbatch."""

    stage: int
    """Which stage."""
    outcome: Outcome
    """``slow``; or why not: ``within`` the threshold, perhaps ``chance``, slower in ``some_microbatches`` only."""
    median_ms: float
    """Milliseconds that its median microbatch computes."""
    average_ms: float
    """The same, the average over all stages."""
    error_ms: float
    """Standard error of the difference, in milliseconds."""
    quickest_ms: float
    """Milliseconds that its quickest microbatch computes."""
    average_quickest_ms: float
    """The same, the average over all stages."""


@dataclass(frozen=True)
class Verdict:
    """Which stages of a target are slow, and why time is lost."""

    imbalance: float | None = None
    """Compute of the slowest stage over the average over stages, by their median microbatches; None where it cannot be
    known."""
    slowest_stage: int | None = None
    """Only where that stage is slow by the rule of this module."""
    causes: tuple[Cause, ...] = ()
    """Why time is lost, those of slow stages first."""
    comparison: Comparison | None = None
    """What the verdict on the slowest stage rests on; None where stages were not compared."""
    also_slow: tuple[Comparison, ...] = ()
    """The other slow stages, the slowest first."""
    withheld: str | None = None
    """Why stages were not compared, a clause; None where they were."""

    @property
    def slow_stages(self) -> frozenset[int]:
        """All slow stages."""
        found = {each.stage for each in self.also_slow}
        return frozenset(found if self.slowest_stage is None else found | {self.slowest_stage})


def judge(target: TargetStages) -> Verdict:
    """The verdict on one target's stages."""
    if target.unjudgeable:
        return Verdict(withheld=target.unjudgeable)
    ranks = slow_ranks(target.stages)
    found = [*ranks, *pipeline_causes(target)]
    if target.sizes.pp == 1:
        return Verdict(causes=tuple(found), withheld="there is no pipeline (pp=1)")
    sizes = sizes_of(target.stages)
    loads = _loads(target.stages, sizes)
    compared = _compare(loads) if len(loads) == target.sizes.pp else []
    if sizes and compared:
        # Whatever microbatches have in common may be a busy machine: as they are, the quickest must be slow, too.
        slow = {each.stage for each in _compare(_loads(target.stages, {})) if exceeds(*_quickest(each))}
        compared = [each if each.stage in slow else _in_some(each) for each in compared]
    if not compared:
        few = f"a stage has fewer than {FEWEST} passes of a known chunk, too few to tell a slow stage from noise"
        withheld = few if len(loads) < target.sizes.pp else "nothing was computed"
        return Verdict(_imbalance(target), causes=tuple(found), withheld=withheld)
    # What slow ranks cost is told already: without them, is a stage still slow, and why?
    aside = {cause.rank for cause in ranks if cause.rank is not None}
    others = _loads(target.stages, sizes, without=aside)
    if not aside or len(others) < len(loads):
        others = loads
    rest = compared if others is loads else _compare(others)
    doubted = {each.stage for each in compared if each.outcome == "some_microbatches"}
    rest = [_in_some(each) if each.stage in doubted else each for each in rest]
    # A slow rank comes first: a stage that is slow only in the pipeline without it will be told when it is mended.
    slow = {each.stage for each in compared if each.outcome == "slow"} & {r.stage for r in rest if r.outcome == "slow"}
    of_stages = [cause for each in rest if each.stage in slow for cause in explain(each.stage, slow, others)]
    first, *also = compared
    return Verdict(
        imbalance=first.median_ms / first.average_ms,
        slowest_stage=first.stage if first.outcome == "slow" else None,
        causes=(*of_stages, *found),
        comparison=first,
        also_slow=tuple(each for each in also if each.outcome == "slow"),
    )


def _quickest(each: Comparison) -> tuple[float, float]:
    return each.quickest_ms, each.average_quickest_ms


def _in_some(each: Comparison) -> Comparison:
    return replace(each, outcome="some_microbatches") if each.outcome == "slow" else each


def _imbalance(target: TargetStages) -> float | None:
    """Where there are too few microbatches for a verdict."""
    compute = [stage.compute_ms.mean for stage in target.stages if stage.compute_ms]
    if len(compute) < target.sizes.pp or max(compute) <= 0:
        return None
    return max(compute) / statistics.fmean(compute)


def _loads(stages: Iterable[Stage], sizes: Sizes, without: Iterable[int] = ()) -> list[Load]:
    return [load for stage in stages if (load := slowest(stage, without, sizes)) is not None]


def _compare(loads: Sequence[Load]) -> list[Comparison]:
    """Every stage, the slowest first; none where nothing was computed."""
    average = statistics.fmean(load.median for load in loads)
    average_quick = statistics.fmean(load.quick for load in loads)
    if average <= 0 or average_quick <= 0:
        return []
    n = len(loads)
    every = sum(load.error**2 for load in loads)
    found = []
    for own in sorted(loads, key=lambda load: -load.median):
        # The average holds the stage too: own - average = (1 - 1/n) own - (1/n) others.
        error = math.sqrt(((1 - 1 / n) * own.error) ** 2 + (every - own.error**2) / n**2)
        outcome: Outcome = "slow"
        if not exceeds(own.median, average):
            outcome = "within"
        elif not exceeds(own.median, average, error=error / own.median, errors=NOISE):
            outcome = "chance"
        elif not exceeds(own.quick, average_quick):
            outcome = "some_microbatches"
        found.append(Comparison(own.stage.pp, outcome, own.median, average, error, own.quick, average_quick))
    return found
