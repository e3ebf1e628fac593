"""Times and faults made on purpose in a real job, to see them found: passes that take a given time or longer than they
should, a slow link, a rank that stops.

What is slow waits, as a host waits for a GPU. That needs no core, so that a busy machine disturbs it little. A fault
stays for the life of the process or of the model; what it does is asked each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["after_exchange", "before_forward", "layers", "linger", "pace"]


class _Backward(torch.autograd.Function):
    """Computes nothing, and calls a function in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
        ctx.act = act
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return gradients[0], None


class _Longer:
    """Two hooks of one module."""

    def __init__(self, more: Callable[[float], tuple[float, float]]) -> None:
        self.more = more
        self.began = 0.0

    def begin(self, module: Any, inputs: Any) -> None:
        self.began = time.perf_counter()

    def end(self, module: Any, inputs: Any, output: Any) -> Any:
        forward_ms, backward_ms = self.more(1e3 * (time.perf_counter() - self.began))
        time.sleep(forward_ms / 1e3)
        return _before_backward(output, lambda: time.sleep(backward_ms / 1e3))


class _Paced:
    """Two hooks of one module."""

    def __init__(self, takes: Callable[[], tuple[float, float]]) -> None:
        self.takes = takes
        self.end_forward = 0.0
        self.begin_backward: Callable[[], object] = lambda: None

    def begin(self, module: Any, inputs: Any, named: Any) -> None:
        forward_ms, backward_ms = self.takes()
        self.end_forward = time.perf_counter() + forward_ms / 1e3
        ends: list[float] = []
        self.begin_backward = lambda: ends.append(time.perf_counter() + backward_ms / 1e3)
        for each in (*inputs, *named.values()):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(lambda gradient: _until(ends.pop()))  # type: ignore[no-untyped-call]
                break

    def end(self, module: Any, inputs: Any, output: Any) -> Any:
        _until(self.end_forward)
        return _before_backward(output, self.begin_backward)


def _before_backward(output: Any, act: Callable[[], object]) -> Any:
    return _Backward.apply(output[0], act), *output[1:]  # type: ignore[no-untyped-call]


def _until(end: float) -> None:
    time.sleep(max(end - time.perf_counter(), 0.0))


def layers(chunks: Iterable[Any]) -> list[Any]:
    """The transformer layers of model chunks."""
    from megatron.core.utils import get_attr_wrapped_model

    return [layer for chunk in chunks for layer in get_attr_wrapped_model(chunk, "decoder").layers]


def linger(modules: Iterable[Any], more: Callable[[float], tuple[float, float]]) -> None:
    """Let modules that return tuples, such as `layers`, take longer.

    ``more`` gets the milliseconds that the module's own forward took, and returns those that this forward and its
    backward wait beyond their work.
    """
    for module in modules:
        longer = _Longer(more)
        module.register_forward_pre_hook(longer.begin)
        module.register_forward_hook(longer.end)


def pace(modules: Iterable[Any], takes: Callable[[], tuple[float, float]]) -> None:
    """Let passes of modules that return tuples, such as `layers`, take a given time: what they compute is part of it,
    so that other work on the machine does not change it unless it makes them compute for longer than that.

    ``takes`` is asked before each forward, and returns the milliseconds of that forward and of its backward.
    """
    for module in modules:
        paced = _Paced(takes)
        module.register_forward_pre_hook(paced.begin, with_kwargs=True)
        module.register_forward_hook(paced.end)


def before_forward(chunk: Any, act: Callable[[], object]) -> None:
    """Call ``act`` before every forward of a model chunk."""

    def hook(module: Any, inputs: Any) -> None:  # what a hook returns would become the inputs
        act()

    chunk.register_forward_pre_hook(hook)


def after_exchange(peer: int, act: Callable[[], object]) -> None:
    """Call ``act`` behind every exchange with global rank ``peer``, as a part of it, that is batched, as those of all
    schedules are but those that overlap with compute. A link is slow for both its ranks."""
    exchange = torch.distributed.batch_isend_irecv

    def exchanged(operations: Any) -> Any:
        begun = exchange(operations)
        return [*begun, _Acts(act)] if any(operation.peer == peer for operation in operations) else begun

    torch.distributed.batch_isend_irecv = exchanged  # type: ignore[assignment]


class _Acts:
    """Stands behind the works of an exchange, which are waited for in turn."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.wait = act
