from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megaprof.cli import main
from megaprof.control.directory import RunningJob
from megaprof.control.request import Requester, first_call, new_request
from megaprof.formats.job import RunRecord
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.cli.running import check
from tests.control import places


@given(
    calls=st.integers(0, 10**6),
    seconds=st.floats(0.001, 100),
    latency=st.floats(0, 60),
    look=st.floats(0.1, 20),
    late=st.floats(0, 1),
)
def test_no_rank_can_have_begun_the_first_call_when_it_hears_of_it(
    calls: int, seconds: float, latency: float, look: float, late: float
) -> None:
    first = first_call(calls, seconds, latency, look)
    # An answer may be a latency and a look old when it is read, and so may the choice.
    begun = calls + 2 * (latency + look * late) / seconds
    assert first > begun


def test_an_unknown_step_time_is_the_next_call_but_one() -> None:
    assert first_call(0, None, 1.0, 1.0) == 1


class Asked:
    """A job of four ranks that can be asked, as far as their files go."""

    def __init__(self, directory: Path) -> None:
        self.layout = WorldLayout(ParallelSizes(pp=2, tp=2))
        self.run = RunRecord.new(self.layout.coords(0), self.layout, None, 0.1)
        self.job = RunningJob(directory, self.run)
        self.paths = places.Paths.of(directory, None, 4)
        places.write(self.paths.run, self.run)

    def requester(self, **options: Any) -> Requester:
        request = new_request(self.run, "train_actor", **options)
        requester = Requester(self.job, request)
        requester.submit()
        return requester

    def says(self, rank: int, state: str | None = None, **more: Any) -> None:
        capture = state and {"request": self.paths.request().id, "state": state, **more}
        later = time.time() + 3600  # it is not late, however long a command takes to come up
        places.write(self.paths.status(rank), places.status(self.run, self.layout, rank, capture=capture, time=later))


def reason(requester: Requester) -> str:
    """Why nothing is captured, as the next look finds."""
    outcome = requester.advance()
    assert outcome is not None
    assert outcome.captured == 0
    return str(outcome.reason)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_two_phases(asked: Asked) -> None:
    requester = asked.requester(steps=2)
    assert requester.ranks == (0, 2)
    assert asked.paths.request() == requester.request
    asked.says(0, "accepted", calls=10, seconds=1.0)
    asked.says(2)
    assert requester.advance() is None
    assert requester.missing == [2]
    asked.says(2, "accepted", calls=11, seconds=1.0)
    assert requester.advance() is None
    first = asked.paths.request().first
    assert first is not None
    assert first > 11
    for rank in (0, 2):
        asked.says(rank, "recording", calls=first)
    assert requester.advance() is None
    for rank in (0, 2):
        asked.says(rank, "done", steps=(first, first + 1), files=(f"{rank}.gz",))
    outcome = requester.advance()
    assert outcome is not None
    files = tuple(str(asked.paths.root.parent / f"{rank}.gz") for rank in (0, 2))
    assert (outcome.reason, outcome.steps, outcome.files) == (None, (first, first + 1), files)
    assert not asked.paths.capture.exists()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"state": "failed", "reason": "too late"}, "rank 2: too late"),
        ({"state": "done", "steps": (9, 10)}, "the ranks number their steps differently"),
    ],
)
def test_a_part_of_a_capture_is_said_to_be_one(asked: Asked, said: dict[str, Any], reason: str) -> None:
    requester = asked.requester()
    for rank in (0, 2):
        asked.says(rank, "accepted", calls=1, seconds=0.1)
    requester.advance()
    asked.says(0, "done", steps=(5, 6))
    asked.says(2, **said)
    outcome = requester.advance()
    assert outcome is not None
    assert outcome.reason is not None
    assert outcome.reason.startswith(reason)


def test_one_rank_that_cannot_is_a_refusal(asked: Asked) -> None:
    requester = asked.requester(select="2-3")
    asked.says(3, "accepted", calls=1, seconds=0.1)
    asked.says(2, "failed", reason="no CUDA device")
    assert reason(requester) == "rank 2: no CUDA device"
    assert not asked.paths.capture.exists(), "the others must not wait for a decision"


def test_a_restart_in_between_is_noticed(asked: Asked) -> None:
    requester = asked.requester()
    places.write(asked.paths.run, replace(asked.run, run="again"))
    assert "started again" in reason(requester)


def test_a_request_that_somebody_removes_is_not_waited_for(asked: Asked) -> None:
    requester = asked.requester()
    asked.paths.capture.unlink()
    assert "somebody removed" in reason(requester)


@pytest.mark.parametrize(("seconds", "still"), [((60, 90), 60), ((60, 0), 0)])
def test_ranks_that_all_stand_still_are_known(seconds: tuple[int, int], still: int, asked: Asked) -> None:
    requester, now = asked.requester(), time.time() + 3600  # no status is late
    called = [{"target": "train_actor", "begun": 5, "seconds": 1.0}]
    for rank, ago in zip(requester.ranks, seconds, strict=True):
        since = now - ago
        status = places.status(asked.run, asked.layout, rank, time=now, since=since, calls=called)
        places.write(asked.paths.status(rank), status)
    requester.advance()
    assert requester.still == pytest.approx(still)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_withdraws(number: int, asked: Asked, tmp_path: Path) -> None:
    asked.says(0)
    command = [sys.executable, "-m", "megaprof", "trigger", str(tmp_path), "--target", "train_actor"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stderr is not None
        assert "waiting for 2 of 2 to answer" in asking.stderr.readline()
        assert asked.paths.capture.exists()
        asking.send_signal(number)
        assert asking.wait(60) == 128 + number
        said = asking.stderr.read()
        assert said.startswith("request ")
        assert ": withdrawn before any rank recorded; nothing is captured\n" in said
    assert not asked.paths.capture.exists()


def test_the_command_prints_what_was_captured_as_json(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # its handler would stay in the process of the tests
    asked.says(0)
    with places.answering(asked.paths, asked.run, asked.layout, (0, 2), last="failed"):
        assert main(["trigger", str(tmp_path), "--target", "train_actor", "--json", "--timeout", "60"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    check("trigger", found)
    assert (found["selected"], found["captured"], found["steps"]) == ([0, 2], 1, [5, 6])
    assert found["files"] == [str(tmp_path / "0.gz")]
    assert found["reason"] == "rank 2: too late"
