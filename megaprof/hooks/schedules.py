"""Installs all hooks on Megatron-Core. Here are those on the three schedules, so that every ``forward_backward_func``
call may be recorded, and on what they call: the data iterator, passes of microbatches, exchanges between stages and the
waits for overlapped ones, gradient finalisation, and the capture of CUDA graphs.

Hosts call ``get_forward_backward_func``, which looks the schedules up in their module at each call (0.12 to 0.19), or
import a schedule by its name. So it is replaced in every module that has it; in an armed process also behind that.

The exchanges do not say which microbatch and chunk they exchange. But a stage always sends the result of the pass that
ran last, and receives the input of the next pass in the schedule's order.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from megaprof.capture.process import process
from megaprof.capture.profiler import Dispatcher
from megaprof.capture.roles import evaluating
from megaprof.config.values import EVALUATE, TRAIN_ACTOR, TRAIN_LOG_PROBS
from megaprof.formats import codes, ranges
from megaprof.formats.ranges import OfPass
from megaprof.hooks.dispatch import argument, given, ranged, stepped
from megaprof.hooks.modules import patch_models, patch_modules, takes_packed
from megaprof.parallel.megatron import innermost
from megaprof.parallel.schedules import EXCHANGES, RECEIVES, SENDS, PipelineSchedule, order_of
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.emit import graph_naming
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


def patch_megatron(patches: Patches) -> None:
    """Hooks the schedules, the full-iteration CUDA graph wrapper (megatron-core 0.14+) around them, and the functions
    that they call, until ``patches`` are undone."""
    import torch
    from megatron.core.pipeline_parallel import schedules

    dispatcher = process.dispatcher
    for name, label in SCHEDULES.items():
        for owner in (armed.schedules, *modules_with(name, getattr(schedules, name))):
            patches.apply(owner, name, partial(_hooked, label, dispatcher))
    patches.apply(schedules, "create_cudagraphs", lambda original: partial(_without_window, dispatcher, original))
    with contextlib.suppress(ImportError):
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        patches.apply(FullCudaGraphWrapper, "__call__", partial(_hooked, None, dispatcher))
    # Module globals of the schedules (0.12 to 0.19). The third is there from 0.19 on, the combined one from 0.14 on.
    patches.apply(schedules, "forward_step", partial(_forward, dispatcher))
    patches.apply(schedules, "backward_step", partial(_backward, dispatcher))
    patches.apply(schedules, "backward_step_multimodule", partial(_backward, dispatcher))
    with contextlib.suppress(ImportError):
        from megatron.core.pipeline_parallel import combined_1f1b

        patches.apply(combined_1f1b, "combined_forward_backward_step", partial(_combined, dispatcher))
    patch_p2p(patches, dispatcher)
    # With it, megatron-core, Transformer Engine and torch.compile capture. The kernels of every replay get our names.
    patches.apply(torch.cuda.graph, "__enter__", partial(_entered, dispatcher))
    patches.apply(torch.cuda.graph, "__exit__", partial(_left, dispatcher))


def _without_window(dispatcher: Dispatcher, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for ``create_cudagraphs``, and closes the window before that captures. A recorder synchronises the device
    when its window closes, and that would break a capture. The schedules call ``create_cudagraphs`` when their
    microbatches are done (0.13+), and it captures the graphs of single layers once."""
    with Contained("closing a window before CUDA graphs are captured", dispatcher.drop):
        if dispatcher.call is not None:
            from megatron.core.transformer import cuda_graphs

            record = getattr(cuda_graphs, "_CudagraphGlobalRecord", None)
            if not getattr(record, "cudagraph_created", False) and getattr(record, "cudagraph_record", True):
                dispatcher.cut("megatron-core captured the CUDA graphs of its layers")
                dispatcher.of_this_call.restore()
    return original(*args, **kwargs)


def _hooked(label: str | None, dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``original``, a schedule. ``label`` names the schedule. None: ``original`` is
    ``FullCudaGraphWrapper.__call__``, and the wrapper holds a schedule."""

    def prepare(call: RecordedCall, arguments: dict[str, Any]) -> None:
        patch_finalize(dispatcher, call)
        patch_models(dispatcher, call, partial(takes_packed, dispatcher))
        if label is not None:  # the graph wrapper reads all data before it runs the schedule
            watch_data(dispatcher, arguments)
        if call.level is not None:
            patch_modules(dispatcher, call)

    return stepped(original, dispatcher, partial(_facts, label), prepare)


def _facts(label: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFacts:
    """Returns the facts of a call. The schedules take only keyword arguments (0.12 to 0.19). So does the graph
    wrapper, after itself."""
    model = kwargs.get("model")
    chunks = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    forward_only = bool(kwargs.get("forward_only", False))
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
        target=_forward_only_target() if forward_only else TRAIN_ACTOR,
        schedule=label,
        forward_only=forward_only,
        microbatches=microbatches if type(microbatches) is int else None,  # a bool is no number of anything
        chunks=chunks,
        graph=graph,
    )


def _forward_only_target() -> str:
    """Returns the target of a forward-only call, by the innermost calling function whose name says what it is for."""
    if evaluating():
        return EVALUATE
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in _EVALUATIONS:
            return EVALUATE
        if name == _TRAINING and frame.f_locals.get(_FORWARD_ONLY) is True:
            return TRAIN_ACTOR
        frame = frame.f_back
    return TRAIN_LOG_PROBS


def watch_data(dispatcher: Dispatcher, arguments: dict[str, Any]) -> None:
    """Watches the data iterators among the arguments of a recorded call, for that call only: one, or one for each model
    chunk. A stage without data has None. What is no plain iterator is passed on as it is."""

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        tape = call.tape
        # Without a timeline, nothing says when a forward has ended.
        inside = not call.timed or tape.now & codes.KIND_MASK in (codes.FORWARD, codes.COMBINED)
        return codes.DATA | (tape.forward or 0) * inside

    def watched(iterator: Any) -> Any:
        kind = type(iterator)
        if not hasattr(kind, "__next__") or hasattr(kind, "__getitem__") or callable(iterator):
            return iterator
        hook = ranged(partial(next, iterator), dispatcher, code, fast=(codes.DATA,))
        return Watched(iterator, "__next__", hook)

    if (source := arguments.get("data_iterator")) is not None:
        arguments["data_iterator"] = [watched(each) for each in source] if type(source) is list else watched(source)


class Watched:
    """Stands for an object of the host's: for a data iterator, whose ``next`` is a hook, or for the handle of an
    exchange, whose ``wait`` is one. It has the object's class, and everything else of it.

    ``next`` and ``wait`` are slots, so Python finds the hook without running any Python code: a method would take
    several times as long. Nothing of the object itself is changed, and whoever else holds it is not watched.
    """

    __slots__ = ("__next__", "__weakref__", "_object", "wait")

    def __init__(self, watched: Any, method: str, hook: Any) -> None:
        object.__setattr__(self, "_object", watched)
        object.__setattr__(self, method, hook)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._object)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._object)

    def __bool__(self) -> bool:
        return bool(self._object)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._object.__reduce_ex__(protocol)  # a copy, which the host may make, is one of the object

    def __getattr__(self, name: str) -> Any:
        return getattr(self._object, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._object, name, value)


_FINALIZE = "finalize_model_grads_func"


def patch_finalize(dispatcher: Dispatcher, call: RecordedCall) -> None:
    """Hooks ``config.finalize_model_grads_func`` of the model that ``call`` runs.

    Hosts set it on the config, possibly after the hooks were installed, or anew for every ``train()``. The schedules
    read it from there at the end of a step (0.12 to 0.19). So it is hooked for each recorded call, then put back.
    """
    config = getattr(call.models[0], "config", None)
    original = getattr(config, "__dict__", {}).get(_FINALIZE)
    if original is None:
        return
    if dispatcher.finalize is None or dispatcher.finalize[0] is not original:  # made only once, not in every step
        hook = ranged(original, dispatcher, codes.FINALIZE, fast=(codes.FINALIZE,))
        dispatcher.finalize = original, functools.wraps(original)(hook)
    dispatcher.of_this_call.put(config, _FINALIZE, *dispatcher.finalize)


def _entered(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(graph: Any) -> Any:
        result = original(graph)
        graph_naming.graphs = True
        with Contained("naming the kernels of a CUDA graph", dispatcher.drop):
            if dispatcher.call is not None:
                graph_naming.begun(graph)
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
                graph_naming.ended(graph, failed=failed)

    return __exit__


def _forward(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    model, microbatch = argument(original, "model"), argument(original, "current_microbatch")

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        position: int = call.tape.position(given(model, args, kwargs), given(microbatch, args, kwargs))
        call.ran["forward"] += 1
        return codes.FORWARD | position

    return ranged(original, dispatcher, code, _produced, fast=(codes.FORWARD, model, microbatch))


def _backward(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    output = argument(original, "output_tensor")

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return codes.BACKWARD | _begin_backward(call, given(output, args, kwargs))

    return ranged(original, dispatcher, code, fast=(codes.BACKWARD, output))


def _combined(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook of a combined forward and backward. Either may be missing: the first call of a step runs only a
    forward, and the last one only a backward."""
    wanted = "f_model", "current_microbatch", "b_model", "b_output_tensor"
    arguments = [argument(original, name) for name in wanted]

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        f_model, microbatch, b_model, output = (given(each, args, kwargs) for each in arguments)
        call.tape.forward = forward = None if f_model is None else call.tape.position(f_model, microbatch)
        call.ran["forward"] += forward is not None
        if b_model is None:
            return codes.FORWARD | (forward or 0)
        backward = _begin_backward(call, output)
        return codes.BACKWARD | backward if forward is None else codes.combined(forward, backward)

    return ranged(original, dispatcher, code, _produced)


def _produced(call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
    return call.tape.produced(result)


def _begin_backward(call: RecordedCall, output: Any) -> int:
    """Returns the part of a code that has the microbatch and chunk of a backward that begins. The call keeps it."""
    call.ran["backward"] += 1
    call.backward = int(call.tape.consumed(output))
    return call.backward


def patch_p2p(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hooks the methods of ``P2PCommunicator`` (0.14+) or the functions of ``p2p_communication`` (up to 0.13).

    Up to 0.13 the non-interleaved schedule has functions of its own that call these, so hooking both would write every
    range twice. Also hooks the methods of ``BridgeCommunicator``, which exchanges between two modules. If the schedule
    uses it, megatron-core has imported it already (0.19).
    """
    from megatron.core.pipeline_parallel import p2p_communication

    owners = [getattr(p2p_communication, "P2PCommunicator", p2p_communication)]
    between_modules = sys.modules.get("megatron.core.pipeline_parallel.bridge_communicator")
    if between_modules is not None:
        owners.append(between_modules.BridgeCommunicator)
    after = partial(_range_waits, dispatcher)
    for operation in ranges.P2P_OPERATIONS:
        code = codes.exchange(operation)
        fast = (code, (-1, None), (-1, None), "overlap_p2p_comm")
        named = partial(_name, operation, EXCHANGES[operation])
        wrap = partial(ranged, dispatcher=dispatcher, code_of=code, after=after, fast=fast, name_of=named)
        for owner in owners:
            patches.apply(owner, operation, wrap)


def _name(label: str, transfers: tuple[str, ...], call: RecordedCall) -> str:
    """Returns the name of a range in which each direction transfers the input or the result of a pass."""
    return ranges.exchange_range(
        label,
        *(
            _sent(call, kind) if SENDS[kind] in transfers and call.ran[kind] else _awaited(call, kind)
            for kind in SENDS
            if {SENDS[kind], RECEIVES[kind]} & set(transfers)
        ),
    )


def _sent(call: RecordedCall, kind: str) -> OfPass:
    """Returns the microbatch and chunk of the forward or backward that ran last, whose result is sent."""
    return codes.microbatch_and_chunk((call.tape.forward or 0) if kind == "forward" else call.backward)


def _awaited(call: RecordedCall, kind: str) -> OfPass:
    """Returns the microbatch and chunk of the forward or backward that is next in the schedule's order, whose input is
    received."""
    facts = call.facts
    if facts.microbatches is None or facts.schedule is None:
        return None, None
    config = getattr(call.models[0], "config", None)
    stages = getattr(config, "pipeline_model_parallel_size", None) or 1
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
    schedule = PipelineSchedule(facts.schedule, stages, len(facts.chunks), facts.microbatches, group)
    order, done = order_of(schedule, kind), call.ran[kind]
    return (order[done].microbatch, order[done].chunk) if done < len(order) else (None, None)


def _range_waits(dispatcher: Dispatcher, call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
    """Returns the result of an exchange, with a range for the wait on each handle in it. With ``overlap_p2p_comm`` an
    exchange returns ``(tensors..., {operation: handle})``, and the schedule waits on each handle when it needs it (0.12
    to 0.19)."""
    if not kwargs.get("overlap_p2p_comm") or not isinstance(result, tuple) or not isinstance(result[-1], dict):
        return result

    def watched(handle: Any, transfer: str) -> Watched:
        """``transfer``: which of the transfers of `SendReceive` the handle is for."""
        code = codes.wait(transfer)
        sent = next((_sent(call, kind) for kind in SENDS if SENDS[kind] == transfer), None)
        label = str(codes.name(code)).removeprefix(ranges.PREFIX)

        def name_of(call: RecordedCall) -> str:
            """Returns the range's name. A send's pass is known when it is sent, a receive's when it is waited for."""
            return _name(label, (transfer,), call) if sent is None else ranges.exchange_range(label, sent)

        return Watched(handle, "wait", ranged(handle.wait, dispatcher, code, fast=(code,), name_of=name_of))

    return (*result[:-1], {transfer: watched(handle, transfer) for transfer, handle in result[-1].items()})
