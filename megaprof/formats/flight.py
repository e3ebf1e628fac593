"""What torch's flight recorder keeps of a process: the collectives that it has called, and its process groups.

torch's watchdog writes it when a collective times out, and `recorders.flight` asks for it while the process runs.
Formats: torch 2.5 and later (``FlightRecorder`` in torch/csrc/distributed/c10d, version 2.4 of the dump and later).
"""

from __future__ import annotations

import re

import msgspec

#: ``nccl:send 0->1``, ``nccl:recv 1<-0``: places in the group, one's own first.
EXCHANGE = re.compile(r"(?P<what>send|recv) \d+(->|<-)(?P<peer>\d+)")


class Call(msgspec.Struct, gc=False):
    """A collective, or one side of an exchange, that the process has called. Python's collector of garbage has nothing
    to find in it: it refers to nothing that refers to it."""

    process_group: tuple[str, str]
    """The group's name, the same on all of its ranks, and what its maker called it."""
    collective_seq_id: int
    """Its place among the collectives of the group, from 1 on; of an exchange, how many came before it."""
    profiling_name: str
    """Such as ``nccl:all_reduce``."""
    time_created_ns: int
    """When the process called it, by the wall clock."""
    state: str
    """``scheduled``, ``started`` or ``completed``, as far as the device was asked."""
    retired: bool
    """Whether nobody watches it any more, because it has ended."""
    record_id: int
    """Its place among all that the process has called, from 0 on."""
    is_p2p: bool = False
    """Whether it is one side of an exchange."""
    duration_ms: float | None = None
    """How long its kernel ran, waiting included: with ``TORCH_NCCL_ENABLE_TIMING=1``, once it has ended. (When it was
    discovered to have started and completed is when torch's watchdog looked, ten times a second.)"""

    @property
    def ended(self) -> bool:
        """Whether it is over on this rank."""
        return self.retired or self.state == "completed"


class Entry(Call):
    """The same, and on what."""

    input_sizes: list[list[int]] = []
    """Shapes of its inputs, in elements."""
    input_dtypes: list[str] = []
    """Their types."""


class GroupConfig(msgspec.Struct):
    """A process group that the process is in."""

    desc: str
    """What its maker called it: Megatron's ``TENSOR_MODEL_PARALLEL_GROUP``."""
    ranks: str
    """Its ranks in its own order: ``[0, 4]``."""


class GroupStatus(msgspec.Struct):
    """How far a process group has come."""

    last_enqueued_collective: int
    """The number of the last operation that was called."""


class Flight(msgspec.Struct):
    """What one process left."""

    version: str | int
    """Of the format."""
    entries: list[Entry] = []
    """What it has called, as far back as the ring goes; torch leaves an empty list out."""
    pg_config: dict[str, GroupConfig] = {}
    """Its groups by name; none where the backend does not say (gloo)."""
    pg_status: dict[str, GroupStatus] = {}
    """The same by number, in the order in which they were made."""
