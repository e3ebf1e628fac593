"""Records the steps of a trainer without a pipeline: one whole model, with a forward and a backward per microbatch.

The hooks on Megatron's schedules find out by themselves what runs. Here, code that knows the trainer has to say it:
either a callback calls `PlainSteps`, or a `Batch` describes the trainer's function that runs the microbatches of a
step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megaprof.capture.bounds import capturing
from megaprof.capture.process import process
from megaprof.capture.profiler import Dispatcher
from megaprof.capture.roles import evaluating
from megaprof.config.values import EVALUATE, TRAIN_ACTOR, TRAIN_LOG_PROBS
from megaprof.formats import codes
from megaprof.formats.facts import MASK, POSITIONS
from megaprof.hooks.dispatch import ranged, stepped
from megaprof.hooks.modules import patch_models
from megaprof.recorders.call import MOST_SEQUENCES, Batch, CallFacts, RecordedCall
from megaprof.runtime.armed import armed
from megaprof.runtime.isolation import Contained


def batched(batch: Batch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``original``, a method that ``batch`` describes, recorded as a call of a schedule without a pipeline."""
    signature = inspect.signature(original)

    def runs_batch(*args: Any, **kwargs: Any) -> Any:
        if armed.awaits_batch:
            armed.awaits_batch = not armed.install(pipeline=False)
        prepare = partial(_prepare, batch, process.dispatcher, args)
        return stepped(original, process.dispatcher, facts, prepare)(*args, **kwargs)

    def facts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFacts:
        arguments = signature.bind(*args, **kwargs).arguments
        return PlainSteps(batch.model(args[0]), forward_only=batch.forward_only(arguments)).facts

    return runs_batch


def _prepare(batch: Batch, dispatcher: Dispatcher, args: tuple[Any, ...], call: RecordedCall, _: Any) -> None:
    """Hooks the forwards and backwards of a call until it ends, so that they are recorded as passes."""
    import torch

    (model,) = call.facts.chunks
    steps = PlainSteps(model, forward_only=call.facts.forward_only)
    # First, so that the pass is around it.
    patch_models(dispatcher, call, lambda bound: partial(_takes_rows, dispatcher, bound))
    owner, name = (model, "forward") if batch.forward is None else (args[0], batch.forward)
    dispatcher.of_this_call.shadow(owner, name, steps.forward)
    if not call.facts.forward_only:
        dispatcher.of_this_call.apply(torch.autograd, "backward", steps.backward)


def _takes_rows(dispatcher: Dispatcher, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for a method of a model, and notes its mask or positions, which show the lengths of its sequences."""
    call = dispatcher.call
    if call is not None and call.tape.forward is not None:
        with Contained("looking at a microbatch", dispatcher.drop):
            if not capturing() and (inputs := _inputs_of(*args[:1], **kwargs)) is not None:
                call.tape.given.append((call.tape.forward, *inputs))
    return original(*args, **kwargs)


def _inputs_of(
    input_ids: Any = None, *, attention_mask: Any = None, position_ids: Any = None, **others: Any
) -> tuple[Any, ...] | None:
    """Returns the tensors and sizes from which `recorders.call` reads the lengths later; None if the arguments show
    none. Takes a few operations on the model's own device, and does not wait for them."""
    import torch

    shape = getattr(input_ids, "shape", None)
    with torch.no_grad():
        if getattr(attention_mask, "ndim", 0) == 2:
            return MASK, attention_mask.sum(-1), attention_mask.numel()
        if getattr(position_ids, "ndim", 0) in (2, 3):
            rows = position_ids if position_ids.ndim == 2 else position_ids[0]  # the first axis of a picture's
            begins = rows == 0
            begins[:, 0] = True
            count, places = rows.numel(), torch.arange(rows.numel(), device=rows.device)
            first = torch.where(begins.reshape(-1), places, count).sort().values
            return POSITIONS, first[: MOST_SEQUENCES + 1], count
    return None if shape is None else (shape,)


class PlainSteps:
    """Steps of one model. What ``forward`` and ``backward`` wrap are the passes of a step's microbatches, in turn. A
    callback calls ``begin`` and ``end`` for each step."""

    def __init__(self, model: Any, microbatches: int | None = None, *, forward_only: bool = False) -> None:
        """``microbatches``: the number of microbatches that a step accumulates before the optimizer's step; None if
        they are to be counted. The hooks must be installed already."""
        passes = EVALUATE if evaluating() else TRAIN_LOG_PROBS
        self.facts = CallFacts(
            target=passes if forward_only else TRAIN_ACTOR,
            schedule="no_pipelining",
            forward_only=forward_only,
            microbatches=microbatches,
            chunks=(model,),
        )
        self._dispatcher = process.dispatcher
        self._begun = False
        self._backward_runs = False
        self._microbatch = 0

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``original``, which runs one microbatch forward, inside a range."""

        def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            return codes.FORWARD | int(call.tape.position(self.facts.chunks[0], self._microbatch))

        def produced(call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
            if self.facts.microbatches is None:
                call.facts = call.facts._replace(microbatches=self._microbatch + 1)
            self._microbatch += self.facts.forward_only
            return call.tape.produced(result)

        return ranged(original, self._dispatcher, code, produced)

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``original``, which runs that microbatch backward, inside a range. A nested call gets no range of its
        own: activation checkpointing runs a part of the model forward again, and then calls this for its backward."""

        def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            return codes.phase(codes.BACKWARD, self._microbatch, 0)

        hooked = ranged(original, self._dispatcher, code)

        def outermost(*args: Any, **kwargs: Any) -> Any:
            if self._backward_runs:
                return original(*args, **kwargs)
            self._backward_runs = True
            try:
                result = hooked(*args, **kwargs)
                self._microbatch += 1
                return result
            finally:
                self._backward_runs = False

        return outermost

    def begin(self) -> None:
        """Begins a step. If the step before it was not ended, it counts as failed."""
        self.end(failed=True)
        self._microbatch = 0
        with Contained("looking at a step", self._dispatcher.drop):
            call, self._begun = self._dispatcher.begin(self.facts), True
            if call is not None:
                patch_models(self._dispatcher, call, lambda bound: partial(_takes_rows, self._dispatcher, bound))

    def end(self, *, failed: bool = False) -> None:
        """Ends a step, whose passes are all done. A no-op outside a step."""
        if self._begun:
            self._begun = False
            with Contained("closing a window", self._dispatcher.drop):
                self._dispatcher.end(failed=failed)
