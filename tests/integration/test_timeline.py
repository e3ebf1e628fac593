"""The timeline on real megatron-core schedules: every phase of every step, and the same numbers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof.analysis.table.files import tables_in
from megaprof.analysis.table.table import Table
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.timeline import Timeline, read_timeline
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.integration.test_capture import STEPS, WORKLOADS, train

FLAGS = ["--profile-target", "train_actor", "train_log_probs", "evaluate", "--profile-tool", "timeline"]
EVERY = ["pp2-vpp2-overlap", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pp1", "pp2", "pp4", "ep2-pp2"))]
COMBINED = GPTWorkload(
    pp=2,
    vpp=2,
    ep=2,
    combined_1f1b=True,
    dtype="bfloat16",
    layers=4,
    hidden=64,
    seq_length=32,
    microbatches=4,
)


def timelines(directory: Path) -> dict[int, Timeline]:
    """By rank. Every file must be whole, and there must be no other."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and "control" not in path.parts)
    read = [read_timeline(path) for path in files]
    assert all(timeline.damage is None for timeline in read)
    return {timeline.metadata[0].coords.rank: timeline for timeline in read}


def events(timeline: Timeline, position: int) -> list[tuple[str, Any, int, int]]:
    found = timeline.events(position)
    assert found is not None
    named = []
    for code, start, end in zip(found.code.tolist(), found.start.tolist(), found.end.tolist(), strict=True):
        name = codes.name(code)
        assert name is not None
        named.append((name.label, tuple(name.fields.values()), start, end))
    return named


@pytest.mark.parametrize("name", EVERY)
def test_every_phase_of_every_step_is_there(name: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    known = run_ranks(train, workload.world_size, workload, [*FLAGS, "--profile-dir", str(tmp_path)], timeout=240)
    read = timelines(tmp_path)
    assert sorted(read) == list(range(workload.world_size))
    for truth in known:
        timeline = read[truth["coords"]["rank"]]
        passes = [
            (timeline.metadata[step["metadata"]].target, int(step["step"]), int(step["index"]))
            for step in timeline.steps
        ]
        assert passes == [
            *(("train_actor", step, 0) for step in range(STEPS)),
            ("train_log_probs", 0, 0),
            ("evaluate", 0, 0),
            ("train_actor", STEPS, 0),
        ]
        assert {key: getattr(timeline.metadata[0].coords, key) for key in truth["coords"]} == truth["coords"]
        assert [chunk.layers for chunk in timeline.metadata[0].chunks] == truth["layers"]
        chunks = workload.vpp or 1
        each = [(microbatch, chunk) for chunk in range(chunks) for microbatch in range(workload.microbatches)]
        for position, (target, _, _) in enumerate(passes):
            here = events(timeline, position)
            forwards = [where for label, where, _, _ in here if label == "forward"]
            backwards = [where for label, where, _, _ in here if label == "backward"]
            assert sorted(forwards) == sorted(each)
            assert sorted(backwards) == (sorted(each) if target == "train_actor" else [])
            fixed = timeline.steps[position]
            # Times of a step are kept in 16 bits: past 65 ms in units of 2 us, past 131 ms of 4 us.
            starts = [0, *(start for _, _, start, _ in here)]
            longest = max(*(end - start for _, _, start, end in here), *(b - a for a, b in itertools.pairwise(starts)))
            resolution = 1 if longest < 1 << 15 else 1 << (longest.bit_length() - 15)
            assert all(0 <= start <= end <= fixed["duration"] + resolution for _, _, start, end in here)
            for kind in ("forward", "backward"):
                lengths = [end - start for label, _, start, end in here if label == kind]
                assert abs(int(fixed[kind]) - sum(lengths)) <= len(lengths) * (resolution - 1)
            assert [label for label, *_ in here].count("finalize_grads") == (target == "train_actor")
            if workload.pp > 1:
                assert 0 < fixed["p2p"] < fixed["duration"]
            assert 0 < fixed["own"] < fixed["duration"]
            assert fixed["flags"] == 0
        # Steps of one kind have one shape, and an evaluation runs as a log-prob pass does.
        assert len(timeline.shapes) == 2
    if name == "pp2":  # a timeline changes no bit
        off = run_ranks(train, 2, workload, [], timeout=240)
        assert [rank["numbers"] for rank in known] == [rank["numbers"] for rank in off]


def test_windows_beside_it_are_marked(tmp_path: Path) -> None:
    flags = [*FLAGS, "torch", "--profile-dir", str(tmp_path), "--profile-steps", "train_actor=1;train_log_probs=none;"]
    flags[-1] += "evaluate=none"
    run_ranks(train, 2, WORKLOADS["pp2"], [*flags, "--profile-select", "per-stage"], timeout=240)
    traces = sorted(tmp_path.glob("*.pt.trace.json.gz"))
    assert [path.name.split(".")[:2] for path in traces] == [["train_actor", "step000001"]] * 2
    for path in tmp_path.glob("*" + format.SUFFIX):
        timeline = read_timeline(path)
        marked = [int(s["step"]) for s in timeline.steps if s["flags"] & format.CAPTURED]
        assert marked == [1]
        assert events(timeline, 1)


@pytest.mark.slow
def test_only_chosen_ranks_keep_one(tmp_path: Path) -> None:
    flags = [*FLAGS, "--profile-dir", str(tmp_path), "--profile-timeline-select", "pp=1"]
    run_ranks(train, 2, WORKLOADS["pp2"], flags, timeout=240)
    assert sorted(timelines(tmp_path)) == [1]


@pytest.mark.slow
def test_combined_passes_name_both_microbatches(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.pipeline_parallel.combined_1f1b", reason="megatron-core before 0.14")
    run_ranks(train, COMBINED.world_size, COMBINED, [*FLAGS, "--profile-dir", str(tmp_path)], timeout=280)
    (table,) = (table for key, table in tables_in(tmp_path).items() if key.target == "train_actor")
    assert isinstance(table, Table), table
    assert table.schedule.combined
    assert (table.passes > 0).all()
    for timeline in timelines(tmp_path).values():
        here = events(timeline, 0)
        kinds = Counter(label for label, *_ in here)
        each = COMBINED.microbatches * 2
        assert kinds["combined"] > 0
        assert kinds["forward"] + kinds["combined"] == kinds["backward"] + kinds["combined"] == each
        assert all(None not in where for label, where, _, _ in here if label == "combined")
        assert timeline.steps[0]["combined"] > 0


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
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    assert table.waited is not None
    waited = table.waited[:, 1, 0, 0]
    assert waited.sum() > 0.1 * table.length.sum()
    assert (table.held.get("processor_wait", 0.0) <= table.passes).all()
