"""Hooks on the functions that a schedule calls for each microbatch. Each call has a range while a window is open."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.formats.steps import codes
from megaprof.hooks.dispatch import Code, ranged
from megaprof.recorders.call import RecordedCall
from megaprof.runtime.patching import Patches


def patch_microbatches(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hooks ``forward_step`` and ``backward_step`` (which the schedules look up as module globals, 0.12 to 0.19),
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
    places = (_place(original, "model"), "model"), (_place(original, "current_microbatch"), "current_microbatch")
    position = _position(original, "model", codes.FORWARD)

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        encoded: int = position(call, args, kwargs)
        call.forwards += call.ranged
        return encoded

    return ranged(original, dispatcher, code, _produced, fast=(codes.FORWARD, *places))


def _backward(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    output = _argument(original, "output_tensor")

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return codes.BACKWARD | _begin_backward(call, output(args, kwargs))

    place = _place(original, "output_tensor"), "output_tensor"
    return ranged(original, dispatcher, code, fast=(codes.BACKWARD, place))


def _combined(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    """Returns the hook of a combined forward and backward. Either may be missing: the first call of a step runs only a
    forward, and the last one only a backward."""
    forward_model, backward_model = _argument(original, "f_model"), _argument(original, "b_model")
    position, output = _position(original, "f_model", 0), _argument(original, "b_output_tensor")

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        call.tape.forward = None if forward_model(args, kwargs) is None else position(call, args, kwargs)
        call.forwards += call.tape.forward is not None
        if backward_model(args, kwargs) is None:
            return codes.FORWARD | (call.tape.forward or 0)
        backward = _begin_backward(call, output(args, kwargs))
        return codes.BACKWARD | backward if call.tape.forward is None else codes.combined(call.tape.forward, backward)

    return ranged(original, dispatcher, code, _produced)


def _produced(call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
    return call.tape.produced(result)


def _begin_backward(call: RecordedCall, output: Any) -> int:
    """Returns the part of a code that has the microbatch and chunk of a backward that begins. The call keeps it."""
    call.backwards += 1
    call.backward = int(call.tape.consumed(output))
    return call.backward


def _argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a function that reads one argument of a call of ``function``, however it is passed. It returns None if
    the argument is not passed."""
    index = _place(function, name)
    return lambda args, kwargs: args[index] if index < len(args) else kwargs.get(name)


def _place(function: Callable[..., Any], name: str) -> int:
    """Returns the position of argument ``name``, or an impossible position if there is no such argument."""
    parameters = list(inspect.signature(function).parameters)
    return parameters.index(name) if name in parameters else sys.maxsize


def _position(function: Callable[..., Any], model_name: str, kind: int) -> Code:
    """Returns a function that makes a code of ``kind`` with the microbatch and chunk of a call of ``function``. The
    tape keeps both."""
    model, microbatch = _argument(function, model_name), _argument(function, "current_microbatch")
    return lambda call, args, kwargs: kind | call.tape.position(model(args, kwargs), microbatch(args, kwargs))
