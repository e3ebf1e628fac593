"""The faults of ``megaprof demo --fault``: the shape that each needs, its description, and how a rank is given it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaprof.testing import BuiltGPT, GPTWorkload

SLOW_RANK, SLOW_LINK, HANG = "slow-rank", "slow-link", "hang"
FAULTS = {
    SLOW_RANK: "the layers of the last rank take at least twice as long",
    SLOW_LINK: "exchanges between the last two stages are delayed",
    HANG: "the last rank stops in a forward, and the others wait for it (--live only)",
}
#: The first step of a live job that has the fault, so that healthy steps come before it.
FIRST_STEP = 3
#: The shortest wait of a slow layer: a small model's own times are lost in the other load of a machine.
_LAYER_MS = 10.0
_LINK_SECONDS = 0.05
_LOOK_SECONDS = 0.1


def least(fault: str | None, ep: int) -> dict[str, int]:
    """Returns the sizes that a fault needs to be visible, by the names of their options. They are the defaults of a
    demo with that fault, so that it has as few ranks as possible."""
    return {SLOW_RANK: {"pp": 1, "dp": 2 * ep}, SLOW_LINK: {"pp": 3}}.get(fault or "", {})


def check(fault: str, workload: GPTWorkload, *, live: bool, steps: int | None) -> None:
    """Checks that a job of this shape can show the fault. Raises ValueError if not."""
    option = f"--fault {fault}"
    if fault == HANG and not live:
        raise ValueError(f"{option}: needs --live, because a hanging job captures nothing")
    if live and steps is not None and steps <= FIRST_STEP:
        raise ValueError(f"{option} with --steps {steps}: the fault begins at step {FIRST_STEP}; use more steps")
    replicas = workload.dp or workload.ep
    if fault == SLOW_RANK and replicas < 2 * workload.ep:
        raise ValueError(
            f"{option} with --dp {replicas}: no other rank does the same work; --dp must be at least {2 * workload.ep}"
        )
    if fault == SLOW_LINK and workload.pp < 2:
        raise ValueError(f"{option} with --pp {workload.pp}: there is no link; --pp must be at least 2")
    if fault == SLOW_LINK and workload.vpp is not None:
        raise ValueError(f"{option} with --vpp {workload.vpp}: exchanges overlap with compute there; drop --vpp")
    if fault == HANG and workload.world_size < 2:
        raise ValueError(f"{option} with one rank: nobody would wait for it; --pp or --dp must be at least 2")


def described(fault: str, workload: GPTWorkload, begin: int) -> str:
    """Returns what goes wrong, in a sentence."""
    rank, stage = workload.world_size - 1, workload.pp - 1
    since = f"from step {begin} on" if begin else "in every step"
    if fault == SLOW_RANK:
        return f"rank {rank} (stage {stage}) takes at least twice as long for every layer, {since}"
    if fault == SLOW_LINK:
        delay_text = f"{1e3 * _LINK_SECONDS:.0f} ms longer"
        return f"each exchange between stages {stage - 1} and {stage} takes {delay_text}, {since}"
    position = f"microbatch {_middle(workload)} of step {begin}"
    return f"rank {rank} (stage {stage}) stops in {position}, and the others wait for it"


def inject(fault: str, gpt: BuiltGPT, begin: int, over: Callable[[], bool] = lambda: True) -> None:
    """Puts a fault into this rank, from step ``begin`` on, if the fault concerns it. A hang lasts until ``over()``."""
    import torch
    from megatron.core import parallel_state

    from megaprof.testing.faults import after_exchange, before_forward, layers, linger

    workload, is_last_rank = gpt.workload, torch.distributed.get_rank() == gpt.workload.world_size - 1

    def twice(took_ms: float) -> tuple[float, float]:  # a backward takes about two forwards
        longer = max(took_ms, _LAYER_MS) if gpt.step >= begin else 0.0
        return longer, 2 * longer

    def delay() -> None:
        if gpt.step >= begin:
            time.sleep(_LINK_SECONDS)

    forwards = 0

    def stop() -> None:
        nonlocal forwards
        microbatch, forwards = forwards % workload.microbatches, forwards + 1
        while gpt.step >= begin and microbatch == _middle(workload) and not over():
            time.sleep(_LOOK_SECONDS)

    if fault == SLOW_RANK and is_last_rank:
        linger(layers(gpt.chunks), twice)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if fault == SLOW_LINK and stage == workload.pp - 2:
        after_exchange(parallel_state.get_pipeline_model_parallel_next_rank(), delay)
    if fault == SLOW_LINK and stage == workload.pp - 1:
        after_exchange(parallel_state.get_pipeline_model_parallel_prev_rank(), delay)
    if fault == HANG and is_last_rank:
        before_forward(gpt.chunks[0], stop)


def _middle(workload: GPTWorkload) -> int:
    return workload.microbatches // 2
