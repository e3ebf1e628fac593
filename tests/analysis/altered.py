"""Runs with a known answer whose files lack something, or say something else of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.report import TargetReport, analyze
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder

Event = dict[str, Any]


def reported(
    scenario: Scenario,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: Callable[[TraceBuilder, Event], bool] = lambda trace, event: True,
    top: dict[str, Any] | None = None,
    **metadata: Any,
) -> TargetReport:
    """The report on ``scenario``, of whose events only those are there that are ``kept``. ``top``: what else stands
    beside the events; ``metadata``: what the files say; a function of the stage says something else on each."""
    whole = TraceBuilder.document

    def document(trace: TraceBuilder) -> dict[str, Any]:
        found = whole(trace)
        events = [event for event in found["traceEvents"] if kept(trace, event)]
        said = {key: value(trace.pp) if callable(value) else value for key, value in metadata.items()}
        return {**(top or {}), **found, "megaprof": found["megaprof"] | said, "traceEvents": events}

    monkeypatch.setattr(TraceBuilder, "document", document)
    write(scenario, directory)
    (target,) = analyze(directory).targets
    return target
