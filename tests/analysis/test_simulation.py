"""Replays of schedules: many steps at once, and one step from plain times."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.simulation import compiled, simulate
from megaprof.parallel.schedules import PassId, PipelineSchedule, phase_order, turns
from tests.analysis.brute_force import (
    brute_force_buffered,
    brute_force_programs,
    duration,
    milliseconds,
    no_rendezvous,
    producer,
    runs,
    schedule_of,
)
from tests.analysis.truth.programs import programs_of
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


@given(runs(), st.booleans(), st.sampled_from(["none", "steady", "all"]), st.data())
def test_links_and_entries_of_their_own_equal_brute_force(run, rendezvous, overlap, data):
    schedule = schedule_of(run, overlap)
    each = st.lists(milliseconds, min_size=schedule.stages, max_size=schedule.stages)
    link, entry = data.draw(each), data.draw(each)
    replay = compiled(schedule, rendezvous)
    passes = passes_of(run)
    options = {"entry": entry, "link": link}
    starts, ends = replay.starts(passes, **options), replay.ends(passes, **options)
    assert starts.shape == ends.shape == passes.shape == replay.shape
    expected = brute_force_programs(schedule, run, link, entry, rendezvous)
    if not rendezvous and (overlap == "all" or schedule.chunks == 1):
        assert expected == brute_force_buffered(run, link, entry)
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
    overlap = "none" if rendezvous else "all"  # as `simulate` has it
    schedule = PipelineSchedule.checked(stages, chunks, microbatches, forward_only=forward_only, overlap=overlap)
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
    monkeypatch.setattr("megaprof.analysis.simulation._MOST_HELD", 150)
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


@given(
    st.tuples(st.integers(3, 5), st.integers(2, 3), st.integers(1, 3)),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from(["none", "steady"]),
    st.booleans(),
)
def test_interleaved_exchanges_equal_the_tests_own_simulation(sizes, forward_only, seed, overlap, buffered):
    stages, chunks, groups = sizes
    microbatches = groups * stages
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.1, 2.0, (stages, chunks, 2, microbatches, 1, 1))
    enter, link = rng.uniform(0, 3, (stages, 1, 1)), rng.uniform(0, 0.5, (stages, 1, 1))
    programs = programs_of(stages, chunks, microbatches, forward_only, overlap if overlap == "steady" else False)
    done = events(programs, work, enter, link, buffered=buffered)
    schedule = PipelineSchedule.checked(
        stages, chunks, microbatches, name="interleaved", forward_only=forward_only, overlap=overlap
    )
    passes = work[:, :, : len(schedule.kinds), :, 0, 0]
    took = compiled(schedule, not buffered).step_ms(passes, entry=enter[:, 0, 0], link=link[:, 0, 0])
    assert took == pytest.approx(max(float(own[-1].end[0, 0]) for own in done))


def spans_of(simulation) -> dict[tuple[int, PassId], tuple[float, float]]:
    return {
        (event.stage, PassId(event.phase, event.chunk, event.microbatch)): (event.start_ms, event.end_ms)
        for event in simulation.events
    }


def uniform(run, p2p_ms):
    """Every link takes the same, and all stages enter at once."""
    stages = len(run["forward_ms"])
    return [p2p_ms] * stages, [0.0] * stages


@given(runs(), milliseconds)
def test_buffered_replay_equals_brute_force(run, p2p_ms):
    assert spans_of(simulate(**run, p2p_ms=p2p_ms)) == brute_force_buffered(run, *uniform(run, p2p_ms))


@given(runs(), milliseconds)
def test_rendezvous_replay_equals_brute_force_and_is_never_faster(run, p2p_ms):
    if no_rendezvous(run):
        with pytest.raises(ValueError, match="2 stages"):
            simulate(**run, p2p_ms=p2p_ms, rendezvous=True)
        return
    simulation = simulate(**run, p2p_ms=p2p_ms, rendezvous=True)
    assert spans_of(simulation) == brute_force_programs(schedule_of(run, "none"), run, *uniform(run, p2p_ms))
    assert simulation.step_ms >= simulate(**run, p2p_ms=p2p_ms).step_ms


@given(runs(), milliseconds, st.booleans())
def test_events_fit_the_stages_and_the_step(run, p2p_ms, rendezvous):
    schedule = schedule_of(run)
    simulation = simulate(**run, p2p_ms=p2p_ms, rendezvous=rendezvous and not no_rendezvous(run))
    spans = spans_of(simulation)
    for stage in range(schedule.stages):
        own = [event for event in simulation.events if event.stage == stage]
        assert [PassId(event.phase, event.chunk, event.microbatch) for event in own] == phase_order(schedule, stage)
        assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(own))
        busy = sum(event.end_ms - event.start_ms for event in own)
        assert simulation.stage_ms[stage] == busy <= simulation.step_ms
        if simulation.step_ms:
            assert simulation.bubble_fraction[stage] == pytest.approx(1 - busy / simulation.step_ms)
        else:
            assert simulation.bubble_fraction[stage] == 0.0
    for (stage, phase), (start, _) in spans.items():
        source = producer(schedule, stage, phase)
        if source:
            assert start >= spans[source][1] + (p2p_ms if source[0] != stage else 0.0)
    assert simulation.step_ms == max(event.end_ms for event in simulation.events)


@given(runs(), milliseconds)
def test_step_is_at_least_each_microbatchs_way_through_the_pipeline(run, p2p_ms):
    schedule = schedule_of(run)
    kinds = ("forward",) if schedule.forward_only else ("forward", "backward")
    hops = (schedule.stages * schedule.chunks - 1) * len(kinds) if schedule.stages > 1 else 0
    step = simulate(**run, p2p_ms=p2p_ms).step_ms
    for microbatch in range(run["microbatches"]):
        way = sum(
            duration(run, stage, PassId(kind, chunk, microbatch))
            for kind in kinds
            for stage in range(schedule.stages)
            for chunk in range(schedule.chunks)
        )
        assert step >= way + hops * p2p_ms


@given(runs(), milliseconds, st.data())
def test_slower_work_never_shortens_the_step_and_scaling_scales_it(run, p2p_ms, data):
    rendezvous = not no_rendezvous(run) and data.draw(st.booleans())
    step = simulate(**run, p2p_ms=p2p_ms, rendezvous=rendezvous).step_ms
    slower = [list(stage) for stage in run["forward_ms"]]
    stage, more = data.draw(st.integers(0, len(slower) - 1)), data.draw(milliseconds)
    entry = slower[stage][0]
    slower[stage][0] = [*entry[:-1], entry[-1] + more] if isinstance(entry, list) else entry + more
    assert simulate(**{**run, "forward_ms": slower}, p2p_ms=p2p_ms, rendezvous=rendezvous).step_ms >= step

    def doubled(times):
        if isinstance(times, list):
            return [doubled(time) for time in times]
        return times if times is None else 2 * times

    twice = {**run, "forward_ms": doubled(run["forward_ms"]), "backward_ms": doubled(run["backward_ms"])}
    assert simulate(**twice, p2p_ms=2 * p2p_ms, rendezvous=rendezvous).step_ms == 2 * step


@given(st.integers(1, 8), st.integers(1, 20), milliseconds, milliseconds, st.booleans())
def test_equal_stages_have_the_textbook_step(stages, microbatches, forward, backward, rendezvous):
    turns = microbatches + stages - 1
    training = simulate([[forward]] * stages, [[backward]] * stages, microbatches)
    assert training.step_ms == turns * (forward + backward)
    assert simulate([[forward]] * stages, None, microbatches, rendezvous=rendezvous).step_ms == turns * forward


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(stages, chunks, groups, quarters):
    """Bubble over ideal time is (p - 1) / (v m) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2)."""
    microbatches, forward = stages * groups, Fraction(quarters, 4)
    simulation = simulate(
        [[float(forward)] * chunks] * stages, [[2 * float(forward)] * chunks] * stages, microbatches, schedule=None
    )
    ideal = microbatches * chunks * 3 * forward
    assert Fraction(simulation.step_ms) == ideal * (1 + Fraction(stages - 1, chunks * microbatches))


def test_a_receiver_that_computes_holds_its_sender_only_in_a_rendezvous():
    slow_middle = {"forward_ms": [[1.0], [5.0], [1.0]], "backward_ms": [[1.0]] * 3, "microbatches": 3}
    starts = {
        rendezvous: [
            event.start_ms
            for event in simulate(**slow_middle, rendezvous=rendezvous).events
            if event.stage == 0 and event.phase == "forward"
        ]
        for rendezvous in (False, True)
    }
    assert starts == {False: [0.0, 1.0, 2.0], True: [0.0, 1.0, 6.0]}


def test_transfer_time_counts_on_every_hop_including_from_the_last_stage_to_the_next_chunk():
    chain = simulate([[1.0, 1.0]] * 3, [[2.0, 2.0]] * 3, 3, p2p_ms=10.0)
    assert chain.step_ms >= 6 * 3.0 + 10 * 10.0
    assert simulate([[1.0]] * 2, [[2.0]] * 2, 1, p2p_ms=10.0).step_ms == 6.0 + 20.0
    assert simulate([[1.0]], [[2.0]], 4, p2p_ms=10.0).step_ms == 12.0


def test_zb_h1_leaves_a_third_of_the_bubble():
    """With equal halves: (p - 1)(F + B - 2 W + W) = (p - 1) F, of (p - 1) 3 F in 1F1B (Qi et al. 2023, table 2)."""
    for stages, microbatches in ((2, 4), (4, 8), (4, 16), (8, 24)):
        whole = simulate([[1.0]] * stages, [[2.0]] * stages, microbatches)
        halves = {"forward_ms": [[1.0]] * stages, "backward_ms": [[1.0]] * stages, "weight_ms": [[1.0]] * stages}
        split = simulate(**halves, microbatches=microbatches, schedule="zb_h1")
        work = 3.0 * microbatches
        assert whole.step_ms - work == 3 * (stages - 1)
        assert split.step_ms - work == stages - 1
        assert split.stage_ms == whole.stage_ms == (work,) * stages


def test_zb_v_leaves_no_bubble_but_that_of_the_first_input_on_the_way():
    """ZB-V is for passes that take equally long: every stage computes without a gap (Qi et al. 2023, section 6)."""
    for stages, microbatches in ((2, 4), (4, 8), (4, 16)):
        halves = [[1.0, 1.0]] * stages
        split = simulate(halves, halves, microbatches, schedule="zbv", weight_ms=halves)
        for stage in range(stages):
            own = [event for event in split.events if event.stage == stage]
            assert own[0].start_ms == stage
            assert own[-1].end_ms - own[0].start_ms == 6.0 * microbatches == split.stage_ms[stage]


def test_what_runs_as_one_begins_with_all_inputs_and_ends_together():
    halves = [[1.0, 1.0]] * 2
    run = simulate(halves, halves, 5, schedule="dualpipev", weight_ms=halves, p2p_ms=0.25)
    spans = spans_of(run)
    seen = 0
    for stage in range(2):
        for turn in turns(run.schedule, stage):
            begin, end = spans[stage, turn[0]][0], spans[stage, turn[-1]][1]
            for which in turn:
                source = run.schedule.placement.producer(which.kind, stage, which.chunk)
                if source is not None and source[0] != stage:
                    made = which._replace(chunk=source[1])
                    other = next(each for each in turns(run.schedule, source[0]) if made in each)
                    assert begin >= spans[source[0], other[-1]][1] + 0.25
                    seen += len(turn) > 1
            assert end - begin == len(turn)
    assert seen > 3


def test_numpy_times_are_accepted():
    times = np.full((2, 1, 4), 1.5)
    assert simulate(times, times, 4).step_ms == simulate([[1.5]] * 2, [[1.5]] * 2, 4).step_ms


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_ms": []}, ["forward_ms", "at least one stage"]),
        ({"forward_ms": 3.0}, ["forward_ms", "3.0"]),
        ({"forward_ms": [1.0, 2.0]}, ["forward_ms", "[stage][chunk]"]),
        ({"forward_ms": [[], []]}, ["forward_ms", "at least one"]),
        ({"forward_ms": [[1.0], [1.0, 2.0]]}, ["forward_ms[1]", "2 chunks"]),
        ({"backward_ms": [[1.0]]}, ["backward_ms", "(1, 1)", "(2, 1)"]),
        ({"forward_ms": [[1.0], [[1.0, 2.0]]]}, ["forward_ms[1][0]", "2 times", "4"]),
        ({"forward_ms": [[1.0], [-1.0]]}, ["forward_ms[1][0]", "-1.0"]),
        ({"backward_ms": [[float("nan")], [1.0]]}, ["backward_ms[0][0]", "nan"]),
        ({"backward_ms": [[[1.0, 1.0, float("inf"), 1.0]], [1.0]]}, ["backward_ms[0][0]", "inf"]),
        ({"forward_ms": [["1.0"], [1.0]]}, ["forward_ms[0][0]", "'1.0'"]),
        ({"forward_ms": [[None], [1.0]]}, ["forward_ms[0][0]", "None"]),
        ({"forward_ms": [[True], [1.0]]}, ["forward_ms[0][0]", "True"]),
        ({"p2p_ms": -0.5}, ["p2p_ms", "-0.5"]),
        ({"p2p_ms": float("nan")}, ["p2p_ms", "nan"]),
        ({"microbatches": 0}, ["microbatches", "0"]),
        ({"weight_ms": [[1.0], [1.0]]}, ["1f1b", "forward_ms, backward_ms,", "weight_ms"]),
        ({"schedule": "zb_h1"}, ["zb_h1", "weight_ms"]),
        ({"schedule": "zb_h1", "weight_ms": [[1.0]]}, ["weight_ms", "(1, 1)"]),
        ({"schedule": "zb_h1", "weight_ms": [[1.0], [1.0]], "rendezvous": True}, ["rendezvous", "zb_h1"]),
        ({"schedule": "gpipe"}, ["gpipe", "1f1b", "interleaved", "no_pipelining"]),
        ({"microbatch_group_size": -1}, ["microbatch_group_size", "-1"]),
    ],
)
def test_bad_arguments_are_named(changes, words):
    good = {"forward_ms": [[1.0], [1.0]], "backward_ms": [[2.0], [2.0]], "microbatches": 4}
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        simulate(**{**good, **changes})
    assert all(word in str(error.value) for word in words)
