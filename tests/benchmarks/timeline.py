"""What it costs to leave the timeline on: real steps of a real job, in alternating blocks with and without it.

    python -m tests.benchmarks.timeline [--microbatches 32] [--steps 6000] [--hidden 32]

A real Megatron-Core GPT at PP=2 over gloo. The recorder rests in every other block of a few steps, by the very means by
which a job measures its own cost (`megaprof.recorders.timeline.cost`), but without pauses between the pairs. Wall time
is the pipeline's; CPU time is that of the whole process, background thread included, of the rank that pays more. Steps
are short, so that the noise of the machine is: what the recorder costs depends on the number of phases, not on how
long they take.

The last line is JSON. ``overhead`` and ``overhead_cpu``: what a step gets longer by and what CPU time it takes more, as
fractions of a step of 100 ms; ``_error``: the standard error. ``stall_ms``: the most CPU time that one round of the
background thread took, an upper bound of how long the training thread waits for the interpreter's lock; Python's switch
interval is another one. ``bytes_per_rank_step``: what the busiest rank wrote.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from megaprof import ProfileConfig, install_hooks
from megaprof.install import _process
from megaprof.recorders import tape
from megaprof.recorders.timeline import cost
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

STEP_US = 100e3
#: Blocks are as long as the machine is steady, and no shorter than a few steps.
BLOCK_SECONDS = 0.2


def _config(directory: str) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), tool=("timeline",), dir=directory)


def job(workload: GPTWorkload, steps: int, directory: str) -> dict[str, Any]:
    """The cost of the timeline in so many steps, bytes of a step, and the longest burst of the background thread."""
    import torch

    torch.set_num_threads(1)
    init_distributed()
    endless = {"EARLY": 5, "LATE": 5, "BLOCK_SECONDS": BLOCK_SECONDS, "PAIRS": steps, "_RATE_STEPS": 2}
    with cpu_megatron(), mock.patch.multiple(cost, **endless):
        gpt = build(workload)
        for _ in range(5):
            gpt.train_step()
        with install_hooks(gpt.chunks, _config(directory)) as handle:
            timeline = handle._timeline
            if timeline is None:
                raise RuntimeError("no timeline")
            for _ in range(20):
                gpt.train_step()
            _process.background.longest = 0.0
            for _ in range(steps):
                gpt.train_step()
            stall = _process.background.longest
        recorded = timeline._begun - timeline._pairs.rested
    found = timeline._pairs.cost()
    if found is None:
        raise RuntimeError("no pairs")
    return {"cost": found, "bytes": timeline.bytes_written / recorded, "stall": 1e3 * stall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--hidden", type=int, default=32)
    args = parser.parse_args()
    quiet = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    workload = GPTWorkload(pp=2, layers=2, microbatches=args.microbatches, hidden=args.hidden, heads=2, seq_length=16)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(job, 2, workload, args.steps, str(Path(folder)), timeout=1800, env=quiet)
    how = "C" if tape.IN_C else "Python"
    print(f"hooks in {how}; a step without the timeline: {ranks[0]['cost'].step_us / 1e3:.1f} ms")
    for number, rank in enumerate(ranks):
        c = rank["cost"]
        print(
            f"rank {number}: wall {c.wall_us:+.0f} ± {c.wall_error_us:.0f} us a step, "
            f"CPU {c.cpu_us:+.0f} ± {c.cpu_error_us:.0f} us, {c.pairs} pairs"
        )
    wall = max((rank["cost"] for rank in ranks), key=lambda c: c.wall_us)
    cpu = max((rank["cost"] for rank in ranks), key=lambda c: c.cpu_us)
    print(
        json.dumps(
            {
                "overhead": round(wall.wall_us / STEP_US, 5),
                "overhead_error": round(wall.wall_error_us / STEP_US, 5),
                "overhead_cpu": round(cpu.cpu_us / STEP_US, 5),
                "overhead_cpu_error": round(cpu.cpu_error_us / STEP_US, 5),
                "stall_ms": round(max(rank["stall"] for rank in ranks), 3),
                "bytes_per_rank_step": round(max(rank["bytes"] for rank in ranks)),
            }
        )
    )


if __name__ == "__main__":
    main()
