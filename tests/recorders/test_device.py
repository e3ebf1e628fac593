"""The timeline's clock on a GPU, with a GPU's runtime that was compiled here: in C, and in Python."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof import install_hooks
from megaprof.analysis.report.report import analyze
from megaprof.formats import timeline as format
from megaprof.formats.facts import unpack_data
from megaprof.formats.phrases import Unanswerable
from megaprof.formats.timeline import read_timeline
from megaprof.recorders import device, tape
from megaprof.recorders import timeline as recorder
from megaprof.recorders.device import device_clock
from megaprof.recorders.tape import PythonTape, Tape
from tests.formats.step_records import events_of
from tests.recorders.fake_gpu import FakeGpu, compiled
from tests.recorders.test_timeline import config, recorded, steps

HOUR = 3600
PATHS = [pytest.param(True, marks=pytest.mark.skipif(not tape.IN_C, reason="built without a C compiler")), False]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def gpu(library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = FakeGpu(library)
    made.install(monkeypatch)
    yield made
    made.driver.fake_reset()


@pytest.fixture(params=PATHS)
def in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(device, "Marker", None)
    return bool(request.param)


def clock() -> device.DeviceClock:
    made = device_clock()
    assert made is not None
    return made


def test_a_mark_is_an_event_on_the_stream_that_is_current_then(gpu: FakeGpu, in_c: bool) -> None:
    own, before = clock(), gpu.recorded
    marks = []
    for stream in (7, 3, 3, 7):
        gpu.stream = stream
        marks.append(own.mark())
    assert [mark.own.stream for mark in marks] == [7, 3, 3, 7]
    assert [mark.own.times for mark in marks] == [1] * 4
    assert (gpu.recorded - before, gpu.python) == (4, 4), "new events are made by torch"
    own.take_back(marks)
    gpu.stream = 5
    again = [own.mark() for _ in range(4)]
    assert {id(mark) for mark in again} == {id(mark) for mark in marks}
    assert [(mark.own.stream, mark.own.times) for mark in again] == [(5, 2)] * 4
    assert (gpu.recorded - before, gpu.python) == (8, 4 if in_c else 8), "in C torch's class is not asked again"
    with own.reading():
        assert own.microseconds(again[0], again[3]) == round((again[3].own.device - again[0].own.device) / 1e3)


@pytest.mark.parametrize("made", [Tape, PythonTape])
def test_what_a_cuda_graph_captures_gets_no_event(made: Any, gpu: FakeGpu, in_c: bool) -> None:
    """It would become part of the graph, and asking for its time would be an error."""
    own = clock()
    noted = made((), False, own.mark)
    first = noted.mark()
    noted.add(1, first, noted.mark())
    gpu.capture(gpu.stream)
    before = gpu.recorded
    assert noted.mark() is None
    noted.add(2, None, None)
    gpu.capture(gpu.stream - 1)  # on another stream
    after = noted.mark()
    noted.add(3, after, None)
    assert after is not None
    assert gpu.recorded == before + 1
    assert (len(noted), noted.marks[0]) == (1, first)


@pytest.mark.skipif(not tape.IN_C, reason="megaprof was built without a C compiler")
@pytest.mark.parametrize("at", [0, 1])
def test_a_hook_in_c_notes_nothing_where_a_graph_is_captured(at: int) -> None:
    answers: list[Any] = ["mark", "mark"]
    answers[at] = None
    gate = tape.Gate(lambda fault: pytest.fail(repr(fault)))
    gate.tape = noted = Tape((), False, answers.pop)
    hook = tape.Hook(gate, lambda: "result", None, 5)
    assert hook() == "result"
    assert (len(noted), noted.marks, noted.now) == (0, [], 0)


def test_a_step_is_recorded_behind_the_host(one_rank: Any, gpu: FakeGpu, in_c: bool, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        recorded(handle).drain()
        gpu.behind(HOUR)
        made, before = gpu.python, gpu.recorded
        one_rank.train_step()
        recorded(handle).drain()
        assert [step for step, _ in steps(tmp_path)] == [0], "the GPU has not done the second one"
        gpu.ahead = HOUR * 10**9
        recorded(handle).drain()
        # The step's begin and end, and those of three forwards, three backwards and the finalisation. In C, a begin
        # is the end before it.
        assert gpu.recorded - before == (9 if in_c else 16)
        assert gpu.python - made == (1 if in_c else 16), "one event of the first step is kept to compare clocks with"
    (path,) = tmp_path.glob("*" + format.SUFFIX)
    timeline = read_timeline(path)
    assert timeline.metadata[0].timeline == {"clock": "device"}
    assert list(timeline.facts(format.MEMORY)) == [0], "said once"
    assert [format.Memory.unpack(each) for each in timeline.holding(format.MEMORY)] == [(3, 5, 7)] * 2
    found = events_of(timeline, 1)
    assert found is not None
    assert len(found.code) == 7
    assert 0 <= found.start[0] <= found.end[-1] <= timeline.steps[1]["duration"]


@pytest.mark.skipif(not tape.IN_C, reason="megaprof was built without a C compiler")
def test_an_event_begins_with_the_end_of_the_one_before(gpu: FakeGpu) -> None:
    own, before = clock(), gpu.recorded
    noted = Tape((), False, own.mark)
    began = noted.mark()
    for code in range(16, 16 * 65, 16):
        noted.end(code, noted.begin(code, True))
    assert gpu.recorded - before == 65
    assert noted.marks[0] is began
    assert all(end is start for end, start in zip(noted.marks[1::2], noted.marks[2::2], strict=False))
    outer = noted.begin(65, True)
    for code in (66, 67):  # what the outer one does lies between them
        noted.end(code, noted.begin(code, True))
    noted.end(65, outer)
    assert gpu.recorded - before == 65 + 2 * 2 + 1
    gpu.stream = 3  # does not wait for the other stream
    noted.end(68, noted.begin(68, True))
    noted.end(69, noted.begin(69, False))  # a trainer's own code may run between two passes
    assert gpu.recorded - before == 65 + 5 + 2 + 2
    assert (len(noted), noted.now) == (69, 0)
    assert all(mark.asked <= mark.own.host for mark in noted.marks)


def host_bound(directory: Path) -> list[list[bool]]:
    """For every step, whether the GPU waited for the host at both ends of each of its six passes."""
    (path,) = directory.glob("*" + format.SUFFIX)
    facts = read_timeline(path).facts(format.HOST_BOUND)
    return [[bool(payload[0] >> number & 1) for number in range(6)] for _, payload in sorted(facts.items())]


def test_where_the_gpu_comes_at_once_it_waits_for_its_host(
    one_rank: Any, gpu: FakeGpu, in_c: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so in the first step. In the second one it has work for a second whenever it is asked."""
    monkeypatch.setattr(recorder, "AT_ONCE_US", 500_000)  # this machine may be busy
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        recorded(handle).drain()
        gpu.behind(1.0)
        gpu.ahead = 2 * 10**9
        one_rank.train_step()
        recorded(handle).drain()
        recent = recorded(handle).recent()
        assert recent is not None
        assert recent.host_bound_passes == 0.5
    assert host_bound(tmp_path) == [[True] * 6, [False] * 6]


def test_a_step_that_is_captured_is_not_recorded(one_rank: Any, gpu: FakeGpu, in_c: bool, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)):
        gpu.capture(gpu.stream)
        one_rank.train_step()
        gpu.capture(0)
        one_rank.train_step()
    assert steps(tmp_path) == [(1, format.DEVICE_CLOCK)], "nothing ran in the first one"


@pytest.mark.parametrize("done", [True, False])
def test_marks_on_streams_that_do_not_wait_for_each_other_make_no_times(
    done: bool, one_rank: Any, gpu: FakeGpu, in_c: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step begins on a stream that is behind, and its passes are on another one: before the step, or done when the
    step's begin is not."""
    forward = one_rank.forward_step

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        gpu.stream = 2
        gpu.behind(0)
        return forward(*args, **kwargs)

    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        gpu.behind(HOUR)
        monkeypatch.setattr(one_rank, "forward_step", elsewhere)
        one_rank.train_step()
        gpu.ahead = HOUR * 10**9 * done
        recorded(handle).drain()
        one_rank.train_step()
    broken = format.DEVICE_CLOCK | format.INCOMPLETE
    assert dict(steps(tmp_path)) == {0: format.DEVICE_CLOCK, 1: broken, 2: format.DEVICE_CLOCK}


def test_an_event_that_cannot_be_recorded_is_our_fault(
    one_rank: Any, gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        recorded(handle).drain()
        gpu.driver.fake_answer(700)
        assert one_rank.train_step()
        assert not handle.active
    assert (0, format.DEVICE_CLOCK) in steps(tmp_path)


def test_a_thread_reads_without_breaking_captures_and_leaves_its_mode(gpu: FakeGpu) -> None:
    """Each thread has a mode of its own; the training thread reads when the hooks go out, and gets its own back."""
    own = clock()
    seen: list[tuple[int, int, int]] = []

    def read() -> None:
        mode = gpu.driver.fake_mode
        before = mode()
        with own.reading():
            inside = mode()
        seen.append((before, inside, mode()))

    read()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert seen == [(0, 2, 0)] * 2


def test_rocm_has_the_same_events(
    one_rank: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(compiled(tmp_path_factory.mktemp("hip"), "libamdhip64.so.7"))
    gpu.install(monkeypatch, "hip")
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        for _ in range(3):
            one_rank.train_step()
            recorded(handle).drain()
    assert steps(tmp_path) == [(number, format.DEVICE_CLOCK) for number in range(3)]
    assert gpu.recorded == (27 if tape.IN_C else 48)
    if tape.IN_C:
        assert gpu.python < 27


def test_a_process_that_uses_its_gpu_later_than_the_hooks_go_in(
    one_rank: Any, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with install_hooks(one_rank.chunks, config(tmp_path)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        one_rank.train_step()
    assert steps(tmp_path) == [(0, format.DEVICE_CLOCK)]


@pytest.mark.parametrize("found", [None, "libc.so.6"])
def test_a_gpu_that_cannot_be_asked_is_said_in_log_and_metadata(
    found: str | None,
    one_rank: Any,
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(device, "_loaded", lambda library: found)
    reason = device_clock()
    assert isinstance(reason, str)
    with install_hooks(one_rank.chunks, config(tmp_path)):
        one_rank.train_step()
        one_rank.log_probs_pass()
    assert [flags for _, flags in steps(tmp_path)] == [0, 0]
    (path,) = tmp_path.glob("*" + format.SUFFIX)
    assert {str(each.timeline) for each in read_timeline(path).metadata} == {str({"clock": "host", "reason": reason})}
    assert caplog.text.count(reason) == 1
    with pytest.raises(Unanswerable, match=reason):
        analyze(tmp_path)


def test_the_library_is_found_under_any_version(library: Path) -> None:
    ctypes.CDLL(str(library))
    found = device._loaded("libcuda.so")
    assert found is not None
    assert Path(found).name == "libcuda.so.1"
    assert device._loaded("libcud") is None


def test_a_gpu_that_has_work_does_not_wait_for_data(
    one_rank: Any, gpu: FakeGpu, in_c: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step it waits with its host. In the second one it has work for a second whenever it is asked."""
    batches = one_rank.data_iterator

    def late(step: int) -> Any:
        for batch in batches(step):
            time.sleep(0.02)
            yield batch

    monkeypatch.setattr(one_rank, "data_iterator", late)
    with install_hooks(one_rank.chunks, config(tmp_path)) as handle:
        one_rank.train_step()
        recorded(handle).drain()
        gpu.behind(1.0)
        gpu.ahead = 2 * 10**9
        one_rank.train_step()
        recorded(handle).drain()
    (path,) = tmp_path.glob("*" + format.SUFFIX)
    first, second = (unpack_data(payload) for _, payload in sorted(read_timeline(path).facts(format.DATA).items()))
    assert first is not None
    assert second is not None
    assert (first[:, 0] >= 20_000 - 500).all()
    assert second.sum() < first.sum() / 2
