"""Each option of the torch recorder, by what it changes in a real trace."""

from __future__ import annotations

import gc
import gzip
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, supported_activities

from megaprof.analysis.trace.traces import find_traces
from megaprof.artifacts.writer import Writer
from megaprof.config.options import ProfileConfig
from megaprof.formats.names import TRACE_SUFFIX, artifact_name
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout
from megaprof.recorders import Window, emit
from megaprof.recorders.torch_profiler import _PIECE, TorchRecorder, add_ranges
from tests import programs

WINDOW = Window("train_actor", None, 7, RankCoords(rank=0, pp=0, tp=0, cp=0, ep=0, dp=0, sizes=ParallelSizes()))
STEM = "train_actor.step000007.pp0-tp0-cp0-ep0-dp0.rank00000"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def config(directory: Path, **fields: Any) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), dir=str(directory), **fields)


def record(
    directory: Path, model: Callable[..., Any] | None = None, window: Window = WINDOW, **fields: Any
) -> TorchRecorder:
    """One window around a forward and a backward; every file is complete afterwards."""
    writer = Writer()
    recorder = TorchRecorder(config(directory, **fields), writer)
    net = Net() if model is None else model
    recorder.start(window)
    with torch.profiler.record_function("megaprof/forward mb=0 chunk=0"):
        net(torch.randn(4, 8)).sum().backward()
    recorder.stop(window, {"target": "train_actor", "steps": [7, 7], "coords": {"rank": 0}})
    assert writer.close(60)
    return recorder


def trace(directory: Path) -> dict[str, Any]:
    with gzip.open(directory / f"{STEM}.pt.trace.json.gz") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def arguments(loaded: dict[str, Any]) -> set[str]:
    """Names of the arguments of operators."""
    return {name for e in loaded["traceEvents"] if e.get("cat") == "cpu_op" for name in e["args"]}


def categories(loaded: dict[str, Any]) -> set[str]:
    return {e.get("cat") for e in loaded["traceEvents"]}


COSTLY = {"Input Dims", "Module Hierarchy", "cpu_instant_event", "python_function"}


def test_nothing_that_costs_memory_is_on_by_default(tmp_path: Path) -> None:
    record(tmp_path)
    loaded = trace(tmp_path)
    assert not COSTLY & (arguments(loaded) | categories(loaded))
    assert {"cpu_op", "user_annotation"} <= categories(loaded)
    assert [path.name for path in tmp_path.iterdir()] == [f"{STEM}.pt.trace.json.gz"]


@pytest.mark.parametrize(
    ("option", "adds"),
    [
        ("record_shapes", {"Input Dims"}),
        ("profile_memory", {"cpu_instant_event"}),
        ("with_stack", {"python_function"}),
        ("with_flops", {"Input Dims"}),
    ],
)
def test_each_option_changes_the_trace_and_nothing_else(option: str, adds: set[str], tmp_path: Path) -> None:
    record(tmp_path, **{option: True})
    loaded = trace(tmp_path)
    assert COSTLY & (arguments(loaded) | categories(loaded)) == adds
    assert loaded[option] == 1


def test_all_files_of_a_rank_of_a_large_world_are_in_its_directory(tmp_path: Path) -> None:
    coords = WorldLayout(ParallelSizes(tp=8, dp=256)).coords(1500)
    window = Window("train_actor", None, 7, coords)
    record(tmp_path, window=window, kernels=True, with_stack=True, export=("trace", "stacks"))
    (folder,) = tmp_path.iterdir()
    assert folder.name == "ranks001024-002047"
    kinds = {path.name.partition("rank01500.")[2] for path in folder.iterdir()}
    assert kinds == {"pt.trace.json.gz", "kernels.json", "stacks.txt.gz"}
    assert find_traces(tmp_path) == [folder / artifact_name("train_actor", None, 7, coords, TRACE_SUFFIX)]


def test_ranges_that_the_host_timed_are_in_a_trace_without_user_annotations(tmp_path: Path) -> None:
    """CUDA activity alone needs a GPU; the ranges that the host times are added to any Kineto trace."""
    writer = Writer()
    recorder = TorchRecorder(config(tmp_path), writer)
    recorder.start(WINDOW)
    emit.log = []  # as with CUDA activity alone
    with emit.Range("megaprof/forward mb=0 chunk=0"), emit.Range("megaprof/forward mb=1 chunk=0"):
        Net()(torch.randn(4, 8))
    recorder.stop(WINDOW, {})
    assert emit.log is None
    assert writer.close(60)
    loaded = trace(tmp_path)
    found = [e for e in loaded["traceEvents"] if e.get("cat") == "user_annotation"]
    kinetos = {e["name"]: e for e in found if e["args"].get("clock") != "host"}
    ours = {e["name"]: e for e in found if e["args"].get("clock") == "host"}
    assert kinetos.keys() == ours.keys() == {f"megaprof/forward mb={n} chunk=0" for n in range(2)}
    for name, theirs in kinetos.items():
        assert (ours[name]["pid"], ours[name]["tid"]) == (theirs["pid"], theirs["tid"])
        assert ours[name]["ts"] == pytest.approx(theirs["ts"], abs=1e5), "the same clock, to 0.1 s"
        assert 0 < ours[name]["dur"] < 1e8
    first, second = (ours[f"megaprof/forward mb={n} chunk=0"] for n in range(2))
    assert first["ts"] <= second["ts"] <= second["ts"] + second["dur"] <= first["ts"] + first["dur"]


def test_ranges_are_not_added_to_what_is_no_trace(tmp_path: Path) -> None:
    logged = [("megaprof/x", 5000, 6000, 1)]
    for text in ("", '{"traceEvents": [', '{"other": 1}'):
        (tmp_path / "t").write_text(text)
        with pytest.raises(ValueError, match=r"no end of Kineto's|no events"):
            add_ranges(tmp_path / "t", logged)
        assert (tmp_path / "t").read_text() == text
    empty = '{"baseTimeNanoseconds": 4000,"traceEvents": [\n  ],"traceName": "t" }'
    (tmp_path / "t").write_text(empty)
    add_ranges(tmp_path / "t", [])
    assert (tmp_path / "t").read_text() == empty
    add_ranges(tmp_path / "t", logged)
    (event,) = json.loads((tmp_path / "t").read_text())["traceEvents"]
    assert (event["name"], event["ts"], event["dur"]) == ("megaprof/x", 1.0, 1.0)


def test_a_discarded_window_leaves_nothing(tmp_path: Path) -> None:
    writer = Writer()
    recorder = TorchRecorder(config(tmp_path), writer)
    recorder.start(WINDOW)
    recorder.discard()
    recorder.discard()
    recorder.stop(WINDOW, {})  # stop before start is a no-op
    assert writer.close(60)
    assert list(tmp_path.iterdir()) == []


def ranges_in(loaded: dict[str, Any]) -> list[str]:
    return [e["name"] for e in loaded["traceEvents"] if e.get("cat") == "user_annotation"]


def work(name: str) -> None:
    with torch.profiler.record_function(name):
        Net()(torch.randn(4, 8)).sum().backward()


def test_a_prepared_window_holds_what_follows_its_start(tmp_path: Path) -> None:
    writer = Writer()
    recorder = TorchRecorder(config(tmp_path), writer)
    for prepared in (True, False, True):
        if prepared:
            recorder.prepare()
            assert list(tmp_path.iterdir()) == []
        work("before")
        recorder.start(WINDOW)
        work("inside")
        recorder.stop(WINDOW, {"device": "cpu"})
        assert writer.flush(60)
        loaded = trace(tmp_path)
        assert ranges_in(loaded) == ["inside"]
        how = loaded["megaprof"]["profiler"]
        assert (how["asked"], how["recorded"], how["prepared"]) == (["cpu", "cuda"], ["cpu"], prepared)
        assert how["waited_ns"] >= 0
        assert how["start_ns"] > 0
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("prepared", [False, True])
def test_garbage_collections_of_old_objects_are_ranges(prepared: bool, tmp_path: Path) -> None:
    writer, before = Writer(), gc.callbacks.copy()
    recorder = TorchRecorder(config(tmp_path), writer)
    if prepared:
        recorder.prepare()
        gc.collect()
    recorder.start(WINDOW)
    with torch.profiler.record_function("around"):
        gc.collect()
        gc.collect(0)
    gc.disable()
    try:
        recorder.stop(WINDOW, {})
    finally:
        gc.enable()
    assert gc.callbacks == before
    assert writer.close(60)
    found = [e for e in trace(tmp_path)["traceEvents"] if e.get("cat") == "user_annotation"]
    (around,) = (e for e in found if e["name"] == "around")
    (collected,) = (e for e in found if e["name"] == "megaprof/garbage_collection")
    assert collected["tid"] == around["tid"]
    assert 0 < collected["dur"] <= around["dur"] + 1000


@pytest.mark.parametrize("theirs", ["inside", "open", "prepared"])
def test_another_profiler_takes_the_place_of_a_prepared_one(theirs: str, tmp_path: Path) -> None:
    """Starting ours would crash the process then: Kineto has one session, and torch does not say whose it is."""
    script = f"""
        import torch
        from pathlib import Path
        from tests.recorders.test_torch_profiler import *
        from torch.profiler import profile
        writer = Writer()
        recorder = TorchRecorder(config(Path({str(tmp_path)!r})), writer)
        recorder.prepare()
        other = profile(activities=[ProfilerActivity.CPU])
        if {theirs!r} == "prepared":
            other.prepare_trace()
        else:
            other.start()
            work("theirs")
        if {theirs!r} == "inside":
            other.stop()
            recorder.start(WINDOW)
            work("inside")
            recorder.stop(WINDOW, {{}})
            assert writer.close(60)
            assert not trace(Path({str(tmp_path)!r}))["megaprof"]["profiler"]["prepared"]
            assert ranges_in(trace(Path({str(tmp_path)!r}))) == ["inside"]
        else:
            recorder.discard()
            if {theirs!r} == "prepared":
                other.start_trace()
                work("theirs")
            other.stop()
        assert [e.name for e in other.events()].count("theirs") == 1
        assert torch.autograd.profiler._prepare_profiler is torch._C._autograd._prepare_profiler
    """
    ran = programs.run(textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("theirs", ["inside", "across", "emits"])
def test_another_profiler_that_begins_in_a_window_runs_as_without_ours(theirs: str, tmp_path: Path) -> None:
    """Exporting ours or theirs crashed the process, or theirs could not begin."""
    script = f"""
        from pathlib import Path
        from tests.recorders.test_torch_profiler import *
        from torch.autograd.profiler import emit_itt
        from torch.profiler import profile
        before = dict(vars(torch.autograd.profiler))
        directory, writer = Path({str(tmp_path)!r}), Writer()
        recorder = TorchRecorder(config(directory), writer)
        recorder.start(WINDOW)
        other = emit_itt() if {theirs!r} == "emits" else profile(activities=[ProfilerActivity.CPU])
        other.__enter__()
        work("theirs")
        if {theirs!r} != "across":
            other.__exit__(None, None, None)
        with pytest.raises(RuntimeError, match="another torch profiler"):
            recorder.stop(WINDOW, {{}})
        recorder.discard()
        if {theirs!r} == "across":
            other.__exit__(None, None, None)
        if {theirs!r} != "emits":
            other.export_chrome_trace(str(directory / "theirs.json"))
            assert [e.name for e in other.events()].count("theirs") == 1
        assert {{name: value for name, value in vars(torch.autograd.profiler).items() if value is not before.get(name)
                and "cupti" not in name}} == {{}}
        recorder.start(WINDOW)
        work("next")
        recorder.stop(WINDOW, {{}})
        assert writer.close(60)
        assert ranges_in(trace(directory)) == ["next"]
    """
    ran = programs.run(textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("reached", [True, False])
def test_a_preparation_that_the_host_breaks_off_is_ended(
    reached: bool, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a time-out of the host's does that is raised in the middle of it."""
    own, calls = torch.profiler.profile.prepare_trace, []

    def broken_off(recording: torch.profiler.profile) -> None:
        calls.append(recording)
        if len(calls) > 1 or reached:
            own(recording)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", broken_off)
    recorder = TorchRecorder(config(tmp_path), Writer())
    with pytest.raises(KeyboardInterrupt):
        recorder.prepare() if ahead else recorder.start(WINDOW)
    recorder.discard()
    assert len(calls) == 2, "only a recording ends it, and only what is prepared may be started"
    assert not torch._C._autograd._profiler_enabled()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as other:
        work("theirs")
    assert [e.name for e in other.events()].count("theirs") == 1


def test_a_prepared_window_that_is_not_wanted_leaves_nothing(tmp_path: Path) -> None:
    recorder = TorchRecorder(config(tmp_path), Writer())
    for _ in range(2):
        recorder.prepare()
        recorder.discard()
        recorder.discard()
        assert not torch._C._autograd._profiler_enabled()
    assert list(tmp_path.iterdir()) == []
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as other:
        work("theirs")
    assert [e.name for e in other.events()].count("theirs") == 1


@pytest.mark.parametrize(
    ("device", "kernel", "activities", "told"),
    [
        ("cuda", False, ("cpu",), "--profile-activities does not ask for cuda"),
        ("cuda", False, ("cpu", "cuda"), "Kineto has no support for it"),
        ("cuda", True, ("cpu", "cuda"), None),
        ("cpu", False, ("cpu", "cuda"), None),
    ],
)
def test_a_window_of_a_gpu_without_kernels_is_told_at_once(
    device: str,
    kernel: bool,
    activities: tuple[str, ...],
    told: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def export(recording: Any, path: str) -> None:
        """A trace with its only kernel across the border of two pieces."""
        event = '{"ph": "X", "cat": "kernel", "name": "k"}' if kernel else ""
        Path(path).write_text('{"traceEvents": [' + " " * (_PIECE - 30) + event + "]}")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    writer = Writer()
    recorder = TorchRecorder(config(tmp_path, activities=activities), writer)
    recorder.start(WINDOW)
    recorder.stop(WINDOW, {"device": device})
    assert writer.close(60)
    said = [record.getMessage() for record in caplog.records if "no GPU kernel" in record.getMessage()]
    assert len(said) == (told is not None)
    assert told is None or (told in said[0] and STEM in said[0])


def test_stacks_are_exported_with_or_instead_of_the_trace(tmp_path: Path) -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        return Net()(x)

    record(tmp_path, traced, with_stack=True, export=("stacks", "trace"))
    assert {path.name for path in tmp_path.iterdir()} == {f"{STEM}.pt.trace.json.gz", f"{STEM}.stacks.txt.gz"}
    record(tmp_path / "alone", traced, with_stack=True, export=("stacks",))
    assert [path.name for path in (tmp_path / "alone").iterdir()] == [f"{STEM}.stacks.txt.gz"]
    for lines in (
        gzip.decompress((d / f"{STEM}.stacks.txt.gz").read_bytes()).decode().splitlines()
        for d in (tmp_path, tmp_path / "alone")
    ):
        stacks = {stack: int(time) for stack, _, time in (line.rpartition(" ") for line in lines)}
        assert all(time > 0 for time in stacks.values())
        deepest = max(stacks, key=lambda stack: ("aten::addmm" in stack, stack.count(";"))).split(";")
        position = [next(i for i, frame in enumerate(deepest) if name in frame) for name in (": traced", ": forward")]
        assert position == sorted(position)
        assert deepest.index("aten::addmm") > position[-1]


@pytest.mark.parametrize("option", ["record_shapes", "with_stack", "with_flops"])
def test_a_closed_window_holds_no_memory_and_no_tensor(option: str, tmp_path: Path) -> None:
    """Without a garbage collection, which Megatron may have switched off: parameters can be swapped again."""
    net = Net()
    gc.disable()
    try:
        recorder = record(tmp_path, net, **{option: True})
        net.zero_grad()
        torch.utils.swap_tensors(net.linear.weight, torch.nn.Parameter(torch.randn(8, 8)))
        recorder.start(WINDOW)
        net(torch.randn(4, 8)).sum().backward()
        recorder.discard()
        net.zero_grad()
        torch.utils.swap_tensors(net.linear.weight, torch.nn.Parameter(torch.randn(8, 8)))
    finally:
        gc.enable()


@pytest.fixture
def _unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)


@pytest.mark.usefixtures("_unwritable")
def test_a_failed_export_leaves_no_half_file_and_no_running_profiler(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        record(tmp_path, kernels=True)
    assert list(tmp_path.iterdir()) == []
    assert not torch._C._autograd._profiler_enabled()


def test_a_cuda_device_that_only_the_host_pretends_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if ProfilerActivity.CUDA in supported_activities():
        pytest.skip("Kineto can record CUDA activity here, so there is nothing to pretend")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    record(tmp_path, activities=("cpu", "cuda"))
    assert "Failed to record CUDA event" not in capfd.readouterr().err
    with pytest.raises(ValueError, match="--profile-activities cuda: there is no CUDA device here"):
        TorchRecorder(config(tmp_path, activities=("cuda",)), Writer())
