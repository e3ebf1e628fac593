"""Full-iteration CUDA graphs: megatron-core's real wrapper, with only the CUDA calls that no CPU has replaced."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.capture.process import process
from megaprof.formats.ranges import parse

full_cuda_graph = pytest.importorskip("megatron.core.full_cuda_graph", reason="megatron-core 0.14 brought it")


class FakeGraph:
    """Counts replays; replaying runs no Python, just as on a GPU."""

    replays = 0

    def register_generator_state(self, state: object) -> None:
        pass

    def replay(self) -> None:
        FakeGraph.replays += 1


def dicts(batches: Iterator[Any]) -> Iterator[dict[str, torch.Tensor]]:
    for tokens, labels in batches:
        yield {"tokens": tokens, "labels": labels}


def test_a_replayed_step_is_counted_and_captured_and_says_that_it_has_no_microbatch_ranges(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    profiled_in_capture = []

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        batch = next(iterator)
        profiled_in_capture.append(torch._C._autograd._profiler_enabled())
        return one_rank.forward_step(iter([(batch["tokens"], batch["labels"])]), model)

    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="0:0:0:1:0")
    microbatches = one_rank.workload.microbatches
    with install_hooks(one_rank.chunks, config):
        wrapper = full_cuda_graph.FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=1)
        for step in range(4):
            wrapper(
                forward_step_func=forward_step,
                data_iterator=dicts(one_rank.data_iterator(step)),
                model=one_rank.chunks,
                num_microbatches=microbatches,
                seq_length=one_rank.workload.seq_length,
                micro_batch_size=one_rank.workload.micro_batch_size,
                forward_only=False,
            )

    # Step 0 warms the wrapper up, step 1 captures the graph (and replays it once), steps 2 and 3 only replay.
    assert FakeGraph.replays == 3
    assert profiled_in_capture == [True] * microbatches + [False] * microbatches
    found = {}
    for path in tmp_path.glob("*.gz"):
        with gzip.open(path) as file:
            found[path.name.split(".pp")[0]] = json.load(file)
    assert sorted(found) == [f"train_actor.step00000{n}" for n in (0, 2, 3)]
    for step, trace in found.items():
        labels = [name.label for e in trace["traceEvents"] if (name := parse(e.get("name", ""))) is not None]
        assert labels.count("train_actor") == 1
        assert trace["megaprof"]["schedule"] == "no_pipelining"
        if step.endswith("0"):
            assert labels.count("forward") == microbatches
            assert trace["megaprof"]["ranges"] == {"microbatch": True}
        else:
            assert "forward" not in labels
            assert trace["megaprof"]["ranges"]["microbatch"] is False
            assert "CUDA graph" in trace["megaprof"]["ranges"]["reason"]


class Capturing:
    """A stream that is being captured between two microbatches: nothing may be opened, closed or waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = False
        self.broken: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self._must_not("synchronize"))
        for name in ("start", "stop"):
            monkeypatch.setattr(torch.profiler.profile, name, self._unless(name, getattr(torch.profiler.profile, name)))

    def _must_not(self, what: str) -> None:
        if self.now:
            self.broken.append(what)

    def _unless(self, name: str, original: Any) -> Any:
        def checked(profile: Any) -> None:
            self._must_not(name)
            original(profile)

        return checked


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capturing:
    return Capturing(monkeypatch)


def captured_steps(directory: Path) -> dict[int, str | None]:
    """By step: why its window was cut short."""
    found = {}
    for path in directory.glob("*.pt.trace.json.gz"):
        with gzip.open(path) as file:
            metadata = json.load(file)["megaprof"]
        found[metadata["steps"][0]] = metadata["truncated_reason"]
    return found


def test_a_host_that_captures_a_whole_call_itself_gets_its_window_afterwards(
    one_rank: Any, capture: Capturing, tmp_path: Path
) -> None:
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="0")):
        capture.now = True
        one_rank.train_step()
        capture.now = False
        one_rank.train_step()
    assert capture.broken == []
    assert captured_steps(tmp_path) == {1: None}


def test_an_open_window_outlasts_a_capture(one_rank: Any, capture: Capturing, tmp_path: Path) -> None:
    config = ProfileConfig(target=("train_overall",), dir=str(tmp_path), schedule="0")
    with install_hooks(one_rank.chunks, config):
        one_rank.train_step()
        capture.now = True
        one_rank.train_step()
        capture.now = False
        one_rank.train_step()
    assert capture.broken == []
    assert captured_steps(tmp_path) == {0: None}


@pytest.mark.parametrize("why", ["memory", "remove"])
def test_what_wants_the_window_closed_waits_for_the_end_of_the_capture(
    why: str, one_rank: Any, capture: Capturing, tmp_path: Path
) -> None:
    handle = install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), schedule="0"))
    passes: list[bool] = []

    def each_forward(module: Any, inputs: Any) -> None:
        passes.append(torch._C._autograd._profiler_enabled())
        capture.now = len(passes) == 1
        if len(passes) == 1:
            if why == "remove":
                handle.remove()
            else:
                process.memory_ran_out(process.window.owner, "host memory: none left")

    hook = one_rank.chunks[0].register_forward_pre_hook(each_forward)
    one_rank.train_step()
    hook.remove()
    handle.remove()
    assert capture.broken == []
    assert passes[:2] == [True, True]
    assert not torch._C._autograd._profiler_enabled()
    assert captured_steps(tmp_path).keys() == {0}
