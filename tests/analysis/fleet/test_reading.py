"""Timelines of many ranks read to a few numbers each, whatever the files hold."""

from __future__ import annotations

import tracemalloc
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaprof.analysis.fleet.fleet import survey
from megaprof.analysis.fleet.reading import BIN, Percentiles, bucketed, read_fleet, stacked
from megaprof.analysis.notes import of_files
from megaprof.analysis.trace.reading import Timelines, recordings_in
from megaprof.formats import timeline as format
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.telling import notes
from tests.formats.step_records import StepRecord, step_record

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=2))


def write(directory: Path, **options: object) -> list[Path]:
    return write_timelines(directory, LAYOUT, **({"steps": 30, "microbatches": 2} | options))  # type: ignore[arg-type]


def test_medians_of_buckets() -> None:
    steps = np.array([10, 11, 12, 13, 20, 21, 22])
    values = np.array([[1.0, 9.0, 2.0, 8.0, 5.0, 6.0, 7.0], [np.nan, 9.0, 2.0, np.nan, 5.0, np.nan, np.nan]])
    first, medians = bucketed(steps, values, 5)
    assert first == 2
    assert medians[:, [0, 2]].tolist() == [[5.0, 6.0], [5.5, 5.0]]
    assert np.isnan(medians[:, 1]).all()
    assert bucketed(steps[:0], np.empty((1, 0)), 5)[1].size == 0


def test_rows_of_several_files_share_their_buckets() -> None:
    rows = stacked([(3, np.array([[1.0, 2.0]])), (5, np.array([[3.0, 4.0]])), (7, np.array([[5.0]]))], 3, 3)
    assert rows[:, 0].tolist()[:1] == [1.0]
    assert np.array_equal(np.isnan(rows), [[False, False, True], [True, True, False], [True, True, True]])
    assert rows[1, 2] == 3.0, "what is behind the last bucket is left out"


def test_a_rank_is_read_to_what_stands_in_its_file(tmp_path: Path) -> None:
    paths = write(tmp_path)
    reading = read_fleet(Timelines(paths))
    ((key, series),) = reading.series.items()
    assert (key.target, key.role, key.sizes.pp) == ("train_actor", None, 2)
    assert sorted(r.coords.rank for r in series.ranks) == [0, 1, 2, 3]
    everything = {path: format.read_timeline(path).steps for path in paths}
    for rank, row in zip(series.ranks, stacked(series.compute, 0, 30), strict=True):
        assert rank.files == (paths[rank.coords.rank],)
        steps = everything[paths[rank.coords.rank]]
        compute = (steps["forward"].astype(np.int64) + steps["backward"] + steps["combined"]) / 1000
        assert np.allclose(row, compute)
        assert rank.mean_ms == pytest.approx(compute.mean())
        assert (rank.steps, rank.first_step, rank.last_step) == (30, 0, 29)
    longest = np.max([steps["duration"] for steps in everything.values()], axis=0) / 1000
    assert np.allclose(series.calls.longest, longest)
    least = np.minimum(everything[paths[0]]["finalize"], everything[paths[1]]["finalize"]) / 1000
    assert np.allclose(series.synchronising[0, 0][1], least)
    own = [(everything[p]["forward"] + everything[p]["backward"]) / 1000 for p in paths[:2]]
    exact = Percentiles(*np.percentile(np.concatenate(own), (50, 95, 99, 100), method="inverted_cdf"))
    counted = series.percentiles(0)
    assert counted is not None
    assert astuple(counted) == pytest.approx(astuple(exact), rel=BIN)


def test_rotated_files_are_one_rank_and_a_restart_counts_as_it_ran_last(tmp_path: Path) -> None:
    write(tmp_path, steps=20)
    write(tmp_path, steps=20, first_step=20, start_ns=2_000_000_000_000_000_000)
    # The job goes back to the checkpoint of step 30, and is slower then.
    later = write(tmp_path, steps=10, first_step=30, start_ns=3_000_000_000_000_000_000, forward_ms=50.0)
    reading = read_fleet(recordings_in(tmp_path)[1])
    (series,) = reading.series.values()
    assert len(series.ranks) == 4
    for rank, row in zip(series.ranks, stacked(series.compute, 0, 40), strict=True):
        assert (rank.steps, rank.again, rank.last_step) == (40, 10, 39)
        assert row[30:].min() > 1.5 * row[:30].max()
    (fleet,) = survey(reading)
    assert any("10 steps of a rank ran twice" in note for note in notes(fleet))
    assert set(later) < set(reading.read)


def test_targets_and_roles_are_kept_apart(tmp_path: Path) -> None:
    write(tmp_path, role="actor")
    write(tmp_path, role="critic", steps=7)
    write(tmp_path, target="train_log_probs", role="actor", first_step=1000)
    reading = read_fleet(recordings_in(tmp_path)[1])
    found = {(key.target, key.role): len(series.calls.steps) for key, series in reading.series.items()}
    assert found == {("train_actor", "actor"): 30, ("train_actor", "critic"): 7, ("train_log_probs", "actor"): 30}


def test_captured_failed_and_untimed_steps_are_left_out(tmp_path: Path) -> None:
    paths = write(tmp_path)
    timeline = format.read_timeline(paths[0])
    records = [format.MAGIC, format.metadata_record(timeline.metadata[0].as_dict()), format.shape_record([])]
    flags = [0] * 7 + [format.INCOMPLETE, format.DISTURBED, format.FAILED]
    for step, flag in zip(timeline.steps[:10], flags, strict=True):
        untimed = flag == format.INCOMPLETE  # given up on the GPU: no times at all
        kinds = {name: 0 if untimed else int(step[name]) for name in ("forward", "backward", "finalize")}
        duration = 0 if untimed else int(step["duration"])
        records.append(
            step_record(
                StepRecord(0, 0, int(step["step"]), 0, int(step["start_ns"]), duration, [], [], kinds, flags=flag)
            )
        )
    paths[0].write_bytes(b"".join(records))
    (series,) = read_fleet(Timelines(paths[:1])).series.values()
    (rank,) = series.ranks
    assert (rank.steps, rank.left_out, rank.last_step) == (7, 3, 9)


def test_ranks_without_common_steps_take_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaprof.analysis.trace.reading._KEPT", 0)
    together = write_timelines(tmp_path / "together", WorldLayout(ParallelSizes(dp=48)), steps=20, microbatches=1)
    apart = [tmp_path / path.name for path in together]
    for rank, (path, other) in enumerate(zip(together, apart, strict=True)):
        timeline = format.read_timeline(path)
        records = [format.MAGIC, format.metadata_record(timeline.metadata[0].as_dict()), format.shape_record([])]
        for step in timeline.steps:
            kinds = {name: int(step[name]) for name in ("forward", "backward", "finalize")}
            begin, number = int(step["start_ns"]), int(step["step"]) + 20 * rank
            records.append(step_record(StepRecord(0, 0, number, 0, begin, int(step["duration"]), [], [], kinds)))
        other.write_bytes(b"".join(records))
    peaks = []
    for paths in (together, apart):
        timelines = Timelines(paths)
        tracemalloc.start()
        (series,) = read_fleet(timelines).series.values()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert [row.steps for row in series.ranks] == [20] * 48
        assert sum(len(rows) for _, rows in series.compute) == 48
    assert series.calls.steps.tolist() == list(range(960))
    assert peaks[1] < 2 * peaks[0]


def test_several_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, slow=[Slow(rank=1, factor=2.0)])
    monkeypatch.setattr("megaprof.analysis.trace.reading._TIMELINES_WORTH_IT", 0)
    done: list[tuple[int, int]] = []
    several = read_fleet(Timelines(paths), 2, lambda now, of: done.append((now, of)))
    alone = read_fleet(Timelines(paths), 1)
    assert done[-1] == (4, 4)
    assert survey(several) == survey(alone)


def test_a_file_that_ends_in_a_record_is_normal_and_told_once(tmp_path: Path) -> None:
    for path in write(tmp_path):
        path.write_bytes(path.read_bytes()[:-5])
    reading = read_fleet(recordings_in(tmp_path)[1])
    (told,) = of_files(reading.warnings)
    assert (told.kind, told.count) == ("cut", 4)
    assert {r.last_step for series in reading.series.values() for r in series.ranks} == {28}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 5000), change=st.binary(max_size=30), cut=st.integers(0, 60))
def test_a_damaged_file_is_told_and_raises_nothing(tmp_path: Path, position: int, change: bytes, cut: int) -> None:
    paths = write(tmp_path)
    data = paths[2].read_bytes()
    position %= len(data)
    paths[2].write_bytes(data[:position] + change + data[position + cut :])
    reading = read_fleet(Timelines(paths))
    told = reading.warnings
    ranks = {r.coords.rank for series in reading.series.values() for r in series.ranks}
    assert {0, 1, 3} <= ranks
    assert ranks == {0, 1, 2, 3} or told
    for fleet in survey(reading):
        notes(fleet)
