"""Rows that are slower than those beside them, on series that are known."""

from __future__ import annotations

import numpy as np
import pytest

from megaprof.analysis.fleet.stragglers import Buckets, noise_of, relative_shifts, slow_rows
from megaprof.analysis.fleet.trends import Floats

COUNT = 60
BUCKETS = Buckets(0, np.arange(COUNT), np.arange(COUNT), np.ones(COUNT, dtype=np.int64), np.full(COUNT, 1.0))


def rows(count: int, noise: float, seed: int) -> Floats:
    made: Floats = 100 * np.exp(np.random.default_rng(seed).normal(0, noise, (count, COUNT)))
    return made


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("count", "noise", "factor"), [(2, 0.5, 6.0), (2, 0.05, 1.3), (8, 0.3, 3.0)])
def test_a_slow_row_is_found_from_where_it_is(count: int, noise: float, factor: float, seed: int) -> None:
    values = rows(count, noise, seed)
    values[1, 20:] *= factor
    (run,) = slow_rows(values, BUCKETS)
    assert (run.row, run.last, run.since_start, run.to_end) == (1, COUNT - 1, False, True)
    assert abs(run.first - 20) <= 2
    assert run.factor == pytest.approx(factor, rel=3 * noise)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0])
def test_noise_is_nobodys(noise: float, seed: int) -> None:
    assert slow_rows(rows(2, noise, seed), BUCKETS) == []
    assert relative_shifts(rows(2, noise, seed), BUCKETS) == [(), ()]


def test_what_is_little_beside_a_floor_is_not_told() -> None:
    values = rows(2, 0.02, 0) / 100
    values[1] *= 3
    assert [run.row for run in slow_rows(values, BUCKETS)] == [1]
    assert slow_rows(values, BUCKETS, floor_ms=50.0) == []


def test_a_change_of_level_is_no_noise() -> None:
    values = rows(2, 0.1, 0)
    quiet = noise_of(values)
    values[1, 20:] *= 10
    assert noise_of(values) == pytest.approx(quiet, rel=0.1)
