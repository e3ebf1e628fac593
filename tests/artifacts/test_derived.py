"""Kernel summaries of windows, which a child process makes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megaprof import ProfileConfig, install_hooks, kernel_summary
from megaprof.capture.process import process


@pytest.fixture(autouse=True)
def _nobody_has_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "summaries", {})


def test_a_controller_gets_the_last_windows_summary(one_rank: Any, tmp_path: Path) -> None:
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="0:0:0:2", kernels=True)
    with install_hooks(one_rank.chunks, config):
        assert kernel_summary() is None, "no window was closed yet"
        for step in range(2):
            one_rank.train_step()
            summary = kernel_summary(timeout=60)
            assert summary is not None
            assert (summary["target"], summary["steps"], summary["truncated"]) == ("train_actor", [step, step], False)
            assert summary["coords"]["rank"] == 0
            assert pickle.loads(pickle.dumps(summary)) == summary
            counts = {k["name"]: k["count"] for k in summary["kernels"]}
            assert counts["aten::mm"] >= one_rank.workload.microbatches
    assert kernel_summary() == summary, "still there after remove()"
    (path,) = tmp_path.glob("*step000001*.kernels.json")
    assert json.loads(path.read_text()) == summary
    assert len(list(tmp_path.iterdir())) == 4


def test_without_the_option_there_is_no_summary(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="0")):
        one_rank.train_step()
        assert kernel_summary(timeout=60) is None
    assert kernel_summary() is None


def test_a_summary_that_fails_costs_only_itself(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megaprof.artifacts.writer._CHILD", "import sys; sys.exit('no memory today')")
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="0", kernels=True)
    with install_hooks(one_rank.chunks, config) as handle:
        one_rank.train_step()
        assert kernel_summary(timeout=60) is None
        assert handle.active
    assert "kernels.json could not be made: exit 1: no memory today" in caplog.text
    assert [path.suffixes[-2:] for path in tmp_path.iterdir()] == [[".json", ".gz"]]
