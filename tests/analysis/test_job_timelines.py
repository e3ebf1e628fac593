"""Timelines of jobs that never ran read back as what they were asked to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import RANKS_PER_HOST, Slow, write_timelines
from tests.formats.step_records import events_of


def test_files_are_whole_named_and_sharded(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(tp=8, pp=4, dp=64))
    paths = write_timelines(tmp_path, layout, steps=3, microbatches=4, ranks=[0, 1030])
    assert [path.parent.name for path in paths] == ["ranks000000-001023", "ranks001024-002047"]
    assert paths[1].name == "timeline.step000000.pp2-tp6-cp0-ep0-dp0.rank01030.timeline.bin"
    for path, rank in zip(paths, (0, 1030), strict=True):
        timeline = read_timeline(path)
        assert timeline.damage is None
        assert timeline.metadata[0].coords.rank == rank
        assert timeline.metadata[0].host == f"node-{rank // RANKS_PER_HOST:04d}"
        assert timeline.steps["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("vpp", [1, 2])
def test_events_are_the_schedules_and_add_up_to_the_totals(tmp_path: Path, vpp: int) -> None:
    layout = WorldLayout(ParallelSizes(pp=2, dp=2, vpp=vpp))
    paths = write_timelines(tmp_path, layout, steps=8, microbatches=4, noise=0.0)
    for path in paths:
        timeline = read_timeline(path)
        for position, step in enumerate(timeline.steps):
            events = events_of(timeline, position)
            assert events is not None
            for kind, name in codes.KINDS.items():
                own = (events.code & codes.KIND_MASK) == kind
                assert (events.end - events.start)[own].sum() == step[name]
                assert np.count_nonzero(own) == {"forward": 4 * vpp, "backward": 4 * vpp, "finalize": 1}.get(
                    name, np.count_nonzero(own)
                )
            assert (np.diff(events.start) >= 0).all()
            assert (events.end[:-1] <= events.start[1:]).all()
            assert events.end[-1] == step["duration"]


def test_what_is_slow_is_slow_for_those_who_wait_too(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(tp=2, pp=2, dp=2))
    paths = write_timelines(
        tmp_path, layout, steps=20, microbatches=4, noise=0.0, slow=[Slow(rank=1, from_step=10, factor=2.0)]
    )
    steps = [read_timeline(path).steps for path in paths]
    passes = [s["forward"] + s["backward"].astype(np.int64) for s in steps]
    changed = [rank for rank, own in enumerate(passes) if own[10] > 1.5 * own[9]]
    assert changed == [0, 1]  # the rank and its tensor-parallel peer
    assert all(own[10] == own[9] for rank, own in enumerate(passes) if rank > 1)
    waiting = [rank for rank, own in enumerate(steps) if own["finalize"][10] > 5 * own["finalize"][9]]
    assert waiting == [2, 3, 6, 7]  # the other replica waits for it
    assert all(own["p2p"][10] > own["p2p"][9] for own in steps[4:6])  # and so does the other stage of its pipeline


def test_options(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(dp=2))
    paths = write_timelines(
        tmp_path, layout, steps=9, first_step=100, last_step={1: 104}, role="ref", device_clock=True, events=False
    )
    first, second = (read_timeline(path) for path in paths)
    assert first.steps["step"].tolist() == list(range(100, 109))
    assert second.steps["step"].tolist() == list(range(100, 105))
    assert (first.steps["flags"] == format.DEVICE_CLOCK | format.INCOMPLETE).all()
    assert first.metadata[0].role == "ref"
    assert events_of(first, 0) is None
    with pytest.raises(ValueError, match="2 times for 1 stages"):
        write_timelines(tmp_path, layout, steps=1, forward_ms=[1.0, 2.0])
