"""Hooks on the exchanges between stages, which put a range around each exchange and around the wait for an overlapped
one.

The calls do not say which microbatch and chunk they exchange. But a stage always sends the result of the pass that ran
last, and receives the input of the next pass in the schedule's order.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.formats import ranges
from megaprof.formats.ranges import Place
from megaprof.formats.steps import codes
from megaprof.hooks.dispatch import always, ranged
from megaprof.parallel.chunks import innermost
from megaprof.parallel.schedules import EXCHANGES, RECEIVES, SENDS, PipelineSchedule, backward_order, forward_order
from megaprof.recorders.call import RecordedCall
from megaprof.runtime.patching import Patches

_UNKNOWN: Place = None, None


def patch_p2p(patches: Patches, dispatcher: Dispatcher) -> None:
    """Hooks the methods of ``P2PCommunicator`` (0.14+) or the functions of ``p2p_communication`` (up to 0.13).

    Up to 0.13 the non-interleaved schedule has functions of its own that call these, so hooking both would write every
    range twice. Also hooks the methods of ``BridgeCommunicator``, which exchanges between two modules. If the schedule
    uses it, megatron-core has imported it already (0.19).
    """
    from megatron.core.pipeline_parallel import p2p_communication

    owners = [getattr(p2p_communication, "P2PCommunicator", p2p_communication)]
    between_modules = sys.modules.get("megatron.core.pipeline_parallel.bridge_communicator")
    if between_modules is not None:
        owners.append(between_modules.BridgeCommunicator)
    after = partial(_range_waits, dispatcher)
    for operation in ranges.P2P_OPERATIONS:
        code = codes.exchange(operation)
        fast = (code, (-1, None), (-1, None), "overlap_p2p_comm")
        named = partial(_name, operation, EXCHANGES[operation])
        wrap = partial(ranged, dispatcher=dispatcher, code_of=always(code), after=after, fast=fast, name_of=named)
        for owner in owners:
            patches.apply(owner, operation, wrap)


def _name(label: str, transfers: tuple[str, ...], call: RecordedCall) -> str:
    """Returns the name of a range in which each direction transfers the input or the result of a pass."""
    return ranges.exchange_range(
        label,
        *(
            _sent(call, kind) if SENDS[kind] in transfers and _ran(call, kind) else _awaited(call, kind)
            for kind in SENDS
            if {SENDS[kind], RECEIVES[kind]} & set(transfers)
        ),
    )


def _ran(call: RecordedCall, kind: str) -> int:
    """Returns how many forwards or backwards have run."""
    return call.forwards if kind == "forward" else call.backwards


def _sent(call: RecordedCall, kind: str) -> Place:
    """Returns the microbatch and chunk of the forward or backward that ran last, whose result is sent."""
    return codes.place((call.tape.forward or 0) if kind == "forward" else call.backward)


def _awaited(call: RecordedCall, kind: str) -> Place:
    """Returns the microbatch and chunk of the forward or backward that is next in the schedule's order, whose input is
    received."""
    facts = call.facts
    if facts.microbatches is None or facts.schedule is None:
        return _UNKNOWN
    config = getattr(innermost(facts.chunks[0]), "config", None) if facts.chunks else None
    stages = getattr(config, "pipeline_model_parallel_size", None) or 1
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
    schedule = PipelineSchedule(facts.schedule, stages, len(facts.chunks), facts.microbatches, group)
    order, done = (forward_order if kind == "forward" else backward_order)(schedule), _ran(call, kind)
    return (order[done].microbatch, order[done].chunk) if done < len(order) else _UNKNOWN


def _range_waits(dispatcher: Dispatcher, call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
    """Returns the result of an exchange, with a range for the wait on each handle in it. With ``overlap_p2p_comm`` an
    exchange returns ``(tensors..., {operation: handle})``, and the schedule waits on each handle when it needs it (0.12
    to 0.19)."""
    if not kwargs.get("overlap_p2p_comm") or not isinstance(result, tuple) or not isinstance(result[-1], dict):
        return result
    waits = {name: _RangedWait(dispatcher, handle, name, call) for name, handle in result[-1].items()}
    return (*result[:-1], waits)


class _RangedWait:
    """A ``torch.distributed.Work`` whose ``wait`` has a range. It passes everything else on to the handle."""

    def __init__(self, dispatcher: Dispatcher, handle: Any, transfer: str, call: RecordedCall) -> None:
        """``transfer``: which of the transfers of `SendReceive` the handle is for. The exchange is in ``call``."""
        self._handle = handle
        code = codes.wait(transfer)
        sent = next((_sent(call, kind) for kind in SENDS if SENDS[kind] == transfer), None)
        label = str(codes.name(code)).removeprefix(ranges.PREFIX)

        def name_of(call: RecordedCall) -> str:
            """Returns the range's name. A send's pass is known when it is sent, a receive's when it is waited for."""
            return _name(label, (transfer,), call) if sent is None else ranges.exchange_range(label, sent)

        self.wait = ranged(handle.wait, dispatcher, always(code), fast=(code,), name_of=name_of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
