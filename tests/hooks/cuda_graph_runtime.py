"""Captures that a CPU can run: torch's own annotations, above a made-up CUDA runtime that only knows nodes in a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

SUCCESS, ACTIVE, KERNEL, MEMCPY, EVENT = "success", "active", "kernel", "memcpy", "event"
EXEC = 100
"""An instantiated graph's number is its captured one's and so many more."""


class Runtime:
    """The functions of ``cuda.bindings`` that `torch.cuda._graph_annotations` calls: ``runtime``'s and, from torch 2.14
    on, ``driver``'s."""

    CUgraphNodeType = SimpleNamespace(
        CU_GRAPH_NODE_TYPE_KERNEL=KERNEL,
        CU_GRAPH_NODE_TYPE_MEMCPY=MEMCPY,
        CU_GRAPH_NODE_TYPE_MEMSET="memset",
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP="memory operations",
        CU_GRAPH_NODE_TYPE_EVENT_RECORD="record",
        CU_GRAPH_NODE_TYPE_WAIT_EVENT="wait",
        CU_GRAPH_NODE_TYPE_HOST="host",
        CU_GRAPH_NODE_TYPE_GRAPH="graph",
        CU_GRAPH_NODE_TYPE_CONDITIONAL="conditional",
    )
    cudaStreamCaptureStatus = SimpleNamespace(cudaStreamCaptureStatusActive=ACTIVE)
    cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeKernel=KERNEL, cudaGraphNodeTypeMemcpy=MEMCPY)

    def __init__(self) -> None:
        self.graph = 0
        self.kinds: list[str] = []
        self.capturing = False

    def launch(self, kind: str = KERNEL) -> None:
        """What a kernel launch does in a capture: a node behind the last one."""
        if self.capturing:
            self.kinds.append(kind)

    def cudaStream_t(self, init_value: int) -> int:
        return init_value

    cudaGraphExec_t = cudaStream_t

    def cudaStreamGetCaptureInfo(self, stream: int) -> Any:
        last = [len(self.kinds) - 1] if self.kinds else []
        return SUCCESS, ACTIVE if self.capturing else "none", 0, self.graph, last, [], len(last)

    def cudaGraphGetRootNodes(self, graph: int, **_: int) -> Any:
        roots = [0] if self.kinds else []
        return SUCCESS, roots, len(roots)

    def cudaGraphNodeGetDependentNodes(self, node: int, **_: int) -> Any:
        following = [node + 1] if node + 1 < len(self.kinds) else []
        return SUCCESS, following, [], len(following)

    def cudaGraphNodeGetType(self, node: int) -> Any:
        return SUCCESS, self.kinds[node]

    cuGraphNodeGetType = cudaGraphNodeGetType

    def cudaGraphNodeGetToolsId(self, node: int) -> Any:
        return SUCCESS, self.graph << 32 | node

    def cudaGraphExecGetId(self, executable: int) -> Any:
        return SUCCESS, EXEC + executable


def checked(result: Any) -> Any:
    error, *values = result
    assert error == SUCCESS
    return values[0] if len(values) == 1 else tuple(values)


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    number = 0

    def register_generator_state(self, state: object) -> None:
        pass

    def replay(self) -> None:
        pass

    def raw_cuda_graph_exec(self) -> int:
        return self.number


class Capture:
    """Stands for ``torch.cuda.graph``."""

    runtime: Runtime

    def __init__(self, cuda_graph: Graph, enable_annotations: bool = False, **_: Any) -> None:
        self.cuda_graph = cuda_graph
        self._enable_annotations = enable_annotations

    def __enter__(self) -> None:
        runtime = self.runtime
        runtime.graph, runtime.kinds, runtime.capturing = runtime.graph + 1, [], True
        self.cuda_graph.number = runtime.graph

    def __exit__(self, *_: object) -> None:
        self.runtime.capturing = False


class _Launches(torch.autograd.Function):
    """A kernel in the forward, and two with a copy in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, runtime: Runtime) -> torch.Tensor:
        ctx.runtime = runtime
        runtime.launch()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        for kind in (KERNEL, EVENT, MEMCPY):
            ctx.runtime.launch(kind)
        return gradients[0], None


def launches(module: Any, runtime: Runtime) -> Any:
    """Let ``module`` launch kernels at its end. Returns the hook's handle."""

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        first = _Launches.apply(first, runtime)  # type: ignore[no-untyped-call]
        return (first, *others) if isinstance(output, tuple) else first

    return module.register_forward_hook(hook)


def made_up_runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """In place of CUDA's, for torch 2.13 and later; inside `cpu_megatron`."""
    annotations = pytest.importorskip("torch.cuda._graph_annotations", reason="torch 2.13 brought it")
    Capture.runtime = runtime = Runtime()
    capture = type("Capture", (Capture,), {"__enter__": Capture.__enter__, "__exit__": Capture.__exit__})
    monkeypatch.setattr(type(torch.cuda.current_stream()), "cuda_stream", 0, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: runtime.capturing)
    monkeypatch.setattr(annotations, "_cuda_runtime", runtime)
    monkeypatch.setattr(annotations, "_HAS_CUDA_BINDINGS", True)
    monkeypatch.setattr(annotations, "_tools_id_available", True)
    monkeypatch.setattr(annotations, "_ANNOTATABLE_TYPES", None)
    monkeypatch.setattr(annotations, "_check_cuda_bindings", checked)
    if hasattr(annotations, "_cuda_driver"):  # torch 2.14 brought it
        monkeypatch.setattr(annotations, "_cuda_driver", runtime)
        monkeypatch.setattr(annotations, "_check_cuda_bindings_driver", checked)
    annotations.clear_kernel_annotations()
    return runtime
