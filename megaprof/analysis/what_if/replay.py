"""A captured run as the simulation takes it: its schedule, its measured times, and how well a replay reproduces it.

What is replayed is the pipeline: from the start of the first microbatch to the end of the last. What lies outside it in
a step (stages that enter the step at different times, the gradient finalisation) is kept as measured.

Exchanges are replayed as a rendezvous unless they overlap with compute (``overlap_p2p_comm``, which the interleaved
schedule heeds except in forward-only passes): Megatron waits for its sends, and neither NCCL nor gloo completes a send
before the receiver has asked for it. With 2 stages Megatron only runs the interleaved schedule with overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaprof.analysis.simulation.simulate import Simulation, simulate
from megaprof.analysis.stages.between import column, transfers
from megaprof.analysis.stages.consistency import comparable
from megaprof.analysis.trace.calls import Call, grouped
from megaprof.formats import ranges
from megaprof.parallel.schedules import PipelineSchedule, phase_order

Times = list[list[list[float]]]
"""Milliseconds as ``[stage][chunk][microbatch]``."""
_Pass = tuple[float, float]


#: Fewer transfers than this say nothing about their time.
_FEWEST = 3
#: Above this replay error, as a fraction of the pipeline, the other model of exchanges is tried, and taken where it
#: leaves at most this part of the error.
_MISFIT = 0.05
_FITS = 0.5


class Withheld(Exception):
    """This run cannot be replayed, or not well enough to predict from; the message says why."""


@dataclass(frozen=True)
class CapturedRun:
    """What all steps of a run have in common."""

    schedule: str
    """One of `schedules.SCHEDULES`."""
    stages: int
    """Pipeline stages."""
    chunks: int
    """Model chunks of each."""
    group_size: int | None
    """Microbatches that pass one chunk before the next one's turn; None: Megatron's default."""
    forward_only: bool
    """Whether there are no backwards."""
    rendezvous: bool
    """Whether sends wait for their receives."""
    p2p_ms: float
    """Milliseconds of one transfer between stages, where nobody waited."""
    refit: str | None = None
    """That exchanges were replayed otherwise than the metadata say, since that fits, a clause; None: as they say."""

    def simulate(self, forward_ms: Times, backward_ms: Times | None) -> Simulation:
        """Replay one step of this run's schedule with other times, or with another number of microbatches."""
        return simulate(
            forward_ms,
            backward_ms,
            len(forward_ms[0][0]),
            schedule=self.schedule,
            p2p_ms=self.p2p_ms,
            microbatch_group_size=self.group_size,
            rendezvous=self.rendezvous,
        )

    def checked(self, microbatches: int) -> PipelineSchedule:
        """The schedule that determines the order of phases. Raises ValueError where Megatron refuses it."""
        return PipelineSchedule.checked(
            self.stages,
            self.chunks,
            microbatches,
            name=self.schedule,
            group_size=self.group_size,
            forward_only=self.forward_only,
        )


@dataclass(frozen=True)
class CapturedStep:
    """One captured step: the times of its slowest pipeline (of several data-parallel ones), and what it took."""

    step: int
    """Its number."""
    forward_ms: Times
    """Forwards, ``[stage][chunk][microbatch]``."""
    backward_ms: Times | None
    """Backwards likewise; None in a forward-only pass."""
    peers_forward_ms: Times | None
    """Where a stage has several captured ranks, the times that they have in common, else None."""
    peers_backward_ms: Times | None
    """The same of backwards."""
    pipeline_ms: float
    """Measured, from the first microbatch's start to the last one's end."""
    outside_ms: float
    """The rest of the step."""
    replay_ms: float
    """The replayed pipeline."""

    @property
    def replay_error(self) -> float:
        """(replayed - measured pipeline) / measured pipeline."""
        return self.replay_ms / self.pipeline_ms - 1.0

    @property
    def microbatches(self) -> int:
        return len(self.forward_ms[0][0])

    @property
    def passes(self) -> list[Times]:
        """Forwards, and backwards where there are any."""
        return [self.forward_ms] if self.backward_ms is None else [self.forward_ms, self.backward_ms]


def run_schedule(calls: Sequence[Call], stages: int) -> CapturedRun:
    """What the calls' metadata say about the schedule. Raises Withheld when they do not, or when it is not known."""
    metadata = calls[0].metadata
    name, chunks = metadata.schedule, len(metadata.chunks)
    if any(phase.kind == ranges.COMBINED for call in calls for phase in call.phases):
        raise Withheld("forward and backward run combined: their own times are not known")
    if not chunks or name is None:
        raise Withheld("the traces do not say which schedule ran, or on which model chunks")
    forward_only = calls[0].forward_only
    rendezvous = stages > 1
    if name == "interleaved":
        overlap = (metadata.p2p or {}).get("overlap_p2p_comm")
        # Megatron-LM overlaps unless told otherwise.
        rendezvous = stages > 2 and (forward_only or overlap is False)
    run = CapturedRun(name, stages, chunks, metadata.microbatch_group_size, forward_only, rendezvous, 0.0)
    try:
        run.checked(metadata.microbatches or 0)
    except ValueError as fault:
        raise Withheld(f"the schedule of the traces cannot be rebuilt: {fault}") from None
    return run


def captured_run(calls: Sequence[Call], stages: int) -> tuple[CapturedRun, list[CapturedStep]]:
    """The run that some calls of one target belong to, and every step that can be replayed.

    Raises:
        Withheld: no step can be.
    """
    run = run_schedule(calls, stages)
    by_step = grouped(calls, lambda call: call.key)
    took: list[int] = []
    for step in by_step.values():
        clocks = comparable(step)
        took += (ns for _, _, ns in transfers(step, clocks.offset)) if clocks.one_clock else ()
    run = replace(run, p2p_ms=statistics.median(took) / 1e6 if len(took) >= _FEWEST else 0.0)
    captured, reason = [], Withheld("no step was captured")
    for (number, _), step in sorted(by_step.items()):
        try:
            captured.append(_captured_step(number, step, run))
        except Withheld as fault:
            reason = fault
    if not captured:
        raise reason
    return _fitting(run, captured)


def _fitting(run: CapturedRun, steps: list[CapturedStep]) -> tuple[CapturedRun, list[CapturedStep]]:
    """The run with the model of exchanges that fits: the other one, where its own is far off and that is not."""
    missed = statistics.median(abs(step.replay_error) for step in steps)
    if missed <= _MISFIT or run.stages == 1:
        return run, steps
    other = replace(run, rendezvous=not run.rendezvous)
    try:
        again = [replace(s, replay_ms=other.simulate(s.forward_ms, s.backward_ms).step_ms) for s in steps]
    except ValueError:
        return run, steps
    left = statistics.median(abs(step.replay_error) for step in again)
    if left > _FITS * missed:
        return run, steps
    names = {True: "waiting for their receiver", False: "leaving without waiting for their receiver"}
    refit = (
        f"exchanges fit better as {names[other.rendezvous]} (replay {left:.1%} off the measured pipeline) than as "
        f"{names[run.rendezvous]} ({missed:.1%}), as the metadata have it"
    )
    return replace(other, refit=refit), again


def _pipelines(step: Sequence[Call], stages: int) -> list[list[list[Call]]]:
    """The calls of one step by pipeline and stage.

    Ranks that differ in their stage alone form a pipeline. Where no such set was captured whole, all calls of a stage
    are taken together.
    """
    columns = [sorted(own, key=lambda call: call.stage) for _, own in sorted(grouped(step, column).items())]
    whole = [[[call] for call in own] for own in columns if [call.stage for call in own] == list(range(stages))]
    if whole:
        return whole
    by_stage = grouped(step, lambda call: call.stage)
    if len(by_stage) < stages:
        raise Withheld("a stage was not captured")
    return [[by_stage[stage] for stage in range(stages)]]


def _check_order(step: Sequence[Call], run: CapturedRun) -> None:
    """Raises Withheld where the passes of a stage did not begin in the order of Megatron's schedule."""
    for call in step:
        stage, ran = call.stage, sorted(call.phases, key=lambda phase: phase.start)
        order = phase_order(run.checked(call.metadata.microbatches or 0), stage)
        for phase, due in zip(ran, order, strict=False):
            if (phase.kind, phase.chunk, phase.microbatch) != due and None not in (phase.chunk, phase.microbatch):
                ran_there, due_there = (f"the {p.kind} of microbatch {p.microbatch}" for p in (phase, due))
                raise Withheld(
                    f"on stage {stage} {ran_there} ran where Megatron's {run.schedule} schedule has {due_there}, so "
                    "another schedule ran"
                )


def _captured_step(number: int, step: list[Call], run: CapturedRun) -> CapturedStep:
    replays = []
    for pipeline in _pipelines(step, run.stages):
        forward = _times(pipeline, ranges.FORWARD)
        backward = None if run.forward_only else _times(pipeline, ranges.BACKWARD)
        try:
            replays.append((run.simulate(forward, backward).step_ms, forward, backward))
        except ValueError as fault:
            raise Withheld(f"the schedule of step {number} cannot be rebuilt: {fault}") from None
    _check_order(step, run)
    replay_ms, forward, backward = max(replays, key=lambda each: each[0])
    pipeline_ms, outside_ms = _measured(number, step, run)
    return CapturedStep(
        step=number,
        forward_ms=forward,
        backward_ms=backward,
        peers_forward_ms=_as_peers(step, ranges.FORWARD, run.stages),
        peers_backward_ms=None if run.forward_only else _as_peers(step, ranges.BACKWARD, run.stages),
        pipeline_ms=pipeline_ms,
        outside_ms=outside_ms,
        replay_ms=replay_ms,
    )


def _measured(number: int, step: list[Call], run: CapturedRun) -> tuple[float, float]:
    """Milliseconds of a step's pipeline, and of what is outside it.

    Without a common clock the first stage's own times count: training begins and ends there.
    """
    clocks = comparable(step)
    if clocks.different_runs:
        raise Withheld("the stages' traces are of different runs")
    if not clocks.one_clock:
        if run.forward_only:
            raise Withheld(
                "the hosts' clocks are not aligned, and a forward-only pass begins and ends on different stages"
            )
        step = [call for call in step if call.stage == 0][:1]
    passes, extents = [], []
    for call in step:
        offset = clocks.offset.get(call.rank, 0)
        passes += [(phase.start + offset, phase.end + offset) for phase in call.phases]
        extents.append(tuple(ns + offset for ns in call.extent))
    pipeline = max(end for _, end in passes) - min(start for start, _ in passes)
    whole = max(end for _, end in extents) - min(start for start, _ in extents)
    if pipeline <= 0:
        raise Withheld(f"the pipeline of step {number} took no time")
    return pipeline / 1e6, (whole - pipeline) / 1e6


def _times(pipeline: list[list[Call]], kind: str) -> Times:
    """The passes of one kind, averaged over the ranks of a stage where there are several."""
    return [
        _mean([[[sum(each) for each in row] for row in _passes(call, kind)] for call in stage]) for stage in pipeline
    ]


def _passes(call: Call, kind: str) -> list[list[_Pass]]:
    """Computation and exposed communication of every pass of one kind, ``[chunk][microbatch]`` in milliseconds."""
    count, chunks = call.metadata.microbatches or 0, len(call.metadata.chunks)
    phases = [phase for phase in call.phases if phase.kind == kind]
    if len(phases) != count * chunks or not phases:
        raise Withheld(f"{call.source} holds {len(phases)} {kind} ranges where {count * chunks} belong")
    own = {(phase.chunk, phase.microbatch): (phase.compute_ns / 1e6, phase.exposed_ns / 1e6) for phase in phases}
    try:
        return [[own[chunk, microbatch] for microbatch in range(count)] for chunk in range(chunks)]
    except KeyError:
        raise Withheld(f"{call.source} holds a {kind} whose microbatch or model chunk is not known") from None


def _mean(ranks: list[list[list[float]]]) -> list[list[float]]:
    return [[statistics.fmean(same) for same in zip(*rows, strict=True)] for rows in zip(*ranks, strict=True)]


def _as_peers(step: list[Call], kind: str, stages: int) -> Times | None:
    """Every pass as its stage's ranks have it in common; None where no stage has two ranks.

    That is the lower median of their computation (of two the quicker one's), with the least exposed communication of
    them: the others' holds the waiting for the slowest.
    """
    by_stage = grouped(step, lambda call: call.stage)
    if all(len(ranks) < 2 for ranks in by_stage.values()):
        return None

    def common(times: tuple[_Pass, ...]) -> float:
        return statistics.median_low(compute for compute, _ in times) + min(exposed for _, exposed in times)

    return [
        [
            [common(same) for same in zip(*rows, strict=True)]
            for rows in zip(*(_passes(call, kind) for call in by_stage[stage]), strict=True)
        ]
        for stage in range(stages)
    ]
