"""The timeline recorder inside a run: faults of ours and of the host, hangs, and a GPU's events (faked)."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console

from megaprof import ProfileConfig, install_hooks, role
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.terminal import show
from megaprof.analysis.table.table import Table
from megaprof.autoload.contract import Facts, inside
from megaprof.autoload.install import Handle
from megaprof.capture.process import process
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.facts import pack_work
from megaprof.formats.timeline import Waited, read_timeline
from megaprof.recorders import device
from megaprof.recorders import timeline as recorder
from megaprof.recorders.call import read_work
from megaprof.recorders.timeline import STEPS_AT_ONCE, TimelineRecorder
from megaprof.recorders.timeline_steps import TimedCalls
from tests.analysis.tables import tables_in
from tests.formats.step_records import events_of


def config(directory: Path, **more: Any) -> ProfileConfig:
    return ProfileConfig(target=("train_actor", "train_log_probs"), tool=("timeline",), dir=str(directory), **more)


def recorded(handle: Handle) -> TimelineRecorder:
    assert handle._session is not None
    assert handle._session.timeline is not None
    return handle._session.timeline


def steps(directory: Path) -> list[tuple[int, int]]:
    """Number and flags of every step in the directory."""
    read = [read_timeline(path) for path in sorted(directory.glob("*" + format.SUFFIX))]
    assert all(timeline.damage is None for timeline in read)
    return [(int(s["step"]), int(s["flags"])) for timeline in read for s in timeline.steps]


def test_a_finished_step_is_on_disk_without_anybody_asking(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        deadline = time.monotonic() + 60
        while not (found := steps(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == [(0, 0)]
        assert {key: calls.finished for key, calls in recorded(handle).by_key.items()} == {
            ("train_actor", None): (0, 1)
        }
        assert recorded(handle).position() is None
    while any(thread.name == "megaprof-background" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "it ends with its last task"
        time.sleep(0.01)


def test_an_iteration_of_reinforcement_learning_says_what_it_waits_for(one_rank: Any, tmp_path: Path) -> None:
    """A worker that is asked for log-probs, training and its weights; the rest of the job is a rollout of 0.3 s, and
    0.1 s between log-probs and training. It collects garbage before the log-probs, which is a part of its training's
    iterations, too."""
    parts, steps = process.parts, 5
    one_rank.train_step()  # the first one takes long, and would not count
    with install_hooks(one_rank.chunks, config(tmp_path)):
        for _ in range(steps):
            with parts.asked(), role("ref"):
                gc.collect()
                one_rank.log_probs_pass()
            time.sleep(0.1)
            with parts.asked():
                one_rank.train_step()
            with parts.asked(), parts.inside("weight_sync"):
                time.sleep(0.05)
            time.sleep(0.3)
    report = analyze(tmp_path)
    found = {target.target: target.iterations for target in report.targets}
    assert found["train_log_probs"] is None  # its process trains, too
    training = found["train_actor"]
    assert training is not None
    assert 0 < training.count < steps  # a slow first step is left out
    for part, ms in (("rollout", 300), ("waiting", 100), ("weight_sync", 50)):
        assert ms <= training.ms_of(part)
    assert training.ms_of("reference") > 0
    assert training.ms_of("garbage_collection") > 0
    assert training.ms_of("optimizer") > 0
    assert training.ms_of("train_log_probs") == 0
    assert sum(part.ms for part in training.parts) == pytest.approx(training.ms)
    assert training.rollout_ahead_ms is not None
    assert training.rollout_ahead_ms <= training.ms - 150
    with Console(file=io.StringIO(), width=200, record=True) as console:
        show(report, console)
    assert "a step of reinforcement learning" in console.export_text()
    (row,) = report.steps()[len(report.targets)].rows
    kinds = dict.fromkeys(box.kind for box in row.passes if box.kind not in ("other", "unknown"))
    assert [*kinds] == ["training", "weight sync", "rollout", "log-probs"]
    assert "Who does what, and when" in page(report, report.steps())


def test_what_lies_between_the_calls_of_one_step_is_known(one_rank: Any, tmp_path: Path) -> None:
    """Some hosts call the schedule once for each batch of a step, with an optimizer step and a save behind each."""
    parts, steps, batches = process.parts, 4, 3
    with install_hooks(one_rank.chunks, config(tmp_path)):
        for number in range(steps):
            for _ in range(batches):
                with inside(Facts(iteration=number), "step"):
                    one_rank.train_step()
                with parts.inside("saving"):
                    time.sleep(0.02)
    (target,) = analyze(tmp_path).targets
    assert target.iterations is not None
    assert target.iterations.ms_of("saving") >= 20 * batches
    assert sum(part.ms for part in target.iterations.parts) == pytest.approx(target.iterations.ms)


def test_a_step_comes_no_more_often_than_steps_last() -> None:
    """The first steps are quicker here, as those of a job whose rank becomes slow are: the time between steps is of the
    same steps, and of their medians, as what a step takes."""
    calls, start = TimedCalls("train_actor", None), 0
    for milliseconds in (300, 300, 1100, 1200, 1200):
        calls.took((1000 * milliseconds, 0, 0, 0, 0, 0), start)
        assert (calls.seconds() is None) == (start == 0)
        start += 1_000_000 * (milliseconds + 50)
    recent = calls.recent()
    assert (recent.step_ms, calls.seconds()) == (1100, pytest.approx(1.15))
    assert recent.host_bound_passes is None, "the host's clock does not say"


def test_compute_is_the_median_of_the_compute_of_each_step() -> None:
    """A disturbance makes the forward of one step long and the backward of another, so the sum of both medians is the
    compute of no step."""
    calls = TimedCalls("train_actor", None)
    for forward, backward, combined in ((100, 300, 0), (300, 100, 0), (100, 250, 60), (250, 100, 60), (110, 260, 0)):
        calls.took(tuple(1000 * ms for ms in (600, forward, backward, combined, 10, 20)), 0)
    recent = calls.recent()
    assert (recent.forward_ms, recent.backward_ms, recent.combined_ms) == (110, 250, 0)
    assert recent.compute_ms == 400


def test_a_step_that_stood_still_counts_for_no_time() -> None:
    """As in the report on the same steps. Steps that stay long count, for they are what a step takes now."""
    calls, start = TimedCalls("train_actor", None), 0
    lengths = [1000, 1010, 53_000, 1020, 1030]
    for milliseconds in lengths:
        calls.took((1000 * milliseconds, 0, 0, 0, 0, 0), start)
        start += 1_000_000 * (milliseconds + 50)
    recent = calls.recent()
    assert (recent.steps, recent.step_ms, calls.seconds()) == (4, 1015, pytest.approx(1.065))
    for _ in lengths:
        calls.took((53_000_000, 0, 0, 0, 0, 0), start)
        start += 53_050_000_000
    recent = calls.recent()
    assert (recent.steps, recent.step_ms) == (10, 53_000)


def test_waits_are_of_the_same_steps_as_the_times(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that begins to wait for a core must not look slow for half a minute."""
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        timeline = recorded(handle)
        one_rank.train_step()
        timeline.drain()
        for waited in (0, 0, 0, 500_000, 500_000, 500_000, 500_000):
            monkeypatch.setattr(timeline, "_read_waits", lambda _, waited=waited: Waited(0, 1_000_000, waited))
            with timeline._writing:  # so that one reading is about all of them
                for _ in range(10):
                    one_rank.train_step()
            timeline.drain()
        assert timeline.waits() == pytest.approx(0.5)


class OnDevice:
    """A tensor on a device that nobody may ask: to compare it would wait for the device."""

    device = SimpleNamespace(type="cuda")
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a tensor is compared")

    def reshape(self, _: int) -> OnDevice:
        return self


def test_the_work_of_a_step_is_of_its_own_shapes(one_rank: Any, tmp_path: Path) -> None:
    """Although most steps have the shapes of the step before."""
    first, second = codes.of_microbatch(0), codes.of_microbatch(1)
    short, long = [(first, (2, 7)), (second, (2, 7))], [(first, (2, 7)), (second, (2, 9))]
    packed: list[tuple[Any, ...]] = [(first, (2, 7)), (second, OnDevice(), None, None)]
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        for given in (short, [*short], long, short, packed, packed, short, [], short):
            assert recorded(handle)._work(given, None) == pack_work(read_work(given, 1, None))


def test_it_says_how_fast(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        timeline = recorded(handle)
        assert timeline.recent() is None
        for _ in range(4):
            one_rank.train_step()
        one_rank.log_probs_pass()
    recent = timeline.recent()
    assert recent is not None
    assert (recent.target, recent.steps) == ("train_actor", 4)
    # Medians, each of its own: a sum of them may exceed the median step.
    assert 0 < max(recent.forward_ms, recent.backward_ms, recent.finalize_ms) <= recent.step_ms
    log_probs = timeline.by_key["train_log_probs", None].recent()
    assert (log_probs.steps, log_probs.backward_ms) == (1, 0.0)


def test_a_rank_that_hangs_is_seen_where_it_hangs(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()
    forward, calls = one_rank.forward_step, []

    def hang(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # microbatch 2
            entered.set()
            leave.wait(20)
        return forward(*args, **kwargs)

    monkeypatch.setattr(one_rank, "forward_step", hang)
    seen = []

    def look(timeline: TimelineRecorder) -> None:
        entered.wait(20)
        seen.append(timeline.position())
        time.sleep(0.05)
        seen.append(timeline.position())
        leave.set()

    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        observer = threading.Thread(target=look, args=(recorded(handle),))
        observer.start()
        one_rank.train_step()
        observer.join()
    first, second = seen
    assert first is not None
    assert (first.target, first.step, first.phase, first.microbatch, first.chunk) == ("train_actor", 0, "forward", 2, 0)
    assert second == first, "it has not moved, so it has been there since the first look"


def test_an_exception_of_the_host_passes_and_is_marked(one_rank: Any, tmp_path: Path) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("the host's own")

    with install_hooks(one_rank.chunks, config(tmp_path)):
        one_rank.train_step()
        good, one_rank.forward_step = one_rank.forward_step, fails
        try:
            with pytest.raises(ZeroDivisionError, match="the host's own"):
                one_rank.train_step()
        finally:
            one_rank.forward_step = good
        one_rank.train_step()
    assert steps(tmp_path) == [(0, 0), (1, format.FAILED), (2, 0)]


@pytest.mark.parametrize("place", ["mark", "begin", "end"])
def test_a_fault_of_ours_never_reaches_training(
    place: str, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        timeline = recorded(handle)

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the clock is unwell")

        monkeypatch.setattr(timeline, "clock" if place == "mark" else place, broken)
        losses = [one_rank.train_step() for _ in range(2)]
        assert all(losses)
        assert not handle.active
        assert timeline.position() is None
    assert caplog.text.count("the clock is unwell") == 1
    assert (0, 0) in steps(tmp_path)


def test_a_writer_that_fails_leaves_training_and_the_other_hooks_alone(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        monkeypatch.setattr(recorded(handle)._files, "append", lambda *_: 1 / 0)
        monkeypatch.setattr(recorder, "WAITING_STEPS", 8)
        monkeypatch.setattr(recorder, "WAKING_STEPS", 4)
        for _ in range(recorder.WAITING_STEPS + 6):
            one_rank.train_step()
        assert handle.active
        assert "a background task failed" in caplog.text
        assert len(recorded(handle)._waiting) <= recorder.WAITING_STEPS
        assert recorded(handle).steps_dropped > 0
        monkeypatch.undo()


def test_many_steps_are_written_with_pauses_between(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a file server that did not answer: the training thread waits for no more than a few steps' writing."""
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        timeline, written, between = recorded(handle), 0, []
        append = timeline._files.append

        def counted(steps: Any) -> Any:
            nonlocal written
            written += len(steps)
            return append(steps)

        def pause() -> None:
            nonlocal written
            between.append(written)
            written = 0

        with timeline._writing:  # the background thread waits
            for _ in range(2 * STEPS_AT_ONCE + 4):
                one_rank.train_step()
            monkeypatch.setattr(timeline._files, "append", counted)
            monkeypatch.setattr(timeline._background, "pause", pause)
            timeline._drain()
        assert between == [STEPS_AT_ONCE] * 2
        assert written == 4
    assert [step for step, _ in steps(tmp_path)] == list(range(2 * STEPS_AT_ONCE + 4))


def test_peers_read_the_ring_when_the_same_step_ends(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path, collectives=True)) as handle:
        timeline, woken = recorded(handle), []
        monkeypatch.setattr(timeline._collectives, "look", lambda **_: [])
        monkeypatch.setattr(timeline._collectives, "due", 2)
        monkeypatch.setattr(
            timeline._background, "wake", lambda: woken.append(timeline.by_key["train_actor", None].finished)
        )
        for _ in range(4):
            one_rank.train_step()
    assert [step for step, _ in woken] == [2]


def test_the_end_says_what_is_missing(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        timeline = recorded(handle)
        one_rank.train_step()
        timeline.drain()
        monkeypatch.setattr(recorder, "WAITING_STEPS", 3)
        with timeline._writing:  # the background thread waits
            for _ in range(8):
                one_rank.train_step()
            monkeypatch.setattr(timeline._files, "_paused_until", time.monotonic() + 60)  # as after a full disk
        timeline.drain()
        monkeypatch.setattr(timeline._files, "_paused_until", 0.0)
        one_rank.train_step()
        timeline.close()
    missing = "the timeline of rank 0 lacks 8 steps: 5 waited too long, and 3 could not be written"
    assert caplog.text.count(missing) == 1
    assert [step for step, _ in steps(tmp_path)] == [0, 9]


def test_the_end_of_a_whole_timeline_says_nothing(
    one_rank: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)):
        one_rank.train_step()
    assert "lacks" not in caplog.text


def test_steps_of_ever_new_lengths_do_not_grow_the_metadata(one_rank: Any, tmp_path: Path) -> None:
    """RL trains on sequences of another length every time."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with install_hooks(one_rank.chunks, config(tmp_path)):
        inner = get_forward_backward_func()
        for length in (16, 12, 10, 8):
            one_rank.train_step(lambda length=length, **kwargs: inner(**(kwargs | {"seq_length": length})))
    (path,) = tmp_path.glob("*" + format.SUFFIX)
    assert len(read_timeline(path).metadata) == 1


@pytest.mark.parametrize("ends", ["removed", "abandoned"])
def test_garbage_collections_are_known_with_the_pass_that_they_held_up(
    ends: str, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step one forward collects; in the steps behind those another one is held up by something else."""
    before, forward = gc.callbacks.copy(), one_rank.forward_step
    kept = [[number] for number in range(100_000)]
    calls = iter(range(100))

    def held_up(*args: Any, **kwargs: Any) -> Any:
        step, microbatch = divmod(next(calls), 3)
        if microbatch == 1 and step % 3 == 1:
            gc.collect()
            gc.collect(0)
        if microbatch == 2 and step % 3 == 2:
            time.sleep(0.02)
        return forward(*args, **kwargs)

    monkeypatch.setattr(one_rank, "forward_step", held_up)
    gc.disable()
    try:
        with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
            for _ in range(9):
                one_rank.train_step()
            if ends == "abandoned":
                assert handle._session is not None
                handle._session.abandon()
                assert gc.callbacks == before
    finally:
        gc.enable()
    assert gc.callbacks == before
    assert len(kept) == 100_000
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    collected = table.delays["garbage_collection"]
    places = {tuple(at) for at in np.argwhere(collected[:, 0, 0, 0] > 0).tolist()}
    assert places == {(t, 0, 1) for t, step in enumerate(table.steps.tolist()) if step % 3 == 1}
    assert (collected <= table.passes).all()
    assert table.compute[:, :, :, 0] == pytest.approx(table.passes - collected - table.delays["data_wait"])


class FakeEvent:
    """A CUDA event on a GPU that is `LAG` events behind, and takes a millisecond from each to the next."""

    LAG = 5
    made: ClassVar[list[FakeEvent]] = []
    recorded: ClassVar[list[FakeEvent]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made.append(self)
        self.number = -1

    def record(self) -> None:
        self.number = len(FakeEvent.recorded)
        FakeEvent.recorded.append(self)

    def query(self) -> bool:
        return self.number < len(FakeEvent.recorded) - FakeEvent.LAG

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query(), "reading an event that is not finished blocks or raises"
        assert end.query()
        return float(end.number - self.number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange_mode(mode: Any) -> int:
        return 0

    FakeEvent.made, FakeEvent.recorded, FakeEvent.LAG = [], [], 5
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the timeline synchronised"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(device, "Marker", None)
    monkeypatch.setattr(recorder, "device_clock", lambda: device.DeviceClock(exchange_mode, None, None))


def test_on_a_gpu_the_times_are_its_events(one_rank: Any, tmp_path: Path, gpu: None) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        for _ in range(3):
            one_rank.train_step()
        assert recorded(handle).device_position() is not None, "the GPU is five events behind"
        FakeEvent.LAG = 0
        assert recorded(handle).device_position() is None
    (path,) = tmp_path.glob("*" + format.SUFFIX)
    timeline = read_timeline(path)
    assert timeline.metadata[0].timeline["clock"] == "device"
    assert [int(s["step"]) for s in timeline.steps] == [0, 1, 2]
    assert {int(s["flags"]) for s in timeline.steps} == {format.DEVICE_CLOCK}
    events = events_of(timeline, 1)
    assert events is not None
    # Three forwards, three backwards and the finalisation, each from one event to the next.
    assert (events.end - events.start).tolist() == [1000] * len(events.code)
    assert events.start.tolist() == [1000 + 2000 * n for n in range(len(events.code))]


def test_a_step_that_the_gpu_never_finishes_is_written_without_times(
    one_rank: Any, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "GIVE_UP_SECONDS", 0.0)
    FakeEvent.LAG = 10**6
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        recorded(handle).drain()
        assert steps(tmp_path) == [(0, format.DEVICE_CLOCK | format.INCOMPLETE)]


def test_a_step_that_the_gpu_has_not_finished_at_the_end_is_written_without_times(
    one_rank: Any, tmp_path: Path, gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage that does not read its losses ends its last step ahead of its GPU."""
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        FakeEvent.LAG = 0
        recorded(handle).drain()
        FakeEvent.LAG = 5
        one_rank.train_step()
    assert steps(tmp_path) == [(0, format.DEVICE_CLOCK), (1, format.DEVICE_CLOCK | format.INCOMPLETE)]
    assert "lacks" not in caplog.text
