"""Replays of full-iteration CUDA graphs: with the names of their nodes they are reported as any other step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.trace.steps import TracedStep, steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats.ranges import GRAPHS_KEY as KEY
from tests.analysis.rows import rows
from tests.analysis.scenarios import Scenario, write
from tests.analysis.tables import stages_of

RUNS = [
    Scenario("imbalance", layers=(6, 4, 4, 4), steps=2, operators=False),
    Scenario("interleaved", layers=((2, 2), (2, 2)), microbatches=4, operators=False),
    Scenario("one axis", exposed={"tp": 0.2}, peers=2, operators=False),
    Scenario("log-probs", target="train_log_probs", operators=False),
    Scenario("hosts of their own", layers=(4, 4), apart=True, steps=2, operators=False),
]


def pair(scenario: Scenario, directory: Path) -> tuple[Path, Path]:
    """The same run with and without a graph."""
    graphed = Scenario(**(vars(scenario) | {"graphed": True}))
    write(scenario, directory / "usual")
    write(graphed, directory / "graphed")
    return directory / "usual", directory / "graphed"


def calls(directory: Path) -> list[TracedStep]:
    return [call for path in find_traces(directory) for call in steps_of(read_trace(path))]


def measured(call: TracedStep) -> Any:
    spent = {name: ns for name, ns in call.spent.items() if not name.startswith("host_")}
    kernels = {label: times[:, 2:].tolist() for label, times in call.kernels.items()}
    return [each._replace(working=0) for each in rows(call)], spent, call.extent, kernels


@pytest.mark.parametrize("scenario", RUNS, ids=lambda scenario: scenario.name)
def test_a_replayed_step_is_reported_as_the_same_step_without_a_graph(scenario: Scenario, tmp_path: Path) -> None:
    usual, graphed = pair(scenario, tmp_path)
    for expected, found in zip(calls(usual), calls(graphed), strict=True):
        assert "host_forward" not in found.spent
        assert len(found.passes.kind) == scenario.microbatches * scenario.chunks * (1 if found.forward_only else 2)
        assert found.incomplete is None
        assert measured(found) == measured(expected)
    (expected,), (found,) = stages_of(calls(usual)), stages_of(calls(graphed))
    for before, now in zip(expected.stages, found.stages, strict=True):
        for name in ("forward_ms", "backward_ms", "compute_ms", "exposed_ms", "pp_waiting_ms", "chunks"):
            assert getattr(now, name) == getattr(before, name), name
        # In a replay nothing waits for the host.
        assert now.bubble_ms.mean == pytest.approx(before.bubble_ms.mean, abs=0.1)
        assert set(now.host_ms.values()) == {None}
    assert found.step_time_ms == expected.step_time_ms
    assert found.unjudgeable == expected.unjudgeable


def changed(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for path in find_traces(directory):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        change(trace)
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def none(trace: dict[str, Any]) -> None:
    del trace[KEY]


def damaged(trace: dict[str, Any]) -> None:
    trace[KEY]["runs"].reverse()


def of_another_graph(trace: dict[str, Any]) -> None:
    trace[KEY]["runs"] = [[first + (1 << 32), last + (1 << 32), stack] for first, last, stack in trace[KEY]["runs"]]


def one_pass_missing(trace: dict[str, Any]) -> None:
    trace[KEY]["runs"] = [
        run for run in trace[KEY]["runs"] if "megaprof/forward mb=3 chunk=0" not in trace[KEY]["stacks"][run[2]]
    ]


@pytest.mark.parametrize("change", [none, damaged, of_another_graph, one_pass_missing])
def test_without_the_names_of_all_kernels_there_are_no_passes(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    _, graphed = pair(RUNS[0], tmp_path)
    changed(graphed, change)
    assert all(not len(call.passes.kind) for call in calls(graphed))
    (found,) = stages_of(calls(graphed))
    assert found.step_time_ms is not None
    assert all(stage.forward_ms is None and stage.bubble_ms is None for stage in found.stages)
    assert found.unjudgeable is not None
    reasons = {read_trace(path).metadata.ranges.reason for path in find_traces(graphed)}
    assert (reasons == {"replayed"}) is (change is not one_pass_missing)
    assert reasons & {each.said for each in found.warnings if each.kind == "passes_unknown"}


def test_kernels_between_passes_need_no_name(tmp_path: Path) -> None:
    """Megatron counts tokens there; less than 1 % of the kernels."""
    usual, graphed = pair(RUNS[0], tmp_path)

    def longer(trace: dict[str, Any]) -> None:
        # The last kernel of the first pass: the pass goes on without it.
        runs = trace[KEY]["runs"]
        place = next(n for n, run in enumerate(runs) if run[1] > run[0])
        runs[place][1] -= 1

    changed(graphed, longer)
    for before, now in zip(calls(usual), calls(graphed), strict=True):
        assert len(now.passes.kind) == len(before.passes.kind)
        assert now.passes.compute.sum() < before.passes.compute.sum()


def test_the_graph_of_a_layer_belongs_to_the_pass_that_launched_it(tmp_path: Path) -> None:
    usual, graphed = tmp_path / "usual", tmp_path / "graphed"
    write(RUNS[0], usual)
    write(RUNS[0], graphed)

    def of_layers(trace: dict[str, Any]) -> None:
        for number, event in enumerate(e for e in trace["traceEvents"] if "gemm" in e["name"]):
            event["args"]["graph node id"] = 7 << 32 | number
        trace[KEY] = {"stacks": [["megaprof/forward mb=0 chunk=0"]], "runs": [[7 << 32, (8 << 32) - 1, 0]]}

    changed(graphed, of_layers)
    for before, now in zip(calls(usual), calls(graphed), strict=True):
        assert measured(now)[0] == measured(before)[0]
        assert "host_forward" in now.spent
