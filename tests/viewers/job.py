"""The job whose traces the viewers open: a pretrain entrypoint, real megatron-core on two ranks."""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprof.formats.ranges import PREFIX
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed

WORKLOAD = GPTWorkload(pp=2, vpp=2, layers=4, hidden=32, seq_length=16, heads=2, microbatches=4)
RANKS = range(WORKLOAD.world_size)
PASSES = WORKLOAD.microbatches * (WORKLOAD.vpp or 1)
"""Forwards on one rank, and backwards."""
TARGETS = {"train_actor": 1, "train_log_probs": 0}
"""Which step of each target is captured."""


def train(flags: list[str]) -> None:
    """One rank."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    init_distributed()
    with cpu_megatron():
        gpt = build(WORKLOAD)
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            for _ in range(TARGETS["train_actor"] + 1):
                gpt.train_step(forward_backward)
            gpt.log_probs_pass(forward_backward)


@dataclass(frozen=True)
class SaveDirectory:
    """What the job left: traces and kernel summaries of two targets, all ranks, in one directory."""

    path: Path

    def pattern(self, target: str) -> str:
        """Matches the traces of one window and no other file."""
        return str(self.path / f"{target}.step{TARGETS[target]:06d}.*.pt.trace.json.gz")

    def trace(self, target: str, rank: int) -> Path:
        name = f"{target}.step{TARGETS[target]:06d}.pp{rank}-tp0-cp0-ep0-dp0.rank{rank:05d}.pt.trace.json.gz"
        return self.path / name


def read(trace: Path) -> list[dict[str, Any]]:
    """The slices of a trace (events with a duration), read by nobody but the json module."""
    with gzip.open(trace) as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def our_ranges(trace: Path) -> Counter[str]:
    return Counter(event["name"] for event in read(trace) if event["name"].startswith(PREFIX))
