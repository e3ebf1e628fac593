from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.control import records
from megaprof.control.gate import Gate
from megaprof.control.paths import Paths
from megaprof.control.records import Owner
from megaprof.control.request import Answer, Refused, Request
from megaprof.control.requester import Requester, first_call, selected_ranks
from megaprof.control.run import Run
from megaprof.parallel.topology import ParallelSizes, WorldLayout


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


@pytest.fixture
def job(tmp_path: Path) -> tuple[Run, Paths, Gate]:
    layout = WorldLayout(ParallelSizes(pp=2, tp=2))
    run = Run.new(layout.coords(0), layout, ("train_actor",), None, 0.1)
    paths = Paths.of(tmp_path, None, run.world)
    gate = Gate(paths, run, Owner.of(os.stat(tmp_path)))
    records.write(paths.run, run.as_record())
    return run, paths, gate


def answer(paths: Paths, run: Run, request: Request, said: Answer) -> None:
    records.write(paths.answer(request.id, said.rank), said.as_record(run.run))


def test_two_phases(job: tuple[Run, Paths, Gate]) -> None:
    run, paths, gate = job
    request = Request.new(run, "train_actor", steps=2)
    ranks = selected_ranks(run, request)
    assert ranks == [0, 2]
    requester = Requester(paths, run, request, ranks)
    gate.look()
    assert paths.order(request.id).exists()
    answer(paths, run, request, Answer(0, "accepted", calls=10, seconds=1.0))
    assert requester.advance() is None
    assert requester.missing == [2]
    answer(paths, run, request, Answer(2, "accepted", calls=11, seconds=1.0))
    assert requester.advance() is None
    first = records.read(paths.go(request.id))["first"]
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
    assert gate.current is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Answer(2, "missed", reason="too late"), "rank 2 missed: too late"),
        (Answer(2, "done", steps=(9, 10)), "the ranks number their steps differently"),
    ],
)
def test_a_part_of_a_capture_is_said_to_be_one(job: tuple[Run, Paths, Gate], said: Answer, reason: str) -> None:
    run, paths, gate = job
    request = Request.new(run, "train_actor")
    requester = Requester(paths, run, request, [0, 2])
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


def test_one_rank_that_cannot_is_a_refusal(job: tuple[Run, Paths, Gate]) -> None:
    run, paths, gate = job
    request = Request.new(run, "train_actor")
    requester = Requester(paths, run, request, [0, 2])
    gate.look()
    answer(paths, run, request, Answer(0, "accepted", calls=1, seconds=0.1))
    answer(paths, run, request, Answer(2, "refused", reason="no CUDA device"))
    with pytest.raises(Refused, match="rank 2: no CUDA device"):
        requester.advance()
    assert not paths.order(request.id).exists(), "the others must not wait for a decision"


def test_a_restart_in_between_is_noticed(job: tuple[Run, Paths, Gate]) -> None:
    run, paths, _ = job
    requester = Requester(paths, run, Request.new(run, "train_actor"), [0, 2])
    layout = WorldLayout(run.sizes)
    records.write(paths.run, Run.new(layout.coords(0), layout, ("train_actor",), None, 0.1).as_record())
    with pytest.raises(Refused, match="started again"):
        requester.advance()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_withdraws(number: int, job: tuple[Run, Paths, Gate], tmp_path: Path) -> None:
    run, paths, _ = job
    status = {"run": run.run, "rank": 0, "host": run.host, "name": "here", "pid": run.pid, "interval": 1.0, "calls": {}}
    status |= {"coords": dict.fromkeys(("pp", "tp", "cp", "ep", "dp"), 0), "time": time.time(), "since": time.time()}
    paths.status(0).parent.mkdir()
    records.write(paths.status(0), status)
    command = [sys.executable, "-m", "megaprof", "trigger", str(tmp_path), "--target", "train_actor"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stderr is not None
        assert "waiting for 2 of 2 to answer" in asking.stderr.readline()
        assert list(paths.requests.iterdir())
        asking.send_signal(number)
        assert asking.wait(60) == 128 + number
        assert asking.stderr.read() == ""
    assert not list(paths.requests.iterdir())


def test_somebody_elses_job(job: tuple[Run, Paths, Gate]) -> None:
    run, paths, _ = job
    if os.geteuid() != 0:
        pytest.skip("only root can make a file somebody else's")
    os.chown(paths.run, 12345, 12345)
    with pytest.raises(Refused, match="the job belongs to user 12345"):
        Requester(paths, run, Request.new(run, "train_actor"), [0, 2])
    assert not list(paths.requests.iterdir())
