"""Finds the stages of a pipeline from its exchanges, for recordings without ranges. Megatron's process groups show the
stage of a rank, and the order of 1F1B shows what was computed between two exchanges.

Megatron runs one kernel per exchange call. A call is one of ``recv_forward``, ``send_forward``,
``send_forward_recv_backward`` and so on. Stage, number of stages and microbatches determine their order
(``forward_backward_pipelining_without_interleaving``, batched). If the number of kernels in a step, or the computation
between them, does not fit this order, the recordings show no stages.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.analysis.foreign.recordings import SEND_RECEIVE, Recording
from megaprof.analysis.notes import Note
from megaprof.analysis.trace.intervals import Intervals, difference, total, union
from megaprof.parallel.schedules import PassId, PipelineSchedule, stage_program

_GROUP = "PIPELINE_MODEL_PARALLEL_GROUP"
_OPERATIONS = ("send-receive", SEND_RECEIVE, "coalesced")
FORWARD, BACKWARD = "forward", "backward"
#: Computation where no pass belongs may take at most this share of a pass.
_BESIDE = 0.1
_MOST_MICROBATCHES = 1 << 16


@dataclass(frozen=True)
class StageFacts:
    """One stage. Times are in milliseconds, medians over microbatches and steps."""

    stage: int
    """Position in the pipeline group."""
    stages: int
    """Number of stages."""
    ranks: tuple[int, ...]
    """Recorded ranks on it."""
    steps: int
    """Number of steps examined, over all these ranks."""
    microbatches: int
    """Microbatches per step."""
    forward_ms: float | None
    """Computation of one forward; None if no exchange separates it from a backward, as on the last stage."""
    backward_ms: float | None
    """Computation of one backward; None if no exchange separates it from a forward, as on the last stage."""
    microbatch_ms: float | None
    """Computation of one forward and one backward together; None if the exchanges do not show it."""
    exchange_ms: float
    """Exchanges per step while nothing computed: waiting for neighbours, and transfers."""
    step_ms: float
    """Duration of a step on the host; of the whole recording if it has no steps."""


@dataclass(frozen=True)
class _Step:
    """The findings from one step of one rank."""

    microbatches: int
    """Number of microbatches."""
    passes: dict[tuple[str, ...], list[int]]
    """Nanoseconds computed between two exchanges, by the passes that lie there."""
    exchange_ns: int
    """Nanoseconds of exchanges while nothing computed."""
    length_ns: int
    """Nanoseconds from its start to its end."""


def stages_of(recordings: Sequence[Recording]) -> tuple[tuple[StageFacts, ...], Note | None]:
    """Returns the stages. If pipeline groups are there but show no stages, returns none, and a note that says why."""
    found: defaultdict[tuple[int, int], list[tuple[int, _Step]]] = defaultdict(list)
    for recording in recordings:
        if (ranks := _pipeline(recording)) is None or recording.rank is None:
            continue
        stage, stages = ranks.index(recording.rank), len(ranks)
        if not (steps := list(_steps(recording, stage, stages))):
            return (), Note("not_1f1b", ranks=(recording.rank,))
        found[stages, stage] += ((recording.rank, step) for step in steps)
    everything = [step for each in found.values() for _, step in each]
    if len({stages for stages, _ in found}) > 1 or len({step.microbatches for step in everything}) > 1:
        return (), Note("pipelines_differ")
    return tuple(_facts(stage, stages, found[stages, stage]) for stages, stage in sorted(found)), None


def _pipeline(recording: Recording) -> tuple[int, ...] | None:
    """Returns the ranks of the recording's pipeline group, by stage; None if it has no group of this
    rank and others."""
    for _, group in recording.communication:
        if (group.description or "").startswith(_GROUP) and group.ranks:
            return group.ranks if len(group.ranks) > 1 and recording.rank in group.ranks else None
    return None


def _steps(recording: Recording, stage: int, stages: int) -> Iterator[_Step]:
    """Yields the steps that have exchanges; nothing if one of them does not follow 1F1B."""
    gpu = recording.gpu
    exchanges, computes = np.zeros(len(gpu.spans), dtype=np.bool_), recording.computes
    for (operation, group), rows in recording.communication.items():
        exchanges[rows] = (group.description or "").startswith(_GROUP) and operation in _OPERATIONS
    computing = union(gpu.spans[computes])
    whole = [[int(gpu.launched.min()), int(gpu.spans[:, 1].max())]]
    steps = []
    for start, end in recording.steps.tolist() or whole:
        inside = (gpu.launched >= start) & (gpu.launched <= end)
        own = exchanges & inside
        if not own.any():
            continue
        own_computing = inside & computes
        step = _step(gpu.launched[own], gpu.launched[own_computing], gpu.spans[own_computing], stage, stages)
        if step is None:
            return
        microbatches, passes = step
        steps.append(_Step(microbatches, passes, total(difference(union(gpu.spans[own]), computing)), end - start))
    yield from steps


def _step(
    exchanges: npt.NDArray[np.int64], launches: npt.NDArray[np.int64], spans: Intervals, stage: int, stages: int
) -> tuple[int, dict[tuple[str, ...], list[int]]] | None:
    """Returns the number of microbatches of a step, and the nanoseconds computed between exchanges, by the passes that
    lie there; None if the step does not follow 1F1B. Does not use the computation before the first exchange and after
    the last one, because other work is there too."""
    microbatches = _count(len(exchanges), stage, stages)
    if microbatches is None:
        return None
    place = np.searchsorted(np.sort(exchanges), launches, side="right")
    order = np.argsort(place, kind="stable")
    spans, bounds = spans[order], np.searchsorted(place[order], np.arange(len(exchanges) + 1))
    passes: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, between in enumerate(_between(stage, stages, microbatches)):
        if 0 < number < len(exchanges):
            passes[between].append(total(union(spans[bounds[number] : bounds[number + 1]])))
    beside = passes.pop((), [])
    lengths = [ns for each in passes.values() for ns in each]
    if not lengths or min(lengths) == 0 or (beside and max(beside) > _BESIDE * statistics.median(lengths)):
        return None
    return microbatches, dict(passes)


def _count(exchanges: int, stage: int, stages: int) -> int | None:
    """Returns the number of microbatches for which a stage has this number of exchanges; None if there is none."""
    low, high = 1, min(exchanges, _MOST_MICROBATCHES)
    while low < high:
        middle = (low + high) // 2
        if len(_between(stage, stages, middle)) - 1 < exchanges:
            low = middle + 1
        else:
            high = middle
    return low if len(_between(stage, stages, low)) - 1 == exchanges else None


def _between(stage: int, stages: int, microbatches: int) -> list[tuple[str, ...]]:
    """Returns which passes lie before, between and after the exchanges of a step."""
    between: list[list[str]] = [[]]
    for step in stage_program(PipelineSchedule.checked(stages, 1, microbatches), stage):
        if isinstance(step, PassId):
            between[-1].append(step.kind)
        else:
            between.append([])
    return [tuple(sorted(each)) for each in between]


def _facts(stage: int, stages: int, steps: Sequence[tuple[int, _Step]]) -> StageFacts:
    def computed(*passes: str) -> float | None:
        lengths = [ns for _, step in steps for ns in step.passes.get(passes, ())]
        return statistics.median(lengths) / 1e6 if lengths else None

    forward, backward, both = computed(FORWARD), computed(BACKWARD), computed(BACKWARD, FORWARD)
    if both is None and forward is not None and backward is not None:
        both = forward + backward
    return StageFacts(
        stage=stage,
        stages=stages,
        ranks=tuple(sorted({rank for rank, _ in steps})),
        steps=len(steps),
        microbatches=steps[0][1].microbatches,
        forward_ms=forward,
        backward_ms=backward,
        microbatch_ms=both,
        exchange_ms=statistics.median(step.exchange_ns for _, step in steps) / 1e6,
        step_ms=statistics.median(step.length_ns for _, step in steps) / 1e6,
    )
