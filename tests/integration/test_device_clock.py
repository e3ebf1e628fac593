"""The timeline on a GPU's clock with a pipeline: real megatron-core schedules over gloo, and a GPU whose streams run
behind the host, each rank's by another time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megaprof.analysis.report.report import analyze
from megaprof.analysis.table.table import Table
from megaprof.analysis.table.tabulate import TOLERANCE_MS
from megaprof.formats import timeline as format
from megaprof.parallel.schedules import phase_order
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import before_forward
from tests.analysis.tables import tables_in
from tests.integration.test_capture import WORKLOADS, timelines
from tests.recorders.fake_gpu import FakeGpu, compiled

STEPS = 3
BEHIND, PACE, LATE = 0.03, 0.02, 1.0
"""Seconds: that each rank's GPU is behind the host more than the one before it; of a forward; that each rank's host
notes the start of a step earlier than the one before it."""


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
            before_forward(chunk, lambda: time.sleep(PACE))
        if library is not None:
            gpu = FakeGpu(Path(library))
            gpu.install(patches)
            patches.setattr(torch.cuda, "synchronize", lambda *_: None)  # of Megatron's own, as with batch_p2p_sync off
            gpu.behind(BEHIND * (1 + rank))
            now = time.time_ns
            patches.setattr(time, "time_ns", lambda: now() - round(LATE * 1e9) * rank)
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            for _ in range(STEPS):
                gpt.train_step(forward_backward)
            time.sleep(BEHIND * workload.world_size + 0.05)  # until the GPU has done it all


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2", "pp2-vpp2-overlap"])
def test_what_the_schedules_write_is_what_they_write_on_the_hosts_clock(name: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    library = str(compiled(tmp_path))
    for clock, given in (("host", None), ("device", library)):
        run_ranks(train, workload.world_size, workload, given, str(tmp_path / clock), timeout=240)
    host, device = timelines(tmp_path / "host"), timelines(tmp_path / "device")
    assert sorted(device) == sorted(host) == list(range(workload.world_size))
    for rank, timeline in device.items():
        assert timeline.metadata[0].timeline == {"clock": "device"}
        assert [int(step["step"]) for step in timeline.steps] == list(range(STEPS))
        assert {int(step["flags"]) for step in timeline.steps} == {format.DEVICE_CLOCK}
        assert [shape.tolist() for shape in timeline.shapes] == [shape.tolist() for shape in host[rank].shapes]
        assert all(0 < step["p2p"] < step["duration"] for step in timeline.steps)
    laid_on_one_clock(tmp_path / "device", workload)


def laid_on_one_clock(directory: Path, workload: GPTWorkload) -> None:
    """Nothing is received before it was sent, although the starts of the steps are seconds apart; on a machine that is
    too busy to tell, the report says so instead."""
    (target,) = analyze(directory).targets
    (table,) = tables_in(directory).values()
    assert isinstance(table, Table)
    schedule, both = table.schedule, (table.start, table.end)
    uncertain = (table.aligned_ms or 0.0) + TOLERANCE_MS
    for stage in range(schedule.stages):
        for which in phase_order(schedule, stage):
            source = schedule.placement.producer(which.kind, stage, which.chunk)
            if source is not None and table.clocks:
                (begun, _), (_, made) = (
                    [times[:, 0, at, each.chunk, schedule.kinds.index(each.kind), each.microbatch] for times in both]
                    for at, each in ((stage, which), (source[0], which._replace(chunk=source[1])))
                )
                assert (begun >= made - uncertain).all()
    for stage in target.stages:
        assert stage.compute_ms is not None
        assert stage.compute_ms.mean >= 1e3 * PACE * workload.microbatches
        assert not table.clocks or None not in stage.bubble_split.values()
