"""Hooks on experts, which note how many tokens the experts of a rank get in a call that a window records.

The experts of a MoE layer have ``forward(hidden_states, tokens_per_expert, ...)`` (0.12 to 0.19), where the number of
tokens of each local expert is a small tensor. The hook keeps the tensor, which is read when the window is closed and
the device has finished.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.formats import ranges
from megaprof.formats.steps import codes
from megaprof.hooks.modules import compiled_in, sites
from megaprof.runtime.device import capturing
from megaprof.runtime.isolation import Contained

_COUNTS = "tokens_per_expert"


def patch_experts(dispatcher: Dispatcher, chunks: tuple[Any, ...]) -> None:
    """Notes how many tokens the experts of ``chunks`` get, until the call ends."""
    for chunk in chunks:
        compiled = compiled_in(chunk)
        for owner, method, name in sites(chunk, parts=True):
            read = ranges.parse(name)
            if isinstance(read, ranges.RangeName) and read.label == ranges.EXPERTS and id(owner) not in compiled:
                dispatcher.of_this_call.shadow(owner, method, partial(_watched, dispatcher))


def _watched(dispatcher: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = dispatcher.call
        # A forward that a backward recomputes was already counted.
        if call is not None and call.ranged and call.tape.now & codes.KIND_MASK != codes.BACKWARD and not capturing():
            with Contained("counting the tokens of experts", dispatcher.drop):
                counts = args[1] if len(args) > 1 else kwargs.get(_COUNTS)
                if counts is not None:
                    call.experts.append(counts)
        return original(*args, **kwargs)

    return watched
