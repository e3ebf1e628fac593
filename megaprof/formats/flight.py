"""A dump of torch's flight recorder: the collectives that a process has called, and its process groups.

torch's watchdog writes one when a collective times out, and `recorders.flight` asks for one while the process runs.
Formats: torch 2.5 and later (``FlightRecorder`` in torch/csrc/distributed/c10d, version 2.4 of the dump and later).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec

#: ``nccl:send 0->1``, ``nccl:recv 1<-0``: positions in the group, the process's own position first.
EXCHANGE = re.compile(r"(?P<what>send|recv) \d+(->|<-)(?P<peer>\d+)")


class Call(msgspec.Struct, gc=False):
    """A collective, or one side of an exchange, that the process has called. It needs no garbage collection (``gc``):
    it refers to nothing that refers back to it."""

    process_group: tuple[str, str]
    """The group's name, the same on all of its ranks, and what its maker called it."""
    collective_seq_id: int
    """Its number among the collectives of the group, from 1; for an exchange, how many of them came before."""
    profiling_name: str
    """Its name, such as ``nccl:all_reduce``."""
    time_created_ns: int
    """When the process called it, by the wall clock."""
    state: str
    """``scheduled``, ``started`` or ``completed``, when torch last asked the device."""
    retired: bool
    """True if torch watches it no more, because it has ended."""
    record_id: int
    """Its number among all that the process has called, from 0."""
    is_p2p: bool = False
    """True if it is one side of an exchange, or a batch of exchanges."""
    p2p_seq_id: int = 0
    """The number of the last exchange, or batch of exchanges, that the process has called in the group."""
    duration_ms: float | None = None
    """Milliseconds that its kernel ran, including waits; only with ``TORCH_NCCL_ENABLE_TIMING=1``, once it has ended.
    (The other times in a dump are those at which torch's watchdog looked, ten times a second.)"""

    @property
    def ended(self) -> bool:
        """True if it is over on this rank."""
        return self.retired or self.state == "completed"

    @property
    def batch(self) -> tuple[str, int, int]:
        """What the calls of a batch share, and no other calls."""
        return self.process_group[0], self.collective_seq_id, self.p2p_seq_id


class Entry(Call):
    """A call with its inputs."""

    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


_C = TypeVar("_C", bound=Call)


def settled(calls: Iterable[_C]) -> list[_C]:
    """Returns ``calls``, which are in order, with the states of their batches.

    torch leaves the calls of a batch ``scheduled`` for ever (``batch_isend_irecv``, Megatron's default). It keeps their
    state in the entry ``nccl:coalesced`` behind them (pytorch/pytorch#137969), which is left out here if a call of the
    batch is among ``calls``."""
    batches: dict[tuple[str, int, int], list[_C]] = {}
    kept = []
    for call in calls:
        members = batches.setdefault(call.batch, [])
        if members and call.profiling_name.endswith("coalesced"):
            for member in members:
                member.state, member.retired, member.duration_ms = call.state, call.retired, call.duration_ms
        else:
            members.append(call)
            kept.append(call)
    return kept


class GroupConfig(msgspec.Struct):
    """A process group of the process."""

    desc: str
    """The name that its maker gave it, such as Megatron's ``TENSOR_MODEL_PARALLEL_GROUP``."""
    ranks: str
    """Its ranks, in its own order, such as ``[0, 4]``."""


class GroupStatus(msgspec.Struct):
    """The progress of a process group."""

    last_enqueued_collective: int
    """The number of the last operation that was called."""


class Flight(msgspec.Struct):
    """The dump of one process."""

    version: str | int
    entries: list[Entry] = []
    """Its calls, as far back as torch's ring buffer goes; torch leaves an empty list out."""
    pg_config: dict[str, GroupConfig] = {}
    """Its groups by name; none if the backend does not say (gloo)."""
    pg_status: dict[str, GroupStatus] = {}
    """The progress of each group, by number, in the order in which the groups were made."""
