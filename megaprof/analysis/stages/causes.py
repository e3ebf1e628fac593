"""Why time is lost, apart from stages that compute for long: slow ranks, uneven microbatches, communication that
nothing hides, slow links, stages that enter late, a host that cannot keep up, and a pipeline that is too deep for its
microbatches.

Every cause has its threshold here, and its evidence says the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaprof.analysis.stages.loads import FEWEST, NOISE, Cause, Load, Sizes, load_of
from megaprof.analysis.stages.samples import MAD, scatter
from megaprof.analysis.stages.slow import EXCESS, exceeds
from megaprof.analysis.stages.stages import Stage, TargetStages
from megaprof.analysis.stages.words import counted, number, percent
from megaprof.analysis.trace.calls import GROUPS, WHOLE_STEP, grouped
from megaprof.formats import ranges

#: Exposed communication of one group, or time in which the GPU waits for the host, as a fraction of the step.
OF_STEP = 0.10
#: Standard deviation of the microbatches' times, as a fraction of their mean, each stage's own mean taken as 1 ...
UNEVEN = 0.15
#: ... and how far the stages must agree which microbatches are long (correlation of each with the others), and the
#: forwards with the backwards, which are computed at another time; ...
AGREE = 0.9
#: ... and how far where there is no backward: a busy machine disturbs what stages compute one after the other alike.
AGREE_FORWARDS = 0.95
#: How far tokens and times must agree.
_TOKENS_AGREE = 0.7
_CHANCE = 2.5
_FEWEST_MICROBATCHES = 4
#: Below this correlation, over this many microbatches at least, passes do not agree which ones are long.
_NO_PATTERN, _FEWEST_TO_AGREE = 0.5, 8
#: From this spread on, by medians, the microbatches of one stage alone are uneven.
UNEVEN_ALONE = 0.20
#: A stage or rank that enters the step late, or waits for its data, costs more than this fraction of it ...
OF_ENTRY = 0.05
#: ... in at least this part of the steps, ...
_MOST_OF = 2 / 3
#: ... waits for data in this part: less than one of the few steps of a capture may differ, ...
_NEARLY_ALL = 0.9
#: ... and by more than the first passes behind the opening of a profiler take: 1 to 9 ms were seen.
OF_OPENING_MS = 10.0
#: By how many times the exchanges of a link, or the spread of a stage, exceed the others'.
_TIMES_AS_LONG = 2.0
#: Part of the step for which a perfectly balanced pipeline of this depth waits to be filled and drained.
FILLING = 0.20
#: The measured bubble must be at least this part of it.
_THERE = 0.5

_Key = tuple[int, int, int]  # step, call and microbatch

_GROUP_NAMES = {
    "tp": "tensor-parallel",
    "ep": "expert-parallel",
    "cp": "context-parallel",
    "pp": "pipeline",
    "dp": "data-parallel",
    "unknown": "some group's (the trace does not name it)",
}


def slow_ranks(stages: Sequence[Stage]) -> list[Cause]:
    """Stragglers: ranks that compute longer than their peers at the same stage, where several were captured."""
    found = []
    for stage in stages:
        loads = [load_of(stage, rank, chunks) for rank, chunks in stage.by_rank.items()]
        known = [load for load in loads if load is not None]
        if len(known) < 2 or len(known) < len(loads):
            continue
        for slow in known:
            peers = [load for load in known if load is not slow]
            usual, quick = statistics.median(p.median for p in peers), statistics.median(p.quick for p in peers)
            errors = (slow.error / slow.median, statistics.fmean(p.error for p in peers) / usual) if usual else (0.0,)
            if not exceeds(slow.median, usual, error=math.hypot(*errors), errors=NOISE):
                continue
            if exceeds(slow.quick, quick):
                found.append(
                    Cause(
                        kind="slow_rank",
                        stage=stage.pp,
                        rank=slow.rank,
                        evidence=_slow_rank(stage.pp, slow, peers, usual),
                        threshold=f"more than {EXCESS:.0%} over its peers, in the median and in the quickest "
                        "microbatch",
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
    links = list(_slow_links(target))
    return [
        *(cause for cause in _communication(target) if not links or cause.group != "pp"),
        *links,
        *_late_entry(target),
        *_data_wait(target),
        *_host_bound(target),
        *_uneven_microbatches(target),
        *_few_microbatches(target),
    ]


def _communication(target: TargetStages) -> Iterator[Cause]:
    step = target.step_ms
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
        alone = group != "pp" and getattr(target.sizes, group, 2) > 1 and len(target.stages[0].ranks) == 1
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
    step = target.step_ms
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


def _slow_links(target: TargetStages) -> Iterator[Cause]:
    """Neighbouring stages whose exchanges take longer than those of the others."""
    step, microbatches = target.step_ms, target.microbatches or 0
    known = [link for link in target.links if link.transfer_ms.count >= FEWEST]
    pairs = grouped(known, lambda link: frozenset((link.sender, link.receiver)))
    for pair, links in sorted(pairs.items(), key=lambda each: min(each[0])):
        others = [link.transfer_ms.median for link in known if not pair & {link.sender} or not pair & {link.receiver}]
        if not others and target.sizes.pp > 2:
            continue
        usual = statistics.median(others) if others else 0.0
        longer = sum(max(0.0, link.quick_ms - usual) for link in links)
        lost = longer * microbatches * max(1, *(len(stage.chunks) for stage in target.stages))
        worst = max(links, key=lambda link: (round(link.quick_ms / max(usual, 1e-6), 1), -link.sender))
        if step <= 0 or lost <= OF_STEP * step or worst.quick_ms <= _TIMES_AS_LONG * usual:
            continue
        compared = f"on the other links {number(usual)} ms" if others else "it is the only link of this pipeline"
        yield Cause(
            kind="slow_link",
            stage=worst.sender,
            group="pp",
            evidence=f"an exchange between stages {min(pair)} and {max(pair)} takes "
            f"{number(worst.transfer_ms.median)} ms (median, from stage {worst.sender} to stage {worst.receiver}), "
            f"{compared}; the receiver waits for it and has nothing else to do",
            threshold=f"more than {OF_STEP:.0%} of the step over all microbatches, and {_TIMES_AS_LONG:.0f} times as "
            "long as on the other links",
            excess_ms=lost,
            basis="per step",
        )


def _late_entry(target: TargetStages) -> Iterator[Cause]:
    step = target.step_ms
    for stage in target.stages:
        for rank, late in stage.late_ms.items():
            usual = _in_most(late)
            if usual is None or step <= 0 or usual <= OF_ENTRY * step:
                continue
            yield Cause(
                kind="late_entry",
                stage=stage.pp,
                rank=rank,
                evidence=f"rank {rank} of stage {stage.pp} enters the step {number(usual)} ms late and the pipeline "
                "waits for it: between steps it is busy for longer than the other stages, for example with data "
                "loading, garbage collection or other work of the host",
                threshold=f"more than {OF_ENTRY:.0%} of the step, in most steps",
                excess_ms=usual,
                basis="per step",
            )


def _data_wait(target: TargetStages) -> Iterator[Cause]:
    """Only the first forward is late, only where the data comes in, and in nearly every step.

    Behind the opening of a profiler the first microbatch is slow as well: by some milliseconds, at every stage. Without
    another stage or a backward to compare with, nothing tells the two apart.
    """
    step = target.step_ms
    first = next((stage for stage in target.stages if stage.pp == 0), None)
    if first is None or step <= 0 or len(first.first_inputs) < 2 or (target.sizes.pp == 1 and target.forward_only):
        return
    least = max(OF_ENTRY * step, OF_OPENING_MS)
    late = [each for each in first.first_inputs if each.longer > least and each.ms > max(each.others)]
    if len(late) < _NEARLY_ALL * len(first.first_inputs):
        return
    longer = statistics.median(each.longer for each in late)
    others = [_first_longer(stage, ranges.FORWARD) for stage in target.stages if stage is not first]
    if any(ms > longer / 2 for ms in (*others, *(_first_longer(stage, ranges.BACKWARD) for stage in target.stages))):
        return
    usual = statistics.median(ms for each in late for ms in each.others)
    not_late = ["its backward"] * (not target.forward_only) + ["the other stages"] * (target.sizes.pp > 1)
    yield Cause(
        kind="data_wait",
        stage=0,
        evidence=f"on stage 0 the first forward of a step takes {number(longer)} ms longer than the others "
        f"({number(usual)} ms), {' and '.join(not_late)} {'does' if not_late == ['its backward'] else 'do'} not: it "
        "seems to wait for its data",
        threshold=f"more than {OF_ENTRY:.0%} of the step and {OF_OPENING_MS:.0f} ms, in nearly every step",
        excess_ms=longer,
        basis="per step",
    )


def _first_longer(stage: Stage, kind: str) -> float:
    """Milliseconds by which the first microbatch's pass of a kind exceeds the usual one on this stage."""
    passes = stage.chunks[0].compute_ms.get(kind, ()) if stage.chunks else ()
    first = [each.ms for each in passes if each.key[2] == 0]
    return statistics.median(first) - statistics.median(each.ms for each in passes) if first else 0.0


def _in_most(samples: Sequence[float]) -> float | None:
    """What most of the samples agree on; None where they do not, or where there is one sample alone."""
    if len(samples) < 2:
        return None
    middle = statistics.median_low(samples)
    return middle if sum(each >= middle / 2 for each in samples) >= _MOST_OF * len(samples) else None


def sizes_of(stages: Sequence[Stage]) -> Sizes:
    """The work of each microbatch, where microbatches differ alike on all stages; empty where they do not."""
    found = _variation(stages)
    return {key: size for key, size in zip(found.keys, found.together, strict=True) if size > 0} if found.alike else {}


@dataclass(frozen=True)
class _Variation:
    """How microbatches differ from the usual one."""

    keys: list[_Key]
    """Step, call and microbatch."""
    own: list[list[float]]
    """By stage: time over the stage's median in this step."""
    together: list[float]
    """The median over stages."""
    by_kind: list[list[float]]
    """The same of forwards alone, and of backwards alone; empty where they are not known apart."""

    @property
    def spread(self) -> float:
        return statistics.pstdev(self.together) if self.keys else 0.0

    @property
    def agreement(self) -> float:
        """The least correlation, of a stage with the others and of forwards with backwards.

        It must not rest on the first microbatch of a step, since a profiler or the data begins with it at every stage,
        nor on the longest, which one stall makes that lasts for some passes.
        """
        rest = [place for place, key in enumerate(self.keys) if key[2]]
        rest.sort(key=lambda place: self.together[place])
        return min(
            _agreement([[each[place] for place in chosen] for each in series])
            for chosen in (rest, rest[:-1])
            for series in (self.own, self.by_kind)
            if series
        )

    @property
    def alike(self) -> bool:
        if len(self.own) < 2 or not self.keys:
            return False
        least = min(statistics.pstdev(own) for own in self.own)
        # Of few microbatches any two series seem to agree.
        agree = max(AGREE if self.by_kind else AGREE_FORWARDS, _CHANCE / math.sqrt(len(self.keys)))
        return self.spread > UNEVEN and least > UNEVEN / 2 and self.agreement > agree


def _variation(stages: Sequence[Stage]) -> _Variation:
    keys, own = _relative([stage.microbatch_ms for stage in stages])
    of_kinds = [[_by_microbatch(stage, kind) for stage in stages] for kind in ranges.PASSES[:2]]
    known = all(set(keys) <= set(times) for kind in of_kinds for times in kind)
    chosen = set(keys)
    by_kind = [
        _together(_relative([{key: times[key] for key in times if key in chosen} for times in kind])[1])
        for kind in of_kinds
        if known
    ]
    return _Variation(keys, own, _together(own), by_kind)


def _together(own: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(each) for each in zip(*own, strict=True)]


def _relative(times: Sequence[Mapping[_Key, float]]) -> tuple[list[_Key], list[list[float]]]:
    """The microbatches that all of some series have, and the series with each step's median as 1."""
    common = set.intersection(*map(set, times)) if times else set()
    keys: list[_Key] = []
    own: list[list[float]] = [[] for _ in times]
    for each in grouped(sorted(common), lambda key: key[:2]).values():
        if len(each) < _FEWEST_MICROBATCHES:
            continue
        keys += each
        for series, relative in zip(times, own, strict=True):
            usual = statistics.median(series[key] for key in each)
            relative += [series[key] / usual if usual > 0 else 1.0 for key in each]
    return keys, own


def _by_microbatch(stage: Stage, kind: str) -> dict[_Key, float]:
    """Milliseconds that a microbatch takes in passes of one kind, on all chunks and captured ranks together."""
    samples = [each for chunk in stage.chunks for each in chunk.compute_ms.get(kind, ())]
    found = grouped((each for each in samples if each.key[2] is not None), lambda each: each.key)
    whole = max(map(len, found.values()), default=0)
    return {(*key[:2], key[2] or 0): sum(x.ms for x in own) for key, own in found.items() if len(own) == whole}


def _uneven_microbatches(target: TargetStages) -> Iterator[Cause]:
    if target.sizes.pp == 1 or len(target.stages) < 2:
        return
    found = _variation(target.stages)
    if not found.keys:
        return
    if found.alike:
        low, high = min(found.together), max(found.together)
        usual = statistics.fmean(statistics.median(s.microbatch_ms[key] for key in found.keys) for s in target.stages)
        why = _by_tokens(target, found) or "they differ in work, for example in sequence length"
        yield Cause(
            kind="uneven_microbatches",
            stage=None,
            evidence=f"microbatches take from {low:.2f} to {high:.2f} times the usual time, alike on all stages"
            f"{', in forwards and in backwards' if found.by_kind else ''} (spread {percent(found.spread)}, correlation "
            f"at least {found.agreement:.2f}): {why}, and no stage is to blame",
            threshold=f"spread above {UNEVEN:.0%} and correlation above {AGREE} (without a backward above "
            f"{AGREE_FORWARDS}), also without the first microbatch of a step and the longest one",
            excess_ms=(high - statistics.fmean(found.together)) * usual,
            basis="per microbatch, the longest compared with the average",
        )
    # What a stage has beyond what microbatches have in common.
    alone = [[own / max(common, 1e-9) for own, common in zip(each, found.together, strict=True)] for each in found.own]
    spreads = [scatter(each) for each in (alone if found.alike else found.own)]
    for place, stage in enumerate(target.stages):
        others = statistics.median(spreads[:place] + spreads[place + 1 :])
        if spreads[place] <= max(UNEVEN_ALONE, _TIMES_AS_LONG * others):
            continue
        times = [stage.microbatch_ms[key] for key in found.keys]
        usual, long = statistics.median(times), sorted(times)[int(0.9 * (len(times) - 1))]
        yield Cause(
            kind="uneven_microbatches",
            stage=stage.pp,
            evidence=f"microbatches vary on stage {stage.pp} only: half of them differ from the usual "
            f"{number(usual)} ms by more than {percent(spreads[place] / MAD)}, on the other stages by "
            f"{percent(others / MAD)}; one in ten takes longer than {number(long)} ms{_work_or_rank(stage)}",
            threshold=f"spread above {UNEVEN_ALONE:.0%}, and {_TIMES_AS_LONG:.0f} times that of the other stages",
            excess_ms=long - usual,
            basis="per microbatch, the longest tenth compared with the usual one",
        )


def _work_or_rank(stage: Stage) -> str:
    """What forwards and backwards that agree which microbatches are long, or do not, say of the reason."""
    keys, own = _relative([_by_microbatch(stage, kind) for kind in ranges.PASSES[:2]])
    agree = _agreement(own)
    if len(keys) < _FEWEST_TO_AGREE or _NO_PATTERN < agree <= AGREE:
        return "; whether their work differs or something disturbs this rank is not known"
    told = f"its forwards and backwards {'agree' if agree > AGREE else 'do not agree'} which ones are long"
    what = "they differ in work there" if agree > AGREE else "something disturbs this rank, and their work is not why"
    return f"; {told} (correlation {agree:.2f}): {what}"


def _by_tokens(target: TargetStages, found: _Variation) -> str | None:
    """That tokens explain the times, with those of the shortest and the longest microbatch; None where they do not."""
    known = [
        (target.tokens[key], size, key)
        for key, size in zip(found.keys, found.together, strict=True)
        if key in target.tokens
    ]
    if len({tokens for tokens, _, _ in known}) < 2:
        return None
    agree = statistics.correlation([float(tokens) for tokens, _, _ in known], [size for _, size, _ in known])
    if agree <= _TOKENS_AGREE:
        return None
    ends = []
    for tokens, _, key in (min(known), max(known)):
        took = statistics.fmean(stage.microbatch_ms[key] for stage in target.stages)
        ends.append(f"one of {counted(tokens, 'token')} takes {number(took)} ms per stage")
    return f"their tokens explain it (correlation {agree:.2f}): {' and '.join(ends)}"


def _agreement(series: Sequence[Sequence[float]]) -> float:
    """The least correlation of one series with the mean of the others."""
    found = []
    for own in series:
        others = [each for each in series if each is not own]
        try:
            found.append(statistics.correlation(own, [statistics.fmean(each) for each in zip(*others, strict=True)]))
        except statistics.StatisticsError:  # constant, or too few
            found.append(0.0)
    return min(found, default=0.0)


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
