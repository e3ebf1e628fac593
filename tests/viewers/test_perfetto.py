"""Perfetto's trace processor reads what we write, and shows it as we meant it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("perfetto", reason="`make test-viewers` installs it")
pytest.importorskip("viztracer", reason="`make test-viewers` installs it")

from tests.viewers.job import PASSES, RANKS, TARGETS, WORKLOAD, SaveDirectory, our_ranges, read
from tests.viewers.trace_processor import query

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js runs Perfetto's WebAssembly build")

ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
RANGES = "select name, count(*) as n from slice where name glob 'megaprof/*' group by name"
GLOO = "select count(*) as n from slice where name glob 'gloo:*'"


def counted(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter({row["name"]: row["n"] for row in rows})


def dropped(slices: list[dict[str, Any]], shown: int) -> dict[str, int]:
    """The one error that a CPU trace may have: torch writes gloo's asynchronous sends and receives on the thread that
    started them, where they overlap what the thread did next; Perfetto shows as many as nest."""
    lost = sum(event["name"].startswith("gloo:") for event in slices) - shown
    return {"slice_drop_overlapping_complete_event": lost} if lost else {}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rank", RANKS)
def test_a_trace(saved: SaveDirectory, target: str, rank: int) -> None:
    path = saved.trace(target, rank)
    step = f"megaprof/{target} step={TARGETS[target]} pp={rank} *"
    inside = f"select count(*) as n from slice s, ancestor_slice(s.id) a where a.name glob '{step}' and s.name glob"
    errors, ranges, gloo, forwards, backwards = query(
        path, ERRORS, RANGES, GLOO, f"{inside} 'megaprof/forward mb=*'", f"{inside} 'megaprof/backward mb=*'"
    )
    assert counted(ranges) == our_ranges(path)
    assert forwards == [{"n": PASSES}]
    assert backwards == [{"n": PASSES if target == "train_actor" else 0}]
    assert {row["name"]: row["value"] for row in errors} == dropped(read(path), gloo[0]["n"])


def arrows_expected() -> Counter[tuple[str, int, int]]:
    """Name, sender and receiver of every message: a microbatch passes all chunks of all stages, there and back. The
    name has the receiver's chunk."""
    way = [(chunk, pp) for chunk in range(WORKLOAD.vpp or 1) for pp in RANKS]
    return Counter(
        (f"{kind} mb={mb} chunk={chunk}", sender, receiver)
        for kind, path in (("forward", way), ("backward", way[::-1]))
        for (_, sender), (chunk, receiver) in pairwise(path)
        for mb in range(WORKLOAD.microbatches)
    )


def test_a_merged_timeline(saved: SaveDirectory, timeline: Path) -> None:
    errors, ranges, gloo, forwards, arrows = query(
        timeline,
        ERRORS,
        RANGES,
        GLOO,
        """include perfetto module slices.with_context;
           select process_name as name, count(*) as n from thread_slice
           where name glob 'megaprof/forward mb=*' group by upid""",
        """select extract_arg(flow.arg_set_id, 'name') as name, sender.pid as sender, receiver.pid as receiver
           from flow join thread_slice start on slice_out = start.id join thread_slice finish on slice_in = finish.id
           join process sender on start.upid = sender.upid join process receiver on finish.upid = receiver.upid
           where extract_arg(flow.arg_set_id, 'cat') = 'p2p'""",
    )
    paths = [saved.trace("train_actor", rank) for rank in RANKS]
    assert counted(ranges) == sum((our_ranges(path) for path in paths), Counter())
    names = {f"pp{rank} tp0 cp0 ep0 dp0 (rank {rank})" for rank in RANKS}
    assert counted(forwards) == dict.fromkeys(names, PASSES)
    # A process id is a rank + 1. Perfetto turns an arrow around that ends in a slice older than the one it starts in.
    found = Counter((arrow["name"], arrow["sender"] - 1, arrow["receiver"] - 1) for arrow in arrows)
    assert found == arrows_expected()

    slices = [event for path in paths for event in read(path)]
    assert {row["name"]: row["value"] for row in errors} == dropped(slices, gloo[0]["n"])


def test_what_perfetto_cannot_read_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no trace")
    with pytest.raises(RuntimeError, match="Unknown trace type"):
        query(broken, ERRORS)
    nameless = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "ts": 0, "args": {"name": ""}}
    broken.write_text(json.dumps({"traceEvents": [nameless]}))
    assert query(broken, ERRORS) == [[{"name": "json_parser_failure", "value": 1}]]
    with pytest.raises(RuntimeError, match="no such table: missing"):
        query(broken, "select * from missing")
