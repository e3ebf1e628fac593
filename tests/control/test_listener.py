"""One rank's side, look by look: the background thread stands still, and the test looks in its place."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig, install_hooks
from megaprof.artifacts import Writer
from megaprof.control import records
from megaprof.control.listener import Listener
from megaprof.control.request import Answer, Request
from megaprof.control.run import Run, read_run
from megaprof.control.status import read_status
from megaprof.demand import Demand
from megaprof.recorders import _registered, register_recorder
from megaprof.topology import ParallelSizes, WorldLayout


class Job:
    def __init__(self, gpt: Any, handle: Any) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.handle = handle
        self.listener: Listener = handle._listener
        self.paths = self.listener.paths
        self.forward_backward = get_forward_backward_func()
        self.gpt = gpt
        self.listener.look()

    @property
    def run(self) -> Run:
        assert self.listener.run is not None
        return self.listener.run

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.gpt.train_step(self.forward_backward)

    def order(self, target: str = "train_actor", **options: Any) -> Request:
        request = Request.new(self.run, target, **options)
        records.write(self.paths.request(request.id), request.as_record(), mode=0o600)
        self.listener.look()
        return request

    def go(self, request: Request, first: int) -> None:
        records.write(self.paths.go(request.id), {"run": self.run.run, "id": request.id, "first": first})
        self.listener.look()

    def answer(self, request: Request) -> Answer:
        return Answer.from_record(records.read(self.paths.answer(request.id, 0)))

    def finish(self, request: Request) -> Answer:
        assert self.handle.flush()
        self.listener.look()
        answer = self.answer(request)
        self.paths.order(request.id).unlink()
        self.listener.look()
        return answer


@pytest.fixture
def job(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(Listener, "start", lambda self, background: None)
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), steps="none", on_demand=True)
    with install_hooks(one_rank.chunks, config) as handle:
        yield Job(one_rank, handle)


def traces(directory: Path) -> list[str]:
    return sorted(path.name.partition(".pp")[0] for path in directory.glob("*.gz"))


def test_exactly_the_calls_that_were_chosen(job: Job, tmp_path: Path) -> None:
    job.step(2)
    request = job.order(steps=2)
    assert (job.answer(request).state, job.answer(request).calls) == ("accepted", 2)
    job.go(request, 4)
    assert job.answer(request).state == "armed"
    job.step(2)
    assert traces(tmp_path) == []
    job.step(3)
    done = job.finish(request)
    assert (done.state, done.steps, done.reason) == ("done", (4, 5), None)
    assert traces(tmp_path) == ["train_actor.step000004", "train_actor.step000005"]
    assert sorted(done.files) == sorted(path.name for path in tmp_path.glob("*.gz"))
    again = job.order(steps=1)
    job.go(again, 7)
    job.step(1)
    assert job.finish(again).steps == (7,)


def test_too_late_is_no_capture_at_all(job: Job, tmp_path: Path) -> None:
    job.step(2)
    request = job.order(steps=3)
    job.go(request, 1)
    missed = job.finish(request)
    assert missed.state == "missed"
    assert "call 1 was over" in str(missed.reason)
    job.step(3)
    assert traces(tmp_path) == []
    assert job.handle.active


def test_an_order_that_the_training_thread_did_not_see_in_time() -> None:
    demand = Demand("train_actor", None, 5, 2, [])
    assert not demand.due("train_actor", None, 4)
    assert not demand.due("train_log_probs", None, 5)
    assert not demand.due("train_actor", "ref", 5)
    assert not demand.due("train_actor", None, 6)
    assert demand.over
    assert not demand.due("train_actor", None, 5)


@pytest.mark.parametrize("target", ["train_log_probs", "train_overall", "evaluate"])
def test_targets_that_the_job_does_not_capture_by_itself(job: Job, tmp_path: Path, target: str) -> None:
    request = job.order(target, steps=1)
    job.go(request, 1)
    for _ in range(3):
        job.step()
        job.gpt.log_probs_pass(job.forward_backward)
        job.gpt.evaluate(job.forward_backward)
    assert job.finish(request).state == "done"
    assert traces(tmp_path) == [f"{target}.step000001"]


class Failing:
    def __init__(self, when: str) -> None:
        self.when = when

    def start(self, window: Any) -> None:
        if self.when == "start":
            raise RuntimeError("no tool today")

    def stop(self, window: Any, metadata: Any) -> None:
        raise RuntimeError("no disk today")

    def discard(self) -> None:
        pass


@pytest.mark.parametrize(("when", "reason"), [("start", "no tool today"), ("stop", "no disk today")])
def test_a_tool_that_fails_ends_its_capture_and_nothing_else(
    job: Job, tmp_path: Path, when: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaprof.recorders._registered", dict(_registered))
    register_recorder("failing", lambda config, writer: Failing(when))
    request = job.order(options={"tool": ["failing"]})
    job.go(request, 0)
    job.step(2)
    failed = job.finish(request)
    assert failed.state in ("failed", "missed")
    assert reason in str(failed.reason)
    assert job.handle.active
    good = job.order(steps=1)
    job.go(good, 2)
    job.step()
    assert job.finish(good).state == "done"


def test_a_tool_that_cannot_run_here_is_refused(job: Job) -> None:
    request = job.order(options={"tool": ["memory"]})
    assert job.answer(request).state == "refused"
    assert "no CUDA device" in str(job.answer(request).reason)


def test_what_is_withdrawn_does_not_begin(job: Job, tmp_path: Path) -> None:
    request = job.order()
    job.go(request, 1)
    job.paths.order(request.id).unlink()
    job.listener.look()
    assert job.answer(request).reason == "it was withdrawn"
    job.step(3)
    assert traces(tmp_path) == []
    assert not job.listener.busy


def test_the_end_of_the_job_is_an_answer(job: Job) -> None:
    request = job.order()
    job.go(request, 100)
    job.handle.remove()
    answer = job.answer(request)
    assert (answer.state, answer.reason) == ("failed", "the job ended before it was finished")
    assert read_run(job.paths.root).ended is not None
    status = read_status(job.paths, job.run, 0)
    assert status is not None
    assert status.ended


def test_somebody_removes_the_directory(job: Job, tmp_path: Path) -> None:
    shutil.rmtree(job.paths.root)
    job.listener.look()
    request = job.order(steps=1)
    job.go(request, 0)
    job.step()
    assert job.finish(request).state == "done"


def test_a_window_of_the_jobs_own_is_not_disturbed(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listener, "start", lambda self, background: None)
    config = ProfileConfig(target=("train_overall",), dir=str(tmp_path), steps="0", on_demand=True)
    with install_hooks(one_rank.chunks, config) as handle:
        job = Job(one_rank, handle)
        request = job.order("train_log_probs", steps=1)
        job.go(request, 0)
        job.step()
        job.gpt.log_probs_pass(job.forward_backward)
        assert "another window was open" in str(job.finish(request).reason)
    assert traces(tmp_path) == ["train_overall.step000000"]


@pytest.fixture
def follower(tmp_path: Path) -> Callable[[], Listener]:
    """Rank 1 of two, without a training thread."""
    layout = WorldLayout(ParallelSizes(pp=2))
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), on_demand=True)
    session = SimpleNamespace(
        config=config, coords=layout.coords(1), role=None, calls={}, timeline=None, disabled=False, demand=None
    )

    def make() -> Listener:
        return Listener(session, layout, Writer(), tmp_path, every=0.1)  # type: ignore[arg-type]

    return make


def test_the_files_of_a_run_that_crashed_are_not_this_ones(follower: Callable[[], Listener]) -> None:
    rank = follower()
    layout = WorldLayout(ParallelSizes(pp=2))
    ours = Run.new(layout.coords(0), layout, ("train_actor",), None, 0.1)
    rank.paths.orders.mkdir(parents=True)
    records.write(rank.paths.run, replace(ours, run="crashed", started=time.time() - 7200).as_record())
    rank.look()
    assert rank.run is None
    earlier = replace(ours, run="restarted", started=time.time() - 60)
    records.write(rank.paths.run, earlier.as_record())
    request = Request.new(earlier, "train_actor", select="all")
    records.write(rank.paths.order(request.id), request.as_record())
    (rank.paths.answers / request.id).mkdir(parents=True)
    rank.look()
    assert rank.busy, "it cannot know better yet"
    records.write(rank.paths.run, ours.as_record())
    rank.look()
    assert rank.run == ours
    assert not rank.busy
    status = read_status(rank.paths, ours, 1)
    assert status is not None
    assert status.coords["pp"] == 1


def test_a_directory_that_cannot_be_written_is_no_fault(
    follower: Callable[[], Listener], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "control").write_text("somebody's file")
    rank = follower()
    rank.look()
    rank.look()
    assert caplog.text.count("does not answer") == 1
