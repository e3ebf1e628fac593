"""One timeline of all ranks: what viewers rely on, checked strictly, and what must never happen to the inputs."""

from __future__ import annotations

import gzip
import json
import math
import re
import tracemalloc
from collections import Counter

import pytest

from megaprof.analysis.merge import merge
from megaprof.analysis.trace.reading import NoSuchRun
from megaprof.analysis.trace.traces import MERGED
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.exchanging import exchanging, write
from tests.analysis.job_timelines import START_NS, write_timelines
from tests.analysis.synthetic import TraceBuilder

PHASES = set("XBEisftMCbne")


def merged(directory, out=None, **options):
    out = out or directory / "step.json.gz"
    result = merge(directory, out, **options)
    data = out.read_bytes()
    return result, json.loads(gzip.decompress(data) if out.suffix == ".gz" else data, parse_constant=pytest.fail)


def check(document):
    """The rules of Chrome's JSON trace format that Perfetto's importer applies; raises AssertionError."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    names = Counter(e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name")
    threads = {}
    for event in events:
        assert event["ph"] in PHASES
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["pid"] > 0  # 0 is the idle task
        assert names[event["pid"]] == 1
        assert math.isfinite(event["ts"])
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if not (event["ph"] == "M" and event["name"].startswith("process_")):
            assert event["tid"] not in names  # or it would be taken for that process's main thread
            assert threads.setdefault(event["tid"], event["pid"]) == event["pid"]
    flows = {}
    for event in events:
        if event["ph"] in "sf":
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    assert len({key[2] for key in flows}) == len(flows)
    for pair in flows.values():
        start, finish = sorted(pair, key=lambda e: e["ph"], reverse=True)
        assert (start["ph"], finish["ph"], finish.get("bp")) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]
        for end in pair:
            slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (end["pid"], end["tid"])]
            assert any(e["ts"] <= end["ts"] < e["ts"] + e["dur"] for e in slices)
    return events


def arrows(document):
    """(kind, from process, from slice, to process, to slice) of every arrow of ours."""
    events = document["traceEvents"]

    def within(end):
        inside = [
            e
            for e in events
            if e["ph"] == "X"
            and e.get("cat") != "p2p"  # not the slice that an arrow ends in
            and e["pid"] == end["pid"]
            and e["ts"] <= end["ts"] < e["ts"] + e["dur"]
            and "step=" not in e["name"]
        ]
        return min(inside, key=lambda e: e["dur"])

    finishes = {e["id"]: e for e in events if e["ph"] == "f" and e["cat"] == "p2p"}
    for start in (e for e in events if e["ph"] == "s" and e["cat"] == "p2p"):
        finish = finishes[start["id"]]
        yield start["name"], start["pid"], within(start)["name"], finish["pid"], within(finish)["name"]


def test_one_process_per_rank_named_and_sorted_by_stage(tmp_path):
    traces = exchanging([0.0, 0.0, 0.0])
    traces[0].coords = {"rank": 9}  # the first stage has the highest rank
    write(traces, tmp_path)
    result, document = merged(tmp_path)
    events = check(document)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [named[pid] for pid in sorted(order, key=order.get)] == [
        "pp0 tp0 cp0 ep0 dp0 (rank 9)",
        "pp1 tp0 cp0 ep0 dp0 (rank 1)",
        "pp2 tp0 cp0 ep0 dp0 (rank 2)",
    ]
    assert {e["args"]["labels"] for e in events if e["name"] == "process_labels"} == {"node-0", "node-1", "node-2"}
    assert result.ranks == (9, 1, 2)
    assert result.events == len(events)


@pytest.mark.parametrize("ahead", [0.0, 40.0, -40.0])
def test_clocks_are_aligned_and_arrows_lead_from_sends_to_receives(tmp_path, ahead):
    write(exchanging([0.0, ahead]), tmp_path)
    result, document = merged(tmp_path)
    check(document)
    found = list(arrows(document))
    assert len(found) == result.arrows == 6
    assert set(found) == {
        *((f"forward mb={mb} chunk=0", 1, "megaprof/send_forward", 2, "megaprof/recv_forward") for mb in range(3)),
        *((f"backward mb={mb} chunk=0", 2, "megaprof/send_backward", 1, "megaprof/recv_backward") for mb in range(3)),
    }
    (steps,) = [[e for e in document["traceEvents"] if "step=" in e["name"]]]
    assert abs(steps[0]["ts"] - steps[1]["ts"]) <= 100  # microseconds; both began at the same moment
    assert abs(document[MERGED]["offset_ns"]["1"] / 1e6 + ahead) <= 0.1
    (told,) = result.clocks
    assert re.fullmatch(r"host node-1: clock \d+\.\d{3} ms (ahead|behind), ±0\.\d{3} ms", told)
    assert not ahead or ("ahead" in told) == (ahead > 0)


def test_ids_of_different_ranks_stay_apart(tmp_path):
    traces = exchanging([0.0, 0.0])
    for trace in traces:
        for ph, time in (("s", 0.5), ("f", 3.0)):
            flow = {"ph": ph, "id": 7, "pid": 7, "tid": 1, "ts": time * 1000, "cat": "fwdbwd", "name": "fwdbwd"}
            trace.events.append(flow | ({"bp": "e"} if ph == "f" else {}))
        trace.events += [
            {
                "ph": "X",
                "cat": "Trace",
                "name": "PyTorch Profiler (0)",
                "pid": "Spans",
                "tid": "PyTorch Profiler",
                "ts": 0,
                "dur": 9,
            },
            {"ph": "M", "name": "process_name", "pid": "Spans", "ts": 0, "args": {"name": "Spans"}},
            {"ph": "M", "name": "thread_name", "pid": 7, "tid": 1, "ts": 0, "args": {"name": "thread 1 (python)"}},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 1, "ts": 0, "dur": 9},
        ]
    write(traces, tmp_path)
    _, document = merged(tmp_path)
    events = check(document)
    assert len({e["id"] for e in events if e.get("cat") == "fwdbwd"}) == 2
    threads = Counter(e["pid"] for e in {e["tid"]: e for e in events if e["ph"] == "X"}.values())
    assert set(threads.values()) == {3}  # the main thread, the profiler's, and the GPU's stream of the same number
    names = Counter(e["args"]["name"] for e in events if e["name"] == "thread_name")
    assert names == {"PyTorch Profiler": 2, "thread 1 (python)": 2}


def test_events_that_no_viewer_can_take_are_left_out_and_counted(tmp_path):
    (trace, _) = traces = exchanging([0.0, 0.0])
    good = len(trace.events) + 1
    trace.events += [
        {"ph": "X", "name": "no time", "pid": 7, "tid": 1},
        {"ph": "X", "name": "negative", "pid": 7, "tid": 1, "ts": 0, "dur": -1},
        {"ph": "X", "name": "nowhere", "pid": [1], "tid": 1, "ts": 0, "dur": 1},
        {"name": "nothing"},
    ]
    write(traces, tmp_path)
    result, document = merged(tmp_path)
    check(document)
    assert any("4 events left out" in warning for warning in result.warnings)
    kept = [e for e in document["traceEvents"] if e["pid"] == 1 and e["ph"] == "X" and e.get("cat") != "p2p"]
    assert len(kept) == good - 1


def test_not_a_number_in_one_event_loses_that_event_only(tmp_path):
    traces = exchanging([0.0, 0.0])
    traces[1].events.append({"ph": "X", "name": "broken", "pid": 7, "tid": 1, "ts": float("nan"), "dur": 1})
    traces[1].events.append(
        {"ph": "X", "name": "args", "pid": 7, "tid": 1, "ts": 1, "dur": 1, "args": {"x": float("nan")}}
    )
    write(traces, tmp_path)
    _, document = merged(tmp_path)
    names = {e["name"] for e in check(document)}
    assert "broken" not in names
    assert "args" in names


def test_the_latest_training_step_is_taken_unless_told_otherwise(tmp_path):
    for step in (3, 11):
        write(exchanging([0.0, 0.0], step=step), tmp_path)
    write(exchanging([0.0, 0.0], target="train_log_probs", role="ref", step=12), tmp_path)
    result, document = merged(tmp_path)
    assert (result.name.target, result.name.step) == ("train_actor", 11)
    assert result.others == ("train_actor step 3", "train_log_probs (ref) step 12")
    assert {e["name"].split(" pp")[0] for e in document["traceEvents"] if "step=" in e["name"]} == {
        "megaprof/train_actor step=11"
    }
    assert merged(tmp_path, step=3)[0].name.step == 3
    assert merged(tmp_path, role="ref")[0].name.target == "train_log_probs"
    with pytest.raises(Unanswerable, match="train_actor step 3"):
        merge(tmp_path, tmp_path / "out.json", step=4)


def test_files_that_cannot_be_used_are_named_and_the_rest_is_merged(tmp_path):
    paths = write(exchanging([0.0, 0.0, 0.0]), tmp_path)
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[:-20])
    result, document = merged(tmp_path, tmp_path / "cut.json.gz")
    check(document)
    assert result.ranks == (0, 1, 2)
    assert any(paths[2].name in warning and "truncated" in warning for warning in result.warnings)
    paths[2].write_bytes(whole[:20])
    result, document = merged(tmp_path)
    check(document)
    assert result.ranks == (0, 1)
    assert any(paths[2].name in warning and "truncated" in warning for warning in result.warnings)
    for path in paths[:2]:
        path.unlink()
    with pytest.raises(Unanswerable, match="truncated"):
        merge(tmp_path, tmp_path / "other.json")


def test_a_renamed_file_is_placed_by_its_metadata(tmp_path):
    (path, _) = write(exchanging([0.0, 0.0]), tmp_path)
    path.rename(tmp_path / "mine.pt.trace.json.gz")
    assert merged(tmp_path)[0].ranks == (0, 1)


def test_of_two_files_of_a_rank_the_later_one_counts(tmp_path):
    write(exchanging([0.0, 0.0]), tmp_path)
    write(exchanging([900_000.0, 900_000.0]), tmp_path / "again")
    result, document = merged(tmp_path)
    check(document)
    assert result.ranks == (0, 1)
    assert [w.partition(" is there twice")[0] for w in result.warnings if "twice" in w] == ["rank 0", "rank 1"]
    assert min(e["ts"] for e in document["traceEvents"] if e["ph"] == "X") >= 900_000_000


def test_two_runs_are_two_and_the_newest_is_merged(tmp_path):
    """The older run captured a later step, of the same sizes, and on one rank that the newer one did not."""
    write(exchanging([0.0, 0.0], step=11, metadata={"run": "a"}), tmp_path / "a")
    write(exchanging([0.0, 0.0], step=5, metadata={"run": "a"}), tmp_path / "a")
    write(exchanging([900_000.0, 900_000.0], step=5, metadata={"run": "b"})[:1], tmp_path / "b")
    result, document = merged(tmp_path)
    check(document)
    assert (result.run, result.runs, result.name.step, result.ranks, result.others) == (2, 2, 5, (0,), ())
    assert min(e["ts"] for e in document["traceEvents"] if e["ph"] == "X") >= 900_000_000
    older = merged(tmp_path, run=1)[0]
    assert (older.run, older.name.step, older.ranks, older.others) == (1, 11, (0, 1), ("train_actor step 5",))
    assert merged(tmp_path, run=1, step=5)[0].ranks == (0, 1)
    with pytest.raises(NoSuchRun, match="runs 1 to 2"):
        merge(tmp_path, tmp_path / "out.json", run=3)


def test_ranks_of_different_runs_are_no_picture(tmp_path):
    """Each run captured another rank, and their sizes differ."""
    sizes = {"tp": 1, "pp": 2, "cp": 1, "ep": 1, "dp": 2, "vpp": 1, "etp": 1}
    write(exchanging([0.0, 0.0], step=5, metadata={"run": "a"})[:1], tmp_path / "a")
    write(exchanging([900_000.0, 900_000.0], step=5, metadata={"run": "b", "sizes": sizes})[1:], tmp_path / "b")
    assert [(each.run, each.runs, each.ranks) for each in (merged(tmp_path)[0], merged(tmp_path, run=1)[0])] == [
        (2, 2, (1,)),
        (1, 2, (0,)),
    ]


def test_a_later_run_without_captures_is_no_reason_to_merge_nothing(tmp_path):
    """Only its timelines show that run."""
    for step in (5, 6):
        write(exchanging([0.0, 0.0], step=step, metadata={"run": "a"}), tmp_path / "a")
    layout, later = WorldLayout(ParallelSizes(pp=2)), START_NS + 10**15
    write_timelines(tmp_path / "new", layout, steps=9, microbatches=2, start_ns=later)
    result = merged(tmp_path)[0]
    assert (result.run, result.runs, result.name.step, result.ranks) == (1, 2, 6, (0, 1))
    with pytest.raises(Unanswerable, match="no capture of run 2"):
        merged(tmp_path, run=2)


def test_one_rank_is_a_timeline_without_arrows(tmp_path):
    TraceBuilder().write(tmp_path)
    result, document = merged(tmp_path, out=tmp_path / "plain.json")
    check(document)
    assert (result.arrows, result.warnings) == (0, ())


def test_nothing_but_an_older_timeline_is_replaced(tmp_path):
    paths = write(exchanging([0.0, 0.0]), tmp_path / "traces")
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for out in (*paths, notes, tmp_path):
        before = out.read_bytes() if out.is_file() else None
        with pytest.raises(ValueError, match=r"not overwritten|is a directory"):
            merge(tmp_path / "traces", out)
        assert before is None or out.read_bytes() == before
    for name in ("step.json.gz", "step.json"):
        for _ in range(2):
            check(merged(tmp_path / "traces", out=tmp_path / name)[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step.json", "step.json.gz", "traces"]


def test_memory_does_not_grow_with_the_number_of_ranks(tmp_path):
    def peak(ranks):
        traces = exchanging([0.0] * ranks, hosts=["a"] * ranks)
        for trace in traces:
            trace.events += [
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": f"op{n}",
                    "pid": 7,
                    "tid": 1,
                    "ts": n,
                    "dur": 0.5,
                    "args": {"n": n},
                }
                for n in range(1500)
            ]
        directory = tmp_path / str(ranks)
        write(traces, directory)
        del traces
        tracemalloc.start()
        try:
            merge(directory, tmp_path / f"{ranks}.json.gz")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)  # imports and caches
    assert peak(6) < 1.5 * peak(2)


def test_on_a_gpu_arrows_lead_from_kernel_to_kernel(tmp_path):
    """Send and receive kernels end together 30 ms after their launch; the second host's clock is 7 ms ahead. Passes
    compute before and after them."""
    traces = [TraceBuilder(pp=pp, pp_size=2, microbatches=1, metadata={"host": f"node-{pp}"}) for pp in (0, 1)]

    def kernel(stage, operation, launched, start, end):
        trace, by = traces[stage], 7.0 * stage
        number = len(trace.events) + 1
        if operation != "pass":
            trace.event(f"megaprof/{operation}", launched + by, 0.2)
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 1, "dur": 10}
        trace.events.append(launch | {"ts": (launched + by + 0.1) * 1000, "args": {"correlation": number}})
        arguments = {"correlation": number}
        if operation != "pass":
            arguments["Process Group Description"] = "PIPELINE_MODEL_PARALLEL_GROUP"
        name = "gemm" if operation == "pass" else "ncclDevKernel_SendRecv"
        times = {"ts": (start + by) * 1000, "dur": (end - start) * 1000}
        trace.events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 20, "args": arguments, **times})

    traces[0].forward(0, 0, 1)
    for stage, launched, start, end in ((0, 0.5, 1, 20), (1, 2, 31, 40), (1, 3.5, 40, 50), (0, 3.5, 61, 65)):
        kernel(stage, "pass", launched, start, end)
    kernel(0, "send_forward", 1.5, 20, 31)
    kernel(1, "recv_forward", 0.5, 2, 31)
    traces[1].forward(0, 7 + 1.5, 1)
    traces[1].backward(0, 7 + 3, 1)
    kernel(1, "send_backward", 5, 50, 61)
    kernel(0, "recv_backward", 2, 40, 61)
    traces[0].backward(0, 3, 1)
    for pp, trace in enumerate(traces):
        trace.call(7.0 * pp, 70)
    write(traces, tmp_path)
    _, document = merged(tmp_path)
    check(document)
    nccl = "ncclDevKernel_SendRecv"
    assert set(arrows(document)) == {
        ("forward mb=0 chunk=0", 1, nccl, 2, nccl),
        ("backward mb=0 chunk=0", 2, nccl, 1, nccl),
    }
    assert abs(document[MERGED]["offset_ns"]["1"] / 1e6 + 7) <= 0.1
