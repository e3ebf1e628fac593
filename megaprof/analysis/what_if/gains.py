"""What each cause of lost time costs: milliseconds by which the step would be shorter without it, by replay."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from megaprof.analysis.stages.consistency import Findings, examine
from megaprof.analysis.stages.loads import Cause
from megaprof.analysis.stages.samples import mean_of
from megaprof.analysis.stages.stages import TargetStages
from megaprof.analysis.stages.words import ranks as ranks_in_words
from megaprof.analysis.stages.words import stages as stages_in_words
from megaprof.analysis.trace.calls import Call
from megaprof.analysis.what_if.replay import CapturedRun, CapturedStep, Times, Withheld, captured_run
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats import ranges

#: Of a stage's computing: which passes they take longer in, None: in both.
_COMPUTING: dict[str, str | None] = {
    "layers": None,
    "embedding_or_loss": None,
    "slow_rank": None,
    "slow_chunk": None,
    "slow_forward": ranges.FORWARD,
    "slow_backward": ranges.BACKWARD,
    "recomputation": ranges.BACKWARD,
    "unexplained": None,
}
#: What they lose is a part of the step itself.
_OF_STEP = ("late_entry", "data_wait", "host_bound", "few_microbatches")
#: A replay that misses more of the pipeline than this, as a fraction, says nothing about a part of it.
_MOST_MISSED = 0.10
#: What the microbatches of one stage must cost to be called uneven, as a fraction of the step.
LEAST = 0.03
#: Steps that are replayed, the last ones.
_MOST_STEPS = 4

_Change = Callable[[Times, str, CapturedStep], Times]


Replayed = tuple[CapturedRun, list[CapturedStep]]


def replayed(measured: TargetStages, calls: Sequence[Call]) -> Replayed | None:
    """The run and its steps; None where they cannot be replayed."""
    whose = measured.target, measured.role, measured.sizes
    own = [c for c in calls if c.step in measured.steps and (c.label, c.role, c.metadata.sizes) == whose]
    try:
        return captured_run(examine(own, measured.sizes, Findings(measured.sizes.pp)), measured.sizes.pp)
    except Withheld:
        return None


def with_gains(
    measured: TargetStages, causes: Sequence[Cause], found: WhatIf, replay: Replayed | None
) -> tuple[Cause, ...]:
    """``causes`` with ``gain_ms``, what costs most first. ``found``: what was predicted, so that what a slow rank costs
    is what the advice says, and what was replayed."""
    advised = {cause: told for cause in causes if (told := _as_advised(cause, found)) is not None}
    others = [cause for cause in causes if cause not in advised]
    gaining = [advised.get(cause) or _with_gain(cause, others, measured, replay) for cause in causes]
    kept = [cause for cause in gaining if not _harmless(cause, measured.step_ms)]
    return tuple(sorted(kept, key=lambda cause: -1.0 if cause.gain_ms is None else cause.gain_ms, reverse=True))


def _as_advised(cause: Cause, found: WhatIf) -> Cause | None:
    """Where the advice is to mend the ranks of this cause, with what that gains; None otherwise."""
    own = cause.ranks or (() if cause.rank is None else (cause.rank,))
    if cause.kind != "slow_rank" or found.best is None or found.measured_ms is None or not set(own) & set(found.mended):
        return None
    told = replace(cause, gain_ms=max(0.0, found.measured_ms - found.best.step_ms))
    return told if set(own) == set(found.mended) else _of_all(told, ranks_in_words(sorted(found.mended)))


def _of_all(cause: Cause, which: str) -> Cause:
    return replace(cause, evidence=f"{cause.evidence}; its cost is that of {which} together")


def _harmless(cause: Cause, step_ms: float) -> bool:
    """Whether the microbatches of one stage vary, as on a busy machine, and the pipeline hardly notices."""
    alone = cause.kind == "uneven_microbatches" and cause.stage is not None
    return alone and cause.gain_ms is not None and cause.gain_ms < LEAST * step_ms


def _with_gain(cause: Cause, causes: Sequence[Cause], measured: TargetStages, replay: Replayed | None) -> Cause:
    if cause.kind in _OF_STEP or (cause.kind, cause.group) == ("communication", "dp"):
        return replace(cause, gain_ms=cause.excess_ms)
    if replay is None:
        return replace(cause, gain_ms=_estimated(cause, measured))
    run, steps = replay[0], replay[1][-_MOST_STEPS:]
    if cause.kind == "slow_link":
        return replace(cause, gain_ms=_of_link(cause, measured, run, steps))
    if statistics.median(abs(step.replay_error) for step in steps) > _MOST_MISSED:
        return replace(cause, gain_ms=_estimated(cause, measured))
    stages: set[int] = set()
    if cause.kind in _COMPUTING:
        # One of two slow stages gains nothing as long as the other holds the pipeline.
        alike = [c for c in causes if c.kind == cause.kind and c.stage is not None and c.basis == cause.basis]
        captured = {rank for stage in measured.stages for rank in stage.ranks}
        if cause.kind == "slow_rank" and cause.basis.startswith("per step") and cause.rank not in captured:
            gain = -_gained(run, steps, _computing([cause], sign=-1.0))
        else:
            gain, stages = _gained(run, steps, _computing(alike)), {c.stage for c in alike if c.stage is not None}
    elif cause.kind == "uneven_microbatches":
        gain = _gained(run, steps, _even(cause.stage))
    elif cause.kind != "communication":
        return cause
    elif cause.group == "pp":
        gain = _gained(run, steps, lambda times, kind, step: times, replace(run, p2p_ms=0.0))
    else:
        gain = _gained(run, steps, _hidden(cause.group or "", measured))
    told = replace(cause, gain_ms=max(0.0, gain))
    return told if len(stages) < 2 else _of_all(told, stages_in_words(sorted(stages)))


def _gained(
    run: CapturedRun, steps: Sequence[CapturedStep], change: _Change, other: CapturedRun | None = None
) -> float:
    """Milliseconds by which the mean step is shorter with changed times, or in another run."""
    gains = []
    for step in steps:
        forward = change(step.forward_ms, ranges.FORWARD, step)
        backward = None if step.backward_ms is None else change(step.backward_ms, ranges.BACKWARD, step)
        changed = (other or run).simulate(forward, backward).step_ms
        gains.append(step.pipeline_ms * (1.0 - changed / step.replay_ms) if step.replay_ms > 0 else 0.0)
    return statistics.fmean(gains)


def _less(rows: list[list[float]], lost: float, of: Sequence[Times], stage: int) -> list[list[float]]:
    """The passes of a stage without their part of ``lost`` milliseconds, which all passes ``of`` it take together."""
    total = sum(sum(map(sum, each[stage])) for each in of)
    factor = max(0.0, 1.0 - lost / total) if total > 0 else 1.0
    return [[ms * factor for ms in row] for row in rows]


def _computing(causes: Sequence[Cause], sign: float = 1.0) -> _Change:
    """Stages without what they compute too long; ``sign`` -1: with it."""

    def change(times: Times, kind: str, step: CapturedStep) -> Times:
        changed = list(times)
        for cause in causes:
            own = _COMPUTING[cause.kind]
            if cause.stage is not None and own in (None, kind):
                lost = sign * cause.excess_ms * (1 if cause.basis.startswith("per step") else step.microbatches)
                of = step.passes if own is None else [times]
                changed[cause.stage] = _less(changed[cause.stage], lost, of, cause.stage)
        return changed

    return change


def _even(stage: int | None) -> _Change:
    """Microbatches that all take the average."""

    def change(times: Times, kind: str, step: CapturedStep) -> Times:
        return [
            [[statistics.fmean(row)] * len(row) for row in rows] if stage in (None, place) else rows
            for place, rows in enumerate(times)
        ]

    return change


def _hidden(group: str, measured: TargetStages) -> _Change:
    """Passes without the exposed communication of a group."""
    exposed = {stage.pp: mean_of(stage.exposed_ms.get(group)) or 0.0 for stage in measured.stages}

    def change(times: Times, kind: str, step: CapturedStep) -> Times:
        return [_less(rows, exposed.get(place, 0.0), step.passes, place) for place, rows in enumerate(times)]

    return change


def _of_link(cause: Cause, measured: TargetStages, run: CapturedRun, steps: Sequence[CapturedStep]) -> float:
    """The residue: what the measured pipeline takes more than one whose links are all as quick as the others."""
    worst = max((link for link in measured.links if link.sender == cause.stage), key=lambda link: link.quick_ms)
    pair = {worst.sender, worst.receiver}
    others = [link.transfer_ms.median for link in measured.links if not {link.sender, link.receiver} <= pair]
    usual = replace(run, p2p_ms=min([run.p2p_ms, *([statistics.median(others)] if others else [0.0])]))
    missed = [step.pipeline_ms - usual.simulate(step.forward_ms, step.backward_ms).step_ms for step in steps]
    return min(cause.excess_ms, max(0.0, statistics.median(missed)))


def _estimated(cause: Cause, measured: TargetStages) -> float | None:
    """Without a replay: the stage that is slow holds all others in every microbatch."""
    if cause.basis.startswith("per step"):
        return cause.excess_ms
    if cause.kind in _COMPUTING and measured.microbatches:
        return cause.excess_ms * measured.microbatches
    return None
