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

from megaprof.formats import ranges
from megaprof.hooks.dispatch import Dispatcher
from megaprof.parallel.chunks import language_model
from megaprof.recorders.emit import Range
from megaprof.runtime.isolation import Contained

Site = tuple[Any, str, str]
"""An object, the method of it that is a range, and the range's name."""


class _Pass:
    """One forward of one module, and its backward. Plain data: an autograd node's hook that held a tensor or a node
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

    @property
    def _active(self) -> bool:
        """A graph, or a reference to a shadowed method, may outlive the call: it must do nothing then."""
        return self._dispatcher.call is self._call

    def ranged(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` inside a range called ``name``, and hooks for the range of its backward."""
        import torch

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return original(*args, **kwargs)
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
        """Close what an exception left open in this thread. Can be run twice."""
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


def _close(stack: list[_Pass], this: _Pass) -> None:
    """Close the range of ``this`` in ``stack``, and those inside it, innermost first; a no-op when it is not there."""
    while this in stack:
        inner = stack[-1]
        if inner.opened is not None:
            inner.opened.close()
            inner.opened = None
        stack.pop()


def patch_modules(dispatcher: Dispatcher, chunks: tuple[Any, ...]) -> None:
    """Range the modules of ``chunks`` for the call that is being recorded, as ``--profile-ranges`` wants."""
    call, level = dispatcher.call, dispatcher.level
    if call is None or level not in ("layer", "module") or call.facts.graph is not None:
        return
    dispatcher.modules = of_this_call = ModuleRanges(dispatcher, call)
    for chunk in chunks:
        for owner, method, name in sites(chunk, parts=level == "module"):
            dispatcher.of_this_call.shadow(owner, method, partial(of_this_call.ranged, name))


def sites(chunk: Any, *, parts: bool) -> Iterator[Site]:
    """The methods of a model chunk that are ranges; ``parts``: those inside layers too.

    Found by the attribute names that GPTModel, MambaModel, HybridModel and their kin share, never by class: the classes
    are the layer spec's choice. Stacks beside the language model's (a vision model's, T5's encoder) have none.
    """
    language = language_model(chunk)
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

    if getattr(layer, "_compiled_call_impl", None) is not None:
        return  # torch.compile would compile our ranges into it, once for this call and once more without them
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
    """The site of a module's ``forward``, where it has one that does something and that can be replaced."""
    import torch
    from megatron.core.transformer.identity_op import IdentityOp  # what a spec puts where a layer has no such part

    if isinstance(module, torch.nn.Module) and not isinstance(module, IdentityOp | torch.jit.ScriptModule):
        yield module, "forward", name


def _nodes(result: Any) -> list[Any]:
    """The autograd nodes of the tensors in what a ``forward`` returned."""
    import torch

    if isinstance(result, torch.Tensor):
        return [] if result.grad_fn is None else [result.grad_fn]
    if isinstance(result, dict):
        result = list(result.values())
    return [node for item in result for node in _nodes(item)] if isinstance(result, list | tuple) else []


def _lowest(output: Any, first: int) -> Any:
    """The oldest node that ``output`` reaches through nodes no older than ``first``, ``output`` included.

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
