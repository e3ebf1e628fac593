"""Hooks on the functions that a schedule calls per microbatch: one range each, while a window is open."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from megaprof import ranges
from megaprof.hooks.dispatch import Dispatcher, Event, always, ranged
from megaprof.hooks.patching import Patches
from megaprof.recorders.timeline import Line
from megaprof.session import Call, CallFacts, Position
from megaprof.timeline import codes


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
    position = _position(original, "model")

    def match(call: Call, where: Position, kwargs: dict[str, Any], result: Any) -> Any:
        call.produced(_output(result), where)
        return result

    return ranged(original, dispatcher, Event(position, *_phase(ranges.FORWARD, codes.FORWARD), match))


def _backward(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    output = _argument(original, "output_tensor")

    def position(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Position:
        return call.consumed(output(args, kwargs))

    return ranged(original, dispatcher, Event(position, *_phase(ranges.BACKWARD, codes.BACKWARD)))


def _combined(original: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    """Either half may be absent: the first call of a step only runs forward, the last one only backward."""
    forward_model, backward_model = _argument(original, "f_model"), _argument(original, "b_model")
    position, output = _position(original, "f_model"), _argument(original, "b_output_tensor")

    def halves(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Position | None, Position | None]:
        forward = None if forward_model(args, kwargs) is None else position(call, args, kwargs)
        backward = None if backward_model(args, kwargs) is None else call.consumed(output(args, kwargs))
        return forward, backward

    def name(both: tuple[Position | None, Position | None]) -> str:
        forward, backward = both
        if backward is None:
            return ranges.phase_range(ranges.FORWARD, *(forward or (None, None)))
        if forward is None:
            return ranges.phase_range(ranges.BACKWARD, *backward)
        return ranges.combined_range(forward, backward)

    def code(both: tuple[Position | None, Position | None]) -> int:
        forward, backward = both
        if backward is None:
            return codes.phase(codes.FORWARD, forward or (None, None))
        return codes.phase(codes.BACKWARD, backward) if forward is None else codes.combined(forward, backward)

    def match(call: Call, both: tuple[Position | None, Position | None], kwargs: dict[str, Any], result: Any) -> Any:
        if both[0] is not None:
            call.produced(_output(result), both[0])
        return result

    return ranged(original, dispatcher, Event(halves, name, code, match))


def probe(line: Line, phases: int) -> None:
    """Record ``phases`` of nothing in ``line``, through the hooks that the schedule's go through: a forward, a backward
    and two exchanges in turns, as a stage in the middle of a pipeline has them. A multiple of four."""
    dispatcher = Dispatcher()
    step = idle_step(dispatcher)
    dispatcher.call = Call(CallFacts(None, False, False, None, None, None, (step.model,)), nullcontext(), line=line)
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
    exchange = always("", codes.exchange("send_forward_recv_backward"))
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


def _phase(label: str, kind: int) -> tuple[Callable[[Position], str], Callable[[Position], int]]:
    return lambda position: ranges.phase_range(label, *position), lambda position: codes.phase(kind, position)


def _argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A reader of one argument of ``function``'s calls, however it is passed; None where it is not passed."""
    parameters = list(inspect.signature(function).parameters)
    index = parameters.index(name) if name in parameters else len(parameters)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[index] if index < len(args) else kwargs.get(name)

    return read


def _position(
    function: Callable[..., Any], model_name: str
) -> Callable[[Call, tuple[Any, ...], dict[str, Any]], Position]:
    """A reader of the microbatch and the model chunk that a call of ``function`` runs forward."""
    model, microbatch = _argument(function, model_name), _argument(function, "current_microbatch")

    def read(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Position:
        number = microbatch(args, kwargs)
        return None if number is None else int(number), call.chunk_of(model(args, kwargs))

    return read


def _output(result: Any) -> Any:
    """The output tensor: ``forward_step`` returns it alone, or with the number of tokens behind it."""
    return result[0] if isinstance(result, tuple) and result else result
