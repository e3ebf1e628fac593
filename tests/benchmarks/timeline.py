"""What it costs to leave the timeline on: real steps, in alternating blocks with and without it.

    python -m tests.benchmarks.timeline [--microbatches 32] [--pairs 12] [--steps 20] [--hidden 96]

A real Megatron-Core GPT at PP=2 over gloo. A block is so many steps with the hooks in, or without any; which of the two
comes first changes from pair to pair. Wall time is the pipeline's, CPU time that of the whole process, background
thread included, of the rank that pays more. The first step of a block, in which hooks go in or out, does not count.

The last line is JSON. ``overhead`` and ``overhead_cpu``: what a step gets longer by and what CPU time it takes more, as
fractions of a step of 100 ms; ``_error``: the standard error. ``stall_ms``: the longest stretch of CPU time that the
background thread took at once, which is the longest that the training thread may wait for the interpreter's lock, if
it is less than Python's switch interval. ``bytes_per_rank_step``: what the busiest rank wrote. ``in_job``: what the job
says of itself by `megaprof.recorders.timeline.cost`, from pairs of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from megaprof import ProfileConfig, install_hooks
from megaprof.install import _process
from megaprof.recorders import tape
from megaprof.recorders.timeline import cost
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

STEP_US = 100e3


def _config(directory: str) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), tool=("timeline",), dir=directory)


def job(workload: GPTWorkload, pairs: int, steps: int, directory: str) -> dict[str, Any]:
    """Wall and CPU time per step in microseconds of every block, ``[pair]`` with and without; bytes of a step; the
    longest burst of the background thread; then what the job says of itself."""
    import torch

    torch.set_num_threads(1)
    init_distributed()
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    written = counted = 0
    stall = 0.0
    with cpu_megatron():
        gpt = build(workload)
        for _ in range(5):
            gpt.train_step()
        for block in range(2 * pairs):
            on = bool(block % 2) == bool(block // 2 % 2)
            handle = install_hooks(gpt.chunks, _config(f"{directory}/{block}")) if on else None
            gpt.train_step()
            _process.background.longest = 0.0
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                gpt.train_step()
            if handle is not None:
                _process.background.wake()
                gpt.train_step()  # in which the background thread writes the block's steps
            length = steps + on
            spent = time.perf_counter() - begin, time.process_time() - cpu
            times[on].append((1e6 * spent[0] / length, 1e6 * spent[1] / length))
            if handle is not None and handle._timeline is not None:
                stall = max(stall, _process.background.longest)
                timeline = handle._timeline
                handle.remove()
                written += timeline.bytes_written
                counted += length + 1
        # What the job says of itself, from pairs that follow each other closely here.
        with (
            mock.patch.multiple(cost, EARLY=3, LATE=3, BLOCK_SECONDS=1.0),
            install_hooks(gpt.chunks, _config(f"{directory}/own")) as handle,
        ):
            while handle._timeline is not None and handle._timeline._begun < 2 * pairs * steps:
                gpt.train_step()
            own = handle._timeline._pairs.cost() if handle._timeline is not None else None
    said = None if own is None else (own.wall_us, own.wall_error_us, own.cpu_us, own.cpu_error_us, own.pairs)
    return {"off": times[False], "on": times[True], "bytes": written / counted, "stall": 1e3 * stall, "own": said}


def _difference(ranks: list[dict[str, Any]], which: int) -> tuple[float, float]:
    """What a step takes more, microseconds, and the standard error: the costlier rank's."""
    found = []
    for rank in ranks:
        pairs = zip(rank["on"], rank["off"], strict=True)
        found.append(cost._median([on[which] - off[which] for on, off in pairs]))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block that count")
    parser.add_argument("--hidden", type=int, default=96)
    args = parser.parse_args()
    quiet = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    workload = GPTWorkload(pp=2, layers=2, microbatches=args.microbatches, hidden=args.hidden, seq_length=64)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(job, 2, workload, args.pairs, args.steps, str(Path(folder)), timeout=1800, env=quiet)
    (wall, wall_error), (cpu, cpu_error) = _difference(ranks, 0), _difference(ranks, 1)
    step = min(wall for wall, _ in ranks[0]["off"])
    print(f"hooks in {'C' if tape.IN_C else 'Python'}; the quickest block without them: {step / 1e3:.1f} ms a step")
    print(f"wall time {wall:+.0f} ± {wall_error:.0f} us a step, CPU time {cpu:+.0f} ± {cpu_error:.0f} us")
    for number, rank in enumerate(ranks):
        if rank["own"] is not None:
            own = rank["own"]
            print(f"rank {number} says: wall {own[0]:+.0f} ± {own[1]:.0f} us, CPU {own[2]:+.0f} ± {own[3]:.0f} us")
    print(
        json.dumps(
            {
                "overhead": round(wall / STEP_US, 5),
                "overhead_error": round(wall_error / STEP_US, 5),
                "overhead_cpu": round(cpu / STEP_US, 5),
                "overhead_cpu_error": round(cpu_error / STEP_US, 5),
                "stall_ms": round(max(rank["stall"] for rank in ranks), 3),
                "bytes_per_rank_step": round(max(rank["bytes"] for rank in ranks)),
                "in_job": [rank["own"] and [round(number, 1) for number in rank["own"]] for rank in ranks],
            }
        )
    )


if __name__ == "__main__":
    main()
