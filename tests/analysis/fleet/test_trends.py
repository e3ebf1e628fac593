"""Levels and single outliers of series that are known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.fleet.reading import BIN, Histogram
from megaprof.analysis.fleet.trends import (
    LASTING_STEPS,
    Floats,
    Percentiles,
    Shift,
    drift,
    lasting,
    levels,
    low_median,
    shifts,
    single_steps,
)

ONES = np.ones(200, dtype=np.int64)


def series(*parts: tuple[int, float], noise: float = 0.02, seed: int = 0) -> Floats:
    """``(how many, level)``, with noise."""
    values = np.concatenate([np.full(count, level) for count, level in parts])
    noisy: Floats = values * np.exp(np.random.default_rng(seed).normal(0, noise, len(values)))
    return noisy


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_noise_is_one_level(noise: float, seed: int) -> None:
    assert len(levels(series((200, 100.0), noise=noise, seed=seed), ONES)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_change_is_found_where_it_is(seed: int) -> None:
    before, after = levels(series((120, 100.0), (80, 130.0), seed=seed), ONES)
    assert (before.first, before.last, after.first, after.last) == (0, 119, 120, 199)
    assert before.value == pytest.approx(100, rel=0.02)
    assert after.value == pytest.approx(130, rel=0.02)
    assert (before.steps, after.steps) == (120, 80)


def test_up_and_down_again_are_two_changes() -> None:
    steps = np.arange(200) * 10
    found = shifts(levels(series((60, 100.0), (40, 150.0), (100, 100.0)), ONES), steps, steps + 9)
    assert [(shift.step, shift.until) for shift in found] == [(600, 999), (1000, None)]
    assert found[0].change == pytest.approx(0.5, abs=0.05)


def test_a_change_below_the_threshold_or_too_short_is_none() -> None:
    assert len(levels(series((100, 100.0), (100, 107.0)), ONES)) == 1
    short = LASTING_STEPS // 2 - 1
    assert len(levels(series((100, 100.0), (short, 200.0), (100 - short, 100.0)), ONES)) == 1


def test_a_level_that_is_left_within_seconds_is_none() -> None:
    found = levels(series((60, 100.0), (20, 150.0), (100, 100.0), (20, 150.0)), ONES)
    assert len(found) == 4
    assert len(lasting(found, np.full(200, 0.2))) == 1
    assert len(lasting(found, np.full(200, 0.3))) == 4


def test_what_took_no_time_before_has_a_change() -> None:
    assert Shift(5, None, 0.0, 20.0).change == pytest.approx(20_000, rel=0.01)


def test_a_gap_belongs_to_no_level() -> None:
    values = series((100, 100.0), (100, 200.0))
    values[95:105] = np.nan
    before, after = levels(values, ONES)
    assert (before.last, after.first) == (94, 105)
    assert levels(np.full(5, np.nan), ONES[:5]) == []


def test_single_slow_steps_are_counted_and_no_level() -> None:
    values = series((1000, 100.0))
    values[99::100] *= 3
    found = single_steps(np.arange(1000), values)
    assert (found.count, found.every) == (10, 100)
    assert {step for step, _ in found.worst} <= set(range(99, 1000, 100))
    assert len(levels(values, np.ones(1000, dtype=np.int64))) == 1


def test_a_lasting_change_is_no_single_step() -> None:
    assert single_steps(np.arange(200), series((100, 100.0), (100, 300.0))).count == 0


def test_a_slow_growth_is_a_drift_and_noise_is_none() -> None:
    growing = series((200, 100.0)) * np.linspace(1, 1.3, 200)
    assert drift(growing) == pytest.approx(0.25, abs=0.04)
    assert drift(series((200, 100.0), noise=0.2)) is None
    assert drift(series((120, 100.0), (80, 109.0))) is None  # one jump, too small for a change of level


def test_medians_without_what_is_not_there() -> None:
    values = np.array([[1.0, np.nan], [np.nan, np.nan], [5.0, 7.0]])
    assert low_median(values).tolist() == [1.0, 7.0]


@given(st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=60).map(sorted))
def test_percentiles_of_a_few_times_are_the_same_whether_counted_or_kept(times_us: list[int]) -> None:
    apart = [times_us[0], *(later for time, later in pairwise(times_us) if later > time * (1 + BIN))]
    half = len(apart) // 2
    histogram = Histogram.of(np.array(apart[:half], dtype=np.int64)).joined(
        Histogram.of(np.array(apart[half:], dtype=np.int64))
    )
    kept = Percentiles.of(np.array(apart) / 1e3)
    assert [kept.p50, kept.p95, kept.p99, kept.max] == [histogram.percentile_ms(part) for part in (0.5, 0.95, 0.99, 1)]
    counted = Histogram.of(np.array(times_us, dtype=np.int64)).percentile_ms(0.5)
    assert counted in {time / 1e3 for time in times_us}
    assert counted == pytest.approx(Percentiles.of(np.array(times_us) / 1e3).p50, rel=2 * BIN, abs=0.002)
