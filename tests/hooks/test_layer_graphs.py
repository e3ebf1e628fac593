"""CUDA graphs of single layers: megatron-core's real classes, with only the CUDA calls that no CPU has replaced."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, analyze, install_hooks
from megaprof.analysis.trace.traces import Trace, find_traces, read_trace
from megaprof.cli import main
from megaprof.testing import GPTWorkload, build

cuda_graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs", reason="megatron-core 0.12 has none")

LAYERS = 2
GRAPHED = "it runs in a CUDA graph of its layer"
PARTS = {("attention", (1, 2)): GRAPHED, ("mlp", (1, 2)): GRAPHED}


class FakeGraph:
    """Counts replays; replaying runs no Python, just as on a GPU."""

    replays = 0

    def register_generator_state(self, state: object) -> None:
        pass

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.fixture
def gpt(one_rank: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model built with ``cuda_graph_impl``, in a process where CUDA graphs capture nothing."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megaprof.testing import gpt as building

    FakeGraph.replays = 0
    memory = {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}
    for name, value in {
        "CUDAGraph": FakeGraph,
        "graph": lambda *args, **kwargs: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
        "get_device_capability": lambda: (10, 0),
        "memory_stats": lambda: memory,
        "empty_cache": lambda: None,
        "set_stream": lambda stream: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"):  # 0.19 calls them itself
        monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
    monkeypatch.setattr(cuda_graphs, "get_all_rng_states", dict)
    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", False)
    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_record", [])
    configure, build_chunk = building._config, building._build_chunk

    def configured(workload: GPTWorkload) -> Any:
        config = configure(workload)
        if not hasattr(config, "cuda_graph_impl"):
            pytest.skip("this megatron-core has no cuda_graph_impl")
        config.cuda_graph_impl = request.param
        return config

    def chunk(*arguments: Any) -> Any:
        monkeypatch.setattr(get_cuda_rng_tracker(), "use_cudagraphable_rng", True)
        return build_chunk(*arguments)

    monkeypatch.setattr(building, "_config", configured)
    monkeypatch.setattr(building, "_build_chunk", chunk)
    return build(GPTWorkload(layers=LAYERS, microbatches=3, hidden=32, seq_length=16, heads=2))


def layers(gpt: Any) -> list[Any]:
    return list(gpt.chunks[0].module.decoder.layers)


@pytest.fixture
def graphed_by_transformer_engine(gpt: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``TECudaGraphHelper`` leaves a callable in each layer that runs none of the layer's Python. So does this."""
    from megatron.core.transformer import transformer_layer

    for name in ("transformer_engine", "transformer_engine.pytorch"):  # whether it is there, is all that is asked
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(transformer_layer, "is_te_min_version", lambda *_, **__: True)

    def graphed(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        FakeGraph.replays += 1
        return (hidden_states * 1.5,)

    for layer in layers(gpt):
        layer.cuda_graphs.append(graphed)
    return gpt


def captured(gpt: Any, directory: Path, steps: int, level: str = "module") -> dict[int, Trace]:
    config = ProfileConfig(("train_actor",), str(directory), schedule="0:0:0:1:0", ranges=level)
    with install_hooks(gpt.chunks, config):
        for _ in range(steps):
            gpt.train_step()
    return {trace.metadata.steps[0]: trace for trace in map(read_trace, find_traces(directory))}


def ranges(trace: Trace) -> Counter[tuple[str, Any]]:
    return Counter((each.name.module, each.name.fields.get("n")) for each in trace.ranges if each.name.module)


def without(trace: Trace) -> dict[tuple[str, tuple[int | None, ...]], str]:
    return {(each.module, each.layers): each.reason for each in trace.metadata.ranges.without}


def assert_replay_is_one_range(gpt: Any, trace: Trace) -> None:
    found = ranges(trace)
    microbatches = gpt.workload.microbatches
    assert FakeGraph.replays > 0
    for number in range(1, LAYERS + 1):
        assert found["layer", number] >= microbatches
        assert ("attention", number) not in found
        assert ("mlp", number) not in found
    assert found["embedding", None] > 0, "what no graph holds has its range"
    assert PARTS.items() <= without(trace).items()
    assert not any(module == "layer" for module, _ in without(trace))


@pytest.mark.parametrize("gpt", ["local"], indirect=True)
def test_layers_graphed_by_megatron(gpt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = captured(gpt, tmp_path, 3)
    assert sorted(found) == [0, 1, 2]

    # The first step runs the layers and then captures their graphs, for which its window closes.
    first = found[0]
    assert cuda_graphs._CudagraphGlobalRecord.cudagraph_created
    assert first.metadata.truncated
    assert "captured the CUDA graphs of its layers" in str(first.metadata.truncated_reason)
    assert ranges(first)["attention", 1] >= gpt.workload.microbatches
    for step in (1, 2):
        assert not found[step].metadata.truncated
        assert_replay_is_one_range(gpt, found[step])

    # The report says so once, wherever people read it.
    sentence = f"no range for {', '.join(module for module, _ in PARTS)} (layers 1-2): {GRAPHED}"
    report = analyze(tmp_path)
    assert [each.text for target in report.targets for each in target.warnings].count(sentence) == 1
    assert main(["report", str(tmp_path), "--json", "-"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert any(note["text"] == sentence for note in target["warnings"])
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert sentence[1:] in " ".join((tmp_path / "report.html").read_text().split())  # it begins with a capital letter


@pytest.mark.parametrize("gpt", ["transformer_engine"], indirect=True)
def test_layers_graphed_by_transformer_engine(graphed_by_transformer_engine: Any, tmp_path: Path) -> None:
    (trace,) = captured(graphed_by_transformer_engine, tmp_path, 1).values()
    assert_replay_is_one_range(graphed_by_transformer_engine, trace)
    assert trace.metadata.truncated is False


@pytest.mark.parametrize("gpt", ["transformer_engine"], indirect=True)
def test_ranges_of_layers_only_ask_for_no_parts(graphed_by_transformer_engine: Any, tmp_path: Path) -> None:
    (trace,) = captured(graphed_by_transformer_engine, tmp_path, 1, level="layer").values()
    assert ranges(trace)["layer", 1] >= graphed_by_transformer_engine.workload.microbatches
    assert without(trace) == {}
