"""Which send belongs to which receive, and what a rank did in a step."""

from __future__ import annotations

from megaprof.analysis.table.matching import ends_of, exchanged
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import read_trace
from tests.analysis.exchanging import exchanging, write
from tests.analysis.synthetic import BASE, TraceBuilder, chunk


def ends(traces, directory):
    read = [read_trace(path) for path in write(traces, directory)]
    return {trace.metadata.coords.rank: ends_of(trace.metadata, steps_of(trace)) for trace in read}


def by_ranks(ends_by_rank):
    """Messages by the ranks of their sender and receiver."""
    found = {}
    for message, sender, receiver in exchanged(ends_by_rank):
        found.setdefault((sender, receiver), []).append(message)
    return found


def test_boxes_are_in_order_and_know_their_microbatch(tmp_path):
    (path, _) = write(exchanging([0.0, 0.0]), tmp_path)
    (call,) = steps_of(read_trace(path))
    passes = call.laid_out
    assert [(each.kind, each.microbatch) for each in passes[:4]] == [
        ("forward", 0),
        ("send_forward", None),
        ("forward", 1),
        ("send_forward", None),
    ]
    assert (passes[0].start - BASE, passes[0].end - BASE) == (0, 2_000_000)
    assert {each.kind for each in passes} == {"forward", "backward", "send_forward", "recv_backward"}
    assert {(each.stage, each.rank) for each in passes} == {(0, 0)}


def test_every_message_is_matched_with_its_receive(tmp_path):
    ends_by_rank = ends(exchanging([0.0, 0.0, 0.0], microbatches=4), tmp_path)
    found = by_ranks(ends_by_rank)
    assert sorted(found) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    for (sender, receiver), messages in found.items():
        assert [message.microbatch for message in messages] == [0, 1, 2, 3]
        for message in messages:
            sent, received = ends_by_rank[sender].sends[message].time, ends_by_rank[receiver].receives[message].time
            assert received[1] >= sent[0] + 100_000  # it travelled 0.1 ms, and may have been there before


def test_interleaved_stages_send_round_to_the_first_one(tmp_path):
    holds = [chunk(1), chunk(1)]
    traces = [TraceBuilder(pp=pp, pp_size=2, microbatches=1, chunks=holds) for pp in (0, 1)]
    for start, stage, name in [
        (0, 0, "forward mb=0 chunk=0"),
        (1, 0, "send_forward_recv_forward"),
        (1, 1, "recv_forward"),
        (2, 1, "forward mb=0 chunk=0"),
        (3, 1, "send_forward_recv_forward"),
        (3, 0, "recv_forward"),
        (4, 0, "forward mb=0 chunk=1"),
        (5, 0, "send_forward"),
        (5, 1, "recv_forward"),
        (6, 1, "forward mb=0 chunk=1"),
        (7, 1, "backward mb=0 chunk=1"),
        (8, 1, "send_backward"),
        (8, 0, "recv_backward"),
        (9, 0, "backward mb=0 chunk=1"),
        (10, 0, "send_backward_recv_backward"),
        (10, 1, "recv_backward"),
        (11, 1, "backward mb=0 chunk=0"),
    ]:
        traces[stage].event(f"megaprof/{name}", start, 0.9)
    for trace in traces:
        trace.call(0, 13)
    found = by_ranks(ends(traces, tmp_path))
    assert [(m.kind, m.stage, m.chunk) for m in found[0, 1]] == [
        ("forward", 1, 0),
        ("forward", 1, 1),
        ("backward", 1, 0),
    ]
    assert [(m.kind, m.stage, m.chunk) for m in found[1, 0]] == [("forward", 0, 1), ("backward", 0, 1)]


def test_an_overlapped_receive_ends_with_its_wait(tmp_path):
    p2p = {"batch_p2p_comm": False, "batch_p2p_sync": True, "overlap_p2p_comm": True}
    trace = TraceBuilder(pp=1, pp_size=2, microbatches=1, metadata={"p2p": p2p})
    trace.event("megaprof/recv_forward", 1, 0.1)  # returns at once
    trace.event("megaprof/wait_recv_prev", 2, 5)
    trace.forward(0, 8, 1)
    trace.call(0, 10)
    (receive,) = ends({1: trace}.values(), tmp_path)[1].receives.values()
    assert receive.time == (BASE + 2_000_000, BASE + 7_000_000)


def test_without_an_exchange_of_its_own_a_pass_bounds_its_messages(tmp_path):
    trace = TraceBuilder(pp=1, pp_size=3, microbatches=2)
    trace.event("megaprof/recv_forward", 0, 1)
    trace.forward(0, 1, 1)
    trace.forward(1, 3, 1)
    trace.call(0, 10)
    found = ends([trace], tmp_path)[1]
    received = {m.microbatch: end.time for m, end in found.receives.items()}
    assert received == {0: (BASE, BASE + 1_000_000), 1: (BASE + 3_000_000, BASE + 3_000_000)}
    assert {m.microbatch: end.time[0] - BASE for m, end in found.sends.items()} == {0: 2_000_000, 1: 4_000_000}


def test_exchanges_of_a_combined_pass_are_somewhere_inside_it(tmp_path):
    trace = TraceBuilder(pp=0, pp_size=2, microbatches=2)
    trace.event("megaprof/combined mb=1 chunk=0 bmb=0 bchunk=0", 5, 4)
    trace.call(0, 10)
    found = ends([trace], tmp_path)[0]
    assert {(m.kind, m.stage, m.microbatch): end.time for m, end in found.sends.items()} == {
        ("forward", 1, 1): (BASE + 5_000_000, BASE + 9_000_000)
    }
    assert {(m.kind, m.microbatch) for m in found.receives} == {("backward", 0)}


def test_host_ranges_say_nothing_about_a_gpu_that_runs_behind(tmp_path):
    trace = TraceBuilder(pp=0, pp_size=2, metadata={"p2p": {"batch_p2p_comm": True, "batch_p2p_sync": False}})
    trace.forward(0, 0, 1)
    trace.event("some_kernel", 0, 1, cat="kernel", tid=7)
    trace.call(0, 10)
    found = ends([trace], tmp_path)[0]
    assert (found.sends, found.receives) == ({}, {})
    assert found.unknown is not None
