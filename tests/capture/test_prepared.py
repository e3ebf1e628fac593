"""When the profiler is prepared behind the call before, and that nothing stays prepared for long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.trace.reading import recordings_in
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.capture import profiler
from megaprof.capture import session as sessions
from megaprof.capture.agenda import Demand
from megaprof.capture.process import process
from megaprof.formats.timeline import DISTURBED, read_timeline
from megaprof.recorders import build_recorders
from megaprof.recorders.torch_profiler import TorchRecorder
from tests.capture.planning import agenda


def test_the_next_step_is_expected_behind_two_that_follow_each_other() -> None:
    run = agenda("train_actor", "evaluate", steps="0:100", select="all")

    def comes(number: int, target: str = "train_actor", role: str | None = None) -> bool:
        run.begins(target, role, number)
        return run.before_wanted(None) is not None

    assert not comes(4)
    assert comes(5)
    assert not comes(5)  # mini-batches of one step: nobody knows which is the last
    assert comes(6)
    assert not comes(7, "evaluate")
    assert not comes(7)  # another call was between
    assert not comes(8, role="critic")


def test_a_gap_longer_than_the_call_is_no_gap_to_stay_prepared_in() -> None:
    for gap, stays in ((90, True), (100, True), (110, False), (5000, False), (10, True)):
        assert sessions.follows_at_once(100 + gap, 100) is stays, gap


class Watched:
    """What the process's torch recorders are told, in order; and which profilers torch is told to prepare and start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        for name in ("prepare", "start", "stop", "discard"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        own = getattr(TorchRecorder, name)

        def watched(recorder: TorchRecorder, *args: Any) -> None:
            if name != "discard" or recorder._prepared is not None or recorder._profile is not None:
                self.said.append(name)
            own(recorder, *args)

        monkeypatch.setattr(TorchRecorder, name, watched)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    # The gaps of a test on a busy machine are as long as they are.
    monkeypatch.setattr(sessions, "follows_at_once", lambda *_: True)
    yield Watched(monkeypatch)
    for session in process.sessions.copy():
        profiler.leave(session)
    assert torch.autograd.profiler._prepare_profiler is torch._C._autograd._prepare_profiler


def on(directory: Path, *targets: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(targets or ("train_actor",), str(directory), activities=("cpu",), **options)


def prepared(directory: Path) -> dict[int, bool]:
    """By step, whether its window was prepared ahead."""
    found = [read_trace(path).metadata for path in find_traces(directory)]
    return {each.steps[0]: each.profiler.prepared for each in found if each.profiler is not None}


def test_by_default_it_is_prepared_behind_the_call_before(one_rank: Any, tmp_path: Path, watched: Watched) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path)):
        said = []
        for _ in range(5):
            one_rank.train_step()
            said.append(watched.said.copy())
    assert said[1:] == [[], ["prepare"], ["prepare", "start", "stop"], ["prepare", "start", "stop"]]
    assert prepared(tmp_path) == {3: True}


@pytest.mark.parametrize("target", ["train_actor", "train_overall"])
def test_calls_that_the_profiler_disturbs_are_marked(
    target: str, one_rank: Any, tmp_path: Path, watched: Watched
) -> None:
    """The call behind which it is prepared, the window, and the call right behind: no other looks like a slow one."""
    with install_hooks(one_rank.chunks, on(tmp_path, target, tool=("torch", "timeline"))):
        for _ in range(7):
            one_rank.train_step()
    (timeline,) = map(read_timeline, recordings_in(tmp_path)[1].paths)
    assert timeline.steps["flags"].tolist() == [0, 0, DISTURBED, DISTURBED, DISTURBED, 0, 0]


def test_each_window_of_consecutive_steps_is_prepared(one_rank: Any, tmp_path: Path, watched: Watched) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, steps="2:5")):
        for _ in range(6):
            one_rank.train_step()
    assert watched.said == 3 * ["prepare", "start", "stop"]
    assert prepared(tmp_path) == dict.fromkeys((2, 3, 4), True)


def test_a_window_of_the_hosts_step_is_prepared_too(one_rank: Any, tmp_path: Path, watched: Watched) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, "train_overall", steps="2")):
        for _ in range(4):
            one_rank.train_step()
    assert watched.said == ["prepare", "start", "stop"]


def test_another_call_in_between_ends_it(one_rank: Any, tmp_path: Path, watched: Watched) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, steps="2")):
        for _ in range(2):
            one_rank.train_step()
        assert watched.said == ["prepare"]
        one_rank.evaluate()
        assert watched.said == ["prepare", "discard"]
        one_rank.train_step()
    assert watched.said == ["prepare", "discard", "start", "stop"]
    assert prepared(tmp_path) == {2: False}


def test_rl_does_not_stay_prepared_across_a_rollout(one_rank: Any, tmp_path: Path, watched: Watched) -> None:
    """Log-prob passes and rollouts lie between its training steps."""
    targets = "train_actor", "train_log_probs"
    with install_hooks(one_rank.chunks, on(tmp_path, *targets, steps="train_actor=2;train_log_probs=2")):
        for _ in range(4):
            one_rank.log_probs_pass()
            one_rank.train_step()
    assert watched.said == 2 * ["start", "stop"]


def test_what_is_prepared_ends_with_the_run(one_rank: Any, tmp_path: Path, watched: Watched) -> None:
    handle = install_hooks(one_rank.chunks, on(tmp_path, steps="2"))
    for _ in range(2):
        one_rank.train_step()
    assert watched.said == ["prepare"]
    handle.remove()
    assert watched.said == ["prepare", "discard"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        torch.ones(1) + 1
    assert theirs.events()


def test_a_preparation_that_fails_costs_nothing_but_itself(
    one_rank: Any, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unwell(recorder: TorchRecorder) -> None:
        raise RuntimeError("Kineto is unwell")

    monkeypatch.setattr(TorchRecorder, "prepare", unwell)
    with install_hooks(one_rank.chunks, on(tmp_path, steps="2")) as handle:
        for _ in range(3):
            one_rank.train_step()
        assert handle.active
    assert prepared(tmp_path) == {2: False}
    assert caplog.text.count("Kineto is unwell") == 1


def test_what_nobody_asks_for_any_more_is_not_prepared_again(
    one_rank: Any, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaprof.control.listener.Listener.look", lambda _: None)  # it would find no request
    only_timeline = ProfileConfig(("train_actor",), str(tmp_path), tool=("timeline",))
    with install_hooks(one_rank.chunks, only_timeline) as handle:
        session = handle._session
        assert session is not None
        session.demand = Demand("train_actor", None, 2, 1, build_recorders(on(tmp_path), session.writer))
        for _ in range(2):
            one_rank.train_step()
        session.demand = None  # the background thread takes a cancelled one away
        for _ in range(3):
            one_rank.train_step()
    assert watched.said == ["prepare", "discard"]
