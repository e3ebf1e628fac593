"""Names on the kernels of CUDA graphs: megatron-core's real wrappers and torch's real annotations, above a made-up CUDA
runtime."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import read_trace
from megaprof.formats.ranges import GRAPHS_KEY as KEY
from megaprof.formats.ranges import GraphNames, read_graph_names
from megaprof.parallel.megatron import innermost
from megaprof.recorders.emit import graph_naming
from tests.analysis.rows import rows
from tests.hooks.cuda_graph_runtime import EXEC, Capture, Graph, Runtime, launches, made_up_runtime

full_cuda_graph = pytest.importorskip("megatron.core.full_cuda_graph", reason="megatron-core 0.14 brought it")


@pytest.fixture
def runtime(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    graph_naming.__init__()  # type: ignore[misc]
    for state in ("curr_iteration", "cuda_graph", "result"):
        empty = (
            {"training": 0, "validation": 0} if state == "curr_iteration" else {"training": None, "validation": None}
        )
        monkeypatch.setattr(full_cuda_graph.FullCudaGraphWrapper, state, empty)
    yield made_up_runtime(monkeypatch)
    graph_naming.__init__()  # type: ignore[misc]


def dicts(batches: Iterator[Any]) -> Iterator[dict[str, torch.Tensor]]:
    for tokens, labels in batches:
        yield {"tokens": tokens, "labels": labels}


def steps(one_rank: Any, number: int, fails: bool = False) -> None:
    """Step 0 warms the wrapper up, step 1 captures the graph, later ones only replay."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        batch = next(iterator)
        if fails and Capture.runtime.capturing:
            raise RuntimeError("of the host")
        return one_rank.forward_step(iter([(batch["tokens"], batch["labels"])]), model)

    wrapper = full_cuda_graph.FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=1)
    for step in range(number):
        wrapper(
            forward_step_func=forward_step,
            data_iterator=dicts(one_rank.data_iterator(step)),
            model=one_rank.chunks,
            num_microbatches=one_rank.workload.microbatches,
            seq_length=one_rank.workload.seq_length,
            micro_batch_size=one_rank.workload.micro_batch_size,
            forward_only=False,
        )


@pytest.fixture
def kernels(one_rank: Any, runtime: Runtime) -> Iterator[Runtime]:
    """Attention and MLP of every layer launch something."""
    layers = innermost(one_rank.chunks[0]).decoder.layers
    hooks = [
        launches(part, runtime) for layer in layers for part in (layer.self_attention.linear_proj, layer.mlp.linear_fc2)
    ]
    yield runtime
    for hook in hooks:
        hook.remove()


def by_node(found: GraphNames) -> list[tuple[str, ...]]:
    """The stack of each node that has one, in order."""
    return [found.stacks[stack] for first, last, stack in found.runs for _ in range(first, last + 1)]


def test_kernels_of_a_whole_step_bear_their_microbatch_and_layer(
    one_rank: Any, kernels: Runtime, tmp_path: Path
) -> None:
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="1", ranges="module")
    with install_hooks(one_rank.chunks, config):
        steps(one_rank, 3)
    (path,) = tmp_path.glob("*.gz")
    with gzip.open(path) as file:
        trace = json.load(file)
    found = read_graph_names(json.dumps(trace[KEY]).encode())
    assert {node >> 32 for first, last, _ in found.runs for node in (first, last)} == {EXEC + 1}
    parts = [(n, part) for n in (1, 2) for part in ("attention", "mlp")]
    forward = [
        (f"megaprof/forward mb={mb} chunk=0", f"megaprof/layer n={n}", f"megaprof/{part} n={n}")
        for mb in range(3)
        for n, part in parts
    ]
    assert [stack for stack in by_node(found) if len(stack) == 3 and "backward" not in stack[0]] == forward
    backward = [stack for stack in by_node(found) if stack[0].startswith("megaprof/backward")]
    wanted = [
        (f"megaprof/backward mb={mb} chunk=0", f"megaprof/layer_backward n={n}", f"megaprof/{part}_backward n={n}")
        for mb in range(3)
        for n, part in reversed(parts)
        for _ in range(3)  # the node between its two annotated ones has their stack
    ]
    assert backward == wanted


def test_the_report_has_the_passes_of_a_replay(one_rank: Any, kernels: Runtime, tmp_path: Path) -> None:
    """What Kineto writes of a replay on a GPU is added to a trace that was recorded on the CPU."""
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="1", ranges="module")
    with install_hooks(one_rank.chunks, config):
        steps(one_rank, 3)
    (path,) = tmp_path.glob("*.gz")
    assert len(steps_of(read_trace(path))[0].passes.kind) == 0
    trace = json.loads(gzip.decompress(path.read_bytes()))
    (begin,) = (e["ts"] for e in trace["traceEvents"] if "step=" in e["name"] and e.get("cat") == "user_annotation")
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": begin + 1, "dur": 1, "tid": 1}
    trace["traceEvents"].append(launch | {"args": {"correlation": 77}})
    nodes = [node for first, last, _ in trace[KEY]["runs"] for node in range(first, last + 1)]
    for number, node in enumerate(nodes):
        event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": begin + 10 + 2 * number, "dur": 2, "tid": 7}
        trace["traceEvents"].append(event | {"args": {"correlation": 77, "graph id": EXEC, "graph node id": node}})
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    (call,) = steps_of(read_trace(path))
    assert [(each.kind, each.microbatch) for each in rows(call)] == [
        (kind, mb) for mb in range(3) for kind in ("forward", "backward")
    ]
    assert call.incomplete is None
    assert call.passes.compute.sum() == 2000 * len(nodes)
    assert {(key.label, key.number, key.kind): len(times) for key, times in call.modules.items() if key.number} == {
        (part, n, kind): 3 for part in ("layer", "attention", "mlp") for n in (1, 2) for kind in ("forward", "backward")
    }


def test_nothing_stays_of_the_capture(one_rank: Any, kernels: Runtime, tmp_path: Path) -> None:
    annotations = torch.cuda._graph_annotations
    entered, left = torch.cuda.graph.__enter__, torch.cuda.graph.__exit__
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="1")):
        assert torch.cuda.graph.__enter__ is not entered
        steps(one_rank, 3)
    assert (torch.cuda.graph.__enter__, torch.cuda.graph.__exit__) == (entered, left)
    assert not graph_naming.noting
    assert annotations._annotations_enabled is False
    assert dict(annotations.get_kernel_annotations()) == {}
    assert annotations._pending_scopes == []


def test_a_capture_that_fails_is_the_hosts_and_leaves_no_names(one_rank: Any, kernels: Runtime, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="1")):
        with pytest.raises(RuntimeError, match="of the host"):
            steps(one_rank, 2, fails=True)
        assert not graph_naming.noting
        assert graph_naming.text() is None


def test_a_graph_that_its_owner_annotates_keeps_those_names(
    one_rank: Any, kernels: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotations = torch.cuda._graph_annotations
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="9")):
        graph = torch.cuda.graph(Graph(), enable_annotations=True)
        monkeypatch.setattr(annotations, "_annotations_enabled", True)
        with graph:
            with annotations.mark_kernels({"name": "theirs"}):
                kernels.launch()
            annotations.resolve_pending_annotations()
    assert list(annotations.get_kernel_annotations().values()) == [[{"name": "theirs"}]]
    assert graph_naming.text() is None


@pytest.mark.parametrize("missing", ["driver", "torch"])
def test_without_torchs_annotations_a_replay_says_that_it_has_no_ranges(
    missing: str, one_rank: Any, kernels: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "driver":
        monkeypatch.setattr(torch.cuda._graph_annotations, "_tools_id_available", False)
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="1")):
        steps(one_rank, 3)
    (path,) = tmp_path.glob("*.gz")
    with gzip.open(path) as file:
        trace = json.load(file)
    assert KEY not in trace
    assert trace["megaprof"]["ranges"]["microbatch"] is False


@pytest.mark.parametrize("function", ["cudaStreamGetCaptureInfo", "cudaGraphNodeGetToolsId", "cudaGraphExecGetId"])
def test_a_fault_of_the_runtime_costs_the_names_alone(
    function: str, one_rank: Any, kernels: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(kernels, function, fails)
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="1")):
        steps(one_rank, 3)
    (path,) = tmp_path.glob("*.gz")
    with gzip.open(path) as file:
        assert KEY not in json.load(file)
    assert dict(torch.cuda._graph_annotations.get_kernel_annotations()) == {}
    assert torch.cuda._graph_annotations._annotations_enabled is False
