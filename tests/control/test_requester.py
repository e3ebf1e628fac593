from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.cli import main
from megaprof.control.job import RunningJob
from megaprof.control.requester import Requester, first_call, selected_ranks
from megaprof.formats.job.requests import Answer, Refused, Request
from megaprof.formats.job.run import RunRecord
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.cli.running import check
from tests.control import places


@given(
    calls=st.integers(0, 10**6),
    seconds=st.floats(0.001, 100),
    age=st.floats(0, 60),
    latency=st.floats(0, 60),
    look=st.floats(0.1, 20),
    late=st.floats(0, 1),
)
def test_no_rank_can_have_begun_the_first_call_when_it_hears_of_it(
    calls: int, seconds: float, age: float, latency: float, look: float, late: float
) -> None:
    first = first_call(calls, seconds, age, latency, look)
    # An answer may be a latency old when it is heard, and hearing of the choice takes another one and a look.
    begun = calls + (age + 2 * latency + look * late) / seconds
    assert first > begun


def test_an_unknown_step_time_is_the_next_call_but_one() -> None:
    assert first_call(0, None, 1.0, 1.0, 1.0) == 1


class Asked(NamedTuple):
    """A job that can be asked, as far as its lowest rank's gate and its files go."""

    job: RunningJob
    paths: places.Paths
    gate: places.Gated


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    layout = WorldLayout(ParallelSizes(pp=2, tp=2))
    run = RunRecord.new(layout.coords(0), layout, ("train_actor",), None, 0.1)
    gate = places.Gated(tmp_path, run)
    places.write(gate.paths.run, run.as_record())
    return Asked(RunningJob(tmp_path, None, run), gate.paths, gate)


def answer(paths: places.Paths, run: RunRecord, request: Request, said: Answer) -> None:
    places.write(paths.answer(request.id, said.rank), said.as_record(run.run))


def test_two_phases(asked: Asked) -> None:
    job, paths, gate = asked
    run = job.run
    request = Request.new(run, "train_actor", steps=2)
    ranks = selected_ranks(run, request)
    assert ranks == [0, 2]
    requester = Requester(job, request, ranks)
    requester.submit()
    gate.look()
    assert paths.order(request.id).exists()
    answer(paths, run, request, Answer(0, "accepted", calls=10, seconds=1.0))
    assert requester.advance() is None
    assert requester.missing == [2]
    answer(paths, run, request, Answer(2, "accepted", calls=11, seconds=1.0))
    assert requester.advance() is None
    first = places.read(paths.go(request.id))["first"]
    assert first > 11
    for rank in ranks:
        answer(paths, run, request, Answer(rank, "recording", calls=first))
    assert requester.advance() is None
    for rank in ranks:
        answer(paths, run, request, Answer(rank, "done", steps=(first, first + 1), files=(f"{rank}.gz",)))
    outcome = requester.advance()
    assert outcome is not None
    assert (outcome.reason, outcome.steps, outcome.files) == (None, (first, first + 1), ("0.gz", "2.gz"))
    assert not paths.order(request.id).exists()
    gate.look()
    assert gate.gate.current is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Answer(2, "missed", reason="too late"), "rank 2 missed: too late"),
        (Answer(2, "done", steps=(9, 10)), "the ranks number their steps differently"),
    ],
)
def test_a_part_of_a_capture_is_said_to_be_one(asked: Asked, said: Answer, reason: str) -> None:
    job, paths, gate = asked
    run = job.run
    request = Request.new(run, "train_actor")
    requester = Requester(job, request, [0, 2])
    requester.submit()
    gate.look()
    for rank in (0, 2):
        answer(paths, run, request, Answer(rank, "accepted", calls=1, seconds=0.1))
    requester.advance()
    answer(paths, run, request, Answer(0, "done", steps=(5, 6)))
    answer(paths, run, request, said)
    outcome = requester.advance()
    assert outcome is not None
    assert outcome.reason is not None
    assert outcome.reason.startswith(reason)


def test_one_rank_that_cannot_is_a_refusal(asked: Asked) -> None:
    job, paths, gate = asked
    run = job.run
    request = Request.new(run, "train_actor")
    requester = Requester(job, request, [0, 2])
    requester.submit()
    gate.look()
    answer(paths, run, request, Answer(0, "accepted", calls=1, seconds=0.1))
    answer(paths, run, request, Answer(2, "refused", reason="no CUDA device"))
    with pytest.raises(Refused, match="rank 2: no CUDA device"):
        requester.advance()
    assert not paths.order(request.id).exists(), "the others must not wait for a decision"


def test_a_restart_in_between_is_noticed(asked: Asked) -> None:
    job, paths, _ = asked
    run = job.run
    requester = Requester(job, Request.new(run, "train_actor"), [0, 2])
    requester.submit()
    layout = WorldLayout(run.sizes)
    places.write(paths.run, RunRecord.new(layout.coords(0), layout, ("train_actor",), None, 0.1).as_record())
    with pytest.raises(Refused, match="started again"):
        requester.advance()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_withdraws(number: int, asked: Asked, tmp_path: Path) -> None:
    job, paths, _ = asked
    run = job.run
    status = {"run": run.run, "rank": 0, "host": run.host, "name": "here", "pid": run.pid, "interval": 1.0, "calls": {}}
    status |= {"coords": dict.fromkeys(("pp", "tp", "cp", "ep", "dp"), 0), "time": time.time(), "since": time.time()}
    paths.status(0).parent.mkdir()
    places.write(paths.status(0), status)
    command = [sys.executable, "-m", "megaprof", "trigger", str(tmp_path), "--target", "train_actor"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stderr is not None
        assert "waiting for 2 of 2 to answer" in asking.stderr.readline()
        assert list(paths.requests.iterdir())
        asking.send_signal(number)
        assert asking.wait(60) == 128 + number
        said = asking.stderr.read()
        assert said.startswith("request ")
        assert ": withdrawn before any rank recorded; nothing is captured\n" in said
    assert not list(paths.requests.iterdir())


def test_somebody_elses_job(asked: Asked) -> None:
    job, paths, _ = asked
    run = job.run
    if os.geteuid() != 0:
        pytest.skip("only root can make a file somebody else's")
    for path in (paths.run, paths.requests):
        os.chown(path, 12345, 12345)
    with pytest.raises(Refused, match="the job belongs to user 12345"):
        Requester(job, Request.new(run, "train_actor"), [0, 2]).submit()
    assert not list(paths.requests.iterdir())


def test_the_command_prints_what_was_captured_as_json(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks answer, in a thread of this process, as their files would."""
    job, paths, gate = asked
    run = job.run
    paths.status(0).parent.mkdir()
    status = {"run": run.run, "rank": 0, "host": run.host, "name": "here", "pid": run.pid, "interval": 1.0, "calls": []}
    status |= {"coords": dict.fromkeys(("pp", "tp", "cp", "ep", "dp"), 0), "time": time.time(), "since": time.time()}
    places.write(paths.status(0), status)
    ended = threading.Event()

    def ranks() -> None:
        while gate.gate.current is None and not ended.wait(0.02):
            gate.look()
        if (request := gate.gate.current) is None:
            return
        for rank in (0, 2):
            answer(paths, run, request, Answer(rank, "accepted", calls=1, seconds=0.1))
        while not paths.go(request.id).exists() and not ended.wait(0.02):
            pass
        answer(paths, run, request, Answer(0, "done", steps=(5, 6), files=("0.gz",)))
        answer(paths, run, request, Answer(2, "missed", reason="too late"))

    answering = threading.Thread(target=ranks)
    answering.start()
    try:
        assert main(["trigger", str(tmp_path), "--target", "train_actor", "--json", "--timeout", "60"]) == 1
    finally:
        ended.set()
        answering.join()
    said = capsys.readouterr()
    found = json.loads(said.out)
    check("trigger", found)
    assert (found["selected"], found["captured"], found["steps"]) == ([0, 2], 1, [5, 6])
    assert found["files"] == [str(tmp_path / "0.gz")]
    assert found["reason"] == "rank 2 missed: too late"
