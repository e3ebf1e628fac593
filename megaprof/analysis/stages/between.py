"""What happens between stages: how long exchanges take on each link, and which stage enters the step late."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaprof.analysis.stages.consistency import shifted
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.stages.steps import Step
from megaprof.analysis.trace.calls import Call, grouped
from megaprof.formats import ranges

_StepKey = tuple[int, int]  # step, and which of its calls
_Column = tuple[int, int, int, int]  # ranks that differ in their stage alone: one pipeline


@dataclass(frozen=True)
class Link:
    """The exchanges in one direction between two neighbouring stages."""

    sender: int
    """The stage that sends."""
    receiver: int
    """The stage that receives."""
    transfer_ms: Spread
    """Milliseconds from the end of the pass that made a tensor to the start of the pass that takes it, where the
    receiver had nothing else to do."""
    quick_ms: float
    """The lower quartile of that."""


@dataclass(frozen=True)
class FirstInput:
    """When a call was through with its first microbatch, in milliseconds."""

    ms: float
    """From the start of the call to the end of its first forward."""
    others: tuple[float, ...]
    """What the forwards of the other microbatches took."""

    @property
    def longer(self) -> float:
        """By how much the first one exceeds the usual other one."""
        return self.ms - statistics.median(self.others)


def links_of(calls: Iterable[Call], steps: Mapping[_StepKey, Step]) -> tuple[Link, ...]:
    """Every link on which a stage was seen waiting for its input; none where the stages have no common clock."""
    samples: dict[tuple[int, int], list[float]] = {}
    for key, own in _by_step(calls, steps):
        for sender, receiver, ns in transfers(own, steps[key].offset):
            samples.setdefault((sender, receiver), []).append(ns / 1e6)
    return tuple(
        Link(*ends, spread, sorted(each)[len(each) // 4])
        for ends, each in sorted(samples.items())
        if (spread := Spread.of(each)) is not None
    )


def lateness(calls: Sequence[Call], steps: Mapping[_StepKey, Step]) -> dict[int, tuple[float, ...]]:
    """By rank how many milliseconds it entered each step late, of the steps that tell it.

    A rank is late when it was away between two steps for longer than the other stages of its pipeline, and the pipeline
    waited: a first stage that came after the others, another one that came after its first input was there. Between two
    captured steps lies what the capture itself takes, unless both are in one file.
    """
    away = _away(calls)
    found: dict[int, list[float]] = {}
    for key, own in _by_step(calls, steps):
        offset = steps[key].offset
        for pipeline in grouped(own, column).values():
            for call in pipeline:
                others = [other for other in pipeline if other is not call]
                gaps = [away[id(other)] for other in others if id(other) in away]
                waited = _waited_for(call, others, offset)
                if id(call) not in away or not gaps or len(gaps) < len(others) or waited is None:
                    continue
                late = min(waited, away[id(call)] - statistics.median(gaps))
                found.setdefault(call.rank, []).append(max(0.0, late) / 1e6)
    return {rank: tuple(each) for rank, each in sorted(found.items())}


def first_inputs(calls: Iterable[Call]) -> tuple[FirstInput, ...]:
    """Of every call with several microbatches."""
    found = []
    for call in calls:
        forwards = [p for p in call.phases if p.kind == ranges.FORWARD and not p.chunk]
        first = [p for p in forwards if p.microbatch == 0]
        others = tuple((p.end - p.start) / 1e6 for p in forwards if p.microbatch)
        if first and others:
            found.append(FirstInput((first[0].end - call.extent[0]) / 1e6, others))
    return tuple(found)


def _by_step(calls: Iterable[Call], steps: Mapping[_StepKey, Step]) -> Iterator[tuple[_StepKey, list[Call]]]:
    by_step = sorted(grouped(calls, lambda call: call.key).items())
    return ((key, own) for key, own in by_step if steps[key].one_clock and len(own) > 1)


def column(call: Call) -> _Column:
    """The pipeline that its rank is of."""
    c = call.metadata.coords
    return c.tp, c.cp, c.ep, c.dp


def transfers(step: Sequence[Call], offset: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Sending stage, receiving stage, and nanoseconds that an input was under way for which its stage already waited.
    ``offset``: nanoseconds that put each rank on one clock."""
    made: dict[tuple[_Column, int, str, int, int], tuple[int, int]] = {}
    for call in step:
        by = offset.get(call.rank, 0)
        for phase in call.phases:
            if phase.kind == ranges.COMBINED or phase.chunk is None or phase.microbatch is None:
                continue
            if (target := call.metadata.placement.consumer(phase.kind, call.stage, phase.chunk)) is not None:
                key = (column(call), target[0], phase.kind, target[1], phase.microbatch)
                made[key] = call.stage, phase.end + by
    for call in step:
        by, free = offset.get(call.rank, 0), shifted(call, offset)[0]
        for phase in sorted(call.phases, key=lambda p: p.start):
            key = (column(call), call.stage, phase.kind, phase.chunk or 0, phase.microbatch or 0)
            if key in made and made[key][0] != call.stage and free <= made[key][1] <= phase.start + by:
                yield made[key][0], call.stage, phase.start + by - made[key][1]
            free = phase.end + by


def _away(calls: Iterable[Call]) -> dict[int, int]:
    """Nanoseconds since a rank's call before, by the call's identity, where nothing was left out between them."""
    found = {}
    for own in grouped(calls, lambda call: call.rank).values():
        own.sort(key=lambda call: call.key)
        for before, call in itertools.pairwise(own):
            if before.source == call.source and call.step <= before.step + 1:
                found[id(call)] = call.extent[0] - before.extent[1]
    return found


def _waited_for(call: Call, others: Sequence[Call], offset: Mapping[int, int]) -> int | None:
    """For how many nanoseconds the pipeline had everything that it needs but this rank."""
    start = shifted(call, offset)[0]
    if call.stage == 0:
        starts = [shifted(other, offset)[0] for other in others]
        return start - round(statistics.median(starts)) if starts else None
    for other in others:
        if other.stage == call.stage - 1:
            by = offset.get(other.rank, 0)
            first = (p.end + by for p in other.phases if p.kind == ranges.FORWARD and not p.microbatch and not p.chunk)
            return next((start - end for end in first), None)
    return None
