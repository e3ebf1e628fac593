"""Self times by construction, against torch's own numbers, and from files that are cut off; collapsed stacks."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.intervals import intervals, total, union
from megaprof.analysis.trace.summary import collapsed_stacks, kernel_summary, read_events, self_times


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


def written(*events: dict[str, Any]) -> Path:
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, file, indent=1)
    return Path(file.name)


def summary(*events: dict[str, Any]) -> dict[str, Any]:
    path = written(*events)
    try:
        return kernel_summary(read_events(path, python=False), {})
    finally:
        path.unlink()


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
    assert sum(mine.values()) == total(union(intervals((s, e) for s, e, _ in ordered)))
    # By brute force: instant by instant, the event that started last, and of those the one that comes last.
    slow: dict[int, int] = defaultdict(int)
    for instant in range(80):
        covering = [(s, i, n) for i, (s, e, n) in enumerate(ordered) if s <= instant < e]
        if covering:
            slow[max(covering)[2]] += 1
    assert {name: time for name, time in mine.items() if time} == dict(slow)


def test_times_are_exact_to_the_nanosecond() -> None:
    many = [op("aten::add", 4_393_776_431.045 + i * 0.001, 0.001) for i in range(3000)]
    count, self_us, union_us = times(summary(*many))["aten::add"]
    assert (count, self_us) == (3000, pytest.approx(3.0, abs=0.002))
    assert union_us == pytest.approx(3.0, abs=0.002)


@pytest.mark.parametrize("cut", [0, 1, 30, 200])
def test_a_trace_that_is_cut_off_is_no_summary(cut: int, tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [op("aten::add", 0, 1)] * 3})
    (path := tmp_path / "x.json").write_text(text[: min(cut, len(text) - 3)])
    with pytest.raises((ValueError, Undecodable), match=r"truncated|empty|ends too early|no list of"):
        read_events(path, python=True)


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
    mine = times(kernel_summary(read_events(tmp_path / "trace.json", python=False), {}))
    theirs = {a.key: (a.count, a.self_cpu_time_total) for a in profile.key_averages() if a.key.startswith("aten::")}
    assert {name: count for name, (count, _, _) in mine.items()}.items() >= {("aten::linear", 10), ("aten::relu", 5)}
    for name, (count, self_us) in theirs.items():
        assert mine[name][1] == pytest.approx(self_us, abs=0.01 * count + 0.1), name


def event(category: str, name: str, start: float, duration: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def collapsed(*events: dict[str, Any]) -> tuple[list[str], list[str]]:
    path = written(*events)
    try:
        return collapsed_stacks(read_events(path, python=True))
    finally:
        path.unlink()


def test_stacks_of_host_and_device() -> None:
    host, device = collapsed(
        event("kernel", "gemm", 900, 40, thread=7, correlation=5),
        event("python_function", "train.py(3): step; x", 0, 100),
        event("cpu_op", "aten::mm", 10, 50),
        event("cuda_runtime", "cudaLaunchKernel", 20, 5.5, correlation=5),
        event("cpu_op", "aten::mm", 70, 10),
        event("kernel", "gemm", 950, 2, thread=8, correlation=77),
        event("cpu_op", "aten::mm", 0, 1, thread=2),
        event("fwdbwd", "fwdbwd", 0, 1),
    )
    assert host == [
        "train.py(3): step: x 40000\n",
        "train.py(3): step: x;aten::mm 54500\n",
        "train.py(3): step: x;aten::mm;cudaLaunchKernel 5500\n",
        "aten::mm 1000\n",
    ]
    assert device == [
        "train.py(3): step: x;aten::mm;cudaLaunchKernel;gemm 40000\n",
        "gemm 2000\n",  # launched before the window: its stack is not known
    ]


def test_nothing_recorded_has_no_stacks() -> None:
    assert collapsed() == ([], [])
