"""Waiting for the device, with a limit. Only `torch.cuda`'s answers are made up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from megaprof.runtime.device import DeviceWait, capturing


class Device:
    """What `torch.cuda` says, and what it was asked to wait for."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.captures = False
        self.waited_for: list[int] = []

    def synchronize(self, device: int) -> None:
        self.waited_for.append(device)
        self.idle.wait()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made_up = Device()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", made_up.synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made_up.captures)
    yield made_up
    made_up.idle.set()


def waiting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "megaprof-device"]


def gone(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


def test_an_idle_device_is_waited_for_once(device: Device) -> None:
    device.idle.set()
    wait = DeviceWait()
    assert device.waited_for == []
    assert wait.wait(60) is None
    assert wait.wait(0) is None
    assert device.waited_for == [3], "the device of the thread that asks, which need not be the first one"


@pytest.mark.parametrize(("seconds", "ending"), [(0.0, lambda: False), (0.3, lambda: False)])
def test_a_busy_device_is_left_alone_when_time_is_up(
    device: Device, seconds: float, ending: Callable[[], bool]
) -> None:
    assert "did not finish" in str(DeviceWait().wait(seconds, ending))


def test_who_has_to_end_waits_no_longer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaprof.runtime.device.GRACE_SECONDS", 0.2)
    assert "did not finish" in str(DeviceWait().wait(3600, lambda: True))


def test_a_device_that_becomes_idle_in_time_is_idle(device: Device) -> None:
    threading.Timer(0.2, device.idle.set).start()
    assert DeviceWait().wait(3600) is None


def test_a_broken_device_is_not_busy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(number: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert DeviceWait().wait(3600) is None


def test_nothing_waits_while_a_graph_is_captured(device: Device) -> None:
    device.captures = True
    assert capturing()
    assert "CUDA graph" in str(DeviceWait().wait(3600))
    assert device.waited_for == []


def test_a_thread_that_is_not_asked_ends_without_waiting(device: Device) -> None:
    wait = DeviceWait()
    threads = waiting()
    assert threads
    wait.end()
    assert gone(threads[-1:])
    assert device.waited_for == []


def test_a_process_without_cuda_has_no_device_and_no_thread() -> None:
    before = len(waiting())
    assert DeviceWait().wait(0) is None
    assert not capturing()
    assert len(waiting()) == before
    assert not torch.cuda.is_initialized()
