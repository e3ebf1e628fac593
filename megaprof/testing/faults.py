"""Faults made on purpose in a real job, to check that they are found: passes that take a given time, or longer than
they should, a slow link, a rank that stops.

Slow parts wait, as a host waits for a GPU. Waiting needs no core, so a busy machine hardly disturbs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch


class _Backward(torch.autograd.Function):
    """Computes nothing; calls a function in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
        ctx.act = act
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return gradients[0], None


def _lingering(
    forward: Callable[..., Any], more: Callable[[float], tuple[float, float]], *inputs: Any, **named: Any
) -> Any:
    """Runs the forward of a module, and then waits; its backward waits, too."""
    began = time.perf_counter()
    output = forward(*inputs, **named)
    forward_ms, backward_ms = more(1e3 * (time.perf_counter() - began))
    time.sleep(forward_ms / 1e3)
    return _before_backward(output, lambda: time.sleep(backward_ms / 1e3))


def _paced(forward: Callable[..., Any], takes: Callable[[], tuple[float, float]], *inputs: Any, **named: Any) -> Any:
    """Runs the forward of a module, so that it and its backward take a given time. If it gets what another one
    returned, its passes begin when those of the other one should have ended: a GPU with work in its queue does not wait
    for its host. It waits inside of the module, where the ranges of the module see it."""
    forward_ms, backward_ms = takes()
    tensors = [each for each in (*inputs, *named.values()) if isinstance(each, torch.Tensor)]
    before = next((each.paced for each in tensors if hasattr(each, "paced")), None)
    ends = [(before[0] if before else time.perf_counter()) + forward_ms / 1e3]

    def end_backward() -> None:
        _until(ends[-1])
        if before:  # its backward comes next
            before.append(ends[-1])

    first = next((each for each in tensors if each.requires_grad), None)
    if first is not None:
        inner = _Backward.apply(first, end_backward)  # type: ignore[no-untyped-call]
        inputs = tuple(inner if each is first else each for each in inputs)
        named = {name: inner if each is first else each for name, each in named.items()}
    output = forward(*inputs, **named)
    _until(ends[0])
    paced = _before_backward(output, lambda: ends.append((ends[1:] or [time.perf_counter()])[0] + backward_ms / 1e3))
    paced[0].paced = ends
    return paced


def _before_backward(output: Any, act: Callable[[], object]) -> Any:
    return _Backward.apply(output[0], act), *output[1:]  # type: ignore[no-untyped-call]


def _until(end: float) -> None:
    time.sleep(max(end - time.perf_counter(), 0.0))


def layers(chunks: Iterable[Any]) -> list[Any]:
    """Returns the transformer layers of model chunks."""
    from megatron.core.utils import get_attr_wrapped_model

    return [layer for chunk in chunks for layer in get_attr_wrapped_model(chunk, "decoder").layers]


def linger(modules: Iterable[Any], more: Callable[[float], tuple[float, float]]) -> None:
    """Makes modules that return tuples, such as `layers`, take longer.

    ``more`` gets the milliseconds that the module's own forward took, and returns how many milliseconds this forward
    and its backward wait in addition.
    """
    for module in modules:
        module.forward = partial(_lingering, module.forward, more)


def pace(modules: Iterable[Any], takes: Callable[[], tuple[float, float]]) -> None:
    """Makes passes of modules that return tuples, such as `layers`, take a given time, with what they compute and wait
    for peers in it. So other work changes it only if it makes a row of them longer; a late tp or ep rank looks slow.

    ``takes`` is called before each forward, and returns the milliseconds of that forward and of its backward.
    """
    for module in modules:
        module.forward = partial(_paced, module.forward, takes)


def before_forward(chunk: Any, act: Callable[[], object]) -> None:
    """Calls ``act`` before every forward of a model chunk."""

    def hook(module: Any, inputs: Any) -> None:  # what a hook returns would become the inputs
        act()

    chunk.register_forward_pre_hook(hook)


def after_exchange(peer: int, act: Callable[[], object]) -> None:
    """Calls ``act`` at the end of every batched exchange with global rank ``peer``, as a part of it. Exchanges of all
    schedules are batched, unless they overlap with compute. A slow link is slow for both its ranks."""
    exchange = torch.distributed.batch_isend_irecv

    def exchanged(operations: Any) -> Any:
        works = exchange(operations)
        # The last work follows those of the exchange, and acts when it is waited for.
        return [*works, SimpleNamespace(wait=act)] if any(operation.peer == peer for operation in operations) else works

    torch.distributed.batch_isend_irecv = exchanged  # type: ignore[assignment]
