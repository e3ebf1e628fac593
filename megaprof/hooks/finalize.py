"""The gradient finalisation of a step (data-parallel reduction, embedding all-reduce): a range while a call records."""

from __future__ import annotations

from functools import partial
from typing import Any

from megaprof.formats import codes
from megaprof.hooks.dispatch import Dispatcher, always, ranged
from megaprof.parallel.chunks import innermost


def patch_finalize(dispatcher: Dispatcher, chunks: tuple[Any, ...]) -> None:
    """Hook ``config.finalize_model_grads_func`` of the model that a call runs.

    Hosts set it on the config (after hooks may have gone in, or for every ``train()`` anew), and the schedules read it
    from there at the end of a step (0.12 to 0.19): so it is hooked per recorded call, and put back when the call ends.
    """
    config = getattr(innermost(chunks[0]), "config", None) if chunks else None
    if config is not None and hasattr(config, "__dict__"):
        finalize = "finalize_model_grads_func"
        wrap = partial(ranged, dispatcher=dispatcher, code_of=always(codes.FINALIZE), fast=(codes.FINALIZE,))
        dispatcher.of_this_call.apply(config, finalize, wrap)
