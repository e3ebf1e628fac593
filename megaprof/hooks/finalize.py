"""Puts a range around the gradient finalisation of a recorded call (data-parallel reduction, embedding all-reduce)."""

from __future__ import annotations

import functools

from megaprof.capture.dispatcher import Dispatcher
from megaprof.formats.steps import codes
from megaprof.hooks.dispatch import always, ranged

_FINALIZE = "finalize_model_grads_func"


def patch_finalize(dispatcher: Dispatcher) -> None:
    """Hooks ``config.finalize_model_grads_func`` of the model that the call runs.

    Hosts set it on the config, possibly after the hooks were installed, or anew for every ``train()``. The schedules
    read it from there at the end of a step (0.12 to 0.19). So it is hooked for each recorded call, and put back when
    the call ends.
    """
    config = getattr(dispatcher.models[0], "config", None) if dispatcher.models else None
    original = getattr(config, "__dict__", {}).get(_FINALIZE)
    if original is None:
        return
    if dispatcher.finalize is None or dispatcher.finalize[0] is not original:  # made only once, not in every step
        hook = ranged(original, dispatcher, always(codes.FINALIZE), fast=(codes.FINALIZE,))
        dispatcher.finalize = original, functools.wraps(original)(hook)
    dispatcher.of_this_call.put(config, _FINALIZE, *dispatcher.finalize)
