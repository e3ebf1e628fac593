"""The tests' own simulation of a pipeline, against cases that can be worked out by hand and against what must hold."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.truth.programs import BACKWARD, FORWARD, Exchange, Pass, programs_of
from tests.analysis.truth.simulation import Done, Load, simulate

SIZES = st.tuples(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from(["buffered", "rendezvous", "overlapped", "steady"]),
)
OVERLAPPED = {"overlapped": True, "steady": "steady"}


def uniform(stages, chunks, microbatches, forward=1.0, backward=2.0, link=0.0, forward_only=False, **options):
    """One step in which all passes of a kind take as long."""
    work = np.empty((stages, chunks, 2, microbatches, 1, 1))
    work[:, :, FORWARD], work[:, :, BACKWARD] = forward, backward
    zero = np.zeros((stages, 1, 1))
    programs = programs_of(stages, chunks, microbatches, forward_only)
    return simulate(programs, work, zero, zero + link, **options)


def length(done: list[list[Done]]) -> float:
    return max(float(each.end.max()) for own in done for each in own)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 4), (4, 4), (4, 16), (8, 32)])
def test_a_balanced_1f1b_takes_its_passes_and_one_filling(stages, microbatches, buffered):
    assert length(uniform(stages, 1, microbatches, buffered=buffered)) == 3.0 * (microbatches + stages - 1)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_model_chunks_divide_the_filling(stages, chunks, microbatches):
    done = uniform(stages, chunks, microbatches, buffered=True)
    assert length(done) == 3.0 * (microbatches * chunks + stages - 1)


def test_forwards_alone_follow_each_other():
    assert length(uniform(4, 1, 10, forward_only=True)) == 10 + 3


def test_the_slowest_stage_sets_the_pace():
    work = np.ones((3, 1, 2, 8, 1, 1))
    work[1] = 2.0
    zero = np.zeros((3, 1, 1))
    done = simulate(programs_of(3, 1, 8), work, zero, zero)
    # It works without a pause, from the first forward of the stage before to the last backward of it.
    assert length(done) == 1 + 8 * (2 + 2) + 1


def test_a_link_delays_only_who_waits_for_it():
    # Two stages, one microbatch: a forward, a message, forward and backward, a message, a backward.
    assert length(uniform(2, 1, 1, link=0.5)) == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_buffered_messages_do_not_hold_their_sender():
    work = np.ones((2, 1, 2, 2, 1, 1))
    enter, zero = np.array([0.0, 10.0])[:, None, None], np.zeros((2, 1, 1))
    ends = {}
    for buffered in (False, True):
        done = simulate(programs_of(2, 1, 2), work, enter, zero, buffered=buffered)
        ends[buffered] = float(next(e for e in done[0] if isinstance(e.what, Exchange) and e.what.sends).end[0, 0])
    assert ends == {False: 10.0, True: 1.0}


def test_bursts_of_load_double_what_runs_in_them():
    load = Load([[[(2.0, 6.0)]]])
    now = np.array([[0.0]])
    assert load.end(now, np.array([[1.0]])) == pytest.approx(1.0)
    assert load.end(now, np.array([[3.0]])) == pytest.approx(4.0)  # 2 alone, 1 in the burst
    assert load.end(now, np.array([[7.0]])) == pytest.approx(9.0)  # 2 alone, 2 in the burst, 3 alone
    assert load.end(np.array([[7.0]]), np.array([[1.0]])) == pytest.approx(8.0)


def test_two_that_receive_from_each_other_first_are_told():
    both = [[Exchange("recv_forward", (), ((FORWARD, 1 - s, s),)), Pass(FORWARD, 0, 0)] for s in range(2)]
    with pytest.raises(ValueError, match="wait for each other for ever"):
        simulate(both, np.ones((2, 1, 2, 1, 1, 1)), np.zeros((2, 1, 1)), np.zeros((2, 1, 1)))


@given(SIZES)
def test_every_pass_runs_once_in_an_order_that_its_inputs_allow(sizes):
    stages, chunks, groups, more, forward_only, exchanges = sizes
    if stages == 1:
        chunks = 1
    microbatches = groups * stages + (more if chunks == 1 else 0)
    rng = np.random.default_rng(microbatches)
    work = rng.uniform(0.1, 2.0, (stages, chunks, 2, microbatches, 2, 2))
    enter, link = rng.uniform(0, 1, (stages, 2, 2)), rng.uniform(0, 0.2, (stages, 2, 2))
    programs = programs_of(stages, chunks, microbatches, forward_only, OVERLAPPED.get(exchanges, False))
    done = simulate(programs, work, enter, link, buffered=exchanges in ("buffered", "overlapped"))
    at = {}
    for stage, own in enumerate(done):
        for before, each in zip([None, *own], own, strict=False):
            assert (each.end >= each.start).all()
            assert before is None or (each.start == before.end).all()
            if isinstance(each.what, Pass):
                assert (stage, each.what) not in at
                at[stage, each.what] = each
    assert len(at) == stages * chunks * microbatches * (1 if forward_only else 2)
    for (stage, what), each in at.items():
        place = what.chunk * stages + stage
        if what.kind == BACKWARD:
            assert (each.start >= at[stage, Pass(FORWARD, what.chunk, what.microbatch)].end).all()
        source = place - 1 if what.kind == FORWARD else place + 1
        if 0 <= source < stages * chunks:
            made = at[source % stages, Pass(what.kind, source // stages, what.microbatch)]
            assert (each.start >= made.end).all()


@given(SIZES)
def test_a_message_holds_what_its_receiver_computes_next(sizes):
    """The n-th receive of a channel is the input of the n-th pass that needs one from there."""
    stages, chunks, groups, more, forward_only, exchanges = sizes
    if stages == 1:
        chunks = 1
    microbatches = groups * stages + (more if chunks == 1 else 0)
    sent, taken = defaultdict(list), defaultdict(list)
    programs = programs_of(stages, chunks, microbatches, forward_only, OVERLAPPED.get(exchanges, False))
    for stage, own in enumerate(programs):
        got: dict = defaultdict(int)
        last: dict = {}
        for each in own:
            if isinstance(each, Exchange):
                if exchanges == "steady" and each.name.startswith("wait"):
                    continue
                for channel in each.sends:
                    sent[channel].append(last[channel[0]])
                for channel in each.receives:
                    got[channel] += 1
                continue
            last[each.kind] = (each.chunk * stages + stage, each.microbatch)
            place = each.chunk * stages + stage + (-1 if each.kind == FORWARD else 1)
            if 0 <= place < stages * chunks:
                channel = (each.kind, place % stages, stage)
                taken[channel].append((place, each.microbatch))
                assert len(taken[channel]) <= got[channel], "a pass without its input"
    assert sent == taken
