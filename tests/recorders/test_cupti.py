"""Which session detaches CUPTI, as Kineto will read it from the environment of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.capture.agenda import Demand
from megaprof.control.listener import Listener
from megaprof.recorders import Recorder, Window, build_recorders, torch_profiler
from megaprof.recorders.emit import graph_naming
from megaprof.recorders.torch_profiler import TorchRecorder, _detach_cupti, _keep_cupti

TEARDOWN, NO_RETURN = "TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TEARDOWN, NO_RETURN):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(graph_naming, "graphs", False)
    monkeypatch.setattr(torch_profiler, "_detaches", False)


def test_only_a_session_that_is_told_to_detaches_it(cuda: None) -> None:
    """The variable stays until Kineto has been prepared again: it attaches CUPTI again only while it is set."""
    _keep_cupti()
    assert TEARDOWN not in os.environ
    assert _detach_cupti() == "detached"
    assert os.environ[TEARDOWN] == "1"
    _keep_cupti()
    assert TEARDOWN not in os.environ


@pytest.mark.parametrize(("name", "value"), [(TEARDOWN, "0"), (TEARDOWN, "1"), (NO_RETURN, "1")])
def test_the_users_own_setting_wins(name: str, value: str, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert _detach_cupti() == f"attached: {name}={value} is set"
    _keep_cupti()
    assert {key: os.environ[key] for key in (TEARDOWN, NO_RETURN) if key in os.environ} == {name: value}


@pytest.mark.parametrize("version", ["12.4", "11.8", None])
def test_older_versions_keep_it(version: str | None, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert _detach_cupti().startswith("attached: ")
    assert TEARDOWN not in os.environ


def test_a_process_with_graphs_keeps_it(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_naming, "graphs", True)
    assert _detach_cupti() == "attached: the process has CUDA graphs"
    assert TEARDOWN not in os.environ


class Told:
    """Notes of each window whether it is the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.final: list[tuple[str, int, bool]] = []
        stop = TorchRecorder.stop

        def watched(recorder: TorchRecorder, window: Window, metadata: dict[str, Any]) -> None:
            self.final.append((window.target, window.step, window.final))
            stop(recorder, window, metadata)

        monkeypatch.setattr(TorchRecorder, "stop", watched)


def on(directory: Path, *targets: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(targets or ("train_actor",), str(directory), activities=("cpu",), **options)


def test_the_last_planned_window_is_the_last_of_all_targets(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    config = on(tmp_path, "train_actor", "train_log_probs", steps="train_actor=1,3;train_log_probs=2,4")
    with install_hooks(one_rank.chunks, config):
        for _ in range(7):
            one_rank.train_step()
            one_rank.log_probs_pass()
    assert [final for *_, final in told.final] == [False, False, False, True]


def test_a_schedule_without_an_end_has_no_last_window(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    with install_hooks(one_rank.chunks, on(tmp_path, schedule="0:1:0:1:0")):
        for _ in range(6):
            one_rank.train_step()
    assert [final for *_, final in told.final] == [False] * 3


@pytest.mark.parametrize("planned", ["none", "20"])
def test_a_request_has_a_last_window_too(
    planned: str, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between its own windows, and not while others are planned."""
    monkeypatch.setattr(Listener, "look", lambda _: None)  # there is no request that it would find
    told, config = Told(monkeypatch), on(tmp_path, on_demand=True, steps=planned)
    with install_hooks(one_rank.chunks, config) as handle:
        assert handle._session is not None
        recorders: tuple[Recorder, ...] = build_recorders(config, handle._session.writer)
        handle._session.demand = Demand("train_actor", None, 2, 2, recorders)
        for _ in range(6):
            one_rank.train_step()
    assert told.final == [("train_actor", 2, False), ("train_actor", 3, planned == "none")]


def test_the_metadata_say_what_became_of_it(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: None
) -> None:
    """With a GPU; here Kineto records none, and only the environment of this process is looked at."""
    from megaprof.analysis.trace.traces import find_traces, read_trace

    monkeypatch.setattr(torch_profiler, "_recordable", lambda config: ("cpu", "cuda"))
    seen = []
    stop = torch_profiler._stop
    monkeypatch.setattr(
        torch_profiler, "_stop", lambda recording: (seen.append(os.environ.get(TEARDOWN)), stop(recording))
    )
    config = ProfileConfig(("train_actor",), str(tmp_path), steps="1:3")
    with install_hooks(one_rank.chunks, config):
        for _ in range(4):
            one_rank.train_step()
    assert seen == [None, "1"]
    profilers = [read_trace(path).metadata.profiler for path in sorted(find_traces(tmp_path))]
    assert [each.cupti for each in profilers if each is not None] == [None, "detached"]
    _keep_cupti()
    assert TEARDOWN not in os.environ


GRAPH = """
import sys, torch
from megaprof import ProfileConfig, install_hooks
from megaprof.recorders.emit import graph_naming
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed
init_distributed()
torch.cuda.graph.__enter__ = lambda graph: graph
torch.cuda.graph.__exit__ = lambda graph, *exception: None
with cpu_megatron():
    gpt = build(GPTWorkload())
    with install_hooks(gpt.chunks, ProfileConfig(("train_actor",), sys.argv[1], activities=("cpu",))):
        before = graph_naming.graphs
        with object.__new__(torch.cuda.graph):
            pass
        print(before, graph_naming.graphs)
"""


def test_a_graph_that_is_captured_is_seen(tmp_path: Path) -> None:
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    job = subprocess.run([sys.executable, "-c", GRAPH, str(tmp_path)], env=env, capture_output=True, text=True)
    assert job.stdout.split()[-2:] == ["False", "True"], job.stderr
