"""Changes of level over runs that are known, and none in healthy ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaprof.analysis.fleet.fleet import (
    LASTING_STEPS,
    Buckets,
    Fleet,
    Level,
    Shift,
    levels,
    noise_of,
    relative_shifts,
    shifts,
    single_steps,
    survey,
)
from megaprof.analysis.fleet.reading import Floats, low_median, read_fleet
from megaprof.analysis.report.views import run_table
from megaprof.analysis.trace.reading import recordings_in
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.telling import findings, notes, of_fleet

PIPELINE = WorldLayout(ParallelSizes(pp=4, dp=8))
EXPERTS = WorldLayout(ParallelSizes(tp=2, pp=2, ep=4, dp=16))
WARM_UP = Slow(from_step=0, until_step=4, factor=6)
CHECKPOINTS = tuple(Slow(from_step=step, until_step=step, factor=3) for step in range(49, 300, 50))


def fleet_of(directory: Path, layout: WorldLayout, **options: Any) -> Fleet:
    write_timelines(directory, layout, **({"steps": 120, "microbatches": 4} | options))
    return fleet_in(directory)


def fleet_in(directory: Path) -> Fleet:
    (fleet,) = survey(read_fleet(recordings_in(directory)[1]))
    return fleet


def test_a_slow_rank_makes_the_step_longer_and_no_stage(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(rank=19, from_step=70, factor=1.31), WARM_UP, *CHECKPOINTS])
    assert not any(stage.shifts for stage in fleet.stages)
    assert [shift.step for shift in fleet.times.step_shifts] == [70]
    assert [found.kind for found in of_fleet(fleet)] == ["slow_step"]
    assert not fleet.synchronisation.synchronisation_shifts  # the others waited in it, and nobody was slow in it
    assert fleet.times.single.count == 5 + 2  # those of the warm-up, and steps 49 and 99


@pytest.mark.parametrize(("finalize_ms", "known"), [(5.0, True), (0.0, False)])
def test_passes_without_gradients_have_no_time_for_them(tmp_path: Path, finalize_ms: float, known: bool) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, steps=12, finalize_ms=finalize_ms, target="train_log_probs")
    assert all((ms is not None) == known for ms in fleet.synchronisation.synchronisation_ms)
    assert any("gradients" in line.cells[0].text for line in run_table(fleet).rows) == known


def test_steps_around_windows_are_no_run(tmp_path: Path) -> None:
    write_timelines(
        tmp_path, PIPELINE, steps=26, first_step=100, slow=[Slow(factor=1.5, from_step=113)], around_windows=True
    )
    assert survey(read_fleet(recordings_in(tmp_path)[1])) == []


def test_thousands_of_steps_are_kept_in_a_few_buckets(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2, dp=4))
    fleet = fleet_of(tmp_path, layout, steps=3000, events=False, slow=[Slow(rank=2, from_step=1500, factor=1.2)])
    assert fleet.width == 15
    assert len(fleet.buckets) == 200
    (shift,) = fleet.times.step_shifts
    assert abs(shift.step - 1500) <= fleet.width
    assert fleet.coverage.calls == 3000
    assert "about step 1500" in findings(fleet)[0]


def test_a_slow_stage_is_told_from_when_on(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(stage=1, from_step=50, factor=1.25)])
    shifts = {stage.pp: [(s.step, s.until) for s in stage.shifts] for stage in fleet.stages}
    assert shifts == {0: [], 1: [(50, None)], 2: [], 3: []}
    assert findings(fleet)[0].startswith("Stage 1 has been 25% slower since step 50, compared with the other stages")


def test_two_stages_of_one_rank_each(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2))
    fleet = fleet_of(tmp_path, layout, slow=[Slow(rank=1, from_step=50, factor=1.25)])
    assert {stage.pp: [s.step for s in stage.shifts] for stage in fleet.stages} == {0: [], 1: [50]}


def test_a_slow_collective_is_no_slow_compute(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(from_step=50, factor=8, kind="finalize")])
    assert not any(stage.shifts for stage in fleet.stages)
    (shift,) = fleet.synchronisation.synchronisation_shifts
    assert (shift.step, shift.until) == (50, None)
    assert shift.after_ms == pytest.approx(8 * shift.before_ms, rel=0.05)
    assert any(found.startswith("Gradient synchronisation has taken 40.") for found in findings(fleet))


def test_the_slow_collective_of_a_stage(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(rank=10, from_step=50, factor=8, kind="finalize")])
    assert [(pp, shift.step) for pp, shift in fleet.synchronisation.stage_synchronisation] == [(1, 50)]


def test_what_lasts_for_seconds_is_nothing(tmp_path: Path) -> None:
    short = {"forward_ms": 1.0, "backward_ms": 2.0, "finalize_ms": 0.0, "steps": 200}
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(stage=2, from_step=70, until_step=110, factor=3.0)], **short)
    assert findings(fleet) == ()


def test_what_ended_is_told_with_both_ends_and_last(tmp_path: Path) -> None:
    slow = [Slow(stage=2, from_step=30, until_step=60, factor=1.5), Slow(stage=1, from_step=80, factor=1.2)]
    fleet = fleet_of(tmp_path, PIPELINE, slow=slow)
    shifts = {stage.pp: [(s.step, s.until) for s in stage.shifts if s.change > 0] for stage in fleet.stages}
    assert (shifts[2], shifts[1]) == ([(30, 60)], [(80, None)])
    of_stages = [found.text for found in of_fleet(fleet) if found.kind == "slow_stage"]
    assert [text[:7] for text in of_stages] == ["Stage 1", "Stage 2"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("layout", "noise", "tails"),
    [
        (PIPELINE, 0.02, 0.0),
        (PIPELINE, 0.15, 0.05),
        (EXPERTS, 0.05, 0.02),
        (WorldLayout(ParallelSizes(dp=2)), 0.2, 0.02),
    ],
    ids=["quiet", "noisy", "experts", "two ranks"],
)
def test_healthy_runs_raise_no_alarm(
    tmp_path: Path, layout: WorldLayout, noise: float, tails: float, seed: int
) -> None:
    fleet = fleet_of(
        tmp_path,
        layout,
        steps=200,
        noise=noise,
        tails=tails,
        seed=seed,
        events=False,
        slow=[WARM_UP, *CHECKPOINTS],
    )
    assert findings(fleet) == ()


def test_ranks_that_ended_early_and_ranks_that_are_missing(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, ranks=[r for r in range(32) if r not in (3, 8, 9, 10)], last_step={20: 77})
    assert fleet.coverage.missing == (3, 8, 9, 10)
    assert [(e.rank, e.stage, e.host, e.last_step) for e in fleet.coverage.ended] == [(20, 2, "node-0002", 77)]
    assert any(note.startswith("Timelines of 28 of 32 ranks are here; missing: 3, 8-10.") for note in notes(fleet))
    assert "rank 20 (stage 2, node-0002) after step 77. The last step of the other ranks is 119." in findings(fleet)[-1]
    # The rank that ended may have been the one that its group waited for.
    assert not fleet.synchronisation.stage_synchronisation


def test_too_few_steps_are_said_to_be_too_few(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, steps=5)
    assert any("5 steps are too few" in note for note in notes(fleet))


def buckets(count: int, seconds: float = 1.0, width: int = 1) -> Buckets:
    first = np.arange(count) * width
    return Buckets(first, np.full(count, width), np.full(count, seconds))


def levels_of(values: Floats, seconds: float = 1.0) -> list[Level]:
    return levels(values, buckets(len(values), seconds), noise_of(values[None]))


def series(*parts: tuple[int, float], noise: float = 0.02, seed: int = 0) -> Floats:
    """``(how many, level)``, with noise."""
    values = np.concatenate([np.full(count, level) for count, level in parts])
    noisy: Floats = values * np.exp(np.random.default_rng(seed).normal(0, noise, len(values)))
    return noisy


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_noise_is_one_level(noise: float, seed: int) -> None:
    assert len(levels_of(series((200, 100.0), noise=noise, seed=seed))) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_change_is_found_where_it_is(seed: int) -> None:
    before, after = levels_of(series((120, 100.0), (80, 130.0), seed=seed))
    assert (before.begin, before.end, after.begin, after.end) == (0, 120, 120, 200)
    assert np.exp([before.middle, after.middle]) == pytest.approx([100, 130], rel=0.02)


def test_up_and_down_again_are_two_changes() -> None:
    values = series((60, 100.0), (40, 150.0), (100, 100.0))
    found = shifts(values, values, buckets(200, width=10), 0.02)
    assert [(shift.step, shift.until) for shift in found] == [(600, 999), (1000, None)]
    assert found[0].change == pytest.approx(0.5, abs=0.05)


def test_a_change_below_the_threshold_or_too_short_is_none() -> None:
    assert len(levels_of(series((100, 100.0), (100, 107.0)))) == 1
    short = LASTING_STEPS // 2 - 1
    assert len(levels_of(series((100, 100.0), (short, 200.0), (100 - short, 100.0)))) == 1


def test_a_level_that_is_left_within_seconds_is_none() -> None:
    values = series((60, 100.0), (20, 150.0), (100, 100.0), (20, 150.0))
    assert len(levels_of(values, 0.1)) == 1
    assert len(levels_of(values, 0.3)) == 4


def test_what_took_no_time_before_has_a_change() -> None:
    assert Shift(5, None, 0.0, 20.0).change == pytest.approx(20_000, rel=0.01)


def test_a_gap_belongs_to_no_level() -> None:
    values = series((100, 100.0), (100, 200.0))
    values[95:105] = np.nan
    before, after = levels_of(values)
    assert (before.end, after.begin) == (95, 105)
    assert levels_of(np.full(5, np.nan)) == []


def test_single_slow_steps_are_counted_and_no_level() -> None:
    values = series((1000, 100.0))
    values[99::100] *= 3
    found = single_steps(np.arange(1000), values)
    assert (found.count, found.every) == (10, 100)
    assert {step for step, _ in found.worst} <= set(range(99, 1000, 100))
    assert len(levels_of(values)) == 1


def test_a_lasting_change_is_no_single_step() -> None:
    assert single_steps(np.arange(200), series((100, 100.0), (100, 300.0))).count == 0


def test_medians_without_what_is_not_there() -> None:
    values = np.array([[1.0, np.nan], [np.nan, np.nan], [5.0, 7.0]])
    assert low_median(values).tolist() == [1.0, 7.0]


def rows(count: int, noise: float, seed: int) -> Floats:
    made: Floats = 100 * np.exp(np.random.default_rng(seed).normal(0, noise, (count, 60)))
    return made


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0])
def test_noise_is_nobodys(noise: float, seed: int) -> None:
    assert relative_shifts(rows(2, noise, seed), buckets(60)) == [(), ()]


def test_what_is_little_beside_a_floor_is_not_told() -> None:
    values = rows(2, 0.02, 0) / 100
    values[1, 20:] *= 3
    assert [shift.step for shift in relative_shifts(values, buckets(60))[1]] == [20]
    assert relative_shifts(values, buckets(60), floor_ms=50.0) == [(), ()]


def test_a_change_of_level_is_no_noise() -> None:
    values = rows(2, 0.1, 0)
    quiet = noise_of(values)
    values[1, 20:] *= 10
    assert noise_of(values) == pytest.approx(quiet, rel=0.1)
