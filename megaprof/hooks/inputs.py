"""Hooks on what a recorded call is given: the lengths of its models' sequences, the tokens of each expert, and how long
each forward waits for its data.

The experts of a MoE layer have ``forward(hidden_states, tokens_per_expert, ...)`` (0.12 to 0.19), where the number of
tokens of each local expert is a small tensor. The hook keeps the tensor, which is read when the window is closed and
the device has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megaprof.capture.bounds import capturing
from megaprof.capture.profiler import Dispatcher
from megaprof.formats import codes, ranges
from megaprof.formats.facts import MASK, POSITIONS
from megaprof.hooks.dispatch import argument, given, ranged
from megaprof.hooks.modules import compiled_in, is_compiled, sites
from megaprof.parallel.megatron import innermost
from megaprof.recorders.call import MOST_SEQUENCES, CallFacts, RecordedCall
from megaprof.recorders.tape import Hook
from megaprof.runtime.isolation import Contained, contained

_PACKED, _TOKENS = "packed_seq_params", "input_ids"


def patch_models(dispatcher: Dispatcher, facts: CallFacts) -> None:
    """Notes what the models of a call get, until the call ends. Leaves out models that torch.compile compiles, because
    a replaced ``forward`` would be compiled again."""
    for chunk, model in zip(facts.chunks, dispatcher.models, strict=True):
        if is_compiled(model) or (chunk is not model and is_compiled(chunk)) or not hasattr(model, "__dict__"):
            continue
        # The combined 1F1B schedule has a model plan its forward, and calls the parts of the plan (0.14 to 0.19).
        combined = getattr(getattr(model, "config", None), "overlap_moe_expert_parallel_comm", False)
        method = "build_schedule_plan" if combined and not facts.forward_only else "forward"
        if hasattr(type(model), method):  # `torch.nn.Module.__getattr__` is slow for attributes that do not exist
            dispatcher.of_this_call.shadow(model, method, partial(_watched, dispatcher))


def _watched(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    packed, tokens = (argument(getattr(original, "__func__", original), name) for name in (_PACKED, _TOKENS))

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if (call := dispatcher.call) is not None:
            try:
                call.tape.takes(given(packed, args, kwargs), given(tokens, args, kwargs))
            except BaseException as fault:
                if not contained("looking at a microbatch", dispatcher.drop, fault):
                    raise
        return result

    return watched if Hook is None else Hook(dispatcher.gate, original, watched, codes.MODEL, packed, tokens)


def patch_plain_model(dispatcher: Dispatcher, model: Any) -> None:
    """Notes what ``model`` gets, until the call ends. It has no packed sequences of Megatron's: its mask or positions
    show the lengths."""
    inner = innermost(model)
    if not is_compiled(model) and not is_compiled(inner):
        dispatcher.of_this_call.shadow(inner, "forward", partial(_seen, dispatcher))


def _seen(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def seen(*args: Any, **kwargs: Any) -> Any:
        call = dispatcher.call
        if call is not None and call.tape.forward is not None:
            try:
                if not capturing() and (inputs := _inputs_of(*args[:1], **kwargs)) is not None:
                    call.tape.given.append((call.tape.forward, *inputs))
            except BaseException as fault:
                if not contained("looking at a microbatch", dispatcher.drop, fault):
                    raise
        return original(*args, **kwargs)

    return seen


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


_COUNTS = 1, "tokens_per_expert"


def patch_experts(dispatcher: Dispatcher, chunks: tuple[Any, ...]) -> None:
    """Notes how many tokens the experts of ``chunks`` get, until the call ends."""
    for chunk in chunks:
        compiled = compiled_in(chunk)
        for owner, method, name in sites(chunk, parts=True):
            read = ranges.parse(name)
            if isinstance(read, ranges.RangeName) and read.label == ranges.EXPERTS and id(owner) not in compiled:
                dispatcher.of_this_call.shadow(owner, method, partial(_counted, dispatcher))


def _counted(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = dispatcher.call
        # A forward that a backward recomputes was already counted.
        if call is not None and call.ranged and call.tape.now & codes.KIND_MASK != codes.BACKWARD and not capturing():
            with Contained("counting the tokens of experts", dispatcher.drop):
                if (counts := given(_COUNTS, args, kwargs)) is not None:
                    call.experts.append(counts)
        return original(*args, **kwargs)

    return watched


_ITERATOR = "data_iterator"


def watch_data(dispatcher: Dispatcher, arguments: dict[str, Any]) -> None:
    """Watches the data iterators among the arguments of a recorded call, for that call only: one, or one for each model
    chunk. A stage without data has None. What is no plain iterator is passed on as it is."""

    def code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        tape = call.tape
        # Without a timeline, nothing says when a forward has ended.
        inside = not call.timed or tape.now & codes.KIND_MASK in (codes.FORWARD, codes.COMBINED)
        return codes.DATA | (tape.forward or 0) * inside

    def watched(iterator: Any) -> Any:
        kind = type(iterator)
        if not hasattr(kind, "__next__") or hasattr(kind, "__getitem__") or callable(iterator):
            return iterator
        return Watched(iterator, ranged(partial(next, iterator), dispatcher, code, fast=(codes.DATA,)))

    if (source := arguments.get(_ITERATOR)) is not None:
        arguments[_ITERATOR] = [watched(each) for each in source] if type(source) is list else watched(source)


class Watched:
    """Stands for an iterator in a call. It has the iterator's attributes and class, and its ``next`` is ``hook``.

    ``next`` is a slot, so Python finds the hook without running any Python code: a method would take several times as
    long. Nothing of the iterator itself is changed, and whoever else holds it is not watched.
    """

    __slots__ = ("__next__", "__weakref__", "_iterator")

    def __init__(self, iterator: Any, hook: Any) -> None:
        object.__setattr__(self, "_iterator", iterator)
        object.__setattr__(self, "__next__", hook)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __bool__(self) -> bool:
        return bool(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._iterator, name, value)
