"""Metrics of every pipeline stage, per step and per microbatch.

All times are milliseconds. A number that the recording does not allow is None, and a warning says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Spread, mean_of
from megaprof.analysis.trace.steps import GROUPS, WHOLE_STEP
from megaprof.formats.metadata import ModelChunk
from megaprof.parallel.topology import ParallelSizes

#: How a step is timed: from the first stage's start to the last stage's end or, if the stages have no common clock, by
#: the range of the longest stage.
Basis = Literal["one_clock", "longest_stage"]
ONE_CLOCK: Final = "one_clock"
LONGEST: Final = "longest_stage"

_TARGET_ORDER = (WHOLE_STEP, "train_actor", "train_log_probs", "evaluate")
#: The parts of a stage's bubble: before its first backward, in between, and after its last forward.
BUBBLE_PARTS = ("warmup_ms", "steady_ms", "cooldown_ms")


@dataclass(frozen=True)
class ChunkTimes:
    """One model chunk of a stage: what it holds, and how long its passes take."""

    chunk: int
    """Number of the chunk on the stage, from 0."""
    holds: ModelChunk | None
    """Layers and other contents; None if the traces do not say."""
    forward_ms: Spread | None
    """Milliseconds of a forward without exposed communication and, on a GPU, without waiting for the host."""
    backward_ms: Spread | None
    """Milliseconds of a backward without exposed communication and, on a GPU, without waiting for the host."""


@dataclass(frozen=True)
class Collectives:
    """The collectives of one group inside passes, split by when its ranks arrive: the last rank makes the others
    wait, and the rest is transfer."""

    waiting_ms: Spread | None
    """Time until the last rank of the group arrives."""
    transferring_ms: Spread | None
    """Time from then on."""
    reason: Literal["arrivals_unknown", "durations_unknown", "computed_beside"] | None
    """Why a number is missing: in no step are all arrivals known; torch does not say how long collectives ran; passes
    compute at the same time."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, measured on one of its ranks. A `Spread` is over steps, in milliseconds per step unless noted
    otherwise; None if the recording does not allow it. The times of a step add up to the step."""

    pp: int
    """Pipeline rank."""
    ranks: tuple[int, ...]
    """Global ranks that these times are from: one rank, or all if no passes are known."""
    chunks: tuple[ChunkTimes, ...]
    """Model chunks of the stage."""
    forward_ms: Spread | None = None
    """All forwards of a step, without exposed communication and without waiting for the host."""
    backward_ms: Spread | None = None
    """All backwards of a step, without exposed communication and without waiting for the host."""
    compute_ms: Spread | None = None
    """Forwards, backwards and combined passes together, without exposed communication or waiting for the host."""
    exposed_ms: dict[str, Spread | None] = field(default_factory=partial(dict.fromkeys, GROUPS))
    """Communication that no compute hides, by group: ``tp``, ``ep``, ``cp``, ``pp``, ``dp``, and ``unknown`` if the
    recording does not tell the group. None for a group that the unknown part may belong to, and for ``dp`` if the
    gradient reduction may have waited for a replica that was not captured."""
    bubble_ms: Spread | None = None
    """Waiting for other stages, and for slower replicas that were captured: what is left of the step after compute,
    exposed communication, ``gradients_ms``, ``host_bound_ms`` and ``data_wait_ms``."""
    bubble_fraction: float | None = None
    """Bubble as a fraction of the step, from 0 to 1."""
    forward_per_microbatch_ms: Spread | None = None
    """Forward of one microbatch on all chunks of the stage, in milliseconds; over microbatches as well as steps."""
    backward_per_microbatch_ms: Spread | None = None
    """Backward of one microbatch on all chunks of the stage, in milliseconds; over microbatches as well as steps."""
    dp_tail_ms: Spread | None = None
    """Part of ``exposed_ms.dp`` that comes after the last pass of all stages and replicas; None if that is."""
    pp_waiting_ms: Spread | None = None
    """Part of the time in exchanges that was waiting for the neighbour; included in the bubble."""
    gradients_ms: Spread | None = None
    """Part of the step after the last pass that is not in ``dp_tail_ms``; None if the two cannot be separated, and all
    of it counts as communication."""
    host_bound_ms: Spread | None = None
    """Time inside passes in which the GPU was idle because nothing was launched; None on a CPU."""
    host_bound_passes: float | None = None
    """Fraction of the passes at both ends of which the GPU had nothing else to do, so that it waited for the host; None
    if no timeline on the GPU's clock says so."""
    modules_ms: dict[str, Spread] = field(default_factory=dict)
    """Milliseconds of every pass through a module, by the module's label and the kind of pass."""
    data_wait_ms: Spread | None = None
    """Time in which forwards waited for this rank's data, which is in no pass; None if it was not recorded."""
    bubble_split: dict[str, Spread | None] = field(default_factory=partial(dict.fromkeys, BUBBLE_PARTS))
    """Parts of the bubble, by the names in `BUBBLE_PARTS`."""
    host_ms: dict[str, Spread | None] = field(default_factory=dict)
    """For a GPU trace, the host's time in ``forward`` and ``backward``."""
    collectives: dict[str, Collectives] = field(default_factory=dict)
    """From timelines: collectives of ``tp``, ``ep`` and ``cp``, if these have several ranks."""


@dataclass(frozen=True)
class TargetStages:
    """The stages of one target and role."""

    target: str
    """The captured target: ``train_actor``, ..."""
    role: str | None
    """``actor``, ``ref``, ...; None without roles."""
    sizes: ParallelSizes
    """Parallel sizes of the job."""
    schedule: str | None
    """``1f1b``, ``interleaved``, ...; None if the traces do not say."""
    forward_only: bool
    """True if there is no backward."""
    microbatches: int | None
    """Microbatches per step. If steps or replicas differ, the most frequent number, and only those count. None if the
    recording does not say."""
    steps: tuple[int, ...]
    """Steps that the lengths are of, ascending. Where a timeline was recorded too, these exclude captured steps."""
    step_time_ms: Spread | None
    """Duration of a step in milliseconds; None if no step is complete."""
    step_time_basis: Basis
    """How the step was measured: from the first stage's start to the last stage's end (``one_clock``) or, without a
    common clock, as the range of the longest stage (``longest_stage``)."""
    stages: tuple[Stage, ...]
    """Captured stages, by pipeline rank."""
    unjudgeable: Note | None
    """Why no stage can be called slow; None if one can."""
    warnings: tuple[Note, ...]
    """Notes on what is missing, and why."""
    imbalance: float | None = None
    """Compute of the slowest stage / average stage; None without a pipeline, if a stage's compute is unknown, or if
    ``unjudgeable`` says why."""
    slow_ranks: tuple[Stage, ...] = ()
    """Times of slow ranks, which ``stages`` leaves out: for each, its stage with the times of this rank only."""
    profiled_step_time_ms: Spread | None = None
    """Duration of a step that a profiler recorded, in milliseconds. It is ``step_time_ms`` if no other step was
    recorded; None if no profiler recorded a step."""
    framework: str | None = None
    """Host framework that trained, such as ``verl``; None for another one."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Kinds of passes: ``forward``, and ``backward`` if there is one."""
        return ("forward",) if self.forward_only else ("forward", "backward")

    @property
    def shown(self) -> list[Stage]:
        """Rows of a table: the stages, and slow ranks below their own."""
        return sorted((*self.stages, *self.slow_ranks), key=lambda stage: stage.pp)

    @property
    def profiled(self) -> bool:
        """True if all times are of steps that a profiler recorded."""
        return self.step_time_ms is not None and self.profiled_step_time_ms == self.step_time_ms

    @property
    def step_ms(self) -> float:
        """Milliseconds of the mean step; 0 if no step is whole."""
        return mean_of(self.step_time_ms) or 0.0


def order(stages: TargetStages) -> tuple[int, str, str, str]:
    """Returns the key that sorts targets."""
    place = _TARGET_ORDER.index(stages.target) if stages.target in _TARGET_ORDER else len(_TARGET_ORDER)
    return place, stages.target, stages.role or "", str(stages.sizes)


def imbalance(stages: Sequence[Stage], sizes: ParallelSizes) -> float | None:
    """Returns the slowest stage's compute over the average over stages; None without a pipeline, or if the
    compute of a stage is not known."""
    compute = [stage.compute_ms.mean for stage in stages if stage.compute_ms]
    if sizes.pp == 1 or len(compute) < sizes.pp or max(compute) <= 0:
        return None
    return max(compute) / statistics.fmean(compute)
