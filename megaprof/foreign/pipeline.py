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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.intervals import difference, total, union
from megaprof.foreign.recordings import SEND_RECEIVE, Recording
from megaprof.parallel.schedules import PassId, PipelineSchedule, stage_program

_GROUP = "PIPELINE_MODEL_PARALLEL_GROUP"
_OPERATIONS = ("send-receive", SEND_RECEIVE, "coalesced")
FORWARD, BACKWARD = "forward", "backward"
#: Computation where no pass belongs may take at most this share of a pass.
_MOST_OUTSIDE = 0.1
_MOST_MICROBATCHES = 1 << 16


@dataclass(frozen=True)
class StageFacts:
    """One stage. Times are in milliseconds, medians over microbatches and steps."""

    folder: str
    """Folder of its recordings, below the one that has all; empty unless each folder is on its own."""
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


class _Step(NamedTuple):
    """What one step of one rank shows: nanoseconds computed between two exchanges, by the passes that lie there; those
    of exchanges while nothing computed; and those from its start to its end."""

    microbatches: int
    passes: Mapping[tuple[str, ...], Sequence[int]]
    exchange_ns: int
    length_ns: int


def stages_of(folder: str, recordings: Sequence[Recording]) -> tuple[list[StageFacts], Note | None]:
    """Returns the stages. If pipeline groups are there but show no stages, returns none, and a note that says why."""
    steps_by_stage: defaultdict[tuple[int, int], list[tuple[int, _Step]]] = defaultdict(list)
    for recording in recordings:
        groups = (group for _, group in recording.communication if (group.description or "").startswith(_GROUP))
        ranks = next((group.ranks for group in groups if group.ranks), ())
        if recording.rank is None or recording.rank not in ranks or len(ranks) == 1:
            continue
        stage, stages = ranks.index(recording.rank), len(ranks)
        if not (steps := list(_steps(recording, stage, stages))):
            return [], Note("no_stages", ranks=(recording.rank,), said="its exchanges do not follow 1F1B")
        steps_by_stage[stages, stage] += ((recording.rank, step) for step in steps)
    all_steps = [step for stage_steps in steps_by_stage.values() for _, step in stage_steps]
    if len({stages for stages, _ in steps_by_stage}) > 1 or len({step.microbatches for step in all_steps}) > 1:
        return [], Note("no_stages", said="the recordings are of pipelines or steps of different sizes")
    return [_facts(folder, stage, stages, steps) for (stages, stage), steps in sorted(steps_by_stage.items())], None


def _steps(recording: Recording, stage: int, stages: int) -> Iterator[_Step]:
    """Yields the steps that have exchanges; nothing if one of them does not follow 1F1B. Does not use the computation
    before the first exchange of a step and after the last one, because other work is there too."""
    gpu = recording.gpu
    is_exchange, computes = np.zeros(len(gpu.spans), dtype=np.bool_), recording.computes
    for (operation, group), rows in recording.communication.items():
        is_exchange[rows] = (group.description or "").startswith(_GROUP) and operation in _OPERATIONS
    computing = union(gpu.spans[computes])
    whole_recording = [[int(gpu.launched.min()), int(gpu.spans[:, 1].max())]]
    steps = []
    for start, end in recording.steps.tolist() or whole_recording:
        in_step = (gpu.launched >= start) & (gpu.launched <= end)
        exchanges, computed = np.flatnonzero(is_exchange & in_step), np.flatnonzero(computes & in_step)
        if not len(exchanges):
            continue
        if (microbatches := _count(len(exchanges), stage, stages)) is None:
            return
        before = np.searchsorted(np.sort(gpu.launched[exchanges]), gpu.launched[computed], side="right")
        spans = gpu.spans[computed[np.argsort(before, kind="stable")]]
        between = np.split(spans, np.cumsum(np.bincount(before, minlength=len(exchanges) + 1))[:-1])
        passes: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for kinds, computed_spans in [*zip(_passes_between(stage, stages, microbatches), between, strict=True)][1:-1]:
            passes[kinds].append(total(union(computed_spans)))
        outside_ns = passes.pop((), [])
        lengths_ns = [ns for pass_ns in passes.values() for ns in pass_ns]
        if not lengths_ns or min(lengths_ns) == 0:
            return
        if max(outside_ns, default=0) > _MOST_OUTSIDE * statistics.median(lengths_ns):
            return
        exchanging = difference(union(gpu.spans[exchanges]), computing)
        steps.append(_Step(microbatches, passes, total(exchanging), end - start))
    yield from steps


def _count(exchanges: int, stage: int, stages: int) -> int | None:
    """Returns the number of microbatches for which a stage has this number of exchanges; None if there is none."""
    low, high = 1, min(exchanges, _MOST_MICROBATCHES)
    while low < high:
        middle = (low + high) // 2
        if len(_passes_between(stage, stages, middle)) - 1 < exchanges:
            low = middle + 1
        else:
            high = middle
    return low if len(_passes_between(stage, stages, low)) - 1 == exchanges else None


def _passes_between(stage: int, stages: int, microbatches: int) -> list[tuple[str, ...]]:
    """Returns which passes lie before, between and after the exchanges of a step."""
    kinds_between: list[list[str]] = [[]]
    for step in stage_program(PipelineSchedule.checked(stages, 1, microbatches), stage):
        if isinstance(step, PassId):
            kinds_between[-1].append(step.kind)
        else:
            kinds_between.append([])
    return [tuple(sorted(kinds)) for kinds in kinds_between]


def _facts(folder: str, stage: int, stages: int, steps: Sequence[tuple[int, _Step]]) -> StageFacts:
    def computed(*passes: str) -> float | None:
        lengths_ns = [ns for _, step in steps for ns in step.passes.get(passes, ())]
        return statistics.median(lengths_ns) / 1e6 if lengths_ns else None

    forward, backward, both_passes = computed(FORWARD), computed(BACKWARD), computed(BACKWARD, FORWARD)
    if both_passes is None and forward is not None and backward is not None:
        both_passes = forward + backward
    return StageFacts(
        folder=folder,
        stage=stage,
        stages=stages,
        ranks=tuple(sorted({rank for rank, _ in steps})),
        steps=len(steps),
        microbatches=steps[0][1].microbatches,
        forward_ms=forward,
        backward_ms=backward,
        microbatch_ms=both_passes,
        exchange_ms=statistics.median(step.exchange_ns for _, step in steps) / 1e6,
        step_ms=statistics.median(step.length_ns for _, step in steps) / 1e6,
    )
