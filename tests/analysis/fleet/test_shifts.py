"""Rows that become slower than those beside them, on series that are known."""

from __future__ import annotations

import numpy as np
import pytest

from megaprof.analysis.fleet.shifts import Buckets, noise_of, relative_shifts
from megaprof.analysis.fleet.trends import Floats

COUNT = 60
BUCKETS = Buckets(0, np.arange(COUNT), np.arange(COUNT), np.ones(COUNT, dtype=np.int64), np.full(COUNT, 1.0))


def rows(count: int, noise: float, seed: int) -> Floats:
    made: Floats = 100 * np.exp(np.random.default_rng(seed).normal(0, noise, (count, COUNT)))
    return made


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0])
def test_noise_is_nobodys(noise: float, seed: int) -> None:
    assert relative_shifts(rows(2, noise, seed), BUCKETS) == [(), ()]


def test_what_is_little_beside_a_floor_is_not_told() -> None:
    values = rows(2, 0.02, 0) / 100
    values[1, 20:] *= 3
    assert [shift.step for shift in relative_shifts(values, BUCKETS)[1]] == [20]
    assert relative_shifts(values, BUCKETS, floor_ms=50.0) == [(), ()]


def test_a_change_of_level_is_no_noise() -> None:
    values = rows(2, 0.1, 0)
    quiet = noise_of(values)
    values[1, 20:] *= 10
    assert noise_of(values) == pytest.approx(quiet, rel=0.1)
