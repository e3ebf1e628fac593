"""Hooks on the capture of CUDA graphs, so that the kernels of every replay carry the names of our ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.recorders.cupti import cupti
from megaprof.recorders.ranges.graph_names import names
from megaprof.runtime.isolation import Contained
from megaprof.runtime.patching import Patches


def patch_graphs(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hooks ``torch.cuda.graph``, with which megatron-core, Transformer Engine and torch.compile capture."""
    import torch

    patches.apply(torch.cuda.graph, "__enter__", lambda original: _entered(original, dispatcher))
    patches.apply(torch.cuda.graph, "__exit__", lambda original: _left(original, dispatcher))


def _entered(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    def __enter__(graph: Any) -> Any:
        result = original(graph)
        cupti.graphs = True
        with Contained("naming the kernels of a CUDA graph", dispatcher.drop):
            if dispatcher.call is not None:
                names.begun(graph)
        return result

    return __enter__


def _left(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    def __exit__(graph: Any, *exception: Any) -> Any:
        failed = True
        try:
            result = original(graph, *exception)
            failed = any(exception)
            return result
        finally:
            with Contained("naming the kernels of a CUDA graph", dispatcher.drop):
                names.ended(graph, failed=failed)

    return __exit__
