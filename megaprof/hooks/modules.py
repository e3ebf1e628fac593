"""Module ranges: embedding, layers, attention, MLP, router, dispatch, experts, output layer, forward and backward.

Only a recorded call has them: its modules' ``forward`` is shadowed in their ``__dict__`` when the call starts and put
back when it ends. ``forward`` rather than module hooks, because megatron-core and Transformer Engine look at hooks and
act on them (CUDA graphs, fused operators), and because a hook is not called for every exception.

A backward range is opened and closed by hooks on autograd nodes. ``torch.nn.Module``'s full backward hooks insert
autograd functions, which changes views and what is freed when; node hooks see the gradients and change nothing. The
engine runs ready nodes in the order of their sequence numbers, latest first, and a node's consumers are younger than
itself: so what one forward created, which is a contiguous stretch of numbers, is also run in one stretch, from the
node of an output down to the lowest node that this output reaches. Outputs that do not depend on each other (tokens
and probabilities in the dispatcher) may make two stretches, which are two ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.formats import ranges
from megaprof.formats.metadata import WithoutRange
from megaprof.parallel.chunks import innermost, language_model
from megaprof.recorders.ranges.emit import Range
from megaprof.recorders.ranges.graph_names import names
from megaprof.runtime.isolation import Contained

COMPILED = "torch.compile compiles it, or a module around it"

Site = tuple[Any, str, str]
"""An object, the method of it that is a range, and the range's name."""


class _Pass:
    """One forward of one module, with its backward. Plain data: a hook of an autograd node that held a tensor or a node
    would keep the whole graph alive."""

    __slots__ = ("enclosing", "name", "opened", "until")

    def __init__(self, name: str, enclosing: _Pass | None) -> None:
        self.name = name
        self.enclosing = enclosing
        self.opened: Range | None = None  # while its forward, then while its backward runs
        self.until = 0  # sequence number of the last node that this backward will run

    def within(self, other: _Pass) -> bool:
        outer = self.enclosing
        while outer is not None and outer is not other:
            outer = outer.enclosing
        return outer is other


class _Running(threading.local):
    """The passes that a thread is in, innermost last. Autograd runs a GPU's nodes on a thread of its own."""

    def __init__(self) -> None:
        self.forward: list[_Pass] = []
        self.backward: list[_Pass] = []
        self.begins: dict[int, list[tuple[_Pass, int]]] = {}  # by the sequence number of an output's node


class ModuleRanges:
    """The module ranges of one recorded call."""

    def __init__(self, dispatcher: Dispatcher, call: Any) -> None:
        self._dispatcher = dispatcher
        self._call = call
        self._running = _Running()
        self._without: dict[str, str] = {}

    def expect(self, name: str, otherwise: str) -> None:
        """A range called ``name`` is wanted. If there is none in the end, ``otherwise`` is the reason."""
        self._without[name] = otherwise

    @property
    def _active(self) -> bool:
        """True while the call runs and its window is open. A graph, or a reference to a shadowed method, may outlive
        both, and must do nothing then."""
        call = self._dispatcher.call
        return call is not None and call is self._call and call.ranged

    def ranged(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``original`` inside a range called ``name``, with hooks for the range of its backward."""
        import torch

        def forward(*args: Any, **kwargs: Any) -> Any:
            # While dynamo traces a function around this one, there must be nothing for it to see.
            if torch.compiler.is_compiling() or not self._active:
                return original(*args, **kwargs)
            self._without.pop(name, None)
            running, this, first = self._running, None, 0
            try:
                with Contained("opening a module's range", self._dispatcher.drop):
                    # A recomputation runs inside a backward, and its nodes are run there too.
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
        """Close what an exception left open in this thread, and note which ranges are missing. Can be run twice."""
        self._call.without = _grouped(self._without)
        for stack in (self._running.forward, self._running.backward):
            while stack:
                _close(stack, stack[-1])

    def _hook_backward(self, this: _Pass, result: Any, first: int) -> None:
        begins = self._running.begins
        for output in dict.fromkeys(_nodes(result)):
            if (begin := output._sequence_nr()) < first:
                continue  # an input handed through
            last = _lowest(output, first)
            until = last._sequence_nr()
            if begin in begins:  # the output of a module inside this one is also this one's
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
                if this.opened is not None:  # by another output
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


def _grouped(without: dict[str, str]) -> tuple[WithoutRange, ...]:
    """Returns ``without``, which has the reason by the name of each missing range, with one entry for layers alike."""
    layers: dict[tuple[str, str], list[int | None]] = {}
    for name, reason in without.items():
        read = ranges.parse(name)
        if isinstance(read, ranges.RangeName):
            layers.setdefault((read.label, reason), []).append(read.fields.get("n"))
    return tuple(WithoutRange(label, tuple(numbers), reason) for (label, reason), numbers in layers.items())


def _close(stack: list[_Pass], this: _Pass) -> None:
    """Close the range of ``this`` in ``stack``, and those inside it, innermost first. A no-op if it is not there."""
    while this in stack:
        inner = stack[-1]
        if inner.opened is not None:
            inner.opened.close()
            inner.opened = None
        stack.pop()


def patch_modules(dispatcher: Dispatcher, chunks: tuple[Any, ...]) -> None:
    """Put ranges around the modules of ``chunks`` until the recorded call ends, as ``--profile-ranges`` wants."""
    call, level = dispatcher.call, dispatcher.level
    if call is None or (call.facts.graph is not None and not (call.facts.graph == "capture" and names.available)):
        return
    of_this_call = ModuleRanges(dispatcher, call)
    dispatcher.close_modules = of_this_call.close
    for chunk in chunks:
        compiled = compiled_in(chunk)
        for owner, method, name in sites(chunk, parts=level == "module"):
            if id(owner) in compiled:
                of_this_call.expect(name, COMPILED)
            else:
                of_this_call.expect(name, _reason(chunk, name))
                dispatcher.of_this_call.shadow(owner, method, partial(of_this_call.ranged, name))


def compiled_in(chunk: Any) -> set[int]:
    """Returns the identities of the modules, and of their token dispatchers, that torch.compile compiles. A method that
    is shadowed there breaks graphs, is refused under ``fullgraph``, and costs a compilation with it and one without."""
    found: set[int] = set()
    for module in chunk.modules() if hasattr(chunk, "modules") else ():
        if id(module) not in found and is_compiled(module):
            found |= {id(inner) for inner in module.modules()}
            found |= {id(getattr(inner, "token_dispatcher", None)) for inner in module.modules()}
    return found


def is_compiled(module: Any) -> bool:
    """Returns whether torch.compile compiles this module, or its ``forward``."""
    own = getattr(module, "__dict__", {})
    return (
        own.get("_compiled_call_impl") is not None  # module.compile()
        or "_orig_mod" in own.get("_modules", {})  # torch.compile(module)
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")  # torch.compile(module.forward)
    )


def _reason(chunk: Any, name: str) -> str:
    """Returns why the range ``name`` of a shadowed module of ``chunk`` may be missing in the end."""
    config = getattr(innermost(chunk), "config", None)
    read = ranges.parse(name)
    label = read.label if isinstance(read, ranges.RangeName) else ""
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and label in (ranges.LAYER, "mlp"):
        return "the combined 1F1B schedule calls its parts itself"
    if getattr(config, "cuda_graph_impl", "none") in ("local", "transformer_engine"):
        return "it runs in a CUDA graph of its layer"
    return "nothing called it in this step"


def sites(chunk: Any, *, parts: bool) -> Iterator[Site]:
    """Yields the methods of a model chunk that get a range; ``parts``: also those inside layers.

    They are found by the attribute names that GPTModel, MambaModel, HybridModel and their kin share, never by class,
    because the layer spec chooses the classes. A vision model is one range; T5's encoder has none.
    """
    language = language_model(chunk)
    for label in ranges.ENCODERS:
        yield from _forward(getattr(innermost(chunk), label, None), ranges.operation_range(label))
    for label in (ranges.EMBEDDING, ranges.OUTPUT_LAYER):
        yield from _forward(getattr(language, label, None), ranges.operation_range(label))
    for layer in _layers(getattr(language, "decoder", None)):
        yield from _layer_sites(layer, None, parts)
    for number, layer in enumerate(_layers(getattr(language, "mtp", None)), 1):
        mtp = getattr(layer, "layer_number", number)
        yield from _forward(layer, ranges.module_range(ranges.MTP_LAYER, mtp))
        # One transformer layer up to 0.16; a stack of layers, or one, by another name from 0.17.
        inner = getattr(layer, "mtp_model_layer", None) or getattr(layer, "transformer_layer", None)
        for inside in _layers(inner) or ([] if inner is None else [inner]):
            yield from _layer_sites(inside, mtp, parts)


def _layers(stack: Any) -> list[Any]:
    return list(getattr(stack, "layers", None) or ())


def _layer_sites(layer: Any, mtp: int | None, parts: bool) -> Iterator[Site]:
    number = getattr(layer, "layer_number", None)

    def name(label: str) -> str:
        return ranges.module_range(label, number, mtp)

    if callable(getattr(layer, "cudagraph_manager", None)):  # megatron-core's own graphs
        yield layer, "cudagraph_manager", name(ranges.LAYER)
    elif getattr(layer, "cuda_graphs", None):  # Transformer Engine's
        yield layer, "_te_cuda_graph_replay", name(ranges.LAYER)
    else:
        yield from _forward(layer, name(ranges.LAYER))
    if not parts:
        return
    for attribute, label in ranges.LAYER_PARTS.items():
        yield from _forward(getattr(layer, attribute, None), name(label))
    mlp = getattr(layer, "mlp", None)
    for label in ranges.MOE_PARTS:
        yield from _forward(getattr(mlp, label, None), name(label))
    dispatcher = getattr(mlp, "token_dispatcher", None)
    for step in ranges.DISPATCHER_STEPS:
        if callable(getattr(dispatcher, step, None)) and hasattr(dispatcher, "__dict__"):
            yield dispatcher, step, name(step)


def _forward(module: Any, name: str) -> Iterator[Site]:
    """Yields the site of a module's ``forward``, if it has one that does something and can be replaced."""
    import torch
    from megatron.core.transformer.identity_op import IdentityOp  # what a spec puts where a layer has no such part

    if isinstance(module, torch.nn.Module) and not isinstance(module, IdentityOp | torch.jit.ScriptModule):
        yield module, "forward", name


def _nodes(result: Any) -> list[Any]:
    """Returns the autograd nodes of the tensors in ``result``, which a ``forward`` returned."""
    import torch

    if isinstance(result, torch.Tensor):
        return [] if result.grad_fn is None else [result.grad_fn]
    if isinstance(result, dict):
        result = list(result.values())
    return [node for item in result for node in _nodes(item)] if isinstance(result, list | tuple) else []


def _lowest(output: Any, first: int) -> Any:
    """Returns the oldest node that ``output`` reaches through nodes no older than ``first``, or ``output`` itself.

    Accumulations into parameters carry the highest number there is and run as soon as they can.
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
