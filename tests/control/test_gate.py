from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaprof.control import records
from megaprof.control.gate import Gate
from megaprof.control.paths import Paths
from megaprof.control.records import Owner
from megaprof.control.request import Request
from megaprof.control.run import Run
from megaprof.parallel.topology import DEFAULT_ORDER, ParallelSizes, WorldLayout
from tests.control.malformed import MALFORMED, changed

SIZES = ParallelSizes(pp=2)


@pytest.fixture
def run() -> Run:
    layout = WorldLayout(SIZES, DEFAULT_ORDER)
    return Run.new(layout.coords(0), layout, ("train_actor",), None, 1.0)


@pytest.fixture
def gate(tmp_path: Path, run: Run) -> Gate:
    paths = Paths.of(tmp_path, None, SIZES.world)
    return Gate(paths, run, Owner.of(os.stat(tmp_path)))


def refusal(gate: Gate, identity: str) -> str:
    return str(records.read(gate._paths.refusal(identity))["reason"])


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_no_request_is_refused_with_a_reason(kind: str, gate: Gate, run: Run) -> None:
    write, reason = MALFORMED[kind]
    path = gate._paths.request("x")
    write(run, path)
    for _ in range(2):
        gate.look()
    assert gate.current is None
    assert reason in refusal(gate, "x")
    assert not list(gate._paths.orders.iterdir())
    assert (kind == "directory") == (path.is_symlink() or path.exists())


def test_one_at_a_time(gate: Gate, run: Run) -> None:
    for number in range(3):
        changed(run, gate._paths.request(f"r{number}"))
    gate.look()
    assert gate.current is not None
    assert gate.current.id == "r0"
    assert refusal(gate, "r1").startswith("busy with r0 ")
    changed(run, gate._paths.request("r0"))
    gate.look()
    assert not gate._paths.refusal("r0").exists(), "the same request once more is the one that is carried out"
    gate._paths.order("r0").unlink()
    changed(run, gate._paths.request("r3"))
    changed(run, gate._paths.request("r0"))
    gate.look()
    assert "answered before" in refusal(gate, "r0")
    gate.look()
    assert gate.current is not None
    assert gate.current.id == "r3"


def test_whoever_asked_and_died_does_not_keep_others_out(gate: Gate, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(run, gate._paths.request("dead"))
    gate.look()
    later = gate._until + 1
    monkeypatch.setattr("megaprof.control.gate.time.monotonic", lambda: later)
    changed(run, gate._paths.request("next"))
    gate.look()
    assert gate.current is not None
    assert gate.current.id == "next"


def test_one_look_is_bounded_and_none_is_forgotten(gate: Gate, run: Run) -> None:
    for number in range(300):
        gate._paths.request(f"r{number:03}").write_bytes(b"no")
    looks = 0
    while any(gate._paths.requests.iterdir()):
        before = len(list(gate._paths.requests.iterdir()))
        gate.look()
        looks += 1
        assert before - len(list(gate._paths.requests.iterdir())) <= 64
    assert looks == 5
    assert len(list(gate._paths.answers.iterdir())) == 256


def test_only_the_owner_may_look_at_requests(gate: Gate) -> None:
    assert gate._paths.requests.stat().st_mode & 0o777 == 0o700


def test_what_an_earlier_run_left_is_gone(gate: Gate, run: Run) -> None:
    changed(run, gate._paths.request("r"))
    gate.look()
    again = Run.new(WorldLayout(SIZES).coords(0), WorldLayout(SIZES), ("train_actor",), None, 1.0)
    changed(run, gate._paths.request("late"))
    after = Gate(gate._paths, again, gate._owner)
    assert not list(after._paths.orders.iterdir())
    after.look()
    assert "another run" in refusal(after, "late")
    assert isinstance(Request.new(again, "train_actor"), Request)
