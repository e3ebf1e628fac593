"""Hooks on the exchanges between stages: a range around each, and around the wait for an overlapped one."""

from __future__ import annotations

from functools import partial
from typing import Any

from megaprof.formats import codes, ranges
from megaprof.hooks.dispatch import Dispatcher, always, ranged
from megaprof.hooks.patching import Patches
from megaprof.recorders.call import RecordedCall


def patch_p2p(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hook ``P2PCommunicator``'s methods (0.14+) or the functions of ``p2p_communication`` (up to 0.13).

    Up to 0.13 the non-interleaved schedule goes through functions of its own that call these, so hooking both would
    write every range twice.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    owner = getattr(p2p_communication, "P2PCommunicator", p2p_communication)
    after = partial(_range_waits, dispatcher)
    for operation in ranges.P2P_OPERATIONS:
        code = codes.exchange(operation)
        fast = (code, (-1, None), (-1, None), "overlap_p2p_comm")
        wrap = partial(ranged, dispatcher=dispatcher, code_of=always(code), after=after, fast=fast)
        patches.apply(owner, operation, wrap)


def _range_waits(dispatcher: Dispatcher, call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
    """An exchange with ``overlap_p2p_comm`` returns ``(tensors..., {operation: handle})``, and the schedule waits on
    each handle when it needs it (0.12 to 0.19): give each wait a range. Anything else is returned as it came."""
    if not kwargs.get("overlap_p2p_comm") or not isinstance(result, tuple) or not isinstance(result[-1], dict):
        return result
    waits = {operation: _RangedWait(dispatcher, handle, operation) for operation, handle in result[-1].items()}
    return (*result[:-1], waits)


class _RangedWait:
    """A ``torch.distributed.Work`` whose ``wait`` is a range. Everything else is the handle's own."""

    def __init__(self, dispatcher: Dispatcher, handle: Any, operation: str) -> None:
        self._handle = handle
        code = codes.wait(operation)
        self.wait = ranged(handle.wait, dispatcher, always(code), fast=(code,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
