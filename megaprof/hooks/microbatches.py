"""Hooks on the functions that a schedule calls per microbatch: one range each, while a window is open."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from megaprof.formats import codes
from megaprof.hooks.dispatch import Code, Dispatcher, always, ranged
from megaprof.hooks.patching import Patches
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.line import Line


def patch_microbatches(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hook ``forward_step`` and ``backward_step`` (looked up as module globals by the schedules, 0.12 to 0.19),
    ``backward_step_multimodule`` (0.19) and ``combined_forward_backward_step`` (0.14+)."""
    from megatron.core.pipeline_parallel import schedules

    patches.apply(schedules, "forward_step", lambda original: _forward(original, dispatcher))
    patches.apply(schedules, "backward_step", lambda original: _backward(original, dispatcher))
    patches.apply(schedules, "backward_step_multimodule", lambda original: _backward(original, dispatcher))
    try:
        from megatron.core.pipeline_parallel import combined_1f1b
    except ImportError:
        return
    patches.apply(combined_1f1b, "combined_forward_backward_step", lambda original: _combined(original, dispatcher))


def _forward(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    return ranged(original, dispatcher, _position(original, "model", codes.FORWARD), _produced)


def _backward(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    output = _argument(original, "output_tensor")
    return ranged(original, dispatcher, lambda call, args, kwargs: codes.BACKWARD | call.consumed(output(args, kwargs)))


def _combined(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    """Either half may be absent: the first call of a step only runs forward, the last one only backward."""
    forward_model, backward_model = _argument(original, "f_model"), _argument(original, "b_model")
    position, output = _position(original, "f_model", 0), _argument(original, "b_output_tensor")

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        call.forward = None if forward_model(args, kwargs) is None else position(call, args, kwargs)
        if backward_model(args, kwargs) is None:
            return codes.FORWARD | (call.forward or 0)
        backward = call.consumed(output(args, kwargs))
        return codes.BACKWARD | backward if call.forward is None else codes.combined(call.forward, backward)

    return ranged(original, dispatcher, code, _produced)


def _produced(call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
    return call.produced(result)


def probe(line: Line, phases: int) -> None:
    """Record ``phases`` of nothing in ``line``, through the hooks that the schedule's go through: a forward, a backward
    and two exchanges in turns, as a stage in the middle of a pipeline has them. A multiple of four."""
    dispatcher = Dispatcher()
    step = idle_step(dispatcher)
    dispatcher.call = RecordedCall(
        CallFacts(None, False, False, None, None, None, (step.model,)), nullcontext(), line=line
    )
    step.run(phases // 4)


@dataclass(frozen=True)
class IdleStep:
    """The functions of a schedule, hooked, with nothing inside: what they take is what hooks cost."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    exchange: Callable[..., Any]
    model: object

    def run(self, microbatches: int) -> None:
        forward, backward, exchange, model = self.forward, self.backward, self.exchange, self.model
        for microbatch in range(microbatches):
            output = forward(_no_forward, None, model, microbatches, current_microbatch=microbatch)
            exchange()
            backward(None, output, None)
            exchange()


def idle_step(dispatcher: Dispatcher) -> IdleStep:
    exchange = always(codes.exchange("send_forward_recv_backward"))
    return IdleStep(
        _forward(_no_forward, dispatcher),
        _backward(_no_backward, dispatcher),
        ranged(_no_exchange, dispatcher, exchange),
        object(),
    )


def _no_forward(step: object, data: object, model: object, microbatches: int, current_microbatch: int) -> object:
    return step


def _no_backward(input_tensor: object, output_tensor: object, gradient: object) -> None: ...


def _no_exchange() -> None: ...


def _argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A reader of one argument of ``function``'s calls, however it is passed; None where it is not passed."""
    index = _place(function, name)
    return lambda args, kwargs: args[index] if index < len(args) else kwargs.get(name)


def _place(function: Callable[..., Any], name: str) -> int:
    """Which positional argument ``name`` is; one that no call can have when it is none."""
    parameters = list(inspect.signature(function).parameters)
    return parameters.index(name) if name in parameters else sys.maxsize


def _position(function: Callable[..., Any], model_name: str, kind: int) -> Code:
    """``kind``, and the microbatch and model chunk that a call of ``function`` runs forward; the call keeps those."""
    model, microbatch = _place(function, model_name), _place(function, "current_microbatch")

    def read(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        # Written out, as in `ranged`.
        chunk = args[model] if model < len(args) else kwargs.get(model_name)
        number = args[microbatch] if microbatch < len(args) else kwargs.get("current_microbatch")
        call.forward = position = call.chunks.get(id(chunk), 0) | codes.of_microbatch(number)
        return kind | position

    return read
