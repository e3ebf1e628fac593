"""TensorBoard's PyTorch profiler plugin loads what we write, by the names under which we write it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch_tb_profiler", reason="`make test-viewers` installs it")

from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader

from tests.viewers.job import RANKS, TARGETS, SaveDirectory, read


def load(directory: Path) -> dict[str, Any]:
    """Profiles by the plugin's word for a trace, worker: the file name before ``.pt.trace.json.gz``."""
    run = RunLoader("run", str(directory), io.Cache()).load()
    return {worker: profile for (worker, _), profile in run.profiles.items()}


def test_every_trace_of_a_save_directory(saved: SaveDirectory, timeline: Path) -> None:
    profiles = load(saved.path)
    paths = {saved.trace(target, rank) for target in TARGETS for rank in RANKS}
    assert set(profiles) == {path.name.removesuffix(".pt.trace.json.gz") for path in paths}
    for path in paths:
        profile = profiles[path.name.removesuffix(".pt.trace.json.gz")]
        assert {view.name for view in profile.views} >= {"overall", "operator", "trace"}
        slices = read(path)
        calls = {row["name"]: row["calls"] for row in profile.operation_table_by_name["data"]}
        expected = Counter(event["name"] for event in slices if event["cat"] == "cpu_op")
        assert calls["aten::baddbmm"] == expected["aten::baddbmm"] > 0
        (step,) = profile.overview["performance"]
        (ours,) = [event["dur"] for event in slices if event["name"].startswith(f"megaprof/{path.name.split('.')[0]} ")]
        passes = sum(e["dur"] for e in slices if e["name"].startswith(("megaprof/forward ", "megaprof/backward ")))
        assert passes < step["value"] <= ours + 1


def test_kernels_of_a_gpu_trace(tmp_path: Path) -> None:
    from tests.analysis.scenarios import Scenario, write

    write(Scenario("even", layers=(2, 2), microbatches=4), tmp_path)
    profiles = load(tmp_path)
    assert len(profiles) == 2
    for path in tmp_path.iterdir():
        profile = profiles[path.name.removesuffix(".pt.trace.json.gz")]
        expected = Counter(event["name"] for event in read(path) if event["cat"] == "kernel")
        assert expected
        assert {row[0]: row[2] for row in profile.kernel_table["data"]["rows"]} == expected
