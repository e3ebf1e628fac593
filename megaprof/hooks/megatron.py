"""Installs all hooks on Megatron-Core."""

from __future__ import annotations

from megaprof.capture.dispatcher import Dispatcher
from megaprof.hooks.graphs import patch_graphs
from megaprof.hooks.microbatches import patch_microbatches
from megaprof.hooks.p2p import patch_p2p
from megaprof.hooks.schedules import patch_schedules
from megaprof.runtime.patching import Patches


def patch_megatron(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hooks the schedules and the functions that they call, until ``patches`` are undone."""
    patch_schedules(patches, dispatcher)
    patch_microbatches(patches, dispatcher)
    patch_p2p(patches, dispatcher)
    patch_graphs(patches, dispatcher)
