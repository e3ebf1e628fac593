"""The timeline on real megatron-core schedules: whose it is, and what a rank waits for a core."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from megaprof.analysis.table.table import Table
from megaprof.formats import timeline as format
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.analysis.tables import tables_in
from tests.integration.test_capture import WORKLOADS, timelines, train

FLAGS = ["--profile-target", "train_actor", "train_log_probs", "evaluate", "--profile-tool", "timeline"]


@pytest.mark.slow
def test_only_chosen_ranks_keep_one(tmp_path: Path) -> None:
    flags = [*FLAGS, "--profile-dir", str(tmp_path), "--profile-timeline-select", "pp=1"]
    run_ranks(train, 2, WORKLOADS["pp2"], flags, timeout=240)
    assert sorted(timelines(tmp_path)) == [1]


RESTLESS = """
import time
until = time.monotonic() + 240
while time.monotonic() < until:
    pass
"""


def share_a_core(directory: str) -> None:
    """Rank 1 has one core, and shares it with a program that never rests."""
    import argparse
    import os
    import subprocess
    import sys

    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    rank, _ = init_distributed()
    args = add_profile_args(argparse.ArgumentParser()).parse_args([*FLAGS, "--profile-dir", directory])
    beside = None
    if rank == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        beside = subprocess.Popen([sys.executable, "-c", RESTLESS])
    try:
        with cpu_megatron():
            gpt = build(GPTWorkload(dp=2, layers=2, hidden=128, seq_length=128, microbatches=4))
            with install_hooks(gpt.chunks, args):
                forward_backward = get_forward_backward_func()
                until = time.monotonic() + 4.0
                more = torch.ones(1)
                while more:
                    gpt.train_step(forward_backward)
                    more.fill_(rank == 1 or time.monotonic() < until)
                    torch.distributed.broadcast(more, 0)
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()


@pytest.mark.slow
def test_a_rank_that_shares_its_core_is_known_to_wait(tmp_path: Path) -> None:
    run_ranks(share_a_core, 2, str(tmp_path), timeout=240)
    read = timelines(tmp_path)
    spans = [format.Waited.unpack(each) for each in read[1].facts(format.WAITED).values()]
    assert spans
    known = [span for span in spans if span is not None]
    assert len(known) == len(spans)
    # Half of the time that it computes, of which there is some in every second; on a busy machine more.
    assert sum(span.waited for span in known) > 0.1 * sum(span.length for span in known)
    assert json.loads(next(tmp_path.rglob("rank00001.json")).read_text())["waits"] > 0.1
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    assert table.core_waits is not None
    waited = table.core_waits[:, 1, 0, 0]
    assert waited.sum() > 0.1 * table.length.sum()
    assert (table.delays.get("processor_wait", 0.0) <= table.passes).all()
