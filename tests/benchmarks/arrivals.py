"""Is the one rank named that comes late to its peers, and nobody where nobody does?

    python -m tests.benchmarks.arrivals [--axis tp ep] [--jobs 10] [--steps 24]

Jobs of two tensor- or expert-parallel ranks over gloo, of Megatron-Core's own layers, which sleep for as long on both
ranks. In every other job one of them, the first and the second by turns, is 20 ms late in each forward of its first
layer. Their timelines have arrivals (`--profile-collectives`), and the report of each is asked for slow ranks. On a
busy machine ranks are slow indeed: nothing else should run.

The last line is JSON, by axis: in how many ``late`` jobs the late rank alone was ``named``, and in how many ``healthy``
ones nobody (``clean``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.report.report import analyze
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import layers, linger
from tests.benchmarks.cores import awake, real_time

#: Milliseconds of a layer's forward and backward, and of the delay.
FORWARD, BACKWARD, LATE = 10.0, 20.0, 20.0

Job = tuple[str, int | None, str]
"""Axis, who is late, and the directory."""


def wait(*_: Any) -> None:
    time.sleep(LATE / 1e3)


def train(jobs: list[Job], steps: int) -> None:
    """One after the other, in one pair of processes."""
    real_time()
    torch.set_num_threads(1)
    rank, _ = init_distributed()
    for axis, late, directory in jobs:
        with cpu_megatron():
            gpt = build(GPTWorkload(**{axis: 2}, layers=2, hidden=32, seq_length=16, microbatches=4))
            own = layers(gpt.chunks)
            if late == rank:
                own[0].self_attention.register_forward_pre_hook(wait)
            linger(own, lambda _: (FORWARD, BACKWARD))
            config = ProfileConfig(target=("train_actor",), tool=("timeline",), dir=directory, collectives=True)
            with install_hooks(gpt.chunks, config):
                for _ in range(steps):
                    gpt.train_step(get_forward_backward_func())


def named(directory: str) -> list[int]:
    """The slow ranks of a report."""
    (target,) = analyze(Path(directory)).targets
    return [rank for cause in target.causes if cause.kind == "slow_rank" for rank in cause.ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", nargs="+", choices=("tp", "ep"), default=["tp", "ep"])
    parser.add_argument("--jobs", type=int, default=10, help="with a late rank, and as many without, of each axis")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder, awake():
        for axis in args.axis:
            jobs = [
                (axis, late, f"{folder}/{axis}-{number}-{late}")
                for number in range(args.jobs)
                for late in (None, number % 2)
            ]
            run_ranks(train, 2, jobs, args.steps, timeout=1800, env={"PYTHONWARNINGS": "ignore"})
            own = found[axis] = {"late": 0, "named": 0, "healthy": 0, "clean": 0}
            for _, late, directory in jobs:
                told = named(directory)
                print(f"{axis}, late: {late}, named: {told}", flush=True)
                kind, right = ("healthy", "clean") if late is None else ("late", "named")
                own[kind] += 1
                own[right] += told == ([] if late is None else [late])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
