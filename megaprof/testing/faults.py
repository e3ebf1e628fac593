"""Faults made on purpose in a real job, to see them found: passes that take longer, a slow link, a rank that stops.

What is slow waits, as a host waits for a GPU. That needs no core, so that a busy machine disturbs it little. A fault
stays for the life of the process or of the model; what it does is asked each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["before_exchange", "before_forward", "layers", "linger"]


class _Wait(torch.autograd.Function):
    """Nothing but waiting, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_ms / 1e3)
        return gradients[0], None, None


class _Longer:
    """Two hooks of one module."""

    def __init__(self, more: Callable[[float], tuple[float, float]]) -> None:
        self.more = more
        self.began = 0.0

    def begin(self, module: Any, inputs: Any) -> None:
        self.began = time.perf_counter()

    def end(self, module: Any, inputs: Any, output: Any) -> Any:
        waiting = self.more(1e3 * (time.perf_counter() - self.began))
        return _Wait.apply(output[0], *waiting), *output[1:]  # type: ignore[no-untyped-call]


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


def before_forward(chunk: Any, act: Callable[[], object]) -> None:
    """Call ``act`` before every forward of a model chunk."""

    def hook(module: Any, inputs: Any) -> None:  # what a hook returns would become the inputs
        act()

    chunk.register_forward_pre_hook(hook)


def before_exchange(peer: int, act: Callable[[], object]) -> None:
    """Call ``act`` before every exchange with global rank ``peer`` that is batched, as those of all schedules are but
    those that overlap with compute."""
    exchange = torch.distributed.batch_isend_irecv

    def exchanged(operations: Any) -> Any:
        if any(operation.peer == peer for operation in operations):
            act()
        return exchange(operations)

    torch.distributed.batch_isend_irecv = exchanged  # type: ignore[assignment]
