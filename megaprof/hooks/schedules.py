"""Installs all hooks on Megatron-Core. Here are those on the three schedules, so that every ``forward_backward_func``
call may be recorded, and on what they call once: gradient finalisation and the capture of CUDA graphs.

Hosts call ``get_forward_backward_func``, which looks the schedules up in their module at each call (0.12 to 0.19), or
import a schedule by its name. So it is replaced in every module that has it; in an armed process also behind that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.capture.roles import evaluating
from megaprof.formats.steps import codes
from megaprof.hooks.dispatch import always, ranged, stepped
from megaprof.hooks.inputs import patch_experts, patch_models, watch_data
from megaprof.hooks.microbatches import patch_microbatches
from megaprof.hooks.modules import patch_modules
from megaprof.hooks.p2p import patch_p2p
from megaprof.parallel.chunks import innermost
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.emit import names
from megaprof.runtime.armed import armed
from megaprof.runtime.isolation import Contained
from megaprof.runtime.patching import Patches, modules_with

SCHEDULES = {
    "forward_backward_no_pipelining": "no_pipelining",
    "forward_backward_pipelining_without_interleaving": "1f1b",
    "forward_backward_pipelining_with_interleaving": "interleaved",
}
#: Functions in which a forward-only pass is an evaluation. Megatron-LM and Megatron-Bridge call theirs ``evaluate``. A
#: host whose evaluation has another name marks it with ``megaprof.evaluation()``.
_EVALUATIONS = frozenset({"evaluate", "evaluate_and_print_results", "validate", "validation_step", "eval_step"})
#: Megatron-LM's training step. With all layers frozen it runs forward only (0.19), and this variable of it is True.
_TRAINING, _FORWARD_ONLY = "train_step", "forward_only"
_STACK_LIMIT = 64


def patch_megatron(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hooks the schedules and the functions that they call, until ``patches`` are undone."""
    import torch

    _patch_schedules(patches, dispatcher)
    patch_microbatches(patches, dispatcher)
    patch_p2p(patches, dispatcher)
    # With it, megatron-core, Transformer Engine and torch.compile capture. The kernels of every replay get our names.
    patches.apply(torch.cuda.graph, "__enter__", partial(_entered, dispatcher))
    patches.apply(torch.cuda.graph, "__exit__", partial(_left, dispatcher))


def _patch_schedules(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hooks the schedules, and the full-iteration CUDA graph wrapper (megatron-core 0.14+) around them."""
    from megatron.core.pipeline_parallel import schedules

    for name, label in SCHEDULES.items():
        for owner in (armed.schedules, *modules_with(name, getattr(schedules, name))):
            patches.apply(owner, name, partial(_hooked, label, dispatcher))
    patches.apply(schedules, "create_cudagraphs", partial(_without_window, dispatcher))
    try:
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    except ImportError:
        return
    patches.apply(FullCudaGraphWrapper, "__call__", partial(_hooked, None, dispatcher))


def _without_window(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``create_cudagraphs``, so that it closes the window before it captures. A recorder synchronises the device
    when its window closes, and that would break a capture. The schedules call ``create_cudagraphs`` when their
    microbatches are done (0.13+), and it captures the graphs of single layers once."""

    def create_cudagraphs(*args: Any, **kwargs: Any) -> Any:
        with Contained("closing a window before CUDA graphs are captured", dispatcher.drop):
            if dispatcher.call is not None and _captures():
                dispatcher.cut("megatron-core captured the CUDA graphs of its layers")
                dispatcher.put_back()
        return original(*args, **kwargs)

    return create_cudagraphs


def _captures() -> bool:
    """Returns whether ``create_cudagraphs`` would capture anything now."""
    from megatron.core.transformer import cuda_graphs

    record = getattr(cuda_graphs, "_CudagraphGlobalRecord", None)
    return not getattr(record, "cudagraph_created", False) and bool(getattr(record, "cudagraph_record", True))


def _hooked(label: str | None, dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``original``, a schedule. ``label`` names the schedule. None: ``original`` is
    ``FullCudaGraphWrapper.__call__``, and the wrapper holds a schedule."""

    def prepare(call: RecordedCall, arguments: dict[str, Any]) -> None:
        chunks = call.facts.chunks
        patch_finalize(dispatcher)
        patch_models(dispatcher, call.facts)
        if label is not None:  # the graph wrapper reads all data before it runs the schedule
            watch_data(dispatcher, arguments)
        if call.ranged:
            if dispatcher.level in ("layer", "module"):
                patch_modules(dispatcher, chunks)
            patch_experts(dispatcher, chunks)

    return stepped(original, dispatcher, partial(_facts, label), prepare)


def _facts(label: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFacts:
    """Returns the facts of a call. The schedules take only keyword arguments (0.12 to 0.19). So does the graph
    wrapper, after itself."""
    model = kwargs.get("model")
    chunks = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    forward_only = bool(kwargs.get("forward_only", False))
    evaluation = training = False
    if forward_only:
        caller, evaluation = _caller(), evaluating()
        training = caller == _TRAINING and not evaluation
        evaluation = evaluation or caller in _EVALUATIONS
    graph = None
    if label is None:
        (graph_wrapper,) = args
        label = SCHEDULES.get(getattr(graph_wrapper.forward_backward_func, "__name__", ""), "unknown")
        stage = "validation" if forward_only else "training"
        if graph_wrapper.cuda_graph[stage] is not None:
            graph = "replay"
        elif graph_wrapper.curr_iter(stage) == graph_wrapper.cuda_graph_warmup_steps:
            graph = "capture"  # before that it warms up, and the schedule really runs
    microbatches = kwargs.get("num_microbatches")
    # With hybrid context parallelism (0.16 to 0.19), every forward runs a sub-sample. How many a rank has then depends
    # on the step's data.
    config = getattr(innermost(chunks[0]), "config", None)
    if label == "no_pipelining" and getattr(config, "hybrid_context_parallel", False):
        microbatches = None
    return CallFacts(
        schedule=label,
        forward_only=forward_only,
        evaluation=evaluation,
        training=training,
        microbatches=_integer(microbatches),
        seq_length=_integer(kwargs.get("seq_length")),
        micro_batch_size=_integer(kwargs.get("micro_batch_size")),
        chunks=chunks,
        graph=graph,
    )


def _caller() -> str | None:
    """Returns the innermost calling function whose name says what a forward-only pass is for; None without one."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_STACK_LIMIT):
        if frame is None:
            return None
        name = frame.f_code.co_name
        if name in _EVALUATIONS or (name == _TRAINING and frame.f_locals.get(_FORWARD_ONLY) is True):
            return name
        frame = frame.f_back
    return None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None  # a bool is no number of anything


_FINALIZE = "finalize_model_grads_func"


def patch_finalize(dispatcher: Dispatcher) -> None:
    """Hooks ``config.finalize_model_grads_func`` of the model that the call runs.

    Hosts set it on the config, possibly after the hooks were installed, or anew for every ``train()``. The schedules
    read it from there at the end of a step (0.12 to 0.19). So it is hooked for each recorded call, then put back.
    """
    config = getattr(dispatcher.models[0], "config", None) if dispatcher.models else None
    original = getattr(config, "__dict__", {}).get(_FINALIZE)
    if original is None:
        return
    if dispatcher.finalize is None or dispatcher.finalize[0] is not original:  # made only once, not in every step
        hook = ranged(original, dispatcher, always(codes.FINALIZE), fast=(codes.FINALIZE,))
        dispatcher.finalize = original, functools.wraps(original)(hook)
    dispatcher.of_this_call.put(config, _FINALIZE, *dispatcher.finalize)


def _entered(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(graph: Any) -> Any:
        result = original(graph)
        from megaprof.recorders.torch_profiler import cupti  # torch's, which is there by then

        cupti.graphs = True
        with Contained("naming the kernels of a CUDA graph", dispatcher.drop):
            if dispatcher.call is not None:
                names.begun(graph)
        return result

    return __enter__


def _left(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
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
