"""Which stage is slow, if any, and why: every verdict with its evidence and its threshold, none without.

A stage is called slow when a microbatch computes longer on it than on the mean stage by more than `EXCESS` of that
mean, in the median and in the quickest microbatch, and by more than `NOISE` standard errors of the median. The median
ignores a few disturbed microbatches, the quickest one a disturbance that lasts for most of them: other load on the node
only ever adds time, and it comes in bursts, whose samples are not independent, so that standard errors understate it.
Causes are reckoned from the quickest microbatches, for the same reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megaprof.analysis.stages.causes import pipeline_causes, slow_ranks
from megaprof.analysis.stages.consistency import name_stages
from megaprof.analysis.stages.loads import EXCESS, FEWEST, NOISE, Cause, Load, extras_of, slowest
from megaprof.analysis.stages.stages import TargetStages

__all__ = ["EXCESS", "PER_LAYER", "Cause", "Verdict", "judge"]

#: How far apart the times per layer of different stages may lie for "more layers" to explain a slow stage.
PER_LAYER = 0.25


@dataclass(frozen=True)
class Verdict:
    """``imbalance``: slowest stage's compute / mean stage's compute, None where it cannot be known.

    ``slowest_stage`` only when that stage is slow by the rule of this module; ``notes`` say why otherwise.
    """

    imbalance: float | None
    slowest_stage: int | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Comparison:
    """The slowest stage against the mean stage: whether it is slow, and the sentence that says so."""

    slow: Load | None
    note: str
    mean_quick: float = 0.0


def judge(target: TargetStages) -> Verdict:
    """The verdict on one target's stages."""
    if target.unjudgeable:
        return Verdict(None, None, (), (f"no stage is called slow: {target.unjudgeable}",))
    ranks = slow_ranks(target.stages)
    found = [*ranks, *pipeline_causes(target)]
    if target.sizes.pp == 1:
        return Verdict(None, None, tuple(found), ("no pipeline (pp=1): there are no stages to compare",))
    compute = [stage.compute_ms.mean for stage in target.stages if stage.compute_ms]
    mean_compute = statistics.fmean(compute) if compute else 0.0
    imbalance = max(compute) / mean_compute if len(compute) == target.sizes.pp and mean_compute > 0 else None
    loads = [load for stage in target.stages if (load := slowest(stage)) is not None]
    if len(loads) < target.sizes.pp:
        few = f"fewer than {FEWEST} passes of known chunk on a stage: too few to tell a slow stage from noise"
        return Verdict(imbalance, None, tuple(found), (f"no stage is called slow: {few}",))
    comparison = _compare(loads)
    of_stage: tuple[Cause, ...] = ()
    # What slow ranks cost is told already: without them, is a stage still slow, and why?
    aside = {cause.rank for cause in ranks if cause.rank is not None}
    others = [load for stage in target.stages if (load := slowest(stage, without=aside)) is not None]
    without = _compare(others) if ranks and len(others) == len(loads) else comparison
    if without.slow is not None:
        of_stage = _causes(without.slow, others if ranks else loads, without.mean_quick)
    slow = comparison.slow.stage.pp if comparison.slow is not None else None
    return Verdict(imbalance, slow, (*of_stage, *found), (comparison.note,))


def _compare(loads: list[Load]) -> _Comparison:
    slow = max(loads, key=lambda load: load.median)
    mean = statistics.fmean(load.median for load in loads)
    excess = slow.median - mean
    # The mean holds the slow stage too: excess = (1 - 1/n) slow - (1/n) others.
    n = len(loads)
    others = sum(load.error**2 for load in loads if load is not slow)
    error = math.sqrt(((1 - 1 / n) * slow.error) ** 2 + others / n**2)
    mean_quick = statistics.fmean(load.quick for load in loads)
    if mean <= 0 or mean_quick <= 0:
        return _Comparison(None, "no stage is called slow: nothing was computed")
    found = (
        f"it computes {slow.median:.4g} ms per microbatch (median), {excess / mean:.1%} more than the mean stage's "
        f"{mean:.4g} ms"
    )
    stage = slow.stage.pp
    if excess <= EXCESS * mean:
        note = f"no stage is slow: stage {stage} is the slowest, and {found}; above {EXCESS:.0%} it would be slow"
        return _Comparison(None, note)
    undecided = f"no stage is called slow: stage {stage} is the slowest, and {found}, but "
    if excess <= NOISE * error:
        vary = f"microbatches vary so much that it may be chance (standard error {error:.2g} ms)"
        return _Comparison(None, undecided + vary)
    if slow.quick - mean_quick <= EXCESS * mean_quick:
        quickest = (
            f"its quickest one took {slow.quick:.4g} ms against {mean_quick:.4g} ms on the mean stage: it is "
            "slower in some microbatches only"
        )
        return _Comparison(None, undecided + quickest)
    return _Comparison(slow, f"stage {stage} is slow: {found} (standard error {error:.2g} ms)", mean_quick)


def _causes(slow: Load, loads: list[Load], mean: float) -> tuple[Cause, ...]:
    others = [load for load in loads if load is not slow]
    excess = slow.quick - mean
    unknown = [load for load in loads if not load.layers]
    if unknown:
        missing = name_stages(load.stage.pp for load in unknown)
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
                evidence=f"beside {_count(slow)} it holds {_and(slow.extras)}: {beyond:.3g} ms per microbatch more "
                f"than its layers take, at {layer:.3g} ms per layer as on {name_stages(plain)}",
                threshold=f"more than {EXCESS:.0%} of the mean stage's {mean:.3g} ms",
                excess_ms=min(beyond, excess),
            )
        )
    return tuple(causes) or (_unexplained(slow, excess, _layer_facts(slow, others)),)


def _more_layers(slow: Load, others: list[Load], part: float) -> Cause:
    return Cause(
        kind="layers",
        stage=slow.stage.pp,
        evidence=_layer_facts(slow, others),
        threshold=f"times per layer within {PER_LAYER:.0%}, where no embedding or loss is beside the layers",
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
    times = _interval([_per_layer(load) for load in plain], ".3g")
    own = f"{_per_layer(slow):.3g}"
    compared = f"on {name_stages(load.stage.pp for load in plain)}"
    return (
        f"{_count(slow)} against {_interval([_layers(load) for load in others], 'd')}: {own} ms per layer in "
        f"the quickest microbatch, " + (f"as {compared}" if own == times else f"{times} ms {compared}")
    )


def _interval(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _count(load: Load) -> str:
    return f"{_layers(load)} layer" + ("" if _layers(load) == 1 else "s")


def _and(things: list[str]) -> str:
    return " and ".join(dict.fromkeys(things))
