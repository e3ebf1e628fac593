"""Many files at once, and files that mean harm."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from megaprof.analysis.notes import Note
from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace import columns, reading
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.reading import read_all
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats.inputs import unpacked
from tests.analysis.rows import rows
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder, kinds, pipeline

ROOT = Path(__file__).parents[3]


@pytest.fixture
def always_worth_it(monkeypatch):
    monkeypatch.setattr(reading, "_WORTH_IT", 0)


def test_several_processes_give_the_same_answer_in_the_same_order(tmp_path, always_worth_it):
    write(Scenario("parallel", layers=(6, 4, 3, 3)), tmp_path)
    (tmp_path / "broken.pt.trace.json").write_text("[")
    paths = find_traces(tmp_path)
    alone, together = list(read_all(paths)), list(read_all(paths, workers=2))
    assert [r.path for r in together] == paths
    assert [(*map(rows, r.steps), r.warnings) for r in together] == [(*map(rows, r.steps), r.warnings) for r in alone]
    assert analyze(tmp_path, workers=2).to_json() == analyze(tmp_path).to_json()


def test_a_killed_process_is_no_reason_to_give_up(tmp_path, always_worth_it, monkeypatch):
    pipeline(tmp_path, [2, 2, 2])
    paths = find_traces(tmp_path)
    monkeypatch.setattr(reading, "ProcessPoolExecutor", _BreakingPool)
    assert [len(r.steps) for r in read_all(paths, workers=2)] == [1, 1, 1]


class _BreakingPool:
    """Stands for a pool whose processes are killed after the first result."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def map(self, function, paths):
        yield function(paths[0])
        raise reading.BrokenProcessPool("killed")


def test_few_bytes_are_not_worth_a_process(tmp_path, monkeypatch):
    pipeline(tmp_path, [2, 2])
    monkeypatch.setattr(reading, "ProcessPoolExecutor", None)  # would fail when called
    assert len(list(read_all(find_traces(tmp_path), workers=8))) == 2


def test_progress_is_told_after_every_file(tmp_path):
    pipeline(tmp_path, [2, 2, 2])
    told = []
    analyze(tmp_path, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_no_progress_where_nobody_looks(tmp_path):
    pipeline(tmp_path, [2, 2])
    run = subprocess.run(
        [sys.executable, "-m", "megaprof", "report", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (run.returncode, run.stderr) == (0, "")


def bomb(megabytes: int) -> bytes:
    """A gzip file a thousandth of its content's size."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(squeeze.compress(b" " * (1 << 20)) for _ in range(megabytes)), squeeze.flush()])


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "bomb.pt.trace.json.gz"
    path.write_bytes(bomb(200))
    with pytest.raises(OSError, match=r"unpacks to more than \d+ MiB, more than a trace of its size can"):
        sum(map(len, unpacked(path)))
    with pytest.raises(Undecodable, match="blank for long"):
        read_trace(path)


def test_small_traces_may_shrink_as_much_as_they_like(tmp_path):
    path = TraceBuilder().write(tmp_path)
    text = gzip.decompress(path.read_bytes()) + b" " * (20 << 20)
    path.write_bytes(gzip.compress(text, 9))
    assert read_trace(path).metadata.target == "train_actor"


def test_a_file_of_several_gzip_members(tmp_path):
    path = TraceBuilder().write(tmp_path)
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text[:100]) + gzip.compress(text[100:]) + b"\0" * 512)
    assert read_trace(path).metadata.target == "train_actor"


@pytest.mark.parametrize("cut", [2, 9, 20, 200])
def test_a_gzip_file_cut_off_anywhere(tmp_path, cut):
    path = TraceBuilder().write(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(Undecodable, match=r"truncated|damaged"):
        read_trace(path)


def test_memory_that_is_left_bounds_the_events_that_are_read(tmp_path, monkeypatch):
    trace = TraceBuilder()
    trace.call(0, 100)
    for number in range(200):
        trace.event("gemm", number, 1, cat="kernel")
    path = trace.write(tmp_path)
    monkeypatch.setattr(columns, "fits", lambda size: size <= 1 << 14)
    with pytest.raises(Undecodable, match=r"more events than fit into memory \(see --max-input-mib\)"):
        read_trace(path)


def test_a_truncated_trace_gives_what_it_holds_and_says_so(tmp_path):
    for path in pipeline(tmp_path, [2, 2]):
        whole = read_trace(path)
        assert whole.cut is None
        if "pp1" in path.name:
            path.write_bytes(path.read_bytes()[:-20])
            found = read_trace(path)
            assert 0 < len(found.ranges) <= len(whole.ranges)
            assert all(each in whole.ranges for each in found.ranges)
            assert "is truncated" in found.cut
            assert all(call.incomplete == Note("incomplete", said=found.cut) for call in steps_of(found))
    assert kinds(analyze(tmp_path).warnings) == {"cut"}


@pytest.mark.parametrize(
    "args",
    [
        {"correlation": "x"},
        {"correlation": 1 << 70},
        {"External id": 1 << 70},
        {"correlation": -3},
        {"Process Group Description": 5},
        "text",
        None,
        [],
        {"correlation": 1.5},
    ],
)
def test_arguments_that_make_no_sense_do_not_cost_the_event(tmp_path, args):
    trace = TraceBuilder(microbatches=1, metadata={"forward_only": True})
    trace.call(0, 20)
    trace.forward(0, 0, 10)
    trace.event("gemm", 1, 2, cat="kernel")
    trace.event("cudaLaunchKernel", 0.5, 0.1, cat="cuda_runtime")
    for event in trace.events[-2:]:
        event["args"] = args
    found = read_trace(trace.write(tmp_path))
    assert found.gpu is not None
    assert len(found.gpu.spans) == 1
    assert not found.gpu.known.any()
    json.dumps(analyze(tmp_path).to_json(), allow_nan=False)
