from __future__ import annotations

from pathlib import Path

import pytest

from megaprof.formats.job.requests import Request
from megaprof.formats.job.run import RunRecord
from megaprof.parallel.topology import DEFAULT_ORDER, ParallelSizes, WorldLayout
from tests.control import places
from tests.control.malformed import MALFORMED, changed
from tests.control.places import Gated

SIZES = ParallelSizes(pp=2)


@pytest.fixture
def run() -> RunRecord:
    layout = WorldLayout(SIZES, DEFAULT_ORDER)
    return RunRecord.new(layout.coords(0), layout, ("train_actor",), None, 1.0)


@pytest.fixture
def gate(tmp_path: Path, run: RunRecord) -> Gated:
    return Gated(tmp_path, run)


def refusal(gate: Gated, identity: str) -> str:
    return str(places.read(gate.paths.refusal(identity))["reason"])


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_no_request_is_refused_with_a_reason(kind: str, gate: Gated, run: RunRecord) -> None:
    write, reason = MALFORMED[kind]
    path = gate.paths.request("x")
    write(run, path)
    for _ in range(2):
        gate.look()
    assert gate.gate.current is None
    assert reason in refusal(gate, "x")
    assert not list(gate.paths.orders.iterdir())
    assert (kind == "directory") == (path.is_symlink() or path.exists())


def test_one_at_a_time(gate: Gated, run: RunRecord) -> None:
    for number in range(3):
        changed(run, gate.paths.request(f"r{number}"))
    gate.look()
    assert gate.gate.current is not None
    assert gate.gate.current.id == "r0"
    assert refusal(gate, "r1").startswith("busy with r0 ")
    changed(run, gate.paths.request("r0"))
    gate.look()
    assert not gate.paths.refusal("r0").exists(), "the same request once more is the one that is carried out"
    gate.paths.order("r0").unlink()
    changed(run, gate.paths.request("r3"))
    changed(run, gate.paths.request("r0"))
    gate.look()
    assert "answered before" in refusal(gate, "r0")
    gate.look()
    assert gate.gate.current is not None
    assert gate.gate.current.id == "r3"


def test_whoever_asked_and_died_does_not_keep_others_out(
    gate: Gated, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(run, gate.paths.request("dead"))
    gate.look()
    later = gate.gate._until + 1
    monkeypatch.setattr("megaprof.control.gate.time.monotonic", lambda: later)
    changed(run, gate.paths.request("next"))
    gate.look()
    assert gate.gate.current is not None
    assert gate.gate.current.id == "next"


def test_one_look_is_bounded_and_none_is_forgotten(gate: Gated, run: RunRecord) -> None:
    for number in range(300):
        gate.paths.request(f"r{number:03}").write_bytes(b"no")
    looks = 0
    while any(gate.paths.requests.iterdir()):
        before = len(list(gate.paths.requests.iterdir()))
        gate.look()
        looks += 1
        assert before - len(list(gate.paths.requests.iterdir())) <= 64
    assert looks == 5
    assert len(list(gate.paths.answers.iterdir())) == 256


def test_only_the_owner_may_look_at_requests(gate: Gated) -> None:
    assert gate.paths.requests.stat().st_mode & 0o777 == 0o700


def test_what_an_earlier_run_left_is_gone(gate: Gated, run: RunRecord) -> None:
    changed(run, gate.paths.request("r"))
    gate.look()
    again = RunRecord.new(WorldLayout(SIZES).coords(0), WorldLayout(SIZES), ("train_actor",), None, 1.0)
    changed(run, gate.paths.request("late"))
    after = Gated(gate.directory, again)
    assert not list(after.paths.orders.iterdir())
    after.look()
    assert "another run" in refusal(after, "late")
    assert isinstance(Request.new(again, "train_actor"), Request)
