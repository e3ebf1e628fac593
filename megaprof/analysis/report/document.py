"""The report as data: what the terminal, HTML, JSON and `diff` all take.

Times are milliseconds, per step and averaged over the captured steps, with their spread beside them. A number that the
traces do not allow is null, and a warning says why.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isclose
from pathlib import Path
from typing import Any

import msgspec

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.diagnosis.examine import Price
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.foreign.facts import Foreign
from megaprof.analysis.report import causes, sentences
from megaprof.analysis.stages.samples import Spread, mean_of
from megaprof.analysis.stages.stages import OF_REPLICAS, Stage, TargetStages
from megaprof.analysis.trace.calls import GROUPS, Call
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import options_of
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.job.standstill import Standstill
from megaprof.formats.phrases import of_several
from megaprof.version import __version__

#: What the JSON gives as the mean, and the spread of under ``spread``.
PER_STEP = (
    "forward_ms",
    "backward_ms",
    "compute_ms",
    "bubble_ms",
    "gradients_ms",
    "host_bound_ms",
    "dp_tail_ms",
    "pp_waiting_ms",
)


class NotAReport(ValueError):
    """This is no report of megaprof's; the message says what is wrong."""


@dataclass(frozen=True)
class TargetReport:
    """One target and role."""

    measured: TargetStages
    """Its stages, with warnings about what was measured."""
    diagnosis: Diagnosis | None
    """Why time is lost, the dearest cause first; None where ``withheld`` says why."""
    what_if: WhatIf
    """What would be faster."""
    withheld: str | None = None
    """Why there is no diagnosis, a clause."""
    fleet: Fleet | None = None
    """The whole run on all ranks; None without timelines."""
    captured: bool = True
    """Whether the diagnosis is of the captured steps, and not of timelines."""

    @property
    def key(self) -> tuple[str, str | None]:
        """Target and role."""
        return self.measured.target, self.measured.role

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Those of the diagnosis."""
        return self.diagnosis.causes if self.diagnosis is not None else ()

    @property
    def slowest_stage(self) -> int | None:
        """The stage that costs most by what it holds or computes; None where none does."""
        return next((each.stage for each in self.causes if each.kind in causes.OF_A_STAGE), None)

    @property
    def findings(self) -> tuple[sentences.Finding, ...]:
        """The verdict in sentences, the dearest cause first."""
        found = causes.findings(self.measured, self.diagnosis, self.withheld, self.fleet, captured=self.captured)
        return (*found, *sentences.of_packing(self.what_if, self.measured.framework, self.measured.sizes.cp))

    @property
    def basis(self) -> str | None:
        """Which steps the causes are of, where these are others than those of the tables, or shorter."""
        found = self.diagnosis
        if found is None:
            return None
        longer = not isclose(found.step_ms, self.measured.step_ms)
        other = (
            found.closing_ms or (longer and self.measured.step_time_basis == OF_REPLICAS) if self.captured else longer
        )
        return causes.basis(found, captured=self.captured) if other else None

    def in_brief(self, standstill: Standstill | None = None) -> sentences.Finding:
        """The verdict in a few words; ``standstill``: where the job stands or was killed."""
        return causes.in_brief(self.diagnosis, self.fleet, standstill)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        measured, diagnosis = self.measured, self.diagnosis
        return {
            "target": measured.target,
            "role": measured.role,
            "steps": list(measured.steps),
            "sizes": asdict(measured.sizes),
            "schedule": measured.schedule,
            "forward_only": measured.forward_only,
            "microbatches": measured.microbatches,
            "step_time_ms": mean_of(measured.step_time_ms),
            "step_time_basis": measured.step_time_basis,
            "spread": {"step_time_ms": _spread(measured.step_time_ms)},
            "stages": [_stage(stage) for stage in measured.stages],
            "imbalance": measured.imbalance,
            "slowest_stage": self.slowest_stage,
            "causes": [_cause(each, measured) for each in self.causes],
            "perhaps": [
                _cause(each, measured) | {"more_steps": each.more_steps}
                for each in (diagnosis.perhaps if diagnosis is not None else ())
            ],
            "rest_ms": diagnosis.rest_ms if diagnosis is not None else None,
            "diagnosed_ms": diagnosis.step_ms if diagnosis is not None else None,
            "diagnosed_steps": diagnosis.steps if diagnosis is not None else None,
            "withheld": self.withheld,
            "notes": [self.findings[0].text],
            "framework": measured.framework,
            "what_if": self.what_if.to_json() | {"host_options": self._host_options()},
            "warnings": list(measured.warnings),
            "fleet": _fleet(self.fleet) if self.fleet else None,
        }

    def _host_options(self) -> list[str] | None:
        """The best layout in the host's own options; None where there is none, or where it takes the flags."""
        best = self.what_if.best
        own = options_of(self.measured.framework, self.measured.role, best.flags) if best else None
        return None if own is None else list(own)


@dataclass(frozen=True)
class Report:
    """Everything found in one directory or file."""

    source: Path
    """The directory or file."""
    traces: tuple[Path, ...]
    """The traces that were read."""
    targets: tuple[TargetReport, ...]
    """One for every target, role and set of parallel sizes."""
    warnings: tuple[str, ...]
    """About single files."""
    timelines: tuple[Path, ...] = ()
    """The timelines that were read."""
    drawn: tuple[Call, ...] = ()
    """The calls of the last step of every target, to be drawn."""
    foreign: Foreign | None = None
    """What recordings tell that hold no ranges of ours; None where there are ranges."""
    standstill: Standstill | None = None
    """Where the job stands still, or stood when it was killed in the middle of a step, by its status files; None where
    it runs, or ended as jobs do, or nobody looked."""
    run: int = 1
    """Which of the runs it is about, from 1, the oldest; a run that went on from a checkpoint is the same."""
    runs: int = 1
    """How many runs have files there."""

    @property
    def of_several(self) -> str | None:
        """That there are other runs, and how to see one, a sentence; None where there is one run."""
        if self.runs == 1:
            return None
        return of_several(self.run, self.runs, f"megaprof report {shlex.quote(str(self.source))}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``: strings, finite numbers, lists, dicts and None."""
        return {
            "version": __version__,
            "run": self.run,
            "runs": self.runs,
            "targets": [target.to_json() for target in self.targets],
            "warnings": list(self.warnings),
            "standstill": asdict(self.standstill) if self.standstill else None,
            **({"foreign": _foreign(self.foreign)} if self.foreign else {}),
        }

    @classmethod
    def from_json(cls, document: object, source: Path) -> Report:
        """What `to_json` wrote, as far as two reports are compared by it: the stages, which of them is slow, and what
        was predicted. The whole run is left out. Raises NotAReport."""
        try:
            found = msgspec.convert(document, dict[str, Any])
            msgspec.convert(found["version"], str)
            warnings = msgspec.convert(found.get("warnings", []), tuple[str, ...])
            targets = tuple(_target_of(target) for target in found["targets"])
            run, runs = (msgspec.convert(found.get(name, 1), int) for name in ("run", "runs"))
            return cls(source, (), targets, warnings, run=run, runs=runs)
        except KeyError as fault:
            raise NotAReport(f"it has no {fault}") from None
        except (msgspec.ValidationError, AttributeError, TypeError, ValueError, RecursionError) as fault:
            raise NotAReport(str(fault)) from None


def _foreign(foreign: Foreign) -> dict[str, Any]:
    """Plain data: files by their names."""
    plain = asdict(foreign)
    for rank in plain["ranks"]:
        rank["file"] = rank.pop("path").name
    return plain | {"advice": sentences.of_foreign(foreign)}


def _target_of(raw: Mapping[str, Any]) -> TargetReport:
    stages = [_stage_of(stage) for stage in raw["stages"]]
    sizes = {axis: size for axis, size in raw["sizes"].items() if size is not None}
    spread = raw["spread"]["step_time_ms"]
    measured = {**raw, "sizes": sizes, "stages": stages, "step_time_ms": spread, "unjudgeable": None}
    diagnosis = Diagnosis(
        step_ms=raw.get("diagnosed_ms") or 0.0,
        steps=raw.get("diagnosed_steps") or 0,
        replayed_ms=0.0,
        causes=tuple(_cause_of(each) for each in raw["causes"]),
        perhaps=(),
        rest_ms=0.0,
    )
    found = msgspec.convert(measured, TargetStages)
    return TargetReport(found, diagnosis, _what_if_of(raw), msgspec.convert(raw.get("withheld"), str | None))


def _cause_of(raw: Mapping[str, Any]) -> Cause:
    """What two reports are compared by."""
    price = msgspec.convert({"ms": raw["gain_ms"], "low": raw["low_ms"], "high": raw["high_ms"]}, Price)
    kind, stage = msgspec.convert(raw["kind"], str), msgspec.convert(raw["stage"], int | None)
    return Cause(kind, price, share=1.0, while_ms=price.ms, since=None, stage=stage)


def _cause(cause: Cause, measured: TargetStages) -> dict[str, Any]:
    return {
        "kind": cause.kind,
        "stage": cause.stage,
        "stages": list(cause.stages),
        "chunk": cause.chunk,
        "rank": cause.ranks[0] if len(cause.ranks) == 1 else None,
        "ranks": list(cause.ranks),
        "hosts": list(cause.hosts),
        "link": None if cause.link is None else list(cause.link),
        "group": cause.group,
        "gain_ms": cause.price.ms,
        "low_ms": cause.price.low,
        "high_ms": cause.price.high,
        "share": cause.share,
        "while_ms": cause.while_ms,
        "since": cause.since,
        "parts": dict(cause.parts),
        "evidence": causes.evidence(cause, measured),
    }


def _what_if_of(raw: Mapping[str, Any]) -> WhatIf:
    found = (raw.get("what_if") or {}).get("candidates") or []
    return WhatIf(candidates=tuple(msgspec.convert(_prediction_of(each), Prediction) for each in found))


def _prediction_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**raw, "step_ms": raw["step_time_ms"], "flags": shlex.split(raw["flags"])}


def _stage_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's fields by their names in `Stage`; those that the JSON does not have stay empty."""
    passes = raw["per_microbatch"]
    return {
        **{name: raw[name] for name in ("pp", "ranks", "bubble_fraction", "modules_ms")},
        **{name: raw["spread"][name] for name in (*PER_STEP, "exposed_ms")},
        "chunks": [{**times, "holds": holds} for times, holds in zip(passes["by_chunk"], raw["chunks"], strict=True)],
        "forward_per_microbatch_ms": passes["forward_ms"],
        "backward_per_microbatch_ms": passes["backward_ms"],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    per_step = {name: getattr(stage, name) for name in PER_STEP}
    return {
        "pp": stage.pp,
        "ranks": list(stage.ranks),
        "chunks": [asdict(chunk.holds) if chunk.holds else None for chunk in stage.chunks],
        **{name: mean_of(spread) for name, spread in per_step.items()},
        "bubble_fraction": stage.bubble_fraction,
        "bubble_split": {part: mean_of(spread) for part, spread in stage.bubble_split.items()},
        "exposed_ms": {group: mean_of(stage.exposed_ms[group]) for group in GROUPS},
        "host_ms": {kind: mean_of(spread) for kind, spread in stage.host_ms.items()},
        "modules_ms": {name: _spread(spread) for name, spread in stage.modules_ms.items()},
        "per_microbatch": {
            "forward_ms": _spread(stage.forward_per_microbatch_ms),
            "backward_ms": _spread(stage.backward_per_microbatch_ms),
            "by_chunk": [
                {"chunk": c.chunk, "forward_ms": _spread(c.forward_ms), "backward_ms": _spread(c.backward_ms)}
                for c in stage.chunks
            ],
        },
        "spread": {
            **{name: _spread(spread) for name, spread in per_step.items()},
            "exposed_ms": {group: _spread(stage.exposed_ms[group]) for group in GROUPS},
        },
    }


def _fleet(fleet: Fleet) -> dict[str, Any]:
    """Without what the target's report says already."""
    plain = asdict(fleet)
    parts = {name: plain.pop(name) for name in ("coverage", "times", "synchronisation", "recording")}
    found = plain | {name: value for part in parts.values() for name, value in part.items()}
    findings = [finding.plain for finding in sentences.of_fleet(fleet)]
    return {
        **_without(found, "key", "directory", "again"),
        "findings": findings,
        "notes": list(sentences.notes_of(fleet)),
    }


def _without(plain: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if name not in names}


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return asdict(spread) if spread else None
