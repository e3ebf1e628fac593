"""Metrics of every pipeline stage, per step and per microbatch.

All times are milliseconds. A number that the recording does not allow is None, and a warning says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Spread, mean_of
from megaprof.analysis.trace.calls import WHOLE_STEP, grouped
from megaprof.formats.metadata import ModelChunk, WithoutRange
from megaprof.parallel.topology import ParallelSizes

#: How a step is timed: from the first stage's start to the last stage's end; or, where the stages have no common
#: clock, as long as the longest stage's own range.
Basis = Literal["one_clock", "longest_stage"]
ONE_CLOCK: Final = "one_clock"
LONGEST: Final = "longest_stage"

_TARGET_ORDER = (WHOLE_STEP, "train_actor", "train_log_probs", "evaluate")
#: What of a stage's bubble lies before its first backward, between, and behind its last forward.
BUBBLE_PARTS = ("warmup_ms", "steady_ms", "cooldown_ms")


@dataclass(frozen=True)
class ChunkTimes:
    """One model chunk of a stage: what it holds, and what a pass over it takes."""

    chunk: int
    """Its number on the stage, from 0."""
    holds: ModelChunk | None
    """Its layers and what is beside them; None where the traces do not say."""
    forward_ms: Spread | None
    """Milliseconds of a forward without exposed communication and, on a GPU, without waiting for the host."""
    backward_ms: Spread | None
    """The same of a backward."""


@dataclass(frozen=True)
class Collectives:
    """The collectives of one group in passes, from when its ranks came to them. The rank that comes last makes the
    others wait; what is left is the transfer."""

    waiting_ms: Spread | None
    """Until the last rank of the group came."""
    transferring_ms: Spread | None
    """From then on."""
    reason: Literal["arrivals_unknown", "durations_unknown", "computed_beside"] | None
    """Why a number is missing: of no step it is known when all ranks came; torch does not say how long they ran; passes
    compute beside them."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, by one of its ranks. The `Spread` of a quantity is over steps, in milliseconds per step where
    nothing else is said; None where the recording does not allow it. The times of a step add up to it."""

    pp: int
    """Its pipeline rank."""
    ranks: tuple[int, ...]
    """Whose times these are, by global numbers: one rank, or all where no passes are known."""
    chunks: tuple[ChunkTimes, ...]
    """Its model chunks."""
    forward_ms: Spread | None
    """All forwards of a step, without exposed communication and waiting for the host."""
    backward_ms: Spread | None
    """All backwards of a step, likewise."""
    compute_ms: Spread | None
    """Both, and combined passes, likewise."""
    exposed_ms: dict[str, Spread | None]
    """Communication that no compute hides, by group: ``tp``, ``ep``, ``cp``, ``pp``, ``dp``, and ``unknown`` where the
    recording does not tell the group. None for a group that the unknown part may be of."""
    bubble_ms: Spread | None
    """Waiting for other stages, and for replicas that are slower: what compute, exposed communication,
    ``gradients_ms`` and ``host_bound_ms`` leave of the step."""
    bubble_fraction: float | None
    """The part of the step that this is, from 0 to 1."""
    forward_per_microbatch_ms: Spread | None
    """Milliseconds of one microbatch's forward on all chunks of the stage, over microbatches too."""
    backward_per_microbatch_ms: Spread | None
    """The same of its backward."""
    dp_tail_ms: Spread | None
    """Of ``exposed_ms``, the data-parallel part behind the last pass of all stages and replicas."""
    pp_waiting_ms: Spread | None
    """Of the time in exchanges, what was waiting for the neighbour; the bubble contains it."""
    gradients_ms: Spread | None
    """What the step goes on for behind the last pass of all, without the communication that ``dp_tail_ms`` has; None
    where the two are not told apart, and all of it is communication."""
    host_bound_ms: Spread | None
    """Inside passes, where the GPU idled because nothing was launched; None on a CPU."""
    modules_ms: dict[str, Spread]
    """Milliseconds of every pass through a module, by its label and the kind of pass."""
    bubble_split: dict[str, Spread | None] = field(default_factory=partial(dict.fromkeys, BUBBLE_PARTS))
    """The bubble's parts, each of `BUBBLE_PARTS`."""
    host_ms: dict[str, Spread | None] = field(default_factory=dict)
    """On a GPU trace the host's time in ``forward`` and ``backward``."""
    collectives: dict[str, Collectives] = field(default_factory=dict)
    """From timelines: those of ``tp``, ``ep`` and ``cp``, where there are several ranks."""


@dataclass(frozen=True)
class TargetStages:
    """The stages of one target and role."""

    target: str
    """What was captured: ``train_actor``, ..."""
    role: str | None
    """``actor``, ``ref``, ...; None without roles."""
    sizes: ParallelSizes
    """The parallel sizes of the job."""
    schedule: str | None
    """``1f1b``, ``interleaved``, ...; None where the traces do not say."""
    forward_only: bool
    """Whether there is no backward."""
    microbatches: int | None
    """Microbatches per step: of several numbers the one that most steps of replicas have, which alone count; None where
    the recording does not say."""
    steps: tuple[int, ...]
    """The captured steps, ascending."""
    step_time_ms: Spread | None
    """Milliseconds of a step; None where no step is whole."""
    step_time_basis: Basis
    """How that was measured: from the first stage's start to the last stage's end (``one_clock``), or, without a common
    clock, as the longest stage's own range (``longest_stage``)."""
    stages: tuple[Stage, ...]
    """By pipeline rank; those that were captured."""
    unjudgeable: Note | None
    """Why no stage may be called slow; None where one may."""
    warnings: tuple[Note, ...]
    """What is missing, and why."""
    imbalance: float | None = None
    """Compute of the slowest stage over the average over stages; None without a pipeline, and where that of a stage is
    not known or ``unjudgeable`` says why."""
    slow_ranks: tuple[Stage, ...] = ()
    """What slow ranks took that ``stages`` are not of: of each its stage with the times of this rank alone."""
    framework: str | None = None
    """The host that trained; None for another one."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Kinds of passes: ``forward``, and ``backward`` where there is one."""
        return ("forward",) if self.forward_only else ("forward", "backward")

    @property
    def shown(self) -> list[Stage]:
        """Rows of a table: the stages, and slow ranks below their own."""
        return sorted((*self.stages, *self.slow_ranks), key=lambda each: each.pp)

    @property
    def step_ms(self) -> float:
        """Milliseconds of the mean step; 0 where no step is whole."""
        return mean_of(self.step_time_ms) or 0.0


def order(stages: TargetStages) -> tuple[int, str, str, str]:
    """Returns where a target stands among others."""
    known = _TARGET_ORDER.index(stages.target) if stages.target in _TARGET_ORDER else len(_TARGET_ORDER)
    return known, stages.target, stages.role or "", str(stages.sizes)


def without_ranges(modules: Iterable[WithoutRange]) -> Iterator[Note]:
    """Yields which modules have no range: those of the same layers, for the same reason, together."""
    layers: dict[tuple[str, str], set[int]] = {}
    for each in modules:
        layers.setdefault((each.reason, each.module), set()).update(n for n in each.layers if n is not None)
    for (why, of), same in grouped(layers, lambda key: (key[0], tuple(sorted(layers[key])))).items():
        yield Note("modules_without_range", names=tuple(module for _, module in same), layers=of, said=why)


def imbalance(stages: Sequence[Stage], sizes: ParallelSizes) -> float | None:
    """Returns the slowest stage's compute over the average over stages; None without a pipeline, or where that of a
    stage is not known."""
    compute = [stage.compute_ms.mean for stage in stages if stage.compute_ms]
    if sizes.pp == 1 or len(compute) < sizes.pp or max(compute) <= 0:
        return None
    return max(compute) / statistics.fmean(compute)
