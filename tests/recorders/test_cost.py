"""Pairs of blocks with and without the recorder: when it rests, and what comes out."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprof.recorders.timeline import cost
from megaprof.recorders.timeline.cost import Pairs


class Job:
    """A job whose steps take ``step`` seconds, and ``more`` with the recorder; the CPU twice as much of it. What the
    recorder leaves to the background thread falls into the step in which it is flushed."""

    def __init__(self, step: float, more: float, noise: float = 0.0) -> None:
        self.now = self.cpu = 0.0
        self.step, self.more, self.noise = step, more, noise
        self.left_over = self.flushed = 0.0
        self.rested: list[int] = []
        self.random = random.Random(7)
        self.pairs = Pairs(self.flush, lambda: (self.now, self.cpu))

    def flush(self) -> None:
        self.cpu += self.left_over
        self.left_over, self.flushed = 0.0, self.now

    def run(self, calls: range) -> None:
        for index in calls:
            rests = self.pairs.rests(index)
            more = 0.0 if rests else self.more
            if self.now - self.flushed > 1.0:
                self.flush()
            self.left_over += more
            self.now += self.step + more + self.random.gauss(0, self.noise)
            self.cpu += self.step + more
            if rests:
                self.rested.append(index)


@settings(max_examples=30)
@given(st.floats(1e-3, 30.0), st.floats(0, 0.05))
def test_the_difference_is_found(step: float, share: float) -> None:
    job = Job(step, share * step)
    length = 1 << max(0, round(cost.BLOCK_SECONDS / step)).bit_length()
    job.run(range(min(6 * cost.EARLY * min(length, cost._LONGEST_BLOCK), 40_000)))
    found = job.pairs.cost()
    if found is None:
        assert job.pairs.taken < cost.FEWEST
        return
    assert found.wall_us == pytest.approx(1e6 * share * step, abs=1e-2 + 1e-9 * job.now * 1e6)
    assert found.step_us == pytest.approx(1e6 * step, rel=1e-6)
    assert found.cpu_us == pytest.approx(2e6 * share * step, rel=1e-3, abs=1.0)


def test_noise_is_told_as_such() -> None:
    job = Job(0.1, 2e-4, noise=0.01)
    job.run(range(40_000))
    found = job.pairs.cost()
    assert found is not None
    assert found.wall_error_us > 50
    assert abs(found.wall_us - 200) < 4 * found.wall_error_us


def test_it_rests_rarely_and_in_whole_blocks() -> None:
    job = Job(0.1, 0.0)
    job.run(range(200_000))
    assert job.pairs.taken > cost.EARLY_PAIRS
    assert len(job.rested) < 0.02 * 200_000
    later = [index for index in job.rested if index > 100_000]
    assert len(later) < 0.004 * 100_000
    blocks = [index for index in job.rested if index - 1 not in job.rested]
    assert len(job.rested) == 33 * len(blocks), "a step to settle and 32 that count"


def test_all_ranks_rest_in_the_same_steps() -> None:
    """Their clocks and speeds differ a little, and one joins late."""
    jobs = [Job(0.1, 0.0), Job(0.104, 0.0), Job(0.097, 0.0)]
    for job in jobs:
        job.run(range(60_000))
    assert jobs[0].rested == jobs[1].rested == jobs[2].rested != []


def test_a_pair_that_was_interrupted_does_not_count() -> None:
    job = Job(0.1, 0.0)
    job.run(range(10_000))
    taken, first = job.pairs.taken, job.rested[0]
    again = Job(0.1, 0.0)
    again.run(range(first + 5))
    again.run(range(first + 9, 10_000))  # steps in between that nobody asked about
    assert again.pairs.taken == taken - 1


def test_no_figure_from_too_few_pairs() -> None:
    job = Job(3.0, 0.1)
    job.run(range(2 * cost.EARLY + 4))
    assert 0 < job.pairs.taken < cost.FEWEST
    assert job.pairs.cost() is None


@pytest.mark.parametrize("pairs", [3, 8, 64])
def test_the_error_is_the_scatter_of_the_median(pairs: int) -> None:
    chance = random.Random(pairs)
    found = [cost._median([chance.gauss(5, 2) for _ in range(pairs)]) for _ in range(3000)]
    scatter = statistics.stdev(median for median, _ in found)
    assert statistics.mean(error for _, error in found) == pytest.approx(scatter, rel=0.15)


def test_it_is_computed_once_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status that asks every second must not cost more the more pairs there are."""
    job, medians = Job(0.1, 2e-4), 0
    median = cost._median

    def counted(values: list[float]) -> tuple[float, float]:
        nonlocal medians
        medians += 1
        return median(values)

    monkeypatch.setattr(cost, "_median", counted)
    job.run(range(20_000))
    assert job.pairs.taken >= cost.FEWEST
    found = [job.pairs.cost() for _ in range(20)]
    assert found == found[:1] * 20 != [None] * 20
    assert medians == 2, "wall and CPU time"
