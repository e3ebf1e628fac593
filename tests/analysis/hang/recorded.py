"""Pipelines that stop at a known rank, as torch's flight recorder has them: every exchange is in a batch, whose calls
stay ``scheduled``, and ``nccl:coalesced`` behind them has their state."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaprof.parallel.schedules import PipelineSchedule, SendReceive, stage_program

ALL = "0"


@dataclass(frozen=True)
class Call:
    """What a host calls at once: a collective of all ranks, or exchanges."""

    exchanges: tuple[tuple[str, int], ...] = ()
    """``send`` or ``recv``, and the other rank; empty for a collective. The host waits for all of them."""
    batched: bool = True
    """Whether torch records the exchanges as one batch; otherwise, each has its own state."""


def pipelines(
    schedule: PipelineSchedule, replicas: int = 1, steps: int = 2, unbatched: Collection[int] = ()
) -> dict[int, list[Call]]:
    """What each rank calls: the exchanges of Megatron's schedule, and one ``all_reduce`` of all ranks after each step.
    ``unbatched``: the ranks that call them one by one."""

    def calls(stage: int, replica: int) -> list[Call]:
        peers = dict(zip(("prev", "next"), schedule.placement.beside(stage), strict=True))
        found = []
        for part in stage_program(schedule, stage):
            if isinstance(part, SendReceive):
                named = [name.split("_") for name, sent in part._asdict().items() if sent is not None]
                exchanges = tuple((what, (peers[side] or 0) * replicas + replica) for what, side in named)
                found.append(Call(exchanges, stage * replicas + replica not in unbatched))
        return [*found, Call()]

    return {
        stage * replicas + replica: calls(stage, replica) * steps
        for stage in range(schedule.stages)
        for replica in range(replicas)
    }


@dataclass
class Rank:
    """One rank while the job runs."""

    program: list[Call]
    stuck: int
    """After how many calls its device takes part in nothing more."""
    called: int = 0
    ended: int = 0
    counts: list[dict[tuple[str, int] | None, int]] = field(default_factory=list)
    """By call, how many of each exchange (None: collectives) have been called up to it."""

    def __post_init__(self) -> None:
        so_far: dict[tuple[str, int] | None, int] = {}
        for call in self.program:
            for what in call.exchanges or (None,):
                so_far[what] = so_far.get(what, 0) + 1
            self.counts.append(dict(so_far))

    def takes_part(self, what: tuple[str, int] | None, number: int) -> bool:
        """Whether it takes part in the exchange or, for None, the collective with this number."""
        called = min(self.called, self.stuck)
        return called > 0 and self.counts[called - 1].get(what, 0) >= number


def run(
    program: Mapping[int, Sequence[Call]],
    stops: Mapping[int, int],
    ahead: int = 1,
    stuck: Mapping[int, int] | None = None,
) -> dict[int, Rank]:
    """Runs until nobody can go on. Hosts are up to ``ahead`` calls before their devices. ``stops``: after how many
    calls a rank's host stops. ``stuck``: after how many calls its device takes part in nothing more."""
    ranks = {rank: Rank(list(calls), (stuck or {}).get(rank, len(calls))) for rank, calls in program.items()}

    def may_end(rank: int) -> bool:
        one = ranks[rank]
        if one.ended == min(one.called, one.stuck):
            return False
        if one.program[one.ended].exchanges:
            return all(answered(ranks, rank, exchange) for exchange in one.program[one.ended].exchanges)
        return all(other.takes_part(None, one.counts[one.ended][None]) for other in ranks.values())

    moved = True
    while moved:
        moved = False
        for rank, one in ranks.items():
            while one.called < min(len(one.program), stops.get(rank, len(one.program)), one.ended + ahead):
                one.called, moved = one.called + 1, True
            while may_end(rank):
                one.ended, moved = one.ended + 1, True
    return ranks


def answered(ranks: Mapping[int, Rank], rank: int, exchange: tuple[str, int]) -> bool:
    """Whether the other side has called this exchange, of those that the device of ``rank`` is in."""
    (what, peer), one = exchange, ranks[rank]
    return ranks[peer].takes_part(("recv" if what == "send" else "send", rank), one.counts[one.ended][exchange])


def dumps_of(
    ranks: Mapping[int, Rank], replicas: int = 1, ring: int = 2000, *, old: bool = False
) -> dict[int, dict[str, Any]]:
    """The dumps of all ranks, of rings that keep ``ring`` entries. ``old``: a batch has the number of a collective,
    as in torch 2.5."""
    groups = {ALL: ("default_pg", list(ranks))}
    for replica in range(replicas):
        groups[str(5 + replica)] = ("PIPELINE_MODEL_PARALLEL_GROUP", list(ranks)[replica::replicas])
    return {
        rank: {
            "version": "2.10",
            "entries": list(_entries(rank, ranks, groups, ring, old)),
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": str(members)}
                for name, (desc, members) in groups.items()
                if rank in members
            },
            "pg_status": {},
            "rank": rank,
        }
        for rank, one in ranks.items()
    }


def _entries(
    rank: int, ranks: Mapping[int, Rank], groups: Mapping[str, tuple[str, list[int]]], ring: int, old: bool
) -> deque[dict[str, Any]]:
    entries: deque[dict[str, Any]] = deque(maxlen=ring)
    (pipeline,) = (name for name, (_, members) in groups.items() if name != ALL and rank in members)
    numbers = {(group, p2p): 0 for group in groups for p2p in (False, True)}
    record, one = 0, ranks[rank]
    for place, call in enumerate(one.program[: one.called]):
        group, p2p, ended = (pipeline if call.exchanges else ALL), bool(call.exchanges), place < one.ended
        description, members = groups[group]
        state = "completed" if ended else "started" if place == one.ended else "scheduled"
        rows = []
        for what, peer in call.exchanges:
            over = not call.batched and (ended or (place == one.ended and answered(ranks, rank, (what, peer))))
            name = f"nccl:{what} {members.index(rank)}{'->' if what == 'send' else '<-'}{members.index(peer)}"
            rows.append((name, over, "completed" if over else "scheduled"))
        rows += [("nccl:coalesced" if p2p else "nccl:all_reduce", ended, state)] if call.batched else []
        for index, (name, retired, said) in enumerate(rows):
            numbers[group, p2p and not (old and call.batched)] += index == 0 or not call.batched
            entries.append(
                {
                    "record_id": record,
                    "pg_id": int(group),
                    "process_group": (group, description),
                    "collective_seq_id": numbers[group, False],
                    "p2p_seq_id": numbers[group, True],
                    "op_id": record,
                    "profiling_name": name,
                    "time_created_ns": (1_790_000_000 + record) * 10**9 + rank,
                    "input_sizes": [] if name == "nccl:coalesced" else [[8]],
                    "input_dtypes": [] if name == "nccl:coalesced" else ["Float"],
                    "is_p2p": p2p,
                    "retired": retired,
                    "state": said,
                }
            )
            record += 1
    return entries
