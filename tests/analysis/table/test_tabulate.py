"""Clocks of ranks aligned by passes whose true times are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.simulation import compiled
from megaprof.analysis.table.tabulate import TOLERANCE_MS, one_clock
from megaprof.parallel.schedules import PipelineSchedule


def aligned(
    hosts: list[str],
    ahead_ms: list[float],
    *,
    link_ms: float = 0.05,
    steps: int = 2,
    forward_only: bool = False,
    rendezvous: bool = False,
    missing: tuple[int, ...] = (),
    slow: float = 1.0,
    drift_ms: float = 0.0,
) -> tuple[Any, bool, float | None]:
    """Returns the shifts of stages, [t, s], whose clocks are ahead, whether they are on one clock, and how uncertain it
    is. ``slow``: the time of stage 1 relative to the others."""
    stages = len(hosts)
    schedule = PipelineSchedule.checked(stages, 1, 8, forward_only=forward_only)
    random = np.random.default_rng(len(hosts))
    passes = random.uniform(2.0, 3.0, (steps, stages, 1, len(schedule.kinds), 8))
    passes[:, 1:2] *= slow
    entry = random.uniform(0.0, 1.0, (steps, stages))
    replay = compiled(schedule, rendezvous)
    end = replay.ends(passes, entry=entry, link=link_ms)
    start = end - passes
    ahead = np.array(ahead_ms) + drift_ms * np.arange(steps)[:, None] * (np.arange(stages) > 0)
    start, end = (times + 1e3 * np.arange(steps)[:, None, None, None, None] for times in (start, end))
    start, end = (times + ahead[:, :, None, None, None] for times in (start, end))
    start[:, list(missing)] = end[:, list(missing)] = np.nan
    enter, reduced = entry + ahead + 1e3 * np.arange(steps)[:, None], np.full((steps, stages), np.nan)
    names = np.array(hosts)[None, :, None]
    axes: tuple[Any, ...] = np.s_[:, None, :, None]
    shift, clocks, uncertain_ms = one_clock(
        names, schedule, start[axes], end[axes], enter[axes], reduced[axes], device=False
    )
    return shift[:, 0, :, 0], clocks, uncertain_ms


def test_one_host_has_nothing_to_align() -> None:
    shift, clocks, uncertain_ms = aligned(["a", "a"], [0.0, 0.0])
    assert (shift == 0.0).all()
    assert (clocks, uncertain_ms) == (True, None)


@pytest.mark.parametrize("ahead_ms", [0.0, 3.0, -700.0, 86_400_000.0])
def test_forwards_and_backwards_bound_the_offset_from_both_sides(ahead_ms: float) -> None:
    shift, clocks, uncertain_ms = aligned(["a", "b"], [0.0, ahead_ms])
    assert clocks
    assert uncertain_ms is not None
    assert abs(shift[0] + [0.0, ahead_ms]).max() <= uncertain_ms + 1e-6 <= 0.07


@given(
    ahead_ms=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6),
    link_ms=st.floats(0.0, 10.0),
    slow=st.floats(0.3, 3.0),
)
def test_the_true_offset_is_never_outside_the_uncertainty(ahead_ms: list[float], link_ms: float, slow: float) -> None:
    hosts = [f"h{stage}" for stage in range(len(ahead_ms))]
    shift, clocks, uncertain_ms = aligned(hosts, ahead_ms, link_ms=link_ms, slow=slow)
    assert clocks
    assert uncertain_ms is not None
    off = np.diff(shift[0] + ahead_ms - ahead_ms[0])
    assert np.abs(off).max() <= uncertain_ms + 1e-6


def test_a_clock_that_drifts_between_steps_makes_it_uncertain() -> None:
    _, clocks, uncertain_ms = aligned(["a", "b"], [0.0, 0.0], steps=3, drift_ms=2.0)
    assert clocks
    assert uncertain_ms is not None
    assert uncertain_ms > 1.5


def test_without_backwards_senders_that_wait_for_their_receivers_show_the_clock() -> None:
    shift, clocks, _ = aligned(["a", "b", "c"], [0.0, 4.0, -9.0], forward_only=True, rendezvous=True, slow=1.5)
    assert clocks
    assert shift[0] == pytest.approx([0.0, -4.0, 9.0], abs=0.5)
    shift, clocks, uncertain_ms = aligned(["a", "b", "c"], [0.0, 4.0, -9.0], forward_only=True, slow=0.5)
    assert (clocks, uncertain_ms) == (False, None)


def test_a_host_name_that_several_machines_bear_is_seen_through() -> None:
    """Containers on different machines may all be called localhost."""
    shift, clocks, uncertain_ms = aligned(["localhost"] * 3, [0.0, 5.0, 0.0])
    assert clocks
    assert uncertain_ms is not None
    assert shift[0] == pytest.approx([0.0, -5.0, 0.0], abs=2 * uncertain_ms)


@pytest.mark.parametrize("ahead_ms", [TOLERANCE_MS, 60_000.0])
def test_a_host_keeps_its_clock_if_it_is_hardly_off_or_if_runs_were_mixed(ahead_ms: float) -> None:
    shift, clocks, uncertain_ms = aligned(["a", "a"], [0.0, ahead_ms])
    assert (shift == 0.0).all()
    assert (clocks, uncertain_ms) == (True, None)


def test_stages_that_were_not_recorded_hide_only_what_is_beyond_them() -> None:
    hosts, ahead_ms = ["a", "b", "c", "d"], [0.0, 7.0, -3.0, 2.0]
    for missing in ((3,), (0,), (0, 3)):
        shift, clocks, uncertain_ms = aligned(hosts, ahead_ms, missing=missing)
        assert clocks
        assert uncertain_ms is not None
        there = [stage for stage in range(4) if stage not in missing]
        off = shift[0, there] + np.array(ahead_ms)[there]
        assert np.ptp(off) <= 3 * uncertain_ms
    assert aligned(hosts, ahead_ms, missing=(2,))[1:] == (False, None)
