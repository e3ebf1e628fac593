"""Hooks on the exchanges between stages: a range around each, and around the wait for an overlapped one."""

from __future__ import annotations

from functools import partial
from typing import Any

from megaprof.formats import codes, ranges
from megaprof.hooks.dispatch import Dispatcher, always, ranged
from megaprof.hooks.patching import Patches
from megaprof.recorders.call import RecordedCall
from megaprof.recorders.emit import Range


def patch_p2p(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hook ``P2PCommunicator``'s methods (0.14+) or the functions of ``p2p_communication`` (up to 0.13).

    Up to 0.13 the non-interleaved schedule goes through functions of its own that call these, so hooking both would
    write every range twice.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    owner = getattr(p2p_communication, "P2PCommunicator", p2p_communication)
    for operation in ranges.P2P_OPERATIONS:
        code = codes.exchange(operation)
        fast = (code, (-1, None), (-1, None), "overlap_p2p_comm")
        wrap = partial(ranged, dispatcher=dispatcher, code_of=always(code), after=_range_waits, fast=fast)
        patches.apply(owner, operation, wrap)


def _range_waits(call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
    """An exchange with ``overlap_p2p_comm`` returns ``(tensors..., {operation: handle})``, and the schedule waits on
    each handle when it needs it (0.12 to 0.19): give each wait a range. Anything else is returned as it came."""
    if not kwargs.get("overlap_p2p_comm") or not isinstance(result, tuple) or not isinstance(result[-1], dict):
        return result
    return (*result[:-1], {operation: _RangedWait(call, handle, operation) for operation, handle in result[-1].items()})


class _RangedWait:
    """A ``torch.distributed.Work`` whose ``wait`` is a range. Everything else is the handle's own."""

    def __init__(self, call: RecordedCall, handle: Any, operation: str) -> None:
        self._call = call
        self._handle = handle
        self._operation = operation

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self._call.line is None:
            return self._wait(*args, **kwargs)
        tape = self._call.tape
        tape.now = code = codes.wait(self._operation)
        began = tape.mark()
        try:
            return self._wait(*args, **kwargs)
        finally:
            tape.add(code, began, tape.mark())
            tape.now = 0

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        if not self._call.ranged:
            return self._handle.wait(*args, **kwargs)
        with Range(ranges.operation_range(ranges.WAIT + self._operation)):
            return self._handle.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
