"""What holds a rank up and is no waiting of the pipeline's own: the profiler's start, which takes each rank another
time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.samples import mean_of
from tests.analysis.altered import reported
from tests.analysis.scenarios import Scenario


def started(slowest_ms: float) -> Any:
    """Metadata of a window before which the profiler's start took so long on stage 2, and 2 ms on the others."""
    asked = {"asked": ["cpu", "cuda"], "recorded": ["cpu", "cuda"]}
    return lambda stage: asked | {"start_ns": round(1e6 * (slowest_ms if stage == 2 else 2.0))}


def bubbles(target: TargetReport) -> list[float | None]:
    return [mean_of(stage.bubble_ms) for stage in target.stages]


def test_a_stage_that_the_profilers_start_holds_up_is_no_bubble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healthy stages, of which one enters its only step 300 ms late."""
    late = Scenario("held up by the profiler", late={2: 300.0})
    target = reported(late, tmp_path, monkeypatch, device="cuda", profiler=started(302.0))
    assert bubbles(target) == [None] * 4
    assert target.step_time_ms is None
    assert all(stage.compute_ms is not None and stage.compute_ms.mean > 900 for stage in target.stages)
    assert not target.causes
    assert (target.what_if.replay_ms, target.what_if.candidates) == (None, ())
    assert [w.why.ms for w in target.warnings if w.kind == "step_disturbed"] == [pytest.approx((2, 302))]


def test_starts_that_take_alike_leave_the_step_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = reported(Scenario("healthy"), tmp_path, monkeypatch, device="cuda", profiler=started(7.0))
    assert not target.warnings
    assert all(bubble is not None and 150 < bubble < 250 for bubble in bubbles(target))
    assert target.what_if.candidates


@pytest.mark.parametrize("merged", [True, False])
def test_a_step_behind_the_start_is_left_out_where_others_are_not(
    merged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a window of several steps the start is before the first one alone; each window of its own has its own."""
    steps = Scenario("several steps", steps=2, merged=merged, layers=(6, 4, 4, 4))
    target = reported(steps, tmp_path, monkeypatch, device="cuda", profiler=started(302.0))
    assert target.measured.steps == ((6,) if merged else (5, 6))
    assert target.slowest_stage == (0 if merged else None)
    assert (target.measured.step_time_ms is not None) == merged


def test_without_a_pipeline_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = reported(Scenario("one", layers=(8,)), tmp_path, monkeypatch, device="cuda", profiler=started(302.0))
    assert target.measured.step_time_ms is not None
