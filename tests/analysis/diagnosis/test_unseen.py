"""Kernels that ran on a GPU and are not in the trace: nothing is said of a step that they are missing from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.report import TargetReport, analyze
from tests.analysis.altered import Event, reported
from tests.analysis.scenarios import Scenario
from tests.analysis.synthetic import TraceBuilder

#: An uneven pipeline, whose kernels tell that stage 0 is slow.
UNEVEN = Scenario("kernels that are missing", layers=(6, 4, 4, 4))
ON_GPU = {"device": "cuda", "profiler": {"asked": ["cpu", "cuda"], "recorded": ["cpu", "cuda"]}}


def is_kernel(event: Event) -> bool:
    return event.get("cat") == "kernel"


def is_cuda(event: Event) -> bool:
    return event.get("cat") in ("kernel", "cuda_runtime")


def says_nothing(target: TargetReport) -> bool:
    times = [getattr(stage, name) for stage in target.stages for name in ("forward_ms", "compute_ms", "bubble_ms")]
    assert target.step_time_ms is None
    assert target.what_if.replay_ms is None
    assert not target.what_if.candidates
    return not any(times) and not target.causes and target.slowest_stage is None and len(times) == 12


def test_every_kernel_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = reported(UNEVEN, tmp_path, monkeypatch, **ON_GPU)
    assert target.slowest_stage == 0
    assert not target.warnings


def test_launches_without_any_kernel_are_no_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a file that does not say where its model was."""
    target = reported(UNEVEN, tmp_path, monkeypatch, lambda trace, event: not is_kernel(event))
    assert says_nothing(target)
    assert len(target.warnings) == 1


@pytest.mark.parametrize(
    ("top", "metadata"),
    [
        ({}, {"device": "cuda", "profiler": {"asked": ["cpu"], "recorded": ["cpu"]}}),
        ({}, {"device": "cuda", "profiler": {"asked": ["cpu", "cuda"], "recorded": ["cpu"]}}),
        ({}, ON_GPU),
        ({"deviceProperties": [{"id": 0, "name": "H100", "totalGlobalMem": 1}]}, {}),
    ],
    ids=["not asked for", "not possible", "lost", "not said"],
)
def test_a_model_on_a_gpu_without_gpu_activity(
    top: dict[str, Any], metadata: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = reported(UNEVEN, tmp_path, monkeypatch, lambda trace, event: not is_cuda(event), top, **metadata)
    assert says_nothing(target)
    assert len(target.warnings) == 1
    assert target.withheld == target.warnings[0]


@pytest.mark.parametrize(
    ("top", "metadata"),
    [
        ({}, {"device": "cpu"}),
        ({"deviceProperties": []}, {}),
        ({"deviceProperties": [{"id": 0, "name": "H100"}]}, {"device": "cpu"}),
    ],
)
def test_a_run_on_a_cpu_is_one(
    top: dict[str, Any], metadata: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario("uneven on a CPU", layers=(6, 4, 4, 4), gpu=False)
    target = reported(scenario, tmp_path, monkeypatch, top=top, **metadata)
    assert target.slowest_stage == 0


def without(part: int) -> Callable[[TraceBuilder, Event], bool]:
    """All events but one in ``part`` of the kernels of stage 2."""
    return lambda trace, event: not (trace.pp == 2 and is_kernel(event) and event["args"]["correlation"] % part == 0)


def test_a_rank_that_lost_more_than_one_launch_in_a_hundred_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = reported(UNEVEN, tmp_path, monkeypatch, without(30), **ON_GPU)
    assert target.withheld is not None
    assert not target.causes
    assert [stage.compute_ms is None for stage in target.stages] == [False, False, True, False]
    assert {stage.bubble_ms for stage in target.stages} == {None}


def test_few_lost_kernels_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(UNEVEN, tmp_path, monkeypatch, without(128), **ON_GPU).slowest_stage == 0


@pytest.mark.parametrize("merged", [False, True])
def test_a_step_that_lost_kernels_leaves_the_others(
    merged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kineto loses the first ones of a session: the first step of a window is another step than it was."""
    scenario = Scenario("the first step without kernels", layers=(6, 4, 4, 4), steps=2, merged=merged)

    def kept(trace: TraceBuilder, event: dict[str, Any]) -> bool:
        second = min((each["ts"] for each in trace.events if "step=6" in each["name"]), default=float("inf"))
        return not (is_kernel(event) and trace.step == 5 and event["ts"] < second)

    target = reported(scenario, tmp_path, monkeypatch, kept, **ON_GPU)
    assert target.steps == (6,)
    assert target.slowest_stage == 0
    assert [w.steps for w in target.warnings if w.kind == "left_out"] == [(5,)] * 4


def test_of_two_tools_the_one_that_saw_the_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch with ``--profile-activities cpu`` beside nsys."""
    with monkeypatch.context() as patched:
        reported(UNEVEN, tmp_path / "torch", patched, lambda trace, event: not is_cuda(event), **ON_GPU)
    reported(UNEVEN, tmp_path / "another", monkeypatch, **ON_GPU)
    (target,) = analyze(tmp_path).targets
    assert target.slowest_stage == 0
    assert not target.warnings
