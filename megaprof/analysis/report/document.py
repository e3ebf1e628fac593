"""The report as data: what the terminal, HTML, JSON and `diff` all take.

Times are milliseconds, per step and averaged over the captured steps, with their spread beside them. A number that the
traces do not allow is null, and a warning says why.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.foreign.facts import Foreign
from megaprof.analysis.report import sentences
from megaprof.analysis.stages.samples import Spread, mean_of
from megaprof.analysis.stages.stages import Stage, TargetStages
from megaprof.analysis.stages.verdict import Verdict
from megaprof.analysis.trace.calls import GROUPS, Call
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import options_of
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.job.standstill import Standstill
from megaprof.version import __version__

#: What the JSON gives as the mean, and the spread of under ``spread``.
PER_STEP = ("forward_ms", "backward_ms", "compute_ms", "bubble_ms", "host_bound_ms", "dp_tail_ms", "pp_waiting_ms")


class NotAReport(ValueError):
    """This is no report of megaprof's; the message says what is wrong."""


@dataclass(frozen=True)
class TargetReport:
    """One target and role."""

    measured: TargetStages
    """Its stages, with warnings about what was measured."""
    verdict: Verdict
    """Which stage is slow, and why time is lost."""
    what_if: WhatIf
    """What would be faster."""
    fleet: Fleet | None = None
    """The whole run on all ranks; None without timelines."""

    @property
    def key(self) -> tuple[str, str | None]:
        """Target and role."""
        return self.measured.target, self.measured.role

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        measured, verdict = self.measured, self.verdict
        said = sentences.of_verdict(verdict)
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
            "imbalance": verdict.imbalance,
            "slowest_stage": verdict.slowest_stage,
            "causes": [_without(asdict(cause), "ranks") for cause in verdict.causes],
            "notes": [said.text] if said else [],
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
        newest = self.run == self.runs
        which = "the newest" if newest else f"number {self.run}, where 1 is the oldest"
        other = f"megaprof report {shlex.quote(str(self.source))} --run {self.run - 1 if newest else self.runs}"
        there = f"The files of {self.runs} runs lie here, and this is about {which}."
        return f"{there} To see {'the one before it' if newest else 'the newest'}: {other}"

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
    verdict = {name: raw[name] for name in ("imbalance", "slowest_stage")}
    return TargetReport(msgspec.convert(measured, TargetStages), msgspec.convert(verdict, Verdict), _what_if_of(raw))


def _what_if_of(raw: Mapping[str, Any]) -> WhatIf:
    found = (raw.get("what_if") or {}).get("candidates") or []
    return WhatIf(candidates=tuple(msgspec.convert(_prediction_of(each), Prediction) for each in found))


def _prediction_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Older reports give no uncertainty of the speedup: it is as uncertain as the step."""
    step_ms = raw["step_time_ms"]
    uncertainty = raw["uncertainty_ms"] / step_ms * raw["speedup"] if step_ms else 0.0
    return {"speedup_uncertainty": uncertainty, **raw, "step_ms": step_ms, "flags": shlex.split(raw["flags"])}


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
    found = _without(found, "key", "directory", "again")
    found["stragglers"] = [_without(each, "gain_ms") for each in found["stragglers"]]
    findings = [finding.plain for finding in sentences.of_fleet(fleet)]
    return {**found, "findings": findings, "notes": list(sentences.notes_of(fleet))}


def _without(plain: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if name not in names}


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return asdict(spread) if spread else None
