"""Self times, exactly: by construction, against torch's own numbers, and from files that are cut off."""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaprof import ProfileConfig, install_hooks
from megaprof.artifacts.kernels import nanoseconds, read_events, self_times, union
from tests.artifacts.summaries import summarise


def kernel(name: str, start: float, duration: float, stream: int = 7, device: int = 0) -> dict[str, Any]:
    args = {"device": device, "stream": stream, "correlation": 1}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def op(name: str, start: float, duration: float, thread: int = 1, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": thread, "ts": start, "dur": duration, "args": {}}


def summary(*events: dict[str, Any]) -> dict[str, Any]:
    return summarise(io.StringIO(json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=1)))


def times(result: dict[str, Any]) -> dict[str, tuple[int, float, float]]:
    return {k["name"]: (k["count"], k["self_us"], k["union_us"]) for k in result["kernels"]}


def test_kernels_on_two_streams_at_once() -> None:
    result = summary(
        kernel("gemm", 100, 10),
        kernel("gemm", 105, 10, stream=8),
        kernel("nccl", 112, 1.5, stream=9),
        op("aten::mm", 0, 500),
    )
    assert times(result) == {"gemm": (2, 20.0, 15.0), "nccl": (1, 1.5, 1.5)}
    assert result["activity"] == "cuda"
    assert result["devices"] == [{"device": "cuda:0", "count": 3, "self_us": 21.5, "busy_us": 15.0}]
    assert [k["name"] for k in result["kernels"]] == ["gemm", "nccl"], "most self time first"


def test_kernels_that_overlap_on_one_stream_are_not_counted_twice() -> None:
    """Programmatic dependent launch starts a kernel before its predecessor has ended."""
    result = summary(kernel("first", 0, 10), kernel("second", 8, 10))
    assert times(result) == {"first": (1, 8.0, 10.0), "second": (1, 10.0, 10.0)}
    assert result["devices"][0]["self_us"] == result["devices"][0]["busy_us"] == 18.0


def test_the_same_kernel_on_two_devices_stands_twice() -> None:
    result = summary(kernel("gemm", 0, 1), kernel("gemm", 0, 2, device=1))
    assert [(k["device"], k["self_us"]) for k in result["kernels"]] == [("cuda:1", 2.0), ("cuda:0", 1.0)]


def test_operators_stand_in_where_there_is_no_device_event() -> None:
    result = summary(
        op("megaprof/forward", 0, 100, category="user_annotation"),
        op("aten::linear", 10, 50),
        op("aten::addmm", 20, 30),
        op("cudaLaunchKernel", 25, 5, category="cuda_runtime"),
        op("train.py: step", 0, 100, category="python_function"),
        op("aten::addmm", 20, 30, thread=2),
    )
    assert result["activity"] == "cpu"
    assert times(result) == {"aten::addmm": (2, 55.0, 30.0), "aten::linear": (1, 20.0, 50.0)}
    assert result["devices"][0]["self_us"] == 130.0


def test_nothing_recorded_is_an_empty_summary() -> None:
    assert summary()["kernels"] == summary()["devices"] == []


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 4)), max_size=30)


@given(spans)
def test_self_times_add_up_to_the_busy_time(given: list[tuple[int, int, int]]) -> None:
    ordered = sorted(((s, s + d, n) for s, d, n in given), key=lambda span: (span[0], -span[1]))
    mine = self_times(ordered)
    assert sum(mine.values()) == union((s, e) for s, e, _ in ordered)
    # By brute force: instant by instant, the event that started last, and of those the one that comes last.
    slow: dict[int, int] = defaultdict(int)
    for instant in range(80):
        covering = [(s, i, n) for i, (s, e, n) in enumerate(ordered) if s <= instant < e]
        if covering:
            slow[max(covering)[2]] += 1
    assert {name: time for name, time in mine.items() if time} == dict(slow)


def test_times_are_exact() -> None:
    assert nanoseconds("4393776431045.965") == 4393776431045965
    assert nanoseconds(12) == 12000
    assert nanoseconds("0.1") == 100
    assert nanoseconds("1e3") == 1000000
    many = [op("aten::add", i * 0.001, 0.001) for i in range(3000)]
    assert times(summary(*many))["aten::add"] == (3000, 3.0, 3.0)


@pytest.mark.parametrize("cut", [0, 1, 30, 200])
def test_a_trace_that_is_cut_off_is_no_summary(cut: int) -> None:
    text = json.dumps({"traceEvents": [op("aten::add", 0, 1)] * 3})
    with pytest.raises(ValueError, match=r"trace ends in the middle|no traceEvents"):
        list(read_events(io.StringIO(text[: min(cut, len(text) - 3)])))


def test_events_are_read_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaprof.artifacts.kernels._CHUNK", 7)
    events = [op(f"aten::op{i}", i, 1.5) for i in range(5)]
    text = json.dumps({"traceEvents": events, "after": ["]"]})
    assert [event["name"] for event in read_events(io.StringIO(text))] == [f"aten::op{i}" for i in range(5)]


def test_self_times_agree_with_torchs_own(tmp_path: Path) -> None:
    """``key_averages`` computes self times from the same profile, its own way, in floating point.

    It folds an operator that only calls itself (another overload) into one, so only its self times can be compared.
    """
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(5):
            with torch.profiler.record_function("step"):
                model(torch.randn(32, 64)).sum().backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    with open(tmp_path / "trace.json") as file:
        mine = times(summarise(file))
    theirs = {a.key: (a.count, a.self_cpu_time_total) for a in profile.key_averages() if a.key.startswith("aten::")}
    assert {name: count for name, (count, _, _) in mine.items()}.items() >= {("aten::linear", 10), ("aten::relu", 5)}
    for name, (count, total) in theirs.items():
        assert mine[name][1] == pytest.approx(total, abs=0.01 * count + 0.1), name


def test_a_controller_gets_the_last_windows_summary(one_rank: Any, tmp_path: Path) -> None:
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), skip_first=0, active=2, kernels=True)
    with install_hooks(one_rank.chunks, config) as handle:
        assert handle.kernel_summary() is None, "no window was closed yet"
        for step in range(2):
            one_rank.train_step()
            summary = handle.kernel_summary(timeout=60)
            assert summary is not None
            assert (summary["target"], summary["steps"], summary["truncated"]) == ("train_actor", [step, step], False)
            assert summary["coords"]["rank"] == 0
            assert pickle.loads(pickle.dumps(summary)) == summary
            counts = {k["name"]: k["count"] for k in summary["kernels"]}
            assert counts["aten::mm"] >= one_rank.workload.microbatches
    assert handle.kernel_summary() == summary, "still there after remove()"
    (path,) = tmp_path.glob("*step000001*.kernels.json")
    assert json.loads(path.read_text()) == summary
    assert len(list(tmp_path.iterdir())) == 4


def test_without_the_option_there_is_no_summary(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(
        one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), skip_first=0)
    ) as handle:
        one_rank.train_step()
        assert handle.kernel_summary(timeout=60) is None
    assert install_hooks(one_rank.chunks, ProfileConfig()).kernel_summary() is None


def test_a_summary_that_fails_costs_only_itself(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megaprof.artifacts.derived._CHILD", "import sys; sys.exit('no memory today')")
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), skip_first=0, kernels=True)
    with install_hooks(one_rank.chunks, config) as handle:
        one_rank.train_step()
        assert handle.kernel_summary(timeout=60) is None
        assert handle.active
    assert "kernels.json could not be made: exit 1: no memory today" in caplog.text
    assert [path.suffixes[-2:] for path in tmp_path.iterdir()] == [[".json", ".gz"]]
