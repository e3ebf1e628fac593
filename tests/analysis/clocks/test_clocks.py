"""Clocks of ranks aligned by messages whose true times are known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.clocks.clocks import TOLERANCE_NS, align
from megaprof.analysis.clocks.matching import Link
from megaprof.analysis.notes import Note
from megaprof.analysis.report.text.notes import of_clocks

MS = 1_000_000


def messages(sender, receiver, ahead, *, count=20, seed=0, quickest=50_000, jitter=2 * MS, drift=0.0, rendezvous=False):
    """``count`` messages in true time, each end on its rank's clock, which is ``ahead[rank]`` nanoseconds ahead.

    The quickest takes ``quickest`` nanoseconds, the others up to ``jitter`` more; the receiver's clock runs ``drift``
    too fast.
    """
    draw = random.Random(seed)
    sends, receives = [], []
    for number in range(count):
        start = number * 40 * MS + draw.randrange(MS)
        took = quickest + (draw.randrange(jitter) if number else 0)
        posted = start + draw.randrange(-MS, took)
        sent = (start, start + took if rendezvous else start + 1000)
        received = (posted, start + took)
        sends.append(tuple(t + ahead[sender] for t in sent))
        receives.append(tuple(t + ahead[receiver] + round(t * drift) for t in received))
    return Link(sender, receiver, sends, receives, rendezvous)


def both_ways(sender, receiver, ahead, **options):
    back = {**options, "seed": options.get("seed", 0) + 1}
    return [messages(sender, receiver, ahead, **options), messages(receiver, sender, ahead, **back)]


def test_one_host_has_nothing_to_align():
    found = align({0: "a", 1: "a"}, both_ways(0, 1, {0: 0, 1: 0}))
    assert (found.offset(1), found.warnings) == (0, ())
    assert of_clocks(found) == ["clocks: all ranks ran on host a, so nothing had to be aligned"]


@pytest.mark.parametrize("ahead", [0, 3 * MS, -700 * MS, 86_400_000 * MS])
def test_forwards_and_backwards_bound_the_offset_from_both_sides(ahead):
    found = align({0: "a", 1: "b"}, both_ways(0, 1, {0: 0, 1: ahead}, quickest=50_000))
    clock = found.clocks[1]
    assert abs(clock.offset_ns + ahead) <= clock.uncertainty_ns <= 60_000
    assert clock.messages == 40
    assert found.warnings == ()


def test_how_far_a_clock_was_off_is_said():
    (line,) = of_clocks(align({0: "a", 1: "b"}, both_ways(0, 1, {0: 0, 1: 5 * MS})))
    assert line.startswith("host b: clock 5.0")
    assert "ms ahead, ±0.0" in line
    assert "from 40 messages" in line
    (line,) = of_clocks(align({0: "a", 1: "b"}, both_ways(0, 1, {0: 5 * MS, 1: 0})))
    assert "behind" in line


def test_uncertainty_adds_up_along_a_chain_of_stages():
    ahead = {stage: (stage * 7919 % 13) * MS for stage in range(16)}
    links = [link for s in range(15) for link in both_ways(s, s + 1, ahead, seed=2 * s)]
    found = align({stage: f"node-{stage}" for stage in ahead}, links)
    assert found.warnings == ()
    uncertainties = [found.clocks[stage].uncertainty_ns for stage in sorted(ahead)]
    assert uncertainties == sorted(uncertainties)
    for stage, clock in found.clocks.items():
        assert abs(clock.offset_ns - (ahead[0] - ahead[stage])) <= clock.uncertainty_ns


def test_ranks_of_one_host_share_what_is_learnt_about_its_clock():
    ahead = {0: 0, 1: 9 * MS, 2: 9 * MS}
    found = align({0: "a", 1: "b", 2: "b"}, both_ways(0, 1, ahead))
    assert found.clocks[1] == found.clocks[2]
    assert len(of_clocks(found)) == 1


def test_the_way_of_the_least_uncertainty_is_taken():
    ahead = {0: 0, 1: MS, 2: 2 * MS}
    slow = both_ways(0, 2, ahead, quickest=20 * MS)
    quick = both_ways(0, 1, ahead) + both_ways(1, 2, ahead)
    found = align({0: "a", 1: "b", 2: "c"}, slow + quick)
    assert found.clocks[2].uncertainty_ns < MS
    assert abs(found.clocks[2].offset_ns + 2 * MS) <= found.clocks[2].uncertainty_ns


def test_one_direction_bounds_one_side_only_and_says_so():
    found = align({0: "a", 1: "b"}, [messages(0, 1, {0: 0, 1: 4 * MS}, quickest=100_000)])
    assert found.clocks[1].uncertainty_ns is None
    assert found.offset(1) == -4 * MS - 100_000  # as if the quickest message had taken no time
    assert "one side only" in of_clocks(found)[0]


def test_where_send_and_receive_meet_one_direction_is_enough():
    found = align({0: "a", 1: "b"}, [messages(0, 1, {0: 0, 1: 4 * MS}, rendezvous=True, quickest=100_000)])
    clock = found.clocks[1]
    assert clock.uncertainty_ns is not None
    assert abs(clock.offset_ns + 4 * MS) <= clock.uncertainty_ns


@pytest.mark.parametrize("hosts", [{0: "a", 1: "a"}, {0: "a", 1: "b"}])
def test_sends_that_nccl_buffers_end_before_their_receive_and_contradict_nothing(hosts):
    """A message that fits into NCCL's buffers leaves the sender's kernel before the receiver has launched its own."""
    ahead = {0: 0, 1: 0 if hosts[1] == "a" else 4 * MS}
    buffered = [replace(link, rendezvous=True) for link in both_ways(0, 1, ahead)]
    assert any(
        send[1] < receive[0] for link in buffered for send, receive in zip(link.sends, link.receives, strict=True)
    )
    found = align(hosts, buffered)
    assert found.warnings == ()
    assert abs(found.offset(1) + ahead[1]) <= found.clocks[1].uncertainty_ns <= 60_000


def test_drift_within_a_step_is_within_the_uncertainty():
    links = both_ways(0, 1, {0: 0, 1: 2 * MS}, count=25, drift=50e-6, quickest=20_000)  # 50 ppm over 1 s: 0.05 ms
    found = align({0: "a", 1: "b"}, links)
    assert found.warnings == ()
    assert abs(found.offset(1) + 2 * MS) <= 50_000 + found.clocks[1].uncertainty_ns


def test_messages_that_contradict_each_other_are_reported():
    forth = messages(0, 1, {0: 0, 1: 0})
    back = messages(1, 0, {0: 0, 1: 3 * MS}, seed=1)  # the clock was set between them
    found = align({0: "a", 1: "b"}, [forth, back])
    (note,) = found.warnings
    assert (note.kind, note.names, int(note.ms[0])) == ("clocks_contradicted", ("host a", "host b"), 2)
    assert found.clocks[1].uncertainty_ns >= MS


def test_contradictions_below_the_tolerance_only_widen_the_uncertainty():
    forth = messages(0, 1, {0: 0, 1: 0}, quickest=0)
    back = messages(1, 0, {0: 0, 1: TOLERANCE_NS - 1}, seed=1, quickest=0)
    found = align({0: "a", 1: "b"}, [forth, back])
    assert found.warnings == ()
    assert found.clocks[1].uncertainty_ns == TOLERANCE_NS // 2


def test_a_host_name_that_several_machines_bear_is_seen_through():
    found = align(
        dict.fromkeys((0, 1, 2), "localhost"), both_ways(0, 1, {0: 0, 1: 5 * MS}) + both_ways(1, 2, {1: 5 * MS, 2: 0})
    )
    assert [each.kind for each in found.warnings] == ["clocks_contradicted"]
    assert abs(found.offset(1) + 5 * MS) <= found.clocks[1].uncertainty_ns
    assert abs(found.offset(2)) <= found.clocks[2].uncertainty_ns


def test_traces_of_different_runs_on_one_host_keep_its_clock():
    forth, back = messages(0, 1, {0: 0, 1: 0}), messages(1, 0, {0: 0, 1: 900 * MS}, seed=1)
    found = align({0: "a", 1: "a"}, [forth, back])
    assert found.offset(1) == 0
    assert [each.kind for each in found.warnings] == ["clocks_contradicted"]


def test_ranks_that_no_message_connects_are_named():
    found = align({0: "a", 1: "b", 2: "c", 3: None}, both_ways(0, 1, {0: 0, 1: 0}))
    assert set(found.clocks) == {0, 1}
    assert (found.offset(2), found.offset(3)) == (0, 0)
    assert found.warnings == (Note("clocks_unconnected", ranks=(0,), names=("host c", "rank 3")),)


def test_a_rank_of_an_unknown_host_has_its_own_clock():
    found = align({0: None, 1: None}, both_ways(0, 1, {0: 0, 1: 6 * MS}))
    assert abs(found.offset(1) + 6 * MS) <= found.clocks[1].uncertainty_ns


def test_a_lost_message_is_said_and_the_others_count():
    link = messages(0, 1, {0: 0, 1: 0})
    found = align({0: "a", 1: "b"}, [Link(0, 1, link.sends, link.receives[:-1])])
    assert found.warnings == (Note("messages_unmatched", ranks=(0, 1), count=20, of=19),)


def test_nobody_and_nothing():
    assert align({}, []).clocks == {}
    assert align({3: "a"}, []).offset(3) == 0


@given(
    ahead=st.lists(st.integers(-(10**12), 10**12), min_size=2, max_size=6),
    seed=st.integers(0, 10**6),
    quickest=st.integers(0, 10**7),
    rendezvous=st.booleans(),
)
def test_the_true_offset_is_never_outside_the_uncertainty(ahead, seed, quickest, rendezvous):
    clocks = dict(enumerate(ahead))
    options = {"seed": seed, "quickest": quickest, "rendezvous": rendezvous, "count": 5}
    links = [link for s in range(len(ahead) - 1) for link in both_ways(s, s + 1, clocks, **options)]
    found = align({rank: f"h{rank}" for rank in clocks}, links)
    assert found.warnings == ()
    for rank, clock in found.clocks.items():
        assert abs(clock.offset_ns - (clocks[0] - clocks[rank])) <= clock.uncertainty_ns
