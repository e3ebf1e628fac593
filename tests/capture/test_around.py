"""The calls around a window, in the timeline that a capture brings by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from megaprof import ProfileConfig, analyze, install_hooks
from megaprof import role as role_scope
from megaprof.analysis.trace.reading import Timelines, recordings_in, runs_in
from megaprof.autoload.install import Handle
from megaprof.capture import profiler
from megaprof.capture import session as sessions
from megaprof.capture.agenda import Demand
from megaprof.capture.process import process
from megaprof.control.listener import Listener
from megaprof.formats.timeline import DISTURBED, SUFFIX, Timeline, read_timeline
from megaprof.hooks.plain import PlainSteps
from megaprof.recorders import build_recorders
from megaprof.recorders.timeline_steps import BEFORE, BEHIND
from megaprof.recorders.torch_profiler import TorchRecorder


@pytest.fixture(autouse=True)
def _no_gaps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The gaps of a test on a busy machine are as long as they are."""
    monkeypatch.setattr(sessions, "follows_at_once", lambda *_: True)
    yield
    for session in process.sessions.copy():
        profiler.leave(session)


def on(directory: Path | str, *targets: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(targets or ("train_actor",), str(directory), activities=("cpu",), **options)


def timelines(directory: Path) -> list[Timeline]:
    read = [read_timeline(path) for path in recordings_in(directory)[1].paths]
    assert all(timeline.damage is None for timeline in read)
    return read


def steps(directory: Path) -> dict[tuple[str, str | None], list[tuple[int, bool]]]:
    """Number of every step, and whether the profiler disturbed it, by target and role."""
    found: dict[tuple[str, str | None], list[tuple[int, bool]]] = {}
    for timeline in timelines(directory):
        for metadata, rows in timeline.by_metadata():
            numbers = zip(rows["step"].tolist(), (rows["flags"] & DISTURBED > 0).tolist(), strict=True)
            found.setdefault((metadata.target, metadata.role), []).extend(numbers)
    return found


def around(first: int, *disturbed: int) -> list[tuple[int, bool]]:
    return [(step, step in disturbed) for step in range(first, disturbed[-1] + BEHIND + 1)]


def timed(handle: Handle) -> int:
    """The calls that the timeline has seen."""
    assert handle._session is not None
    assert handle._session.timeline is not None
    return sum(calls.count for calls in handle._session.timeline.by_key.values())


def test_a_capture_keeps_the_calls_around_its_window(one_rank: Any, tmp_path: Path) -> None:
    window = BEFORE + 10
    with install_hooks(one_rank.chunks, on(tmp_path, steps=str(window))) as handle:
        for _ in range(window):
            one_rank.train_step()
        assert handle._session is not None
        timeline = handle._session.timeline
        assert timeline is not None
        timeline.drain()
        (calls,) = timeline.by_key.values()
        assert len(calls.before) == BEFORE + 1, "memory does not grow with the run"
        assert not list(tmp_path.iterdir())
        for _ in range(3 * BEHIND):
            one_rank.train_step()
        assert timed(handle) == window + 2 + BEHIND, "when nothing more is captured, nothing more is recorded"
    assert steps(tmp_path) == {
        ("train_actor", None): around(window - BEFORE, window - 1, window, window + 1),
    }
    (timeline_file,) = timelines(tmp_path)
    assert timeline_file.metadata[0].around_windows
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    assert path.stat().st_size < 10_000
    assert not runs_in((), Timelines([path])).pieces, "it does not tell which steps a process continues"


@pytest.mark.parametrize("drained", [False, True])
def test_windows_near_each_other_share_a_stretch(drained: bool, one_rank: Any, tmp_path: Path) -> None:
    """Whether the background thread packs each step at once, or all at the end."""
    with install_hooks(one_rank.chunks, on(tmp_path, steps="2,4,30")) as handle:
        assert handle._session is not None
        timeline = handle._session.timeline
        assert timeline is not None
        timeline._background.remove(timeline.drain)
        for _ in range(40):
            one_rank.train_step()
            if drained:
                timeline.drain()
    first, second = around(0, 1, 2, 3, 4, 5), around(30 - BEFORE, 29, 30, 31)
    found = steps(tmp_path)["train_actor", None]
    assert found == [*first, *(step for step in second if step not in first)]


def test_each_target_and_role_has_its_own(one_rank: Any, tmp_path: Path) -> None:
    """A window of a role's work keeps the calls in it and around it; calls of others are not of its job."""
    config = on(
        tmp_path, "train_actor", "train_log_probs", discrete=True, steps="annotated=none;train_log_probs=3;none"
    )
    with install_hooks(one_rank.chunks, config):
        for _ in range(12):
            with role_scope("ref"):
                one_rank.log_probs_pass()
            with role_scope("actor"):
                one_rank.train_step()
    found = steps(tmp_path)
    assert found.keys() == {("train_log_probs", "ref")}
    assert [step for step, _ in found["train_log_probs", "ref"]] == list(range(9))
    assert [step for step, disturbed in found["train_log_probs", "ref"] if disturbed] == [3]


def test_a_window_of_the_whole_step_keeps_every_call(one_rank: Any, tmp_path: Path) -> None:
    config = on(tmp_path, "train_overall", "train_log_probs", steps="train_overall=3;train_log_probs=none")
    number = 0
    with install_hooks(one_rank.chunks, config, iteration=lambda: number):
        for number in range(12):  # noqa: B007 - the host's counter
            one_rank.train_step()
    assert steps(tmp_path) == {("train_actor", None): around(0, 2, 3, 4)}


def test_on_demand(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "look", lambda _: None)  # there is no request that it would find
    config = on(tmp_path, on_demand=True, steps="none")
    with install_hooks(one_rank.chunks, config) as handle:
        session = handle._session
        assert session is not None
        for _ in range(6):
            one_rank.train_step()
        session.demand = Demand("train_actor", None, 7, 2, build_recorders(config, session.writer))
        for _ in range(14):
            one_rank.train_step()
        assert timed(handle) == 20, "the next request may come at any time"
    assert steps(tmp_path) == {("train_actor", None): around(0, 6, 7, 8, 9)}


def test_without_a_pipeline(one_rank: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with install_hooks(model, on(tmp_path, steps="3"), pipeline=False):
        plain = PlainSteps(model, 1)
        forward = plain.forward(lambda: model(torch.ones(4)).sum())
        backward = plain.backward(torch.Tensor.backward)
        for _ in range(12):
            plain.begin()
            backward(forward())
            plain.end()
            assert process.parts.now is None, "also behind a step that is not recorded"
    assert steps(tmp_path) == {("train_actor", None): around(0, 2, 3, 4)}


def test_a_window_that_is_lost_leaves_no_timeline(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no profiler today")

    monkeypatch.setattr(TorchRecorder, "start", fails)
    with install_hooks(one_rank.chunks, on(tmp_path, steps="3")):
        for _ in range(12):
            one_rank.train_step()
    assert not list(tmp_path.iterdir())


def test_a_remote_directory_gets_it_too(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = tmp_path / "told"
    config = on("memory://bucket/around", steps="2", on_finish=f'echo "$PROFILED_FILES" >> {told}')
    with install_hooks(one_rank.chunks, config):
        for _ in range(12):
            one_rank.train_step()
    names = fsspec.filesystem("memory").find("/bucket/around")
    assert [name.rsplit(".", 2)[1] for name in names] == ["timeline", "json"]
    assert sorted(told.read_text().split()) == [f"memory:/{name}" for name in names]
    assert list(tmp_path.iterdir()) == [told]


def test_the_report_takes_lengths_from_undisturbed_steps(one_rank: Any, tmp_path: Path) -> None:
    """And does not take the steps for those of the whole run."""
    with install_hooks(one_rank.chunks, on(tmp_path, steps="12")):
        for _ in range(20):
            one_rank.train_step()
    (target,) = analyze(tmp_path).targets
    assert target.fleet is None
    assert 12 not in target.steps
    assert 6 < len(target.steps) <= 11 + BEHIND
    assert target.profiled_step_time_ms is not None
    assert target.profiled_step_time_ms.count == 1
    assert not target.profiled
