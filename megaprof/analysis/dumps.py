"""Reads dumps of torch's flight recorder: what each rank called on its process groups, one file per rank.

torch's watchdog writes a pickled dump when a collective times out; its path is ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` or
``TORCH_FR_DUMP_TEMP_FILE``, followed by the rank. torch also offers the dump as JSON, which megaprof's ranks write when
they stand still.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from megaprof.analysis.trace.groups import ranks_of
from megaprof.formats.flight import EXCHANGE, Entry, Flight, settled
from megaprof.formats.phrases import Unanswerable

#: A recorder holds a few thousand entries of about 1 kB each, with their frames.
_LARGEST_BYTES = 1 << 28
#: How the name of a dump ends.
ENDING = re.compile(r"(?P<rank>\d{1,7})(\.(json|pkl|pickle))?$")


@dataclass(frozen=True)
class Operation:
    """A collective, or one side of an exchange, that a rank has called. Its name, and sizes and types of its inputs, as
    torch has them; the name of its group is the same on all ranks."""

    rank: int
    group: str
    batch: tuple[str, int, int]
    """The same for the exchanges of one batch, which end together."""
    number: int
    """Number among the group's collectives, from 1 on; for an exchange, the number of collectives before it."""
    name: str
    peer: int | None
    """The other rank of an exchange; None for a collective."""
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    called: float
    """When the rank called it, in seconds since 1970 by the clock of its host."""
    started: bool
    """True if the device was seen to begin it; gloo does not report this."""

    @property
    def between(self) -> tuple[int, ...]:
        """The two ranks of an exchange; empty for a collective."""
        return () if self.peer is None else tuple(sorted((self.rank, self.peer)))


@dataclass(frozen=True)
class Dump:
    """The operations that one rank has called, and those of them that have not ended."""

    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    """By name: Megatron's description, such as ``TENSOR_MODEL_PARALLEL_GROUP`` (empty if there is none), and global
    ranks in the group's order (empty if the dump does not say: gloo)."""
    called: Mapping[str, int]
    """Number of the last collective called, among the operations in the dump, by group."""
    enqueued: Mapping[str, int]
    """Number of the last operation that torch counted, by group. It counts collectives only if the group has no
    exchanges. Empty if the dump does not say."""
    exchanging: frozenset[str]
    """Groups with exchanges in the dump."""
    pending: tuple[Operation, ...]
    """Operations that have not ended, in the order of their calls."""
    latest: float
    """When the last operation in the dump was called, in seconds since 1970; 0 if there is none."""

    def first(self, *, sends: bool = True) -> tuple[Operation, ...]:
        """Returns the first operation that has not ended, and those that end with it. Without ``sends``, passes over
        batches that only send."""
        batch = next((operation.batch for operation in self.pending if sends or operation.name != "send"), None)
        return tuple(operation for operation in self.pending if operation.batch == batch)


class _Plain(pickle.Unpickler):
    """An unpickler for containers, numbers and strings only, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_dump(rank: int, path: Path) -> Dump:
    """Returns the dump of ``rank`` in a file. Raises Unanswerable and OSError."""
    if path.stat().st_size > _LARGEST_BYTES:
        raise Unanswerable(f"it has more than {_LARGEST_BYTES >> 20} MiB")
    content = path.read_bytes()
    try:
        decoded = json.loads(content) if content[:1] == b"{" else _Plain(io.BytesIO(content)).load()
        flight = msgspec.convert(decoded, Flight, strict=False)
    except Exception as fault:  # a hostile pickle may raise anything
        raise Unanswerable(" ".join(str(fault).split())[:200] or type(fault).__name__) from None
    return dump_of(rank, flight)


def dump_of(rank: int, flight: Flight) -> Dump:
    """Returns the dump of ``rank`` from what its flight recorder holds. Raises Unanswerable."""
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, config in flight.pg_config.items():
        if name:
            if (ranks := ranks_of(config.ranks)) is None:
                raise Unanswerable(f"a group has the ranks {config.ranks[:40]!r}")
            groups[name] = config.desc, ranks
    called: defaultdict[str, int] = defaultdict(int)
    exchanging = set()
    pending: list[Operation] = []
    for entry in settled(sorted(flight.entries, key=lambda entry: entry.record_id)):
        name, description = entry.process_group
        _, ranks = groups.setdefault(name, (description, ()))
        called[name] = max(called[name], entry.collective_seq_id)
        exchange = EXCHANGE.search(entry.profiling_name)
        if exchange is not None or entry.is_p2p:
            exchanging.add(name)
        if entry.ended or (exchange is None and entry.is_p2p):  # of such a batch, the ring has not kept the exchanges
            continue
        if exchange is not None or not pending or pending[-1].batch != entry.batch:
            pending.append(_operation(rank, entry, ranks, exchange))
    # `pg_status` numbers the groups in the order in which the process made them, and `pg_config` has their names. As
    # long as names are numbers, both have the same order; otherwise they cannot be matched.
    names, places = [name for name in flight.pg_config if name], list(flight.pg_status)
    enqueued: dict[str, int] = {}
    if len(names) == len(places) and all(name.isdigit() for name in (*names, *places)):
        for name, place in zip(sorted(names, key=int), sorted(places, key=int), strict=True):
            enqueued[name] = flight.pg_status[place].last_enqueued_collective
    latest = max((entry.time_created_ns for entry in flight.entries), default=0) / 1e9
    return Dump(groups, dict(called), enqueued, frozenset(exchanging), tuple(pending), latest)


def _operation(rank: int, entry: Entry, ranks: tuple[int, ...], exchange: re.Match[str] | None) -> Operation:
    name = entry.profiling_name.partition(":")[2] or entry.profiling_name
    peer = None
    if exchange is not None:
        name, index = exchange["what"], int(exchange["peer"])
        if index >= len(ranks):
            raise Unanswerable(f"{entry.profiling_name} in a group of {len(ranks)} ranks")
        peer = ranks[index]
    return Operation(
        rank,
        entry.process_group[0],
        entry.batch,
        entry.collective_seq_id,
        name,
        peer,
        tuple(tuple(shape) for shape in entry.input_sizes),
        tuple(entry.input_dtypes),
        entry.time_created_ns / 1e9,
        entry.state == "started",
    )
