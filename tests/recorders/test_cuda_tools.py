"""The recorders that need a GPU, with torch's CUDA calls replaced by notes of what was called."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof.artifacts.writer import Writer
from megaprof.config.options import ProfileConfig
from megaprof.formats.metadata import SESSION_VARIABLE
from megaprof.parallel.topology import ParallelSizes, RankCoords
from megaprof.recorders import Window, emit
from megaprof.recorders.cuda_tools import MAX_ENTRIES, MemoryRecorder, NsysRecorder

COORDS = RankCoords(rank=3, pp=1, tp=0, cp=0, ep=0, dp=0, sizes=ParallelSizes(pp=2))
WINDOW = Window("train_actor", "ref", 7, COORDS)
STEM = "train_actor.ref.step000007.pp1-tp0-cp0-ep0-dp0.rank00003"


class Cuda:
    """What was called, in order, and what answers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answer = 0
        self.history_on = False

    def cudart(self) -> Cuda:
        return self

    def cudaProfilerStart(self) -> int:
        self.calls.append("start")
        return self.answer

    def cudaProfilerStop(self) -> int:
        self.calls.append("stop")
        return self.answer

    def record_history(self, enabled: str | None, **options: Any) -> None:
        self.calls.append((enabled, options))
        self.history_on = enabled is not None

    def snapshot(self) -> dict[str, Any]:
        self.calls.append("snapshot")
        return {"segments": [], "device_traces": [[{"action": "alloc", "size": 512}]]}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", fake.cudart)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake.record_history)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: fake.history_on, raising=False)
    return fake


def config(directory: Path, tool: str) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), dir=str(directory), tool=(tool,))


@pytest.mark.parametrize(("tool", "recorder"), [("nsys", NsysRecorder), ("memory", MemoryRecorder)])
def test_a_process_that_leaves_its_gpu_alone_keeps_doing_so(
    tool: str, recorder: Any, cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray driver, or a CPU actor on a machine with GPUs: even asking how many there are calls cuInit."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda.calls.append("is_available"))
    with pytest.raises(ValueError, match=f"--profile-tool {tool}: there is no CUDA device here, or this process does"):
        recorder(config(tmp_path, tool), Writer())
    assert (cuda.calls, list(tmp_path.iterdir())) == ([], [])


def test_nsys_opens_one_capture_range_per_window(cuda: Cuda, tmp_path: Path) -> None:
    writer = Writer()
    recorder = NsysRecorder(config(tmp_path, "nsys"), writer)
    for step in (7, 8):
        recorder.start(Window("train_actor", "ref", step, COORDS))
        recorder.stop(Window("train_actor", "ref", step, COORDS), {"steps": [step, step]})
    assert cuda.calls == ["start", "stop"] * 2  # the session has waited for the device
    assert writer.close(60)
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert said == [{"megaprof": {"steps": [7 + i, 7 + i]}} for i in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir())[0] == f"{STEM}.nsys.json"


def test_a_stop_without_start_opens_no_capture_range(cuda: Cuda, tmp_path: Path) -> None:
    recorder = NsysRecorder(config(tmp_path, "nsys"), Writer())
    recorder.discard()
    recorder.stop(WINDOW, {})
    assert cuda.calls == []


def test_a_refusal_of_the_profiler_interface_is_an_error(cuda: Cuda, tmp_path: Path) -> None:
    recorder = NsysRecorder(config(tmp_path, "nsys"), Writer())
    cuda.answer = 216
    with pytest.raises(RuntimeError, match="cudaProfilerStart answered 216"):
        recorder.start(WINDOW)
    recorder.discard()
    assert cuda.calls == ["start"]


def test_nsys_that_does_not_run_is_said_before_the_first_step(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SESSION_VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING, "megaprof"):
        NsysRecorder(config(tmp_path, "nsys"), Writer())
        assert "'megaprof nsys' prints the command" in caplog.text
        caplog.clear()
        monkeypatch.setenv(SESSION_VARIABLE, "123")
        monkeypatch.setattr(emit.nvtx, "get_domain", lambda domain: object())
        NsysRecorder(config(tmp_path, "nsys"), Writer())
        assert caplog.text == ""


def test_where_nsys_waits_for_a_range_no_cuda_is_needed(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("NSYS_NVTX_PROFILER_RANGE", "megaprof/window")
    opened: list[str] = []
    monkeypatch.setattr(emit.nvtx, "push_range", lambda name, domain: opened.append(name))
    monkeypatch.setattr(emit.nvtx, "pop_range", lambda domain: opened.append("end"))
    writer = Writer()
    recorder = NsysRecorder(config(tmp_path, "nsys"), writer)
    recorder.start(WINDOW)
    recorder.stop(WINDOW, {"target": "train_actor"})
    assert (opened, cuda.calls) == (["megaprof/window", "end"], [])
    assert writer.close(60)
    assert [path.name for path in tmp_path.iterdir()] == [f"{STEM}.nsys.json"]


def test_ranges_that_reach_nobody_are_said_once(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The nvtx package drops all ranges where it does not recognise the tool."""
    monkeypatch.setenv(SESSION_VARIABLE, "123")
    monkeypatch.setattr(emit.nvtx, "get_domain", lambda domain: type("DummyDomain", (), {})())
    recorder = NsysRecorder(config(tmp_path, "nsys"), Writer())
    for _ in range(2):
        recorder.start(WINDOW)
        recorder.discard()
    assert caplog.text.count("nsys will record no ranges: nvtx") == 1
    assert "Install 'nvtx<0.2.12'" in caplog.text


def test_memory_history_is_bounded_on_in_the_window_and_off_again(cuda: Cuda, tmp_path: Path) -> None:
    writer = Writer()
    recorder = MemoryRecorder(config(tmp_path, "memory"), writer)
    assert cuda.calls == []
    recorder.start(WINDOW)
    assert cuda.calls == [("all", {"context": "all", "stacks": "python", "max_entries": MAX_ENTRIES})]
    recorder.stop(WINDOW, {"target": "train_actor"})
    assert cuda.calls[1:] == ["snapshot", (None, {})]
    assert writer.close(60)
    with open(tmp_path / f"{STEM}.memory.pickle", "rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["device_traces"] == [[{"action": "alloc", "size": 512}]]
    assert json.loads(snapshot["megaprof"]) == {"target": "train_actor"}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_snapshot_that_fails_leaves_no_history_on(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = MemoryRecorder(config(tmp_path, "memory"), Writer())
    recorder.start(WINDOW)

    def snapshot() -> None:
        raise RuntimeError("no snapshot today")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", snapshot)
    with pytest.raises(RuntimeError, match="no snapshot today"):
        recorder.stop(WINDOW, {})
    assert not cuda.history_on
    assert list(tmp_path.iterdir()) == []


def test_history_of_somebody_elses_is_left_alone(cuda: Cuda, tmp_path: Path) -> None:
    cuda.history_on = True
    with pytest.raises(ValueError, match="--profile-tool memory: memory history is already recorded"):
        MemoryRecorder(config(tmp_path, "memory"), Writer())
    assert cuda.calls == []
