"""What the ranks of ``megaprof demo`` run: a small pretrain entrypoint, and the faults that it can have."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
#: What a live job prints after its first step.
RUNNING = "running"
_LINK_SECONDS = 0.05
_LOOK_SECONDS = 0.1
_NEVER_SECONDS = 1e6


def captured(workload: GPTWorkload, flags: list[str], fault: str | None, steps: int) -> None:
    """Runs one rank of a job that ends by itself: training, log-probs and an evaluation."""
    with _hooked(workload, flags, fault) as (gpt, forward_backward):
        for target, run_step in (("train_actor", gpt.train_step), ("train_log_probs", gpt.log_probs_pass)):
            for step in range(steps):
                print(f"{target} step {step} ({step + 1} of {steps})", flush=True)
                run_step(forward_backward)
        print("evaluation pass", flush=True)
        gpt.evaluate(forward_backward)
        print("finishing the files", flush=True)


def live(
    workload: GPTWorkload, flags: list[str], fault: str | None, steps: int | None, seconds: float, stop: str
) -> int:
    """Runs one rank until ``steps`` are done, the file ``stop`` appears or the time is up. Returns the number of steps,
    which is the same on all ranks."""
    deadline = time.monotonic() + seconds

    def over() -> bool:
        return Path(stop).exists() or time.monotonic() > deadline

    with _hooked(workload, flags, fault, FIRST_STEP, over) as (gpt, forward_backward):
        import torch

        go_on = torch.ones(1)
        while go_on.item():
            gpt.train_step(forward_backward)
            if gpt.step == 1 and torch.distributed.get_rank() == 0:
                print(RUNNING, flush=True)
            go_on[0] = gpt.step != steps and not over()
            torch.distributed.broadcast(go_on, 0)
    return gpt.step


@contextmanager
def _hooked(
    workload: GPTWorkload, flags: list[str], fault: str | None, begin: int = 0, over: Callable[[], bool] = lambda: True
) -> Iterator[tuple[BuiltGPT, Any]]:
    """Yields the model of a rank and its schedule, with the two lines that megaprof needs. The fault begins at step
    ``begin``."""
    print("importing Megatron-Core", flush=True)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks
    from megaprof.testing import build, cpu_megatron, init_distributed

    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    init_distributed(timeout=_NEVER_SECONDS)
    with cpu_megatron():
        print("building the model", flush=True)
        gpt = build(workload)
        if fault is not None:
            _inject(fault, gpt, begin, over)
        with install_hooks(gpt.chunks, args):
            yield gpt, get_forward_backward_func()


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
    position = f"microbatch {workload.microbatches // 2} of step {begin}"
    return f"rank {rank} (stage {stage}) stops in {position}, and the others wait for it"


def _inject(fault: str, gpt: BuiltGPT, begin: int, over: Callable[[], bool]) -> None:
    """Puts a fault into this rank, from step ``begin`` on, if the fault concerns it. A hang lasts until ``over()``."""
    import torch
    from megatron.core import parallel_state

    from megaprof.testing.faults import after_exchange, before_forward, layers, linger

    workload, is_last_rank = gpt.workload, torch.distributed.get_rank() == gpt.workload.world_size - 1
    stage, forwards = parallel_state.get_pipeline_model_parallel_rank(), 0

    def twice(took_ms: float) -> tuple[float, float]:  # a backward takes about two forwards
        longer = took_ms if gpt.step >= begin else 0.0
        return longer, 2 * longer

    def delay() -> None:
        if gpt.step >= begin:
            time.sleep(_LINK_SECONDS)

    def stop() -> None:
        nonlocal forwards
        microbatch, forwards = forwards % workload.microbatches, forwards + 1
        while gpt.step >= begin and microbatch == workload.microbatches // 2 and not over():
            time.sleep(_LOOK_SECONDS)

    if fault == SLOW_RANK and is_last_rank:
        linger(layers(gpt.chunks), twice)
    if fault == SLOW_LINK and stage == workload.pp - 2:
        after_exchange(parallel_state.get_pipeline_model_parallel_next_rank(), delay)
    if fault == SLOW_LINK and stage == workload.pp - 1:
        after_exchange(parallel_state.get_pipeline_model_parallel_prev_rank(), delay)
    if fault == HANG and is_last_rank:
        before_forward(gpt.chunks[0], stop)
