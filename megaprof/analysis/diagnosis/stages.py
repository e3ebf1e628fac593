"""Metrics of every pipeline stage, per step and per microbatch, from the table of passes or from what is known without.

All times are milliseconds. A number that the recording does not allow is None, and a warning says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from megaprof.analysis.diagnosis.policy import MOST
from megaprof.analysis.fleet.reading import Key, Series
from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Spread, mean_of
from megaprof.analysis.table.table import DATA, Floats, Table
from megaprof.analysis.table.traced import Job
from megaprof.analysis.trace.groups import GROUPS, INSIDE, parallel_of
from megaprof.analysis.trace.steps import WHOLE_STEP, Passes, TracedStep, grouped
from megaprof.formats.metadata import Metadata, ModelChunk
from megaprof.formats.ranges import PASSES
from megaprof.parallel.peers import began
from megaprof.parallel.topology import ParallelSizes

#: How a step is timed: from the first stage's start to the last stage's end or, if the stages have no common clock, by
#: the range of the longest stage.
Basis = Literal["one_clock", "longest_stage"]

_TARGET_ORDER = (WHOLE_STEP, "train_actor", "train_log_probs", "evaluate")
#: The parts of a stage's bubble: before its first backward, in between, and after its last forward.
BUBBLE_PARTS = ("warmup_ms", "steady_ms", "cooldown_ms")
#: The parts of `Table.spent` that are subtracted from a step, with compute and reduction, to find its bubble.
_SPENT = (*INSIDE, "unknown", "dp", "pp", "host_bound", DATA)


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


def order(key: Key) -> tuple[int, str, str, str]:
    """Returns what sorts targets."""
    place = _TARGET_ORDER.index(key.target) if key.target in _TARGET_ORDER else len(_TARGET_ORDER)
    return place, key.target, key.role or "", str(key.sizes)


def averages(table: Table, slow: Collection[int] = (), suspects: Collection[int] = ()) -> TargetStages:
    """Returns the stages, each measured on one of its ranks. These ranks are from the pipeline with the fewest ``slow``
    ranks, and of these the one with the fewest ``suspects``, so that no slow machine distorts the picture of the
    layout. Slow ranks of other pipelines are shown beside them."""
    first = table.first
    place = shown(table, slow, suspects)
    recorded = [stage for stage, metadata in enumerate(table.metadata) if metadata is not None]
    stages = tuple(_stage((place[0], stage, place[1]), table) for stage in recorded)
    compute_ms = [stage.compute_ms.mean for stage in stages if stage.compute_ms]
    known = first.sizes.pp > 1 and len(compute_ms) == first.sizes.pp and max(compute_ms) > 0
    imbalance = max(compute_ms) / statistics.fmean(compute_ms) if known else None
    others = []
    if table.ranks.shape[2] == table.compute.shape[3]:  # else the passes of one rank stand for all its peers
        for rank in sorted(set(slow).difference(*(stage.ranks for stage in stages))):
            others += [_stage((d, s, p), table) for d, s, p in np.argwhere(table.ranks == rank).tolist()]
    notes = tuple(dict.fromkeys((*_notes(table), *table.warnings, *_waiting_for_host(table, place))))
    return TargetStages(
        target=table.target,
        role=table.role,
        sizes=first.sizes,
        schedule=first.schedule,
        forward_only="backward" not in table.schedule.kinds,
        microbatches=table.schedule.microbatches,
        steps=tuple(sorted(set(table.steps.tolist()))),
        step_time_ms=_spread(table.length),
        step_time_basis="one_clock" if table.clocks else "longest_stage",
        profiled_step_time_ms=_spread(table.profiled_length) if len(table.profiled_length) else None,
        stages=stages,
        unjudgeable=next((note for note in notes if note.kind == "stages_missing"), None),
        warnings=notes,
        imbalance=imbalance,
        slow_ranks=tuple(others),
        framework=first.framework,
    )


def of_series(series: Series, why: Note) -> TargetStages:
    """Returns what timelines show about stages without the times of single passes: how long a step took, and its passes
    together. ``why``: the reason why these times are missing."""
    first = next(iter(series.metadata.values()))
    ranks = grouped(sorted(series.ranks, key=lambda rank: rank.coords.rank), lambda rank: rank.coords.pp)
    stages = (
        Stage(
            pp=pp,
            ranks=tuple(rank.coords.rank for rank in ranks[pp]),
            chunks=_chunks(series.metadata[pp], None, None),
            compute_ms=Spread.of([rank.mean_ms for rank in ranks[pp] if rank.steps]),
        )
        for pp in sorted(ranks)
    )
    return TargetStages(
        target=first.target,
        role=first.role,
        sizes=first.sizes,
        schedule=first.schedule,
        forward_only=first.forward_only,
        microbatches=first.microbatches,
        steps=tuple(np.unique(series.calls.steps).tolist()),
        step_time_ms=Spread.of(series.calls.longest.tolist()),
        step_time_basis="longest_stage",
        stages=tuple(stages),
        unjudgeable=why,
        warnings=(why,),
        framework=first.framework,
    )


def of_steps(job: Job, why: Note) -> TargetStages:
    """Returns what traces show about stages without a table of their passes: how long a step took on the longest stage,
    and its passes together. ``why``: the reason why there is no table."""
    steps = job.steps
    first = steps[0]
    stages = grouped(steps, lambda step: step.stage)
    longest = []
    for same in grouped(steps, lambda step: step.key).values():
        if not any(step.incomplete for step in same):
            longest.append(max(step.extent[1] - step.extent[0] for step in same) / 1e6)
    counts = {step.metadata.microbatches for step in steps if step.target == step.metadata.target}
    return TargetStages(
        target=first.target,
        role=first.role,
        sizes=first.metadata.sizes,
        schedule=first.metadata.schedule,
        forward_only=first.forward_only,
        microbatches=counts.pop() if len(counts) == 1 else None,
        steps=tuple(sorted({step.step for step in steps})),
        step_time_ms=Spread.of(longest),
        step_time_basis="longest_stage",
        profiled_step_time_ms=Spread.of(longest),
        stages=tuple(_of_sums(pp, stages[pp]) for pp in sorted(stages)),
        unjudgeable=job.unjudgeable or why,
        warnings=tuple(dict.fromkeys((*job.warnings(), why))),
        framework=first.metadata.framework,
    )


def _of_sums(pp: int, steps: Sequence[TracedStep]) -> Stage:
    """Returns how long the passes of a stage took together, over all of its ranks."""
    whole = [s.passes for s in steps if len(s.passes.kind) and not s.incomplete and s.on_gpu == s.has_kernels]
    separate = [] if any((each.kind == 2).any() for each in whole) else whole

    def together(passes: Sequence[Passes], *kinds: int) -> Spread | None:
        return Spread.of([float(each.working[np.isin(each.kind, kinds)].sum()) / 1e6 for each in passes])

    return Stage(
        pp=pp,
        ranks=tuple(sorted({step.rank for step in steps})),
        chunks=_chunks(steps[0].metadata, None, None),
        forward_ms=together(separate, 0),
        backward_ms=None if steps[0].forward_only else together(separate, 1),
        compute_ms=together(whole, 0, 1, 2),
    )


def _notes(table: Table) -> Iterator[Note]:
    """Yields what a reader must know about the stages, steps and clocks of a table."""
    missing = tuple(stage for stage, metadata in enumerate(table.metadata) if metadata is None)
    if missing:
        yield Note("stages_missing", stages=missing, count=table.sizes.pp - len(missing), of=table.sizes.pp)
    if table.waits_unseen:
        yield Note("replicas_missing", count=table.captured, of=table.sizes.dp)
    if table.aligned_ms is not None:
        yield Note("clocks_aligned", ms=(table.aligned_ms,))
    elif not table.clocks and not missing:
        if table.device:
            yield Note("clocks_apart", said="the GPU's clocks of the stages could not be aligned")
        else:
            hosts = tuple(sorted(set(table.hosts.values())))
            yield Note("clocks_apart", names=hosts, said="no exchanges align the hosts' clocks")
    # Modules without a range; one note for all that share their layers and the reason.
    layers: dict[tuple[str, str], set[int]] = {}
    for module in (each for metadata in table.metadata if metadata is not None for each in metadata.ranges.without):
        layers.setdefault((module.reason, module.module), set()).update(n for n in module.layers if n is not None)
    for (why, of), same in grouped(layers, lambda key: (key[0], tuple(sorted(layers[key])))).items():
        yield Note("modules_without_range", names=tuple(name for _, name in same), layers=of, said=why)


def _waiting_for_host(table: Table, place: tuple[int, int]) -> Iterator[Note]:
    """Yields a note about the stages whose GPUs wait for the host in most passes, and since which step they do."""
    waiting, since, of_ranks = dict[int, float](), set[int](), table.spent.get("host_passes")
    for stage, shares in enumerate(() if of_ranks is None else of_ranks[:, place[0], :, place[1]].T):
        known = np.isfinite(shares)
        if not known.any():
            continue
        first = began(shares[known] > MOST) or 0
        if (share := float(shares[known][first:].mean())) > MOST:
            waiting[stage] = share
            since.add(int(table.steps[known][first]) if first else -1)
    if waiting:
        steps = () if -1 in since else (min(since),)
        yield Note("waits_for_host", stages=tuple(waiting), factor=min(waiting.values()), steps=steps)


def shown(table: Table, slow: Collection[int], suspects: Collection[int]) -> tuple[int, int]:
    """Returns the replica and the peer that have the fewest slow ranks over all stages, and of these the fewest
    suspects."""
    measured_ranks = table.ranks[..., : table.compute.shape[3]]
    of_slow, suspected = (np.isin(measured_ranks, list(ranks)).sum(axis=1) for ranks in (slow, suspects))  # [d, p]
    first = np.lexsort((suspected.ravel(), of_slow.ravel()))[0]
    replica, peer = np.unravel_index(int(first), suspected.shape)
    return int(replica), int(peer)


def _stage(place: tuple[int, int, int], table: Table) -> Stage:
    """Returns the stage as it was on one rank, whose ``place`` is its replica, stage and peer."""
    replica, pp, _ = place
    sizes = table.first.sizes
    at_place = (slice(None), *place)
    working, length = table.working[at_place], table.length
    # A forward and a backward that run as one have no separate times.
    kinds = () if table.schedule.combined else table.schedule.kinds
    of_kind = dict(zip(kinds, np.moveaxis(working, 2, 0), strict=False))  # [t, c, m]
    forward, backward = (of_kind.get(kind) for kind in ("forward", "backward"))
    compute = working.sum(axis=(1, 2, 3))
    spent = {name: values[at_place] for name, values in table.spent.items()}
    beside = sum((np.nan_to_num(spent[name]) for name in _SPENT if name in spent), compute + table.reduction)
    bubble = np.maximum(length - beside, 0.0) * (sizes.pp > 1 or table.reduces or len(table.ranks) > 1)
    # If the GPU does not show what it computes after all passes, all of that time counts as communication.
    gradients = np.minimum(spent.get("gradients", 0.0), table.reduction) if table.reduces else table.reduction
    tail = np.full_like(table.reduction, np.nan) if table.waits_unseen else table.reduction - gradients
    exposed = _exposed(spent, tail, sizes)
    modules_ms: dict[str, list[float]] = {}
    for key, times_ns in table.modules[pp].items():
        modules_ms.setdefault(f"{key.label} {key.kind}", []).extend(ns / 1e6 for ns in times_ns)
    metadata, of_host = table.metadata[pp], spent.get("host_passes")
    known = None if of_host is None else Spread.of(of_host[np.isfinite(of_host)].tolist())
    return Stage(
        pp=pp,
        ranks=(int(table.ranks[place]),),
        chunks=() if metadata is None else _chunks(metadata, forward, backward),
        forward_ms=_spread(forward, (1, 2)),
        backward_ms=_spread(backward, (1, 2)),
        compute_ms=_spread(compute),
        exposed_ms=exposed,
        bubble_ms=_spread(bubble),
        bubble_fraction=float(bubble.sum() / length.sum()),
        forward_per_microbatch_ms=_spread(forward, 1),
        backward_per_microbatch_ms=_spread(backward, 1),
        bubble_split=_split(table, replica, pp, bubble),
        dp_tail_ms=exposed["dp"] and _spread(tail),
        pp_waiting_ms=_spread(spent.get("pp_waiting")),
        gradients_ms=None if table.reduces and "gradients" not in spent else _spread(gradients),
        host_bound_ms=_spread(spent.get("host_bound")),
        data_wait_ms=_spread(spent.get(DATA)),
        host_bound_passes=mean_of(known),
        host_ms={kind: None if table.schedule.combined else _spread(spent.get(f"host_{kind}")) for kind in PASSES[:2]},
        modules_ms={name: spread for name, times_ms in sorted(modules_ms.items()) if (spread := Spread.of(times_ms))},
        collectives={
            axis: _parted(spent.get(f"{axis}_waiting"), spent.get(axis), table)
            for axis in parallel_of(INSIDE, sizes)
            if f"{axis}_waiting" in spent or axis not in spent
        },
    )


def _exposed(spent: Mapping[str, Floats], tail: Floats, sizes: ParallelSizes) -> dict[str, Spread | None]:
    """Returns exposed communication by group. ``tail``: data-parallel communication after all passes."""
    inside = parallel_of(INSIDE, sizes)
    hidden = {*inside, *parallel_of(("pp",), sizes), *(["unknown"] if inside else [])}
    none = np.zeros_like(tail)
    exposed = {group: spent.get(group, None if group in hidden else none) for group in GROUPS}
    dp, unknown = spent.get("dp", none), exposed["unknown"]
    exposed["dp"] = dp + tail
    if unknown is not None and not np.isfinite(dp).all():
        exposed["unknown"] = unknown + tail
    return {group: _spread(samples) for group, samples in exposed.items()}


def _parted(waited: Floats | None, ran: Floats | None, table: Table) -> Collectives:
    if waited is None or not np.isfinite(waited).all():
        return Collectives(None, None, "arrivals_unknown")
    if ran is None:
        return Collectives(_spread(waited), None, "computed_beside" if table.schedule.combined else "durations_unknown")
    return Collectives(_spread(waited), _spread(np.maximum(ran - waited, 0.0)), None)


def _split(table: Table, replica: int, stage: int, bubble: Floats) -> dict[str, Spread | None]:
    """Returns the parts of the bubble: before the first backward, after the last forward, and in between."""
    if not table.clocks:
        return dict.fromkeys(BUBBLE_PARTS)
    steps = len(table.length)
    start, end = (times[:, replica, stage].reshape(steps, -1) for times in (table.start, table.end))
    filled = table.start[:, replica, stage, :, -1].reshape(steps, -1).min(axis=1)
    drained = np.maximum(table.end[:, replica, stage, :, 0].reshape(steps, -1).max(axis=1), filled)
    before = np.clip(np.minimum(end, filled[:, None]) - start, 0.0, None).sum(axis=1)
    behind = np.clip(end - np.maximum(start, drained[:, None]), 0.0, None).sum(axis=1)
    warmup = np.clip(filled - before, 0.0, bubble)
    cooldown = np.clip(table.length - table.reduction - drained - behind, 0.0, bubble - warmup)
    return dict(zip(BUBBLE_PARTS, map(_spread, (warmup, bubble - warmup - cooldown, cooldown)), strict=True))


def _chunks(metadata: Metadata, *kinds: Floats | None) -> tuple[ChunkTimes, ...]:
    """Returns the chunks of a stage. ``kinds``: times of forwards and of backwards, [t, c, m]; None if unknown."""
    chunk_times = []
    for chunk, holds in enumerate(metadata.chunks):
        forward, backward = (None if times is None else _spread(times[:, chunk]) for times in kinds)
        chunk_times.append(ChunkTimes(chunk, holds, forward, backward))
    return tuple(chunk_times)


def _spread(samples: Floats | None, summed: int | tuple[int, ...] = ()) -> Spread | None:
    """Returns the statistics of samples, or of their sums over some axes. None if any sample is unknown, because an
    average of the others would describe something else."""
    if samples is None or not np.isfinite(samples).all():
        return None
    return Spread.of(samples.sum(axis=summed).ravel().tolist())
