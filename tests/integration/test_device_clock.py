"""The timeline on a GPU's clock with a pipeline: real megatron-core schedules over gloo, and a GPU whose streams run
behind the host, each rank's by another time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import before_forward
from tests.recorders.fake_gpu import FakeGpu, compiled

STEPS = 8
BEHIND = 0.03


def train(workload: GPTWorkload, library: str | None, directory: str) -> None:
    """One rank; ``library``: the GPU's runtime, None: on the host's clock."""
    import argparse

    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    flags = ["--profile-target", "train_actor", "--profile-tool", "timeline", "--profile-dir", directory]
    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    rank, _ = init_distributed()
    with cpu_megatron(), pytest.MonkeyPatch.context() as patches:
        gpt = build(workload)
        for chunk in gpt.chunks:
            before_forward(chunk, lambda: time.sleep(0.02))
        if library is not None:
            gpu = FakeGpu(Path(library))
            gpu.install(patches)
            patches.setattr(torch.cuda, "synchronize", lambda *_: None)  # of Megatron's own, as with batch_p2p_sync off
            gpu.behind(BEHIND * (1 + rank))
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            for _ in range(STEPS):
                gpt.train_step(forward_backward)
            time.sleep(BEHIND * workload.world_size + 0.05)  # until the GPU has done it all
