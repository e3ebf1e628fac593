"""What a report says of one recording. Needs no torch, so that a process for each recording begins at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaprof.analysis.report.report import analyze


@dataclass(frozen=True)
class Said:
    """The figures that twins are compared by."""

    failed: str | None = None
    """The exception that the report raised."""
    step_ms: float | None = None
    replay_error: float | None = None
    exposed_ms: float | None = None
    """Of tensor parallelism, on the first stage."""
    causes: tuple[dict[str, Any], ...] = ()
    """Each as the report's JSON has it."""


def said(directory: Path) -> Said:
    """The report on ``directory``."""
    try:
        (target,) = analyze(directory).targets
    except Exception as error:  # of one recording; the others are looked at
        return Said(f"{type(error).__name__}: {error}")
    step, error_of_replay, exposed = (
        None if each is None else each.mean
        for each in (target.step_time_ms, target.what_if.replay_error, target.stages[0].exposed_ms["tp"])
    )
    causes = () if target.diagnosis is None else tuple(map(asdict, target.diagnosis.causes))
    return Said(None, step, error_of_replay, exposed, causes)
