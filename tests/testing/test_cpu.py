"""The CPU mode for megatron-core: what it makes possible, and that nothing of it stays."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megaprof.testing import cpu_megatron, cpu_patches


def snapshot() -> dict[tuple[int, str], object]:
    """Every attribute that is ever replaced, as it stands in its owner's own dictionary."""
    places = ((patch.getter(), patch.attribute) for patch in cpu_patches())
    return {(id(target), name): vars(target).get(name) for target, name in places}


@pytest.mark.parametrize("error", [None, RuntimeError("from inside")])
def test_every_attribute_is_put_back(error: Exception | None) -> None:
    before = snapshot()
    with contextlib.suppress(RuntimeError), cpu_megatron():
        first = snapshot()
        with cpu_megatron():
            assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert all(snapshot()[key] is value for key, value in first.items())
        assert any(first[key] is not value for key, value in before.items())
        if error is not None:
            raise error
    after = snapshot()
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []
    # The redirection of devices, which is no attribute, is gone as well.
    assert torch.overrides._get_current_function_mode() is None


def test_cuda_devices_are_the_cpu() -> None:
    with cpu_megatron():
        assert torch.empty(2, device=torch.device("cuda", 1)).device.type == "cpu"
        assert torch.empty(2, device=torch.cuda.current_device()).to("cuda:0").device.type == "cpu"
        assert torch.nn.Linear(1, 1).to(torch.cuda.current_device()).weight.device.type == "cpu"
        tensor, module = torch.zeros(1), torch.nn.Linear(1, 1)
        assert tensor.cuda() is tensor
        assert module.cuda() is module
        torch.cuda.synchronize()
        with torch.cuda.device(0):
            tensor.record_stream(torch.cuda.current_stream())


def test_gpu_that_is_there_stays_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with cpu_megatron():
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
    assert torch.cuda.is_available()


def test_streams_and_events_behave() -> None:
    with cpu_megatron():
        outer, stream = torch.cuda.current_stream(), torch.cuda.Stream(device="cuda")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        assert outer is torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() is stream
            begin.record()
        stream.wait_stream(outer)
        end.record(stream)
        end.wait(stream)
        assert torch.cuda.current_stream() is outer
        assert begin.elapsed_time(end) >= 0
        assert end.query()


def test_random_state_tracker_forks_for_real() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with cpu_megatron():
        torch.manual_seed(1)
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        expected_inside = torch.rand(3, generator=torch.Generator().manual_seed(7))
        expected_outside = torch.rand(3, generator=torch.Generator().manual_seed(1))
        with tracker.fork():
            inside = torch.rand(3)
        assert torch.equal(inside, expected_inside)
        assert torch.equal(torch.rand(3), expected_outside)


class Annotated(torch.autograd.Function):
    """Opens a profiler range in its backward, which autograd runs."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("in backward"):
            return grad * torch.ones(1, device="cuda")


def test_torch_profiler_works_inside() -> None:
    x = torch.ones(4, requires_grad=True)
    with cpu_megatron(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("in forward"):
            y = Annotated.apply(x)
        y.sum().backward()
    assert {"in forward", "in backward"} <= {event.name for event in profiler.events()}
