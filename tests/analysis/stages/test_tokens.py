"""Uneven microbatches, where the traces say how many tokens each had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megaprof.analysis.report.report import analyze
from megaprof.analysis.stages.causes import pipeline_causes
from tests.analysis.scenarios import Scenario, write


def evidence(tmp_path: Path, *, reverse: bool) -> str:
    """Of a run whose microbatches take different times; the tokens grow with them, or do not."""
    write(Scenario("uneven", layers=(4, 4), uneven=0.6), tmp_path)
    (target,) = analyze(tmp_path).targets
    measured = target.measured
    times = measured.stages[0].microbatch_ms
    tokens = {key: round(1000 / ms if reverse else 10 * ms) for key, ms in times.items()}
    (cause,) = [c for c in pipeline_causes(replace(measured, tokens=tokens)) if c.kind == "uneven_microbatches"]
    return cause.evidence


def test_tokens_that_explain_the_times_are_said_beside_them(tmp_path: Path) -> None:
    found = evidence(tmp_path, reverse=False)
    assert "their tokens explain it (correlation 1.00): one of " in found
    assert found.endswith(", and no stage is to blame")


def test_tokens_that_do_not_are_not(tmp_path: Path) -> None:
    found = evidence(tmp_path, reverse=True)
    assert "tokens" not in found
    assert "they differ in work, for example in sequence length, and no stage is to blame" in found
