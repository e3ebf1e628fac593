"""Which stage is slow, if any, and why: every verdict with its evidence and its threshold, none without.

A stage is called slow when a microbatch computes longer on it than on average over the stages, in the median and in the
quickest microbatch (`slow.exceeds`). The median ignores a few disturbed microbatches, the quickest one a disturbance
that lasts for most of them: other load on the node only ever adds time, and it comes in bursts, whose samples are not
independent, so that standard errors understate it. Causes are reckoned from the quickest microbatches, for the same
reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megaprof.analysis.stages.causes import pipeline_causes, slow_ranks
from megaprof.analysis.stages.loads import FEWEST, NOISE, Cause, Load, extras_of, slowest
from megaprof.analysis.stages.slow import EXCESS, exceeds
from megaprof.analysis.stages.stages import Stage, TargetStages
from megaprof.analysis.stages.words import counted, number
from megaprof.analysis.stages.words import stages as stages_in_words

#: How far apart the times per layer of different stages may lie for "more layers" to explain a slow stage.
PER_LAYER = 0.25

Outcome = Literal["slow", "within", "chance", "some_microbatches"]


@dataclass(frozen=True)
class Comparison:
    """The slowest stage against the average over stages, by what it computes for one microbatch."""

    stage: int
    """The slowest stage."""
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
    """Which stage of a target is slow, and why time is lost."""

    imbalance: float | None = None
    """Compute of the slowest stage over the average over stages; None where it cannot be known."""
    slowest_stage: int | None = None
    """Only where that stage is slow by the rule of this module."""
    causes: tuple[Cause, ...] = ()
    """Why time is lost, those of the slow stage first."""
    comparison: Comparison | None = None
    """What the verdict on stages rests on; None where stages were not compared."""
    withheld: str | None = None
    """Why stages were not compared, a clause; None where they were."""


def judge(target: TargetStages) -> Verdict:
    """The verdict on one target's stages."""
    if target.unjudgeable:
        return Verdict(withheld=target.unjudgeable)
    ranks = slow_ranks(target.stages)
    found = [*ranks, *pipeline_causes(target)]
    if target.sizes.pp == 1:
        return Verdict(causes=tuple(found), withheld="there is no pipeline (pp=1)")
    imbalance = _imbalance(target)
    loads = _loads(target.stages)
    comparison = _compare(loads) if len(loads) == target.sizes.pp else None
    if comparison is None:
        few = f"a stage has fewer than {FEWEST} passes of a known chunk, too few to tell a slow stage from noise"
        withheld = few if len(loads) < target.sizes.pp else "nothing was computed"
        return Verdict(imbalance, causes=tuple(found), withheld=withheld)
    # What slow ranks cost is told already: without them, is a stage still slow, and why?
    aside = {cause.rank for cause in ranks if cause.rank is not None}
    others = _loads(target.stages, without=aside)
    if not aside or len(others) < len(loads):
        others = loads
    rest = comparison if others is loads else _compare(others)
    of_stage: tuple[Cause, ...] = ()
    if rest is not None and rest.outcome == "slow":
        slow = next(load for load in others if load.stage.pp == rest.stage)
        of_stage = _causes(slow, others, rest.average_quickest_ms)
    return Verdict(
        imbalance,
        slowest_stage=comparison.stage if comparison.outcome == "slow" else None,
        causes=(*of_stage, *found),
        comparison=comparison,
    )


def _imbalance(target: TargetStages) -> float | None:
    compute = [stage.compute_ms.mean for stage in target.stages if stage.compute_ms]
    if len(compute) < target.sizes.pp or max(compute) <= 0:
        return None
    return max(compute) / statistics.fmean(compute)


def _loads(stages: Iterable[Stage], without: Iterable[int] = ()) -> list[Load]:
    return [load for stage in stages if (load := slowest(stage, without)) is not None]


def _compare(loads: Sequence[Load]) -> Comparison | None:
    """None where nothing was computed."""
    slow = max(loads, key=lambda load: load.median)
    average = statistics.fmean(load.median for load in loads)
    average_quick = statistics.fmean(load.quick for load in loads)
    if average <= 0 or average_quick <= 0:
        return None
    # The average holds the slow stage too: slow - average = (1 - 1/n) slow - (1/n) others.
    n = len(loads)
    others = sum(load.error**2 for load in loads if load is not slow)
    error = math.sqrt(((1 - 1 / n) * slow.error) ** 2 + others / n**2)
    outcome: Outcome = "slow"
    if not exceeds(slow.median, average):
        outcome = "within"
    elif not exceeds(slow.median, average, error=error / slow.median, errors=NOISE):
        outcome = "chance"
    elif not exceeds(slow.quick, average_quick):
        outcome = "some_microbatches"
    return Comparison(slow.stage.pp, outcome, slow.median, average, error, slow.quick, average_quick)


def _causes(slow: Load, loads: list[Load], mean: float) -> tuple[Cause, ...]:
    others = [load for load in loads if load is not slow]
    excess = slow.quick - mean
    unknown = [load for load in loads if not load.layers]
    if unknown:
        missing = stages_in_words(load.stage.pp for load in unknown)
        return (_unexplained(slow, excess, f"the traces of {missing} do not say how many layers it holds"),)
    kinds = {kind for load in loads for chunk in load.stage.chunks if chunk.holds for kind in chunk.holds.kinds or ()}
    if len(kinds) > 1:
        listed = ", ".join(sorted(kinds))
        return (_unexplained(slow, excess, f"layers of different kinds ({listed}) have no common time per layer"),)
    plain = _plain_layer_times(others)
    if plain:
        return _explained_by_plain_layers(slow, loads, plain, excess, mean)
    return _explained_by_count(slow, others, excess)


def _explained_by_count(slow: Load, others: list[Load], excess: float) -> tuple[Cause, ...]:
    """Every other stage holds an embedding or a loss, so that its time per layer is only an upper bound.

    More layers explain the slow stage when its own time per layer does not exceed any such bound.
    """
    own, mean_layers = _per_layer(slow), _mean_layers([slow, *others])
    bound = min(_per_layer(load) for load in others)
    if _layers(slow) > mean_layers and own <= (1 + PER_LAYER) * bound:
        part = min(excess, min(own, bound) * (_layers(slow) - mean_layers))
        return (_more_layers(slow, others, part),)
    beside = (
        f"; it also holds {_and(slow.extras)}, which cannot be told apart from a slow rank here" if slow.extras else ""
    )
    return (_unexplained(slow, excess, _layer_facts(slow, others) + beside),)


def _explained_by_plain_layers(
    slow: Load, loads: list[Load], plain: dict[int, float], excess: float, mean: float
) -> tuple[Cause, ...]:
    """Chunks of nothing but layers on other stages (``plain``) give the time of one layer to compare with."""
    others = [load for load in loads if load is not slow]
    layer = statistics.median(plain.values())
    if max(plain.values()) > (1 + PER_LAYER) * min(plain.values()):
        return (_unexplained(slow, excess, "the time per layer differs between stages: " + _layer_facts(slow, others)),)
    own = _plain_layer_times([slow])  # empty when every chunk of it holds an embedding or a loss
    if any(not 1 / (1 + PER_LAYER) <= time / layer <= 1 + PER_LAYER for time in own.values()):
        return (_unexplained(slow, excess, _layer_facts(slow, others)),)
    causes = []
    part = layer * (_layers(slow) - _mean_layers(loads))
    beyond = slow.quick - layer * _layers(slow)
    if part > EXCESS * mean:
        causes.append(_more_layers(slow, others, min(part, excess)))
    if slow.extras and beyond > EXCESS * mean:
        causes.append(
            Cause(
                kind="embedding_or_loss",
                stage=slow.stage.pp,
                evidence=f"besides {_count(slow)} it holds {_and(slow.extras)}, which takes {number(beyond)} ms per "
                f"microbatch; a layer takes {number(layer)} ms, as measured on {stages_in_words(plain)}",
                threshold=f"more than {EXCESS:.0%} of the average over stages ({number(mean)} ms)",
                excess_ms=min(beyond, excess),
            )
        )
    return tuple(causes) or (_unexplained(slow, excess, _layer_facts(slow, others)),)


def _more_layers(slow: Load, others: list[Load], part: float) -> Cause:
    return Cause(
        kind="layers",
        stage=slow.stage.pp,
        evidence=_layer_facts(slow, others),
        threshold=f"times per layer differ by less than {PER_LAYER:.0%}, where a stage holds nothing but layers",
        excess_ms=part,
    )


def _unexplained(slow: Load, excess: float, evidence: str) -> Cause:
    return Cause(
        kind="unexplained",
        stage=slow.stage.pp,
        evidence=evidence,
        threshold="neither its number of layers nor an embedding or loss explains it",
        excess_ms=excess,
    )


def _plain_layer_times(loads: list[Load]) -> dict[int, float]:
    """Milliseconds per layer of the chunks that hold nothing but layers, by stage; only stages with such chunks."""
    times = {}
    for load in loads:
        plain = [c for c in load.stage.chunks if c.holds and c.holds.layers and not extras_of(c)]
        if plain:
            layers = sum(c.holds.layers or 0 for c in plain if c.holds)
            times[load.stage.pp] = sum(load.quick_by_chunk[c.chunk] for c in plain) / layers
    return times


def _layers(load: Load) -> int:
    return load.layers or 0


def _per_layer(load: Load) -> float:
    return load.quick / _layers(load)


def _mean_layers(loads: list[Load]) -> float:
    return statistics.fmean(_layers(load) for load in loads)


def _layer_facts(slow: Load, others: list[Load]) -> str:
    plain = [load for load in others if not load.extras] or others
    times = _interval([_per_layer(load) for load in plain], number)
    own = number(_per_layer(slow))
    where = stages_in_words(load.stage.pp for load in plain)
    return (
        f"{_count(slow)} against {_interval([_layers(load) for load in others], str)}: {own} ms per layer in the "
        "quickest microbatch, " + (f"the same per layer on {where}" if own == times else f"{times} ms on {where}")
    )


def _interval(values: Sequence[float], form: Callable[[float], str]) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def _count(load: Load) -> str:
    return counted(_layers(load), "layer")


def _and(things: list[str]) -> str:
    return " and ".join(dict.fromkeys(things))
