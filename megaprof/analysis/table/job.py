"""Reads a job's table from the metadata of its ranks: which replica and peer a rank is, and which schedule runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megaprof.analysis.notes import Note
from megaprof.analysis.table.table import Unfit
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.parallel.topology import RankCoords


def place_of(coords: RankCoords) -> tuple[int, int]:
    """Returns replica and peer. Peers wait for each other inside a pass. They are tensor- and context-parallel ranks,
    and those that exchange tokens for experts, which are spread over several data-parallel ranks."""
    sizes = coords.sizes
    tp_cp_ranks = sizes.tp * sizes.cp
    spread = max(1, sizes.etp * sizes.ep // math.gcd(sizes.etp * sizes.ep, tp_cp_ranks))
    peer = (coords.dp % spread * sizes.cp + coords.cp) * sizes.tp + coords.tp
    return coords.dp // spread, peer


def schedule_of(metadata: Metadata, forward_only: bool, *, combined: bool = False) -> PipelineSchedule:
    """Returns the schedule. ``combined``: whether forwards and backwards ran as one. Raises Unfit if the metadata do
    not say enough, or if Megatron refuses the schedule."""
    if metadata.schedule is None or not metadata.chunks or not metadata.microbatches:
        raise Unfit(Note("schedule_unknown", said="the files name no schedule, or not its microbatches"))
    try:
        return PipelineSchedule.checked(
            metadata.sizes.pp,
            len(metadata.chunks),
            metadata.microbatches,
            name=metadata.schedule,
            group_size=metadata.microbatch_group_size,
            forward_only=forward_only,
            combined=combined,
        )
    except ValueError as fault:
        raise Unfit(Note("schedule_unknown", said=f"it cannot be rebuilt: {fault}")) from None


def rendezvous_of(metadata: Metadata, forward_only: bool) -> bool:
    """Returns whether a sender waits for its receiver by Megatron's settings. It does unless exchanges overlap with
    computing. Only the interleaved schedule overlaps them, and not in forward-only passes."""
    if metadata.schedule != "interleaved":
        return metadata.sizes.pp > 1
    overlap = (metadata.p2p or {}).get("overlap_p2p_comm")
    return metadata.sizes.pp > 2 and (forward_only or overlap is False)


def forward_share(forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """Returns the fraction of a combined pass (a forward and a backward that run as one) that counts as its forward.
    With ``overlap_moe_expert_parallel_comm``, Megatron alternates between their layers, so neither has a time of its
    own, but a table has them separately. Where they are divided changes neither their sum nor a replay, in which they
    run as one. It follows from the forwards that ran alone
    at the beginning of the step and the backwards that ran alone at its end; without any, it is a half."""
    if not len(forwards) or not len(backwards):
        return 0.5
    forward, backward = float(np.median(forwards)), float(np.median(backwards))
    return forward / (forward + backward) if forward + backward > 0 else 0.5
