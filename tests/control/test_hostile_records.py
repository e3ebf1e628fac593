"""Whatever a record says, it is refused or read; nothing else happens, and the background thread lives on.

Structure-aware: real records with values replaced, removed or nested.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaprof.cli import main
from megaprof.control.blame import find_culprits
from megaprof.control.directory import RunningJob
from megaprof.control.request import check, new_request
from megaprof.formats import job as records
from megaprof.formats.job import MOST_RANKS, RankStatus, Refused, Request, RunRecord
from megaprof.metrics import summarise
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.control import places

R = TypeVar("R", bound=records.Record)
LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=2))


def plain(record: records.Record) -> dict[str, Any]:
    """As it stands in the file."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(record))
    return found


RUN = RunRecord.new(LAYOUT.coords(0), LAYOUT, None, 1.0)
PLACE = {"target": "train_actor", "step": 7, "phase": "recv_forward", "microbatch": 1, "chunk": 0, "since": 1e9}
RECENT = dict.fromkeys(
    ("step_ms", "forward_ms", "backward_ms", "combined_ms", "compute_ms", "finalize_ms", "p2p_ms"), 1.5
)
STATUS: dict[str, Any] = {
    "run": RUN.run,
    "rank": 0,
    "coords": dict.fromkeys(("pp", "tp", "cp", "ep", "dp"), 0),
    "host": "elsewhere-1",
    "name": "node",
    "pid": 100,
    "time": 1e9,
    "interval": 1.0,
    "since": 1e9,
    "calls": [{"target": "train_actor", "role": "actor", "begun": 8, "seconds": 0.5, "step": 6, "count": 7}],
    "position": PLACE,
    "device_position": PLACE,
    "recent": {"target": "train_actor", "steps": 3, **RECENT},
    "capture": {"request": "x", "state": "done", "reason": None, "calls": 9, "steps": [1, 2], "files": ["a.gz"]},
    "ended": False,
    "off": False,
}
REQUEST = plain(new_request(RUN, "train_actor", options={"tool": ["torch"], "with_stack": True}))

VALUES = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1 << 20, 1 << 40, 1 << 63, 10**30, -(10**30), 1e308, -0.5, float("nan"), float("inf")])
    | st.sampled_from(["", "x", "\x1b[2J", "../../etc/passwd", "/etc", "\ud800", "🙂" * 300, "0-99999999999", "pp=9|*"])
    | st.sampled_from([[], {}, [[]], {"x": {}}, ["x"] * 2000, [10**20], {"tp": [1]}, [{"target": {}}]])
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
)
DEEP: list[Any] = []
for _ in range(500):
    DEEP = [DEEP]


@st.composite
def mutated(draw: st.DrawFn, record: dict[str, Any]) -> dict[str, Any]:
    """``record`` with one to three values replaced, removed, or put one level deeper."""
    changed: dict[str, Any] = json.loads(json.dumps(record))
    for _ in range(draw(st.integers(1, 3))):
        inside: Any = changed
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans()):
                inside = inside[key]
                continue
            action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "wrap", "deep"]))
            if action == "remove":
                del inside[key]
            else:
                inside[key] = copy.deepcopy({"replace": draw(VALUES), "wrap": [inside[key]], "deep": DEEP}[action])
            break
    return changed


def through_a_file(record: dict[str, Any], kind: type[R]) -> R:
    """Raises ValueError."""
    return records.decode(json.dumps(record).encode(), kind)


def read_run(record: dict[str, Any]) -> None:
    run = through_a_file(record, RunRecord)
    assert run.world <= MOST_RANKS
    assert run.interval <= 300
    assert through_a_file(plain(run), RunRecord) == run
    _ = run.layout
    with contextlib.suppress(Refused):
        new_request(run, "train_actor").selector.ranks(run.sizes, run.layout)


def read_status(record: dict[str, Any]) -> None:
    status = through_a_file(record, RankStatus)
    assert through_a_file(plain(status), RankStatus) == status
    assert status.last_step is None or status.last_step >= 0  # type: ignore[operator]
    others = [through_a_file({**STATUS, "rank": rank}, RankStatus) for rank in range(1, 4)]
    if status.rank == 0 and all(status.coords[axis] < getattr(RUN.sizes, axis) for axis in status.coords):
        everyone = {each.rank: each for each in (status, *others)}
        find_culprits(RUN, everyone, time.time())
        summarise(RUN, everyone.values())


def read_request_record(record: dict[str, Any]) -> None:
    request = through_a_file(record, Request)
    check(request, RUN)
    assert 1 <= request.steps <= 100
    assert len(request.selector.ranks(RUN.sizes, RUN.layout) or ()) <= RUN.world


READERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], None]]] = {
    "run": (plain(RUN), read_run),
    "status": (STATUS, read_status),
    "request": (REQUEST, read_request_record),
}
REFUSALS = (Refused, ValueError)


def refused_or_read(name: str, record: dict[str, Any]) -> None:
    said = ""
    try:
        READERS[name][1](record)
    except REFUSALS as refusal:
        said = str(refusal) or "nothing"
    assert said != "nothing"
    assert len(said) < 1000


@pytest.mark.parametrize("name", READERS)
def test_what_is_written_is_read(name: str) -> None:
    record, read = READERS[name]
    read(record)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_mutated_record_is_refused_or_read(name: str, data: st.DataObject) -> None:
    refused_or_read(name, data.draw(mutated(READERS[name][0])))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hundreds_of_mutated_records_are_refused_or_read(name: str, data: st.DataObject) -> None:
    refused_or_read(name, data.draw(mutated(READERS[name][0])))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("run", {"sizes": {"tp": 1 << 20, "pp": 400}}),
        ("run", {"sizes": {"dp": MOST_RANKS + 1}}),
        ("run", {"sizes": {"tp": True}}),
        ("run", {"interval": 9000.0}),
        ("run", {"interval": float("nan")}),
        ("run", {"pid": -1}),
        ("run", {"version": 1}),
        ("status", {"calls": [{"target": []}]}),
        ("status", {"calls": [{"target": "train_actor", "begun": "8"}]}),
        ("status", {"recent": {**STATUS["recent"], "step_ms": "fast"}}),
        ("status", {"interval": 1e6}),
        ("request", {"options": {"tool": {}}}),
        ("request", {"options": {"with_stack": {"x": 1}}}),
        ("request", {"options": [[]]}),
        ("status", {"capture": {"request": "x", "state": "fine"}}),
        ("request", {"first": 1 << 70}),
    ],
)
def test_what_no_job_would_write_is_refused(name: str, change: dict[str, Any]) -> None:
    record, read = READERS[name]
    with pytest.raises(REFUSALS):
        read({**record, **change})


def look_at(directory: Path, data: st.DataObject) -> None:
    """Every rank's looks at a directory in which everything is mutated; each must come to its end."""
    leader, follower = (places.listening(directory, LAYOUT, rank) for rank in (0, 1))
    leader.look()
    follower.look()
    paths = places.Paths(leader.path, 4)
    assert leader.job is not None
    run = leader.job.run
    request = {**plain(new_request(run, "train_actor", select="all")), "first": 5}
    for path, record in ((paths.run, plain(run)), (paths.capture, request)):
        places.write(path, data.draw(mutated(record) | st.just(record)))
    for _ in range(2):
        leader.look()
        follower.look()
    assert not leader.closed
    assert leader.job is not None or leader._ousted
    leader.close()
    follower.close()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_record_ends_the_background_thread(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    look_at(tmp_path_factory.mktemp("job"), data)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_record_of_many_ends_the_background_thread(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    look_at(tmp_path_factory.mktemp("job"), data)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_record_makes_a_command_fail_with_more_than_a_line(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr("megaprof.control.directory.time.sleep", lambda seconds: None)
    monkeypatch.setattr(RunningJob, "starting", lambda self, statuses: False)
    directory = tmp_path_factory.mktemp("job")
    paths = places.Paths.of(directory, None, 4)
    record = data.draw(mutated(plain(RUN)) | st.just(plain(RUN)))
    places.write(paths.run, {**record, "sizes": record.get("sizes") and {"pp": 2, "dp": 2}})
    for rank in range(4):
        places.write(paths.status(rank), data.draw(mutated({**STATUS, "rank": rank})))
    for command in (["status", "--wait", "0"], ["status", "--wait", "0", "--json"], ["watch", "--once"]):
        assert main([command[0], str(directory), *command[1:]]) in (0, 1, 3)
