"""The stage report as plain data: `analyze` a directory of traces, `Report.to_json` for tools.

Times are milliseconds, per step and averaged over the captured steps, with their spread beside them. A number that the
traces do not allow is null, and a warning says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaprof.analysis.advice import Verdict, judge
from megaprof.analysis.calls import GROUPS, Call
from megaprof.analysis.reading import Progress, read_all
from megaprof.analysis.samples import Spread
from megaprof.analysis.stages import Stage, TargetStages, measure
from megaprof.analysis.traces import find_traces
from megaprof.analysis.what_if import WhatIf, what_if
from megaprof.version import __version__

#: A directory without files of ours is searched for renamed ones, up to this many.
_MOST_OTHERS = 64


class NothingToReport(Exception):
    """There is no trace of ours to report on; the message says what was found instead."""


@dataclass(frozen=True)
class TargetReport:
    """One target and role: its stages as measured (with warnings), which is slow and why, and what to change."""

    measured: TargetStages
    verdict: Verdict
    what_if: WhatIf

    def to_json(self) -> dict[str, Any]:
        measured, verdict = self.measured, self.verdict
        return {
            "target": measured.target,
            "role": measured.role,
            "steps": list(measured.steps),
            "sizes": asdict(measured.sizes),
            "schedule": measured.schedule,
            "forward_only": measured.forward_only,
            "microbatches": measured.microbatches,
            "step_time_ms": _mean(measured.step_time_ms),
            "step_time_basis": measured.step_time_basis,
            "spread": {"step_time_ms": _spread(measured.step_time_ms)},
            "stages": [_stage(stage) for stage in measured.stages],
            "imbalance": verdict.imbalance,
            "slowest_stage": verdict.slowest_stage,
            "causes": [asdict(cause) for cause in verdict.causes],
            "notes": list(verdict.notes),
            "what_if": self.what_if.to_json(),
            "warnings": list(measured.warnings),
        }


@dataclass(frozen=True)
class Report:
    """Everything found in ``source``. ``traces``: the files that were read; ``warnings``: about single files."""

    source: Path
    traces: tuple[Path, ...]
    targets: tuple[TargetReport, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``: strings, finite numbers, lists, dicts and None."""
        return {
            "version": __version__,
            "targets": [target.to_json() for target in self.targets],
            "warnings": list(self.warnings),
        }


def analyze(source: str | os.PathLike[str], *, workers: int = 1, progress: Progress | None = None) -> Report:
    """Report on every trace under a directory (or on one file).

    ``workers``: processes that read traces, each one at a time (see `reading.read_all`); ``progress(done, files)`` is
    called after each. A file that cannot be used becomes a warning of the report. Raises NothingToReport when no file
    can be.
    """
    path = Path(source)
    if path.is_file():
        candidates = [path]
    elif path.is_dir():
        candidates = find_traces(path) or _others(path)
    else:
        raise NothingToReport(f"{path} does not exist")
    if not candidates:
        raise NothingToReport(f"{path} holds no trace (*.pt.trace.json.gz or *.pt.trace.json): {_contents(path)}")
    calls: list[Call] = []
    read: list[Path] = []
    warnings: list[str] = []
    for reading in read_all(candidates, workers, progress):
        warnings += reading.warnings
        if reading.calls:
            read.append(reading.path)
            calls += reading.calls
    if not calls:
        raise NothingToReport(f"{path} holds no trace of megaprof's. " + " ".join(_sentences(warnings)))
    targets = tuple(TargetReport(measured, judge(measured), what_if(measured, calls)) for measured in measure(calls))
    return Report(path, tuple(read), targets, tuple(warnings))


def _others(directory: Path) -> list[Path]:
    """Files that may be traces under another name: names are only a hint."""
    listed = (p for p in sorted(directory.iterdir()) if p.name.endswith((".json", ".json.gz")) and p.is_file())
    return [p for p in listed if not p.name.startswith(".")][:_MOST_OTHERS]


def _contents(directory: Path) -> str:
    names = sorted(os.listdir(directory))
    if not names:
        return "it is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}"


def _sentences(warnings: list[str]) -> Iterator[str]:
    for warning in warnings[:5]:
        yield warning.rstrip(".") + "."
    if len(warnings) > 5:
        yield f"And {len(warnings) - 5} more like it."


def _stage(stage: Stage) -> dict[str, Any]:
    per_step = {
        "forward_ms": stage.forward_ms,
        "backward_ms": stage.backward_ms,
        "compute_ms": stage.compute_ms,
        "bubble_ms": stage.bubble_ms,
        "host_bound_ms": stage.host_bound_ms,
        "dp_tail_ms": stage.dp_tail_ms,
        "pp_waiting_ms": stage.pp_waiting_ms,
    }
    return {
        "pp": stage.pp,
        "ranks": list(stage.ranks),
        "chunks": [asdict(chunk.holds) if chunk.holds else None for chunk in stage.chunks],
        **{name: _mean(spread) for name, spread in per_step.items()},
        "bubble_fraction": stage.bubble_fraction,
        "bubble_split": {part: _mean(spread) for part, spread in stage.bubble_split.items()},
        "exposed_ms": {group: _mean(stage.exposed_ms[group]) for group in GROUPS},
        "host_ms": {kind: _mean(spread) for kind, spread in stage.host_ms.items()},
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


def _mean(spread: Spread | None) -> float | None:
    return spread.mean if spread else None


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return asdict(spread) if spread else None
