"""start, step and stop as a controller dispatches them, and the kernel summary without a handle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megaprof
from megaprof import ProfileConfig, install_hooks, role
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.capture.process import process


@pytest.fixture(autouse=True)
def _stopped(one_rank: Any) -> Iterator[None]:
    yield
    megaprof.stop()


def dispatch(function: Any, *args: Any, **kwargs: Any) -> Any:
    """As a controller does: the function, its arguments and its result travel as bytes."""
    function, args, kwargs = pickle.loads(pickle.dumps((function, args, kwargs)))
    return pickle.loads(pickle.dumps(function(*args, **kwargs)))


def config(directory: Path, *targets: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(targets, str(directory), **options)


def test_a_step_of_the_controllers_is_one_window(one_rank: Any, tmp_path: Path) -> None:
    wanted = config(tmp_path, "train_overall", schedule="1")
    assert dispatch(megaprof.start, wanted) is True
    try:
        for number in range(1, 4):
            one_rank.log_probs_pass()
            one_rank.train_step()
            one_rank.train_step()
            assert dispatch(megaprof.step) == number
    finally:
        assert dispatch(megaprof.stop) is True
    (path,) = find_traces(tmp_path)
    labels = [r.name.label for r in read_trace(path).ranges if "step" in r.name.fields]
    assert labels == ["train_overall", "train_log_probs", "train_actor", "train_actor"]
    assert path.name.startswith("train_overall.step000001.")
    assert not torch._C._autograd._profiler_enabled()


def test_stop_before_start_and_twice_does_nothing(one_rank: Any, tmp_path: Path) -> None:
    assert dispatch(megaprof.stop) is True
    megaprof.step()
    assert dispatch(megaprof.start, config(tmp_path, "train_actor", steps="5"), first=5) is True
    assert dispatch(megaprof.start, config(tmp_path, "train_actor", steps="5")) is True
    one_rank.train_step()
    megaprof.stop()
    megaprof.stop()
    assert [path.name.split(".pp")[0] for path in find_traces(tmp_path)] == ["train_actor.step000005"]


def test_stop_keeps_an_open_window(one_rank: Any, tmp_path: Path) -> None:
    megaprof.start(config(tmp_path, "train_overall", steps="0"))
    one_rank.train_step()
    assert torch._C._autograd._profiler_enabled()
    assert megaprof.stop() is True
    (path,) = find_traces(tmp_path)
    assert read_trace(path).metadata.truncated


def test_stop_on_another_thread_says_that_a_window_is_still_open(one_rank: Any, tmp_path: Path) -> None:
    megaprof.start(config(tmp_path, "train_overall", steps="0"))
    one_rank.train_step()
    with ThreadPoolExecutor(1) as controller:
        assert controller.submit(megaprof.stop).result() is False
    assert not find_traces(tmp_path)
    one_rank.train_step()
    assert find_traces(tmp_path)


def test_off_and_mistakes(tmp_path: Path, monkeypatch: Any) -> None:
    assert megaprof.start() is False
    megaprof.stop()
    monkeypatch.setenv("MEGAPROF_TARGET", "train_nobody")
    with pytest.raises(ValueError, match="train_nobody"):
        megaprof.start()
    assert megaprof.stop() is True


def test_the_kernel_summary_without_a_handle_by_role(one_rank: Any, tmp_path: Path) -> None:
    wanted = config(tmp_path, "train_log_probs", steps="0", kernels=True)
    with install_hooks(one_rank.chunks, wanted):
        for name in ("actor", "ref"):
            with role(name):
                one_rank.log_probs_pass()
    last, actor = dispatch(megaprof.kernel_summary), dispatch(megaprof.kernel_summary, "actor")
    assert (last["role"], actor["role"]) == ("ref", "actor")
    assert dispatch(megaprof.kernel_summary, role="ref") == last
    assert megaprof.kernel_summary("critic") is None


def test_the_summary_of_an_older_window_passes_for_no_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    older, newest = Future[bytes](), Future[bytes]()
    older.set_result(b'{"steps":[0,0]}')
    monkeypatch.setattr(process, "summaries", {"actor": older, "ref": newest})
    assert megaprof.kernel_summary() is None, "it is still being made"
    assert megaprof.kernel_summary("actor") == {"steps": [0, 0]}
    monkeypatch.setattr(process, "summaries", {"actor": older, "ref": None})
    assert megaprof.kernel_summary() is None, "it was not made"
