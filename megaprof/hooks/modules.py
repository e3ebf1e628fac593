"""Module ranges: embedding, layers, attention, MLP, router, dispatch, experts, output layer, forward and backward; and
what models and experts are given.

Only a recorded call has them. When the call starts, the ``forward`` of its modules is shadowed in their ``__dict__``;
when it ends, that is undone. Module hooks would not do: megatron-core and Transformer Engine look at hooks and act on
them (CUDA graphs, fused operators), and a hook is not called for every exception.

Hooks on autograd nodes open and close a backward range. ``torch.nn.Module``'s full backward hooks insert autograd
functions, which changes views and when memory is freed; node hooks see the gradients and change nothing. The engine
runs ready nodes in the order of their sequence numbers, latest first, and the consumers of a node are younger than the
node. One forward creates a contiguous stretch of numbers, so its nodes also run in one stretch, from the node of an
output down to the lowest node that this output reaches. Outputs that do not depend on each other (tokens and
probabilities in the dispatcher) may make two stretches, which are two ranges.

In the same way a recorded call has the lengths of the sequences that its models are given, and the tokens of each
expert. The experts of a MoE layer have ``forward(hidden_states, tokens_per_expert, ...)`` (0.12 to 0.19), where the
number of tokens of each local expert is a small tensor. The hook keeps the tensor, which is read when the window is
closed and the device has finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megaprof.capture.bounds import capturing
from megaprof.capture.profiler import Dispatcher
from megaprof.formats import codes, ranges
from megaprof.formats.metadata import WithoutRange
from megaprof.formats.ranges import RangeName
from megaprof.hooks.dispatch import argument, given
from megaprof.parallel.megatron import innermost, language_model
from megaprof.recorders.call import RecordedCall
from megaprof.recorders.emit import Range, graph_naming
from megaprof.recorders.tape import Hook
from megaprof.runtime.isolation import Contained
from megaprof.runtime.patching import Wrap

COMPILED = "torch.compile compiles it, or a module around it"

Site = tuple[Any, str, RangeName]
"""An object, the name of its method that gets a range, and the name of the range."""


class _Pass:
    """One forward of one module, with its backward. It holds only plain data: if the hook of an autograd node held a
    tensor or a node, it would keep the whole graph alive."""

    __slots__ = ("enclosing", "name", "opened", "until")

    def __init__(self, name: str, enclosing: _Pass | None) -> None:
        self.name = name
        self.enclosing = enclosing
        self.opened: Range | None = None  # set while its forward or its backward runs
        self.until = 0  # the sequence number of the last node that this backward will run

    def within(self, other: _Pass) -> bool:
        outer = self.enclosing
        while outer is not None and outer is not other:
            outer = outer.enclosing
        return outer is other


class _Running(threading.local):
    """The passes that are open on a thread, innermost last. Autograd runs a GPU's nodes on a thread of its own."""

    def __init__(self) -> None:
        self.forward: list[_Pass] = []
        self.backward: list[_Pass] = []
        self.begins: dict[int, list[tuple[_Pass, int]]] = {}  # by the sequence number of an output's node


class ModuleRanges:
    """The module ranges of one recorded call."""

    def __init__(self, dispatcher: Dispatcher, call: RecordedCall) -> None:
        self._dispatcher = dispatcher
        self._call = call
        self._running = _Running()
        self.without: dict[str, tuple[RangeName, str]] = {}
        """The missing ranges by their names in full, and why they are missing. One is taken out as soon as it is
        there."""

    @property
    def _active(self) -> bool:
        """True while the call runs and its window is open. An autograd graph, or a reference to a shadowed method, may
        live longer than both, and its hooks must do nothing then."""
        call = self._dispatcher.call
        return call is not None and call is self._call and call.level is not None

    def ranged(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``original`` inside a range called ``name``, with hooks for the range of its backward."""
        import torch

        def forward(*args: Any, **kwargs: Any) -> Any:
            # While dynamo traces a function around this one, it must not see any of this.
            if torch.compiler.is_compiling() or not self._active:
                return original(*args, **kwargs)
            self.without.pop(name, None)
            running, this, first = self._running, None, 0
            try:
                with Contained("opening a module's range", self._dispatcher.drop):
                    # A recomputation runs inside a backward, and so do the backwards of its nodes.
                    enclosing = running.forward or running.backward
                    this = _Pass(name, enclosing[-1] if enclosing else None)
                    first = torch._C._autograd._get_sequence_nr()
                    running.forward.append(this)
                    this.opened = Range(name)
                    this.opened.__enter__()
                result = original(*args, **kwargs)
            finally:
                with Contained("closing a module's range", self._dispatcher.drop):
                    if this is not None:
                        _close(running.forward, this)
            if this is not None and torch.is_grad_enabled():
                with Contained("hooking a module's backward", self._dispatcher.drop):
                    self._hook_backward(this, result, first)
            return result

        return forward

    def close(self) -> None:
        """Closes the ranges that an exception left open in this thread, and notes which ranges are missing."""
        layers: dict[tuple[str, str], list[int | None]] = {}  # all that miss the same range for the same reason
        for name, reason in self.without.values():
            layers.setdefault((name.label, reason), []).append(name.fields.get("n"))
        self._call.without = tuple(WithoutRange(label, tuple(ns), reason) for (label, reason), ns in layers.items())
        for stack in (self._running.forward, self._running.backward):
            while stack:
                _close(stack, stack[-1])

    def _hook_backward(self, this: _Pass, result: Any, first: int) -> None:
        begins = self._running.begins
        for output in dict.fromkeys(_nodes(result)):
            if (begin := output._sequence_nr()) < first:
                continue  # an input that is returned unchanged
            last = _lowest(output, first)
            until = last._sequence_nr()
            if begin in begins:  # this module returns the output of a module inside it
                begins[begin].insert(0, (this, until))
            else:
                begins[begin] = passes = [(this, until)]
                output.register_prehook(partial(self._open, passes))
            last.register_hook(partial(self._close, this, until))

    def _open(self, passes: list[tuple[_Pass, int]], *gradients: Any) -> None:
        if not self._active:
            return
        with Contained("opening a module's backward range", self._dispatcher.drop):
            stack = self._running.backward
            for this, until in passes:
                if this.opened is not None:  # another output opened it
                    this.until = min(this.until, until)
                    continue
                while stack and not this.within(stack[-1]):
                    _close(stack, stack[-1])
                this.until = until
                stack.append(this)
                this.opened = Range(ranges.module_backward(this.name))
                this.opened.__enter__()

    def _close(self, this: _Pass, number: int, *gradients: Any) -> None:
        if not self._active or this.opened is None or number > this.until:
            return
        with Contained("closing a module's backward range", self._dispatcher.drop):
            _close(self._running.backward, this)


def _close(stack: list[_Pass], this: _Pass) -> None:
    """Closes the range of ``this`` in ``stack``, and the ranges inside it, innermost first. A no-op if it is not
    there."""
    while this in stack:
        inner = stack[-1]
        if inner.opened is not None:
            inner.opened.close()
            inner.opened = None
        stack.pop()


def patch_modules(dispatcher: Dispatcher, call: RecordedCall) -> None:
    """Puts ranges around the modules of ``call`` until it ends, as ``--profile-ranges`` says, and notes how many tokens
    its experts get."""
    graph, labels = call.facts.graph, {"layer": ranges.OUTER_MODULES, "module": ranges.MODULES}.get(str(call.level), ())
    if graph is not None and not (graph == "capture" and graph_naming.available):
        labels = ()
    of_this_call = ModuleRanges(dispatcher, call)
    call.outermost.callback(of_this_call.close)
    for chunk in call.facts.chunks:
        compiled = compiled_in(chunk)
        for owner, method, name in sites(chunk):
            is_compiled_in = id(owner) in compiled
            if name.label in labels:
                of_this_call.without[str(name)] = name, COMPILED if is_compiled_in else _reason(chunk, name.label)
                if not is_compiled_in:
                    dispatcher.of_this_call.shadow(owner, method, partial(of_this_call.ranged, str(name)))
            if name.label == ranges.EXPERTS and not is_compiled_in:
                dispatcher.of_this_call.shadow(owner, method, lambda bound: partial(_counted, dispatcher, bound))


def patch_models(dispatcher: Dispatcher, call: RecordedCall, watched: Wrap) -> None:
    """Notes what the models of ``call`` get, until it ends, by a hook that ``watched`` makes of a method. Leaves
    out models that torch.compile compiles, because a replaced ``forward`` would be compiled again."""
    for chunk, model in zip(call.facts.chunks, call.models, strict=True):
        if is_compiled(model) or (chunk is not model and is_compiled(chunk)) or not hasattr(model, "__dict__"):
            continue
        # The combined 1F1B schedule has a model plan its forward, and calls the parts of the plan (0.14 to 0.19).
        combined = getattr(getattr(model, "config", None), "overlap_moe_expert_parallel_comm", False)
        method = "build_schedule_plan" if combined and not call.facts.forward_only else "forward"
        if hasattr(type(model), method):  # `torch.nn.Module.__getattr__` is slow for attributes that do not exist
            dispatcher.of_this_call.shadow(model, method, watched)


def takes_packed(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a model of Megatron's that notes the packed sequences that it gets."""
    function = getattr(original, "__func__", original)
    packed, tokens = argument(function, "packed_seq_params"), argument(function, "input_ids")

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if (call := dispatcher.call) is not None:
            with Contained("looking at a microbatch", dispatcher.drop):
                call.tape.takes(given(packed, args, kwargs), given(tokens, args, kwargs))
        return result

    return watched if Hook is None else Hook(dispatcher.gate, original, watched, codes.MODEL, packed, tokens)


def _counted(dispatcher: Dispatcher, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for the forward of experts, and notes how many tokens they get."""
    call = dispatcher.call
    # A forward that a backward recomputes was already counted.
    if (
        call is not None
        and call.level is not None
        and call.tape.now & codes.KIND_MASK != codes.BACKWARD
        and not capturing()
    ):
        with Contained("counting the tokens of experts", dispatcher.drop):
            if (counts := given((1, "tokens_per_expert"), args, kwargs)) is not None:
                call.experts.append(counts)
    return original(*args, **kwargs)


def compiled_in(chunk: Any) -> set[int]:
    """Returns the ids of the modules that torch.compile compiles, and of their token dispatchers. Shadowing a method
    there would break graphs, fail with ``fullgraph``, and cost two compilations, with the shadow and without it."""
    compiled_ids: set[int] = set()
    for module in chunk.modules() if hasattr(chunk, "modules") else ():
        if id(module) not in compiled_ids and is_compiled(module):
            compiled_ids |= {id(inner) for inner in module.modules()}
            compiled_ids |= {id(getattr(inner, "token_dispatcher", None)) for inner in module.modules()}
    return compiled_ids


def is_compiled(module: Any) -> bool:
    """Returns whether torch.compile compiles this module, or its ``forward``."""
    attributes = getattr(module, "__dict__", {})
    # Every step asks this. A bound method would take long to find that its function lacks an attribute.
    forward = attributes.get("forward") or getattr(type(module), "forward", None)
    return (
        attributes.get("_compiled_call_impl") is not None  # module.compile()
        or "_orig_mod" in attributes.get("_modules", {})  # torch.compile(module)
        or hasattr(forward, "_torchdynamo_orig_callable")  # torch.compile(module.forward)
    )


def _reason(chunk: Any, label: str) -> str:
    """Returns why the range of a shadowed module of ``chunk`` may be missing in the end."""
    config = getattr(innermost(chunk), "config", None)
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and label in (ranges.LAYER, "mlp"):
        return "the combined 1F1B schedule calls its parts itself"
    if getattr(config, "cuda_graph_impl", "none") in ("local", "transformer_engine"):
        return "it runs in a CUDA graph of its layer"
    return "nothing called it in this step"


def sites(chunk: Any) -> Iterator[Site]:
    """Yields the methods of a model chunk that may get a range.

    Finds them by the attribute names that GPTModel, MambaModel, HybridModel and similar models share, and never by
    class, because the layer spec chooses the classes. A vision model is one range; T5's encoder has none.
    """
    language = language_model(chunk)
    for label in ranges.ENCODERS:
        yield from _forward(getattr(innermost(chunk), label, None), RangeName(label, {}))
    for label in (ranges.EMBEDDING, ranges.OUTPUT_LAYER):
        yield from _forward(getattr(language, label, None), RangeName(label, {}))
    for layer in _layers(getattr(language, "decoder", None)):
        yield from _layer_sites(layer, None)
    for number, layer in enumerate(_layers(getattr(language, "mtp", None)), 1):
        mtp = getattr(layer, "layer_number", number)
        yield from _forward(layer, ranges.module_range(ranges.MTP_LAYER, mtp))
        # Up to 0.16 this is one transformer layer. From 0.17 it is one layer or a stack, under another name.
        inner = getattr(layer, "mtp_model_layer", None) or getattr(layer, "transformer_layer", None)
        for inside in _layers(inner) or ([] if inner is None else [inner]):
            yield from _layer_sites(inside, mtp)


def _layers(stack: Any) -> list[Any]:
    return list(getattr(stack, "layers", None) or ())


def _layer_sites(layer: Any, mtp: int | None) -> Iterator[Site]:
    number = getattr(layer, "layer_number", None)

    def name(label: str) -> RangeName:
        return ranges.module_range(label, number, mtp)

    if callable(getattr(layer, "cudagraph_manager", None)):  # megatron-core's own graphs
        yield layer, "cudagraph_manager", name(ranges.LAYER)
    elif getattr(layer, "cuda_graphs", None):  # Transformer Engine's
        yield layer, "_te_cuda_graph_replay", name(ranges.LAYER)
    else:
        yield from _forward(layer, name(ranges.LAYER))
    for attribute, label in ranges.LAYER_PARTS.items():
        yield from _forward(getattr(layer, attribute, None), name(label))
    mlp = getattr(layer, "mlp", None)
    for label in ranges.MOE_PARTS:
        yield from _forward(getattr(mlp, label, None), name(label))
    dispatcher = getattr(mlp, "token_dispatcher", None)
    for step in ranges.DISPATCHER_STEPS:
        if callable(getattr(dispatcher, step, None)) and hasattr(dispatcher, "__dict__"):
            yield dispatcher, step, name(step)


def _forward(module: Any, name: RangeName) -> Iterator[Site]:
    """Yields the site of a module's ``forward``, if that does something and can be replaced."""
    import torch
    from megatron.core.transformer.identity_op import IdentityOp  # stands in a spec for a part that the layer lacks

    if isinstance(module, torch.nn.Module) and not isinstance(module, IdentityOp | torch.jit.ScriptModule):
        yield module, "forward", name


def _nodes(result: Any) -> list[Any]:
    """Returns the autograd nodes of the tensors in ``result``, the result of a ``forward``."""
    import torch

    if isinstance(result, torch.Tensor):
        return [] if result.grad_fn is None else [result.grad_fn]
    if isinstance(result, dict):
        result = list(result.values())
    return [node for item in result for node in _nodes(item)] if isinstance(result, list | tuple) else []


def _lowest(output: Any, first: int) -> Any:
    """Returns the oldest node that ``output`` reaches through nodes no older than ``first``, or ``output`` itself.

    Accumulations into parameters have the highest possible number, and run as soon as they can.
    """
    lowest, number = output, output._sequence_nr()
    seen, pending = {output}, [output]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            age = node._sequence_nr()
            if age < first:
                continue
            pending.append(node)
            if age < number:
                lowest, number = node, age
    return lowest
