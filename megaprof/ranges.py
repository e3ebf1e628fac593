"""Range names: one grammar, written by the hooks and parsed back by the analysis.

The same name goes to NVTX (domain ``megaprof``) and to the torch trace::

    megaprof/train_actor step=12 pp=1 tp=0 cp=0 ep=0 dp=0     the outermost range, one per schedule call
    megaprof/forward mb=3 chunk=0                             one microbatch on one model chunk
    megaprof/backward mb=3 chunk=0
    megaprof/combined mb=4 chunk=0 bmb=3 bchunk=0             combined 1F1B: forward of one, backward of another
    megaprof/recv_forward                                     a pipeline exchange, named as Megatron names it

A label and ``key=value`` fields, separated by single spaces. A value that is not known is ``?``: it is read back as
``None`` and never as a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaprof.topology import RankCoords

PREFIX = "megaprof/"
DOMAIN = "megaprof"

FORWARD = "forward"
BACKWARD = "backward"
COMBINED = "combined"
FINALIZE_GRADS = "finalize_grads"

#: Megatron's exchanges between stages, in every version from 0.12: functions of ``p2p_communication`` up to 0.13,
#: methods of ``P2PCommunicator`` from 0.14.
P2P_OPERATIONS = (
    "recv_forward",
    "recv_backward",
    "send_forward",
    "send_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)
#: Prefix of the range in which an overlapped exchange (``overlap_p2p_comm``) is waited for, e.g. ``wait_recv_prev``.
WAIT = "wait_"

_UNKNOWN = "?"
_LABEL = re.compile(r"[^\s=/][^\s=]*")


@dataclass(frozen=True)
class RangeName:
    """A parsed range name: ``label`` and its integer fields (``None`` where the writer did not know)."""

    label: str
    fields: dict[str, int | None]

    @property
    def is_p2p(self) -> bool:
        return self.label in P2P_OPERATIONS or self.label.startswith(WAIT)


def step_range(target: str, step: int, coords: RankCoords) -> str:
    """Name of the outermost range of one schedule call."""
    c = coords
    return f"{PREFIX}{target} step={step} pp={c.pp} tp={c.tp} cp={c.cp} ep={c.ep} dp={c.dp}"


def phase_range(phase: str, microbatch: int | None, chunk: int | None) -> str:
    """Name of one microbatch's forward or backward on one model chunk."""
    return f"{PREFIX}{phase} mb={_value(microbatch)} chunk={_value(chunk)}"


def combined_range(forward: tuple[int | None, int | None], backward: tuple[int | None, int | None]) -> str:
    """Name of a combined-1F1B step: ``(microbatch, chunk)`` of its forward and of its backward."""
    mb, chunk = map(_value, forward)
    bmb, bchunk = map(_value, backward)
    return f"{PREFIX}{COMBINED} mb={mb} chunk={chunk} bmb={bmb} bchunk={bchunk}"


def operation_range(operation: str) -> str:
    """Name of a range without fields: a pipeline exchange, a wait, the gradient finalisation."""
    return PREFIX + operation


def parse(name: str) -> RangeName | None:
    """Read a range name back; ``None`` when ``name`` is not one of ours (never raises)."""
    if not name.startswith(PREFIX):
        return None
    label, *rest = name[len(PREFIX) :].split(" ")
    if not _LABEL.fullmatch(label):
        return None
    fields: dict[str, int | None] = {}
    for part in rest:
        key, separator, value = part.partition("=")
        if not separator or not key or key in fields:
            return None
        if value == _UNKNOWN:
            fields[key] = None
        elif value.isascii() and value.isdigit() and len(value) < 19:
            fields[key] = int(value)
        else:
            return None
    return RangeName(label, fields)


def _value(number: int | None) -> str:
    return _UNKNOWN if number is None else str(number)
