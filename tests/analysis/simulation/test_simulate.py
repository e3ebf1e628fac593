from __future__ import annotations

import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.simulation.simulate import simulate
from megaprof.parallel.schedules import PassId, phase_order, turns
from megaprof.parallel.schedules import producer as made_by
from tests.analysis.simulation.brute_force import (
    brute_force_buffered,
    brute_force_rendezvous,
    duration,
    milliseconds,
    no_rendezvous,
    producer,
    runs,
    schedule_of,
)


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
    assert spans_of(simulation) == brute_force_rendezvous(run, *uniform(run, p2p_ms))
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
                source = made_by(run.schedule, stage, which)
                if source is not None and source[0] != stage:
                    other = next(each for each in turns(run.schedule, source[0]) if source[1] in each)
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
