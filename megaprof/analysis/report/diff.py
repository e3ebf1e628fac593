"""Two captures side by side, stage by stage: what changed, and whether by more than it varies anyway.

A change is *beyond the spread* when the means differ by more than `NOISE` standard errors of their difference (Welch).
The samples are steps; where fewer than `FEWEST` were captured, they are microbatches, for what is known of each
(forward, backward, and compute as their sum). Where neither is enough, that stays open: None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from megaprof.analysis.report import words

NOISE = 2.0
FEWEST = 3
QUANTITIES = ("forward_ms", "backward_ms", "compute_ms", "bubble_ms")


class NothingToCompare(Exception):
    """The two captures have nothing in common, or one of them is no report; the message says which."""


@dataclass(frozen=True)
class Change:
    """One quantity, in milliseconds per step, before and after. ``change`` is a fraction of ``before``."""

    before: float | None
    after: float | None
    change: float | None
    beyond_spread: bool | None


@dataclass(frozen=True)
class StageDiff:
    """One stage; its layers in words (``emb+6``), None for a stage that is only in the other capture."""

    pp: int
    layers_before: str | None
    layers_after: str | None
    changes: dict[str, Change]


@dataclass(frozen=True)
class TargetDiff:
    """One target and role that both captures have; ``notes``: what makes them differ beside the times."""

    target: str
    role: str | None
    step_time: Change
    stages: tuple[StageDiff, ...]
    slowest_before: int | None
    slowest_after: int | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Diff:
    """``targets`` of both captures; ``warnings`` name those that only one has."""

    targets: tuple[TargetDiff, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {"targets": [target.to_json() for target in self.targets], "warnings": list(self.warnings)}


@dataclass(frozen=True)
class _Spread:
    mean: float
    stdev: float
    count: int


@dataclass(frozen=True)
class _Microbatches:
    forward_ms: _Spread | None = None
    backward_ms: _Spread | None = None


@dataclass(frozen=True)
class _StageSpread:
    forward_ms: _Spread | None = None
    backward_ms: _Spread | None = None
    compute_ms: _Spread | None = None
    bubble_ms: _Spread | None = None


@dataclass(frozen=True)
class _Chunk:
    embedding: bool | None = None
    layers: int | None = None
    mtp: int | None = None
    loss: bool | None = None


@dataclass(frozen=True)
class _Stage:
    pp: int
    chunks: tuple[_Chunk | None, ...] = ()
    per_microbatch: _Microbatches = _Microbatches()
    spread: _StageSpread = _StageSpread()

    @property
    def layers(self) -> str:
        return words.layers(asdict(chunk) if chunk else None for chunk in self.chunks)


@dataclass(frozen=True)
class _StepSpread:
    step_time_ms: _Spread | None = None


@dataclass(frozen=True)
class _Target:
    target: str
    stages: tuple[_Stage, ...]
    role: str | None = None
    schedule: str | None = None
    microbatches: int | None = None
    step_time_basis: str | None = None
    slowest_stage: int | None = None
    sizes: dict[str, int | None] = field(default_factory=dict)
    spread: _StepSpread = _StepSpread()


@dataclass(frozen=True)
class _Report:
    version: str
    targets: tuple[_Target, ...]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Diff:
    """Compare two reports, each as ``Report.to_json`` gives it or read back from its file. Raises NothingToCompare."""
    old, new = _targets("the first", before), _targets("the second", after)
    common = [key for key in old if key in new]
    if not common:
        raise NothingToCompare(f"no target is in both: {_names(old)} in the first, {_names(new)} in the second")
    warnings = [
        f"{_names(dict.fromkeys(only))} only in the {where} capture: not compared"
        for where, only in (("first", old.keys() - new.keys()), ("second", new.keys() - old.keys()))
        if only
    ]
    return Diff(tuple(_target(old[key], new[key]) for key in common), tuple(warnings))


_Key = tuple[str, str | None]


def _targets(which: str, report: Mapping[str, Any]) -> dict[_Key, _Target]:
    try:
        found = msgspec.convert(report, _Report).targets
    except (msgspec.ValidationError, RecursionError) as fault:
        raise NothingToCompare(f"{which} is no report of megaprof's: {fault}") from None
    targets: dict[_Key, _Target] = {}
    for target in found:
        targets.setdefault((target.target, target.role), target)
    return targets


def _names(keys: Mapping[_Key, Any]) -> str:
    return ", ".join(sorted(words.title({"target": t, "role": r}) for t, r in keys)) or "nothing"


def _target(before: _Target, after: _Target) -> TargetDiff:
    old = {stage.pp: stage for stage in before.stages}
    new = {stage.pp: stage for stage in after.stages}
    alike = before.microbatches is not None and before.microbatches == after.microbatches
    return TargetDiff(
        target=before.target,
        role=before.role,
        step_time=_change(before.spread.step_time_ms, after.spread.step_time_ms, None, None),
        stages=tuple(_stage(pp, old.get(pp), new.get(pp), alike) for pp in sorted(old.keys() | new.keys())),
        slowest_before=before.slowest_stage,
        slowest_after=after.slowest_stage,
        notes=tuple(_notes(before, after)),
    )


def _notes(before: _Target, after: _Target) -> list[str]:
    notes = []
    for name, old, new in (
        ("schedule", before.schedule, after.schedule),
        ("microbatches", before.microbatches, after.microbatches),
        *((axis, before.sizes.get(axis), after.sizes.get(axis)) for axis in {**before.sizes, **after.sizes}),
    ):
        if old != new:
            shown = [words.ABSENT if value is None else value for value in (old, new)]
            notes.append(f"{name} {shown[0]} -> {shown[1]}: not the same work per stage and step")
    if before.step_time_basis != after.step_time_basis:
        notes.append(f"step times are not measured alike: {before.step_time_basis}; {after.step_time_basis}")
    return notes


def _stage(pp: int, before: _Stage | None, after: _Stage | None, alike: bool) -> StageDiff:
    """``alike``: steps of equally many microbatches, so that a change of these is one of the step."""
    return StageDiff(
        pp=pp,
        layers_before=before.layers if before else None,
        layers_after=after.layers if after else None,
        changes={
            quantity: _change(
                getattr(before.spread, quantity) if before else None,
                getattr(after.spread, quantity) if after else None,
                _microbatches(before, quantity) if alike else None,
                _microbatches(after, quantity) if alike else None,
            )
            for quantity in QUANTITIES
        },
    )


def _change(
    before: _Spread | None, after: _Spread | None, old: list[_Spread] | None, new: list[_Spread] | None
) -> Change:
    """``old`` and ``new`` are the samples of microbatches, to fall back on."""
    if before is None or after is None:
        return Change(before.mean if before else None, after.mean if after else None, None, None)
    fraction = after.mean / before.mean - 1 if before.mean else None
    beyond = _beyond([before], [after])
    if beyond is None and old and new:
        beyond = _beyond(old, new)
    return Change(before.mean, after.mean, fraction, beyond)


def _beyond(before: list[_Spread], after: list[_Spread]) -> bool | None:
    """Whether two sums of independent means differ; None with too few samples of one of them."""
    if any(spread.count < FEWEST for spread in (*before, *after)):
        return None
    difference = sum(s.mean for s in after) - sum(s.mean for s in before)
    # `stdev` is that of the samples themselves, so n - 1 gives the unbiased error of their mean.
    error = math.sqrt(sum(s.stdev**2 / (s.count - 1) for s in (*before, *after)))
    return abs(difference) > NOISE * error


def _microbatches(stage: _Stage | None, quantity: str) -> list[_Spread] | None:
    if stage is None:
        return None
    forward, backward = stage.per_microbatch.forward_ms, stage.per_microbatch.backward_ms
    spreads = {"forward_ms": [forward], "backward_ms": [backward], "compute_ms": [forward, backward]}.get(quantity, [])
    return [spread for spread in spreads if spread is not None] or None
