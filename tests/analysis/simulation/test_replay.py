from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.simulation.replay import compiled
from megaprof.analysis.simulation.simulate import simulate
from megaprof.parallel.schedules import PassId, PipelineSchedule
from tests.analysis.simulation.brute_force import (
    brute_force_buffered,
    brute_force_rendezvous,
    duration,
    milliseconds,
    no_rendezvous,
    runs,
    schedule_of,
)
from tests.analysis.truth.programs import program
from tests.analysis.truth.simulation import simulate as events

KINDS = ("forward", "backward")


def passes_of(run) -> np.ndarray:
    """[stage, chunk, kind, microbatch] of the arguments of `simulate`."""
    schedule = schedule_of(run)
    kinds = KINDS[: 1 if schedule.forward_only else 2]
    return np.array(
        [
            [
                [[duration(run, stage, PassId(kind, chunk, m)) for m in range(schedule.microbatches)] for kind in kinds]
                for chunk in range(schedule.chunks)
            ]
            for stage in range(schedule.stages)
        ]
    )


@given(runs(), st.booleans(), st.data())
def test_links_and_entries_of_their_own_equal_brute_force(run, rendezvous, data):
    rendezvous = rendezvous and not no_rendezvous(run)
    schedule = schedule_of(run)
    each = st.lists(milliseconds, min_size=schedule.stages, max_size=schedule.stages)
    link, entry = data.draw(each), data.draw(each)
    replay = compiled(schedule, rendezvous)
    passes = passes_of(run)
    options = {"entry": entry, "link": link}
    starts, ends = replay.starts(passes, **options), replay.ends(passes, **options)
    assert starts.shape == ends.shape == passes.shape == replay.shape
    expected = (brute_force_rendezvous if rendezvous else brute_force_buffered)(run, link, entry)
    found = {
        (stage, PassId(KINDS[kind], chunk, m)): (starts[stage, chunk, kind, m], ends[stage, chunk, kind, m])
        for stage, chunk, kind, m in np.ndindex(passes.shape)
    }
    assert found == expected
    assert replay.step_ms(passes, **options) == max(end for _, end in expected.values())
    np.testing.assert_allclose(replay.starts(ends, **options, ended=True), starts)  # each from the ends of the others


def test_a_pass_that_began_late_delays_no_other_beyond_its_end():
    """The earliest begin of a pass follows from when the others did end, and not from when they could have ended."""
    replay = compiled(PipelineSchedule.checked(2, 1, 4), False)
    ends = replay.ends(np.full((2, 1, 2, 4), 10.0), link=1.0)
    later = ends + 5.0 * (ends > 40.0)
    late = (later - 10.0) - replay.starts(later, link=1.0, ended=True)
    assert (late >= 0.0).all()
    assert late[ends <= 40.0].max() == 0.0
    assert late.max() == 5.0


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(1, 1, 3), (4, 1, 9), (2, 1, 1), (4, 3, 8), (3, 2, 6)])
@pytest.mark.parametrize("forward_only", [False, True])
def test_many_steps_at_once_are_each_alone(stages, chunks, microbatches, forward_only, rendezvous):
    schedule = PipelineSchedule.checked(stages, chunks, microbatches, forward_only=forward_only)
    replay = compiled(schedule, rendezvous)
    random = np.random.default_rng(0)
    passes = random.random((3, 1, *replay.shape))
    entry, link = random.random((4, stages)), random.random((3, 4, stages))
    together = replay.step_ms(passes, entry=entry, link=link)
    ends = replay.ends(passes, entry=entry, link=link)
    assert together.shape == (3, 4)
    assert ends.shape == (3, 4, *replay.shape)
    for draw, step in np.ndindex(3, 4):
        alone = replay.step_ms(passes[draw, 0], entry=entry[step], link=link[draw, step])
        assert together[draw, step] == alone == ends[draw, step].max()
        # The same link everywhere and nobody late: exactly what `simulate` says.
        times = [passes[draw, 0, :, :, kind] for kind in range(replay.shape[2])]
        run = simulate(times[0], None if forward_only else times[1], microbatches, p2p_ms=0.3, rendezvous=rendezvous)
        assert replay.step_ms(passes[draw, 0], link=0.3) == run.step_ms


def test_more_steps_than_are_held_at_once_are_evaluated_in_turn(monkeypatch):
    replay = compiled(PipelineSchedule.checked(3, 1, 4), True)
    passes = np.random.default_rng(0).random((7, *replay.shape))
    whole = replay.ends(passes, link=0.5)
    monkeypatch.setattr("megaprof.analysis.simulation.replay._MOST_HELD", 150)
    assert (replay.ends(passes, link=0.5) == whole).all()
    assert replay.step_ms(np.empty((0, 2, *replay.shape))).shape == (0, 2)


def test_a_missing_time_is_missing_in_what_waits_for_it_only():
    replay = compiled(PipelineSchedule.checked(2, 1, 2), False)
    passes = np.ones((2, *replay.shape))
    passes[1, 0, 0, 0, 1] = np.nan  # the second forward on stage 0, which is on the way to the second microbatch's end
    ends = replay.ends(passes)
    assert np.isfinite(ends[0]).all()
    assert np.isfinite(ends[1, :, 0, 0, 0]).all()
    assert np.isnan(ends[1, 1, 0, :, 1]).all()
    assert np.isnan(replay.step_ms(passes)).tolist() == [False, True]


def test_shapes_that_do_not_fit_are_named():
    replay = compiled(PipelineSchedule.checked(2, 1, 4), False)
    good = np.ones(replay.shape)
    for arguments, word in (
        ((good[0], {}), "passes has shape"),
        ((1.0, {}), "passes has shape"),
        ((good, {"entry": [1.0]}), "entry has shape"),
        ((good, {"link": np.ones((2, 3))}), "link has shape"),
    ):
        with pytest.raises(ValueError, match=word):
            replay.step_ms(arguments[0], **arguments[1])
    with pytest.raises(ValueError, match="2 stages"):
        compiled(PipelineSchedule.checked(2, 2, 4), True)


@given(st.tuples(st.integers(3, 5), st.integers(2, 3), st.integers(1, 3)), st.booleans(), st.integers(0, 9))
def test_messages_that_are_received_in_turn_equal_the_tests_own_simulation(sizes, forward_only, seed):
    stages, chunks, groups = sizes
    microbatches = groups * stages
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.1, 2.0, (stages, chunks, 2, microbatches, 1, 1))
    enter, link = rng.uniform(0, 3, (stages, 1, 1)), rng.uniform(0, 0.5, (stages, 1, 1))
    programs = [
        program(s, stages=stages, chunks=chunks, microbatches=microbatches, forward_only=forward_only)
        for s in range(stages)
    ]
    done = events(programs, work, enter, link, buffered=True)
    schedule = PipelineSchedule.checked(
        stages, chunks, microbatches, name="interleaved", forward_only=forward_only, group_size=stages
    )
    passes = work[:, :, : len(schedule.kinds), :, 0, 0]
    took = compiled(schedule, rendezvous=False, in_turn=True).step_ms(passes, entry=enter[:, 0, 0], link=link[:, 0, 0])
    assert took == pytest.approx(max(float(own[-1].end[0, 0]) for own in done))
