"""One rank's side, look by look: the background thread stands still, and the test looks in its place."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megaprof import ProfileConfig, install_hooks
from megaprof.capture.agenda import Wish
from megaprof.capture.process import process
from megaprof.cli.look import standings
from megaprof.config import values
from megaprof.control.blame import Blame, WaitedFor
from megaprof.control.directory import RunningJob
from megaprof.control.listener import Listener
from megaprof.control.request import new_request
from megaprof.formats.flight import Entry
from megaprof.formats.job import MOST_WINDOWS, Answer, Position, RankStatus, Recent, Request, RunRecord
from megaprof.formats.metadata import SESSION_VARIABLE
from megaprof.formats.timeline import SUFFIX as TIMELINE_SUFFIX
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.recorders import flight, register_recorder
from megaprof.recorders.torch_profiler import TorchRecorder
from megaprof.runtime.background import Background
from tests.control import places


def _without_a_thread(listener: Listener) -> bool:
    """What `Listener.start` does, but nobody looks."""
    process.listeners[listener.path] = listener
    return True


class Job:
    def __init__(self, gpt: Any, handle: Any) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.handle = handle
        self.listener: Listener = next(iter(process.listeners.values()))
        self.paths = places.Paths.of(Path(handle.config.dir), None, 1)
        self.forward_backward = get_forward_backward_func()
        self.gpt = gpt
        self.listener.look()

    @property
    def run(self) -> RunRecord:
        assert self.listener.job is not None
        return self.listener.job.run

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.gpt.train_step(self.forward_backward)

    def order(self, target: str = "train_actor", **options: Any) -> Request:
        request = new_request(self.run, target, **options)
        places.write(self.paths.capture, request)
        self.listener.look()
        return request

    def go(self, request: Request, first: int) -> None:
        places.write(self.paths.capture, replace(request, first=first))
        self.listener.look()

    def answer(self, request: Request) -> Answer:
        said = self.paths.says(0)
        assert said is not None
        assert said.request == request.id
        return said

    def status(self) -> RankStatus | None:
        return RunningJob(self.paths.root.parent, self.run).leader()

    def finish(self, request: Request) -> Answer:
        assert self.handle.flush()
        self.listener.look()
        answer = self.answer(request)
        self.paths.capture.unlink()
        self.listener.look()
        return answer


@pytest.fixture
def job(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(Listener, "start", _without_a_thread)
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
    assert job.answer(request).state == "accepted"
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


def test_an_answer_says_how_far_the_rank_is_now(job: Job) -> None:
    """The command chooses by it, and may read it long after the rank accepted."""
    job.step(2)
    request = job.order()
    for begun in (3, 4):
        job.step()
        job.listener.look()
        assert (job.answer(request).state, job.answer(request).calls) == ("accepted", begun)


def test_a_rank_says_which_part_of_its_loop_it_is_in(job: Job) -> None:
    """The others wait for it there, and it has moved since its last step."""
    job.step()
    job.listener.look()
    before = job.status()
    with process.parts.inside("saving"):
        job.listener.look()
        saving = job.status()
    job.listener.look()
    after = job.status()
    assert before is not None
    assert saving is not None
    assert after is not None
    assert (before.part, saving.part, after.part) == (None, "saving", None)
    assert before.since < saving.since < after.since
    blame = Blame((0,), (WaitedFor(0, silent=False, gone=False, waiting=1, for_s=60.0),), 60.0, {})
    (standing,) = standings(job.run, {0: saving}, blame)
    assert (standing.rank, standing.phase) == (0, "saving")


def test_a_rank_that_stands_still_writes_again_what_it_has_in_flight(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may compute for long, with nothing in flight, and then wait: it stands in the same pass all the time."""
    path = job.paths.root / "collectives" / "rank00000.json"
    called: list[Entry] = []
    monkeypatch.setattr(flight, "entries", lambda: [*called])
    job.step(3)
    job.listener.look()
    began = time.time()
    found = []
    for seconds, groups in ((5, ""), (15, ""), (20, "a"), (35, "a"), (60, "ab")):
        called[:] = [Entry((name, "TENSOR"), 1, "gloo:all_reduce", 0, "scheduled", False, 0) for name in groups]
        monkeypatch.setattr(time, "time", lambda now=began + seconds: now)
        job.listener.look()
        written = json.loads(path.read_text()) if path.exists() else None
        found.append(written and [entry["process_group"][0] for entry in written["entries"]])
    assert found == [None, [], [], ["a"], ["a"]]
    job.step()
    job.listener.look()
    assert not path.exists()


def test_a_withdrawn_capture_does_not_wait_for_its_files(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = job.handle._session.writer
    monkeypatch.setattr(writer, "end_window", lambda *tasks: None)  # the disk does not answer
    first = job.order(steps=1)
    job.go(first, 0)
    job.step(2)
    job.listener.look()
    assert job.answer(first).state == "recording"
    second = job.order(steps=1)
    assert job.answer(second).state == "accepted"


def test_too_late_is_no_capture_at_all(job: Job, tmp_path: Path) -> None:
    job.step(2)
    request = job.order(steps=3)
    job.go(request, 1)
    missed = job.finish(request)
    assert missed.state == "failed"
    assert "call 1 was over" in str(missed.reason)
    job.step(3)
    assert traces(tmp_path) == []
    assert job.handle.active


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


@pytest.mark.parametrize("target", ["train_log_probs", "evaluate"])
def test_a_target_that_nobody_runs_is_refused_with_what_runs(job: Job, target: str) -> None:
    job.step(3)
    refused = job.answer(job.order(target))
    assert refused.state == "failed"
    assert refused.reason == f"nobody has run {target} in this job so far; what runs is train_actor"


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
    monkeypatch.setattr("megaprof.config.values.registered", dict(values.registered))
    register_recorder("failing", lambda config, writer: Failing(when))
    request = job.order(options={"tool": ["failing"]})
    job.go(request, 0)
    job.step(2)
    failed = job.finish(request)
    assert failed.state == "failed"
    assert reason in str(failed.reason)
    assert job.handle.active
    good = job.order(steps=1)
    job.go(good, 2)
    job.step()
    assert job.finish(good).state == "done"


def test_a_window_of_which_nothing_was_written_is_not_captured(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    full = iter([False, True])

    def publish(raw: Path, final: Path) -> Path:
        if next(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return final

    monkeypatch.setattr("megaprof.artifacts.writer.publish", publish)
    monkeypatch.setattr("megaprof.artifacts.writer._keep", lambda raw, final: None)
    request = job.order(steps=2)
    job.go(request, 0)
    job.step(2)
    failed = job.finish(request)
    assert (failed.state, failed.steps, len(failed.files)) == ("failed", (0, 1), 1)
    assert str(failed.reason).startswith("no file of step 1 was written")


def test_a_tool_that_cannot_run_here_is_refused(job: Job) -> None:
    request = job.order(options={"tool": ["memory"]})
    assert job.answer(request).state == "failed"
    assert "no CUDA device" in str(job.answer(request).reason)


def test_a_tool_that_breaks_while_it_is_made_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Any, writer: Any) -> Any:
        raise RuntimeError("no library today")

    monkeypatch.setattr("megaprof.config.values.registered", dict(values.registered))
    register_recorder("broken", broken)
    request = job.order(options={"tool": ["broken"]})
    assert job.answer(request).state == "failed"
    assert "no library today" in str(job.answer(request).reason)
    job.listener.look()
    assert job.answer(request).state == "failed"


def test_the_longest_status_is_a_record(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of thousands of characters, also ones that no file can hold, and a file for each step and tool."""
    request = job.order(steps=MOST_WINDOWS)
    name = f"ranks001024-002047/{'t' * 40}.{'r' * 40}.step000000.pp00-tp00-cp00-ep00-dp0000.rank16383.pt.trace.json.gz"
    for field, value in (("written", [[name] * 3] * MOST_WINDOWS), ("reason", "原因\udcff\x1b" * 4000), ("over", True)):
        monkeypatch.setattr(job.listener._session.demand, field, value)
    monkeypatch.setattr(job.handle._session, "off", "\udcff" * 4000)
    job.listener.look()
    said = job.answer(request)
    assert len(said.files) == 3 * MOST_WINDOWS
    assert said.reason is not None
    assert said.reason.startswith("原因  原因")
    status = job.status()
    assert status is not None
    assert set(str(status.why)) == {" "}


class CudaProfiler:
    """The calls that nsys waits for, noted instead of made."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def cudaProfilerStart(self) -> int:
        self.calls.append("start")
        return 0

    def cudaProfilerStop(self) -> int:
        self.calls.append("stop")
        return 0


def order_nsys(job: Job, monkeypatch: pytest.MonkeyPatch) -> Request:
    with monkeypatch.context() as gpu:
        for question in ("is_available", "is_initialized"):
            gpu.setattr(torch.cuda, question, lambda: True)
        return job.order(steps=2, options={"tool": ["nsys"]})


def test_nsys_on_demand_opens_a_capture_range_per_step(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = CudaProfiler()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: profiler)
    monkeypatch.setenv(SESSION_VARIABLE, "1")
    request = order_nsys(job, monkeypatch)
    assert job.answer(request).state == "accepted"
    assert profiler.calls == []
    job.go(request, 1)
    job.step(4)
    assert profiler.calls == ["start", "stop"] * 2
    done = job.finish(request)
    assert (done.state, done.steps) == ("done", (1, 2))
    written = [json.loads((tmp_path / file).read_text()) for file in done.files]
    assert [each["megaprof"]["steps"] for each in written] == [[1, 1], [2, 2]]


def test_nsys_on_demand_needs_a_process_that_runs_under_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SESSION_VARIABLE, raising=False)
    refused = job.answer(order_nsys(job, monkeypatch))
    assert refused.state == "failed"
    assert refused.reason == (
        "this process does not run under nsys ('megaprof nsys' prints the command to start it with)"
    )


def test_what_is_withdrawn_does_not_begin(job: Job, tmp_path: Path) -> None:
    request = job.order()
    job.go(request, 1)
    job.paths.capture.unlink()
    job.listener.look()
    job.step(3)
    assert traces(tmp_path) == []
    assert job.listener._session.demand is None


def test_what_records_already_is_finished_and_then_comes_the_next(job: Job, tmp_path: Path) -> None:
    first = job.order(steps=2)
    job.go(first, 0)
    job.step(1)
    second = job.order(steps=1)
    assert job.answer(first).state == "recording"
    job.step(1)
    assert job.handle.flush()
    for _ in range(2):
        job.listener.look()
    assert job.answer(second).state == "accepted"
    assert traces(tmp_path) == ["train_actor.step000000", "train_actor.step000001"]


def test_the_end_of_the_job_is_an_answer(job: Job) -> None:
    request = job.order()
    job.go(request, 100)
    job.handle.remove()
    answer = job.answer(request)
    assert (answer.state, answer.reason) == ("failed", "the job ended before it was finished")
    assert places.read(job.paths.run, RunRecord).ended is not None
    status = job.status()
    assert status is not None
    assert status.ended


@pytest.mark.parametrize("what", ["", "status", "run.json"])
def test_somebody_removes_the_directory_or_a_part_of_it(job: Job, what: str) -> None:
    removed = job.paths.root / what
    shutil.rmtree(removed) if removed.is_dir() else removed.unlink()
    for _ in range(2):
        job.listener.look()
    assert places.read(job.paths.run, RunRecord).run == job.run.run
    assert job.status() is not None
    request = job.order(steps=1)
    job.go(request, 0)
    job.step()
    assert job.finish(request).state == "done"


def test_a_directory_that_does_not_answer_at_first(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Listener, "start", _without_a_thread)
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), steps="none", on_demand=True)
    with install_hooks(one_rank.chunks, config):
        (listener,) = process.listeners.values()
        with monkeypatch.context() as failing:
            fault = OSError(5, "Input/output error")
            failing.setattr("megaprof.control.listener.write", lambda *given: (_ for _ in ()).throw(fault))
            listener.look()
        assert "does not answer: Input/output error" in caplog.text
        paths = places.Paths(listener.path)
        assert not paths.run.exists()
        listener.look()
        assert places.read(paths.run, RunRecord) == listener.job.run


def test_a_later_job_in_the_same_directory_takes_over(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    later = RunRecord.new(WorldLayout(job.run.sizes).coords(0), None, None, 1.0)
    places.write(job.paths.run, later)
    status = job.paths.status(0).read_bytes()
    for _ in range(2):
        job.listener.look()
    assert caplog.text.count("another job") == 1
    job.handle.remove()
    assert places.read(job.paths.run, RunRecord) == later, "it has not ended, the earlier one has"
    assert job.paths.status(0).read_bytes() == status


def test_when_the_later_job_has_ended_the_earlier_one_is_there_again(job: Job) -> None:
    ours = job.run
    later = RunRecord.new(WorldLayout(ours.sizes).coords(0), None, None, 1.0)
    places.write(job.paths.run, later)
    job.listener.look()
    places.write(job.paths.run, replace(later, ended=time.time()))
    job.listener.look()
    assert places.read(job.paths.run, RunRecord) == ours


def test_a_file_system_that_hangs_does_not_hold_up_the_end(
    follower: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, background, before = follower(), Background(), {*threading.enumerate()}
    monkeypatch.setattr(process, "background", background)
    hangs, released = threading.Event(), threading.Event()

    def hang(*arguments: Any, **options: Any) -> None:
        hangs.set()
        released.wait(60)

    monkeypatch.setattr("megaprof.control.listener._END_SECONDS", 0.1)
    monkeypatch.setattr("megaprof.control.listener.write", hang)
    rank.start()
    assert hangs.wait(60)
    rank.close()
    assert rank.closed
    assert not released.is_set()
    (thread,) = {*threading.enumerate()} - before
    monkeypatch.undo()
    released.set()
    thread.join(60)
    assert not thread.is_alive(), "it has nothing more to do"


@pytest.mark.parametrize("role", ["策略" * 50, "🙂" * 40, "a" * 500, "x\n"])
def test_long_names_fit_into_a_status_file(job: Job, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    for name in (role, *(f"{number}" + role for number in range(8))):
        job.handle._session.agenda.wishes["train_actor", name] = Wish(None, ran=7, last=6)
    inside = Position("train_actor", 1 << 40, "send_forward_backward_recv_forward_backward", 999, 99, time.time(), role)
    recent = Recent("train_actor", 32, *[123456.789012] * 7, role)
    recorder = job.handle._session.timeline  # its task runs until it is closed
    assert recorder is not None
    timeline = SimpleNamespace(
        position=lambda: inside,
        device_position=lambda: inside,
        by_key={
            ("train_actor", role): SimpleNamespace(finished=(1 << 40, 1 << 40), times=[()], seconds=lambda: 1.0),
        },
        recent=lambda: recent,
        waits=lambda: 0.123456789,
        close=recorder.close,
    )
    monkeypatch.setattr(job.handle._session, "timeline", timeline)
    job.listener.look()
    status = job.status()
    assert status is not None
    assert status.position is not None
    assert status.position.role == role
    assert len(status.calls) == 9


def test_a_rank_without_a_timeline_says_the_hosts_number_of_its_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with a timeline do, and who waits for whom is a matter of both: the job was resumed at step 10,000."""
    job.handle._session.agenda.wishes["train_actor", None] = Wish(None, ran=3, first=10_000, last=10_002)
    with monkeypatch.context() as patch:  # undone before the job ends, which closes the timeline
        patch.setattr(job.handle._session, "timeline", None)
        job.listener.look()
    status = job.status()
    assert status is not None
    assert status.last_step == 10_002
    assert [(calls.begun, calls.count) for calls in status.calls] == [(3, None)]


def test_a_window_of_the_jobs_own_is_not_disturbed(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listener, "start", _without_a_thread)
    config = ProfileConfig(target=("train_overall",), dir=str(tmp_path), steps="0", on_demand=True)
    with install_hooks(one_rank.chunks, config) as handle:
        job = Job(one_rank, handle)
        request = job.order("train_log_probs", steps=1)
        job.go(request, 0)
        job.step()
        job.gpt.log_probs_pass(job.forward_backward)
        assert "a window of train_overall was open" in str(job.finish(request).reason)
    assert traces(tmp_path) == ["train_overall.step000000"]


def test_a_window_of_the_jobs_own_that_fails_is_all_that_is_lost(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeline, the status, the next window and a capture that is asked for later go on."""
    monkeypatch.setattr(Listener, "start", _without_a_thread)
    start, starts = TorchRecorder.start, itertools.count()

    def unwell_at_first(recorder: TorchRecorder, window: Any) -> None:
        if next(starts) == 0:
            raise RuntimeError("Kineto is unwell")
        start(recorder, window)

    monkeypatch.setattr(TorchRecorder, "start", unwell_at_first)
    tool = ("torch", "timeline")
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), steps="0,2", tool=tool, on_demand=True)
    with install_hooks(one_rank.chunks, config) as handle:
        job = Job(one_rank, handle)
        job.step(3)
        request = job.order(options={"tool": ["torch"]}, steps=1)
        job.go(request, 3)
        job.step()
        assert job.finish(request).state == "done"
        status = job.status()
        assert status is not None
        assert (status.off, status.why, status.step_of("train_actor", None)) == (False, None, 3)
    assert traces(tmp_path) == ["train_actor.step000002", "train_actor.step000003"]
    (timeline,) = tmp_path.glob("*" + TIMELINE_SUFFIX)
    assert read_timeline(timeline).steps["step"].tolist() == [0, 1, 2, 3]


def test_what_turns_a_rank_off_is_in_its_status(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()

    def broken(*call: Any, **options: Any) -> Any:
        raise RuntimeError("the agenda is unwell")

    (session,) = process.sessions
    monkeypatch.setattr(session.agenda, "begins", broken)
    job.step()
    job.listener.look()
    status = job.status()
    assert status is not None
    assert status.off
    assert "the agenda is unwell" in str(status.why)
    refused = job.answer(job.order())
    assert refused.state == "failed"
    assert "the agenda is unwell" in str(refused.reason)


@pytest.fixture
def follower(tmp_path: Path) -> Callable[[], Listener]:
    """Rank 1 of two, without a training thread."""
    return lambda: places.listening(tmp_path, WorldLayout(ParallelSizes(pp=2)), 1)


def test_the_files_of_a_run_that_crashed_are_not_this_ones(follower: Callable[[], Listener]) -> None:
    rank = follower()
    layout = WorldLayout(ParallelSizes(pp=2))
    ours = RunRecord.new(layout.coords(0), layout, None, 0.1)
    paths = places.Paths(rank.path, 2)
    earlier = replace(ours, run="crashed", started=ours.started - 60)
    places.write(paths.run, earlier)
    places.write(paths.capture, new_request(earlier, "train_actor", select="all"))
    rank.look()
    assert rank._session.demand is not None, "it cannot know better yet"
    places.write(paths.run, ours)
    rank.look()
    assert rank.job is not None
    assert rank.job.run == ours
    assert rank._session.demand is None
    places.write(paths.run, replace(ours, run="later", started=ours.started + 600))
    rank.look()
    assert rank.job is not None
    assert rank.job.run == ours, "and not that of a job that is started into the same directory"
    written = paths.status(1).read_bytes()
    rank.look()
    assert paths.status(1).read_bytes() == written, "which writes its own there"
    status = rank.job.statuses([1]).get(1)
    assert status is not None
    assert status.coords["pp"] == 1


def test_a_directory_that_cannot_be_written_is_no_fault(
    follower: Callable[[], Listener], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "control").write_text("somebody's file")
    rank = follower()
    rank.look()
    rank.look()
    assert caplog.text.count("is no directory; profiling on demand and status are off") == 1
