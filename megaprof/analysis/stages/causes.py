"""Why time is lost, apart from layers and what stands beside them: slow ranks, uneven microbatches, communication that
nothing hides, a host that cannot keep up, and a pipeline that is too deep for its microbatches.

Every cause has its threshold here, and its evidence says the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from megaprof.analysis.stages.loads import NOISE, Cause, Load, load_of
from megaprof.analysis.stages.slow import EXCESS, exceeds
from megaprof.analysis.stages.stages import Stage, TargetStages
from megaprof.analysis.stages.words import counted, number, percent
from megaprof.analysis.trace.calls import GROUPS, WHOLE_STEP

#: Exposed communication of one group, or time in which the GPU waits for the host, as a fraction of the step.
OF_STEP = 0.10
#: Standard deviation of the microbatches' times, as a fraction of their mean, each stage's own mean taken as 1 ...
UNEVEN = 0.15
#: ... and how far the stages must agree which microbatches are long (correlation of each with the others).
AGREE = 0.7
_FEWEST_MICROBATCHES = 4
#: Part of the step for which a perfectly balanced pipeline of this depth waits to be filled and drained.
FILLING = 0.20
#: The measured bubble must be at least this part of it.
_THERE = 0.5

_GROUP_NAMES = {
    "tp": "tensor-parallel",
    "ep": "expert-parallel",
    "cp": "context-parallel",
    "pp": "pipeline",
    "dp": "data-parallel",
}


def slow_ranks(stages: Sequence[Stage]) -> list[Cause]:
    """Stragglers: ranks that compute longer than their peers at the same stage, where several were captured."""
    found = []
    for stage in stages:
        loads = [load_of(stage, rank, chunks) for rank, chunks in stage.by_rank.items()]
        known = [load for load in loads if load is not None]
        if len(known) < 2 or len(known) < len(loads):
            continue
        slow = max(known, key=lambda load: load.median)
        peers = [load for load in known if load is not slow]
        usual, quick = statistics.median(p.median for p in peers), statistics.median(p.quick for p in peers)
        error = math.hypot(slow.error / slow.median, statistics.fmean(p.error for p in peers) / usual) if usual else 0.0
        if not (exceeds(slow.median, usual, error=error, errors=NOISE) and exceeds(slow.quick, quick)):
            continue
        found.append(
            Cause(
                kind="slow_rank",
                stage=stage.pp,
                rank=slow.rank,
                evidence=_slow_rank(stage.pp, slow, peers, usual),
                threshold=f"more than {EXCESS:.0%} over its peers, in the median and in the quickest microbatch",
                excess_ms=slow.median - usual,
                basis="per microbatch, compared with its peers",
            )
        )
    return found


def _slow_rank(stage: int, slow: Load, peers: Sequence[Load], usual: float) -> str:
    """What both took, with as many digits as their errors allow."""
    others = (
        f"rank {peers[0].rank} of stage {stage} computes"
        if len(peers) == 1
        else f"the {len(peers)} other ranks of stage {stage} compute"
    )
    return (
        f"rank {slow.rank} computes {number(slow.median, slow.error)} ms per microbatch, {others} "
        f"{number(usual, peers[0].error)} ms for the same work"
    )


def pipeline_causes(target: TargetStages) -> list[Cause]:
    """Causes that no single stage or rank is to blame for."""
    if target.target == WHOLE_STEP:
        return []
    return [*_communication(target), *_host_bound(target), *_uneven_microbatches(target), *_few_microbatches(target)]


def _communication(target: TargetStages) -> Iterator[Cause]:
    step = target.step_time_ms.mean if target.step_time_ms else 0.0
    for group in GROUPS:
        # Of several ranks the one that waited least: what the others had more was waiting for it.
        exposed = {
            stage.pp: min(own)
            for stage in target.stages
            if (own := [ms for each in stage.exposed_by_rank.values() if (ms := each[group]) is not None])
        }
        if not exposed or step <= 0 or max(exposed.values()) <= OF_STEP * step:
            continue
        stage = max(exposed, key=lambda pp: exposed[pp])
        alone = group != "pp" and getattr(target.sizes, group) > 1 and len(target.stages[0].ranks) == 1
        yield Cause(
            kind="communication",
            stage=stage,
            group=group,
            evidence=f"stage {stage} computes nothing for {number(exposed[stage])} ms of a step "
            f"({percent(exposed[stage] / step)}) while {_GROUP_NAMES[group]} communication runs"
            + ("; one rank was captured, so this may include waiting for a slower peer" if alone else "")
            + ("; both stages are ready, the transfer itself takes this long" if group == "pp" else ""),
            threshold=f"more than {OF_STEP:.0%} of the step on the worst stage",
            excess_ms=exposed[stage],
            basis="per step",
        )


def _host_bound(target: TargetStages) -> Iterator[Cause]:
    step = target.step_time_ms.mean if target.step_time_ms else 0.0
    idle = {stage.pp: stage.host_bound_ms.mean for stage in target.stages if stage.host_bound_ms}
    if not idle or step <= 0 or max(idle.values()) <= OF_STEP * step:
        return
    stage = max(idle, key=lambda pp: idle[pp])
    yield Cause(
        kind="host_bound",
        stage=stage,
        evidence=f"the GPU of stage {stage} is idle for {number(idle[stage])} ms of a step "
        f"({percent(idle[stage] / step)}) inside forward and backward passes, because the host launches too slowly",
        threshold=f"more than {OF_STEP:.0%} of the step on the worst stage",
        excess_ms=idle[stage],
        basis="per step",
    )


def _uneven_microbatches(target: TargetStages) -> Iterator[Cause]:
    if target.sizes.pp == 1 or len(target.stages) < 2:
        return
    common = set.intersection(*(set(stage.microbatch_ms) for stage in target.stages))
    by_call: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for key in sorted(common):
        by_call.setdefault(key[:2], []).append(key)
    relative: list[list[float]] = [[] for _ in target.stages]
    for keys in by_call.values():
        if len(keys) < _FEWEST_MICROBATCHES:
            continue
        for stage, own in zip(target.stages, relative, strict=True):
            mean = statistics.fmean(stage.microbatch_ms[key] for key in keys)
            own += [stage.microbatch_ms[key] / mean if mean > 0 else 1.0 for key in keys]
    if len(relative[0]) < _FEWEST_MICROBATCHES:
        return
    together = [statistics.fmean(each) for each in zip(*relative, strict=True)]
    spread = statistics.pstdev(together)
    agreement = min(_agreement(own, together, len(relative)) for own in relative)
    if spread <= UNEVEN or agreement <= AGREE:
        return
    mean = statistics.fmean(statistics.fmean(stage.microbatch_ms[key] for key in common) for stage in target.stages)
    yield Cause(
        kind="uneven_microbatches",
        stage=None,
        evidence=f"microbatches take from {min(together):.2f} to {max(together):.2f} times their average, alike on "
        f"all stages (spread {percent(spread)}, correlation between stages at least {agreement:.2f}): they differ in "
        "work, for example in sequence length, and no stage is to blame",
        threshold=f"spread above {UNEVEN:.0%} and correlation above {AGREE}",
        excess_ms=(max(together) - 1.0) * mean,
        basis="per microbatch, the longest compared with the average",
    )


def _agreement(own: list[float], together: list[float], stages: int) -> float:
    """Correlation of one stage with the mean of the others."""
    others = [(all_ * stages - one) / (stages - 1) for all_, one in zip(together, own, strict=True)]
    try:
        return statistics.correlation(own, others)
    except statistics.StatisticsError:  # constant
        return 0.0


def _few_microbatches(target: TargetStages) -> Iterator[Cause]:
    depth, microbatches = target.sizes.pp - 1, target.microbatches
    measured = [stage.bubble_fraction for stage in target.stages if stage.bubble_fraction is not None]
    if depth < 1 or not microbatches or not measured or target.step_time_ms is None:
        return
    chunks = max(len(stage.chunks) for stage in target.stages) or 1
    ideal = depth / (chunks * microbatches + depth)
    bubble = statistics.fmean(measured)
    if ideal <= FILLING or bubble < _THERE * ideal:
        return
    each = f" in {chunks} model chunks" if chunks > 1 else ""
    yield Cause(
        kind="few_microbatches",
        stage=None,
        evidence=f"with {counted(microbatches, 'microbatch')}{each} on {target.sizes.pp} stages, filling and draining "
        f"the pipeline takes (p-1)/(v*m+p-1) = {percent(ideal)} of a balanced step; the measured bubble is "
        f"{percent(bubble)}",
        threshold=f"more than {FILLING:.0%} of the step",
        excess_ms=ideal * target.step_time_ms.mean,
        basis="per step",
    )
