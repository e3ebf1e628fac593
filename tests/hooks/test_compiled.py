"""Module ranges and torch.compile: nothing of ours is compiled, nothing is compiled again, and the metadata says so."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import transformer_layer
from torch._dynamo.utils import counters

from megaprof import ProfileConfig, annotate, install_hooks
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.capture.process import process
from megaprof.hooks.modules import COMPILED
from megaprof.recorders.loop import Parts
from megaprof.testing import GPTWorkload, build
from tests import programs


@pytest.fixture(autouse=True)
def _dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


class Mlp(torch.nn.Module):
    """What dynamo can trace as one graph on a CPU, in the place of megatron-core's, with a module inside."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(hidden, hidden)
        for parameter in self.parameters():  # it came too late for megatron-core's gradient buffers
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return torch.relu(self.router(x)), None


def compile_module(layer: Any) -> None:
    layer.mlp.compile(backend="eager", fullgraph=True)


def wrap_module(layer: Any) -> None:
    layer.mlp = torch.compile(layer.mlp, backend="aot_eager", fullgraph=True)


def compile_forward(layer: Any) -> None:
    layer.mlp.forward = torch.compile(layer.mlp.forward, backend="eager", fullgraph=True)


def compile_around(layer: Any) -> None:
    """A function that nobody sees from outside: only dynamo's own word tells."""
    mlp = layer.mlp
    around = torch.compile(lambda *args, **kwargs: mlp(*args, **kwargs), backend="eager", fullgraph=True)
    del layer.mlp
    vars(layer)["mlp"] = around
    layer.mixer = mlp  # found by its place, called inside the compiled function


MODULES_ONLY = pytest.mark.skipif(
    "apply_module(self.mlp" in inspect.getsource(transformer_layer),
    reason="this megatron-core calls modules only",
)


@pytest.mark.parametrize(
    "how", [compile_module, wrap_module, compile_forward, pytest.param(compile_around, marks=MODULES_ONLY)]
)
def test_compiled_modules_are_left_alone(
    how: Callable[[Any], None], one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = build(GPTWorkload(layers=2, microbatches=2, hidden=32, seq_length=16, heads=2))
    first = gpt.chunks[0].module.decoder.layers[0]
    first.mlp = Mlp(32)
    how(first)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.set_stance("default"):
        config = ProfileConfig(("train_actor",), str(tmp_path), schedule="1", ranges="module")
        with install_hooks(gpt.chunks, config):
            gpt.train_step()
            before = counters["stats"]["unique_graphs"]
            gpt.train_step()
            gpt.train_step()
    assert before > 0, "nothing was compiled"
    assert not counters["graph_break"]
    if how is not compile_around:  # there dynamo sees another forward, and compiles what it sees: the same
        assert counters["stats"]["unique_graphs"] == before
    (path,) = find_traces(tmp_path)
    trace = read_trace(path)
    found = Counter((each.name.module, each.name.fields.get("n")) for each in trace.ranges if each.name.module)
    assert ("mlp", 1) not in found
    assert ("router", 1) not in found
    assert found["mlp", 2] > 0
    assert found["attention", 1] > 0
    without = {(each.module, each.layers): each.reason for each in trace.metadata.ranges.without}
    if how is compile_around:
        assert list(without) == [("mixer", (1,))]
    else:
        assert without == {("mlp", (1,)): COMPILED, ("router", (1,)): COMPILED}


def test_a_compiled_stack_has_no_ranges_inside(one_rank: Any) -> None:
    from megaprof.hooks.modules import compiled_in

    gpt = build(GPTWorkload(layers=2, microbatches=2, hidden=32, seq_length=16, heads=2))
    (chunk,) = gpt.chunks
    assert compiled_in(chunk) == set()
    decoder = chunk.module.decoder
    decoder.compile(backend="eager")
    covered = compiled_in(chunk)
    assert {id(module) for module in decoder.modules()} <= covered
    assert id(chunk.module.embedding) not in covered


def test_a_model_that_is_compiled_before_or_behind_the_hooks_is_that_model(one_rank: Any, tmp_path: Path) -> None:
    model = one_rank.chunks[0].module
    compiled = torch.compile(model)
    config = ProfileConfig(("train_actor",), str(tmp_path))
    for first, second in ((model, compiled), (compiled, one_rank.chunks)):
        with install_hooks(first, config) as handle:
            assert install_hooks(second, config) is handle


class Descent(torch.optim.Optimizer):
    """What dynamo can trace as one graph, in the place of torch's optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def compile_step() -> None:
    parts, parameter = Parts(), torch.nn.Parameter(torch.ones(2))
    optimizer, parameter.grad = Descent([parameter], {}), torch.ones(2)
    step = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    parts.enter("training", schedule=True)
    parts.leave()
    parts.watch_optimizers()
    step()
    optimizer.step()
    print(parameter.tolist(), counters["stats"]["unique_graphs"], [part for part, *_ in parts.spans])


def test_a_compiled_step_of_an_optimizer_is_one_graph() -> None:
    assert programs.run(compile_step).stdout == "[-1.0, -1.0] 1 ['training', 'optimizer']\n"


def compile_annotated() -> None:
    process.traced = True  # as under Nsight Systems, where annotations have ranges without hooks

    @annotate(role="critic")
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    compiled = torch.compile(lambda x: double(x) + 1, backend="eager", fullgraph=True)
    print(compiled(torch.ones(2)).tolist(), counters["stats"]["unique_graphs"])


def test_an_annotated_function_inside_what_is_compiled_is_compiled_with_it() -> None:
    assert programs.run(compile_annotated).stdout == "[3.0, 3.0] 1\n"
