"""Levels, their changes and single outliers, in series that are known."""

from __future__ import annotations

import numpy as np
import pytest

from megaprof.analysis.fleet.levels import (
    LASTING_STEPS,
    Buckets,
    Floats,
    Level,
    Shift,
    levels,
    low_median,
    noise_of,
    relative_shifts,
    shifts,
    single_steps,
)


def buckets(count: int, seconds: float = 1.0, width: int = 1) -> Buckets:
    first = np.arange(count) * width
    return Buckets(first, first + width - 1, np.full(count, width), np.full(count, seconds))


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
