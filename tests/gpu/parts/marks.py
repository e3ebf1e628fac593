"""What one mark of the timeline costs the training thread on a GPU's clock, and what it marks."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megaprof.recorders.device import DeviceClock, device_clock
from tests.gpu.found import Found

_MARKS, _ROUNDS = 512, 9
"""Less than the GPU's queue holds, so that nobody waits for the GPU; and the median of so many rounds."""

_OF_A_STEP = 130
"""On a stage of a pipeline with 32 microbatches: the ends of 64 passes and as many exchanges, and of the step; and the
step's begin."""


def run(work: Path, cpu: bool) -> Found:
    with _gpu(work, cpu) as driver:
        clock = device_clock()
        if not isinstance(clock, DeviceClock):
            return Found(skipped=clock or "torch does not use a GPU here")
        event: Any = torch.cuda.Event(enable_timing=True)
        found = Found(
            {
                "mark_ns": _nanoseconds(clock, clock.mark),
                "torch_record_ns": _nanoseconds(clock, event.record),
                "torch_current_stream_ns": _nanoseconds(clock, lambda: torch.cuda.current_stream() and None),
            }
        )
        quicker = found.figures["mark_ns"] < found.figures["torch_record_ns"]
        found.on_a_gpu(cpu, "a mark is quicker (ns)", found.figures["mark_ns"], "less than torch's own", quicker)
        share = _OF_A_STEP * found.figures["mark_ns"] / 100e6
        found.on_a_gpu(cpu, "share of a step of 100 ms with 130 marks", share, "at most 0.0025", share <= 0.0025)
        found.figures["cuEventRecord_ns"] = _bare_event_ns(driver)
        if not cpu:
            _against_torch(found, clock)
    return found


def _nanoseconds(clock: DeviceClock, mark: Callable[[], Any]) -> float:
    """Of one mark on the host; events are in the pool, and the GPU has nothing else to do."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        marks = [mark() for _ in range(_MARKS)]
        rounds.append((time.perf_counter_ns() - began) / _MARKS)
        clock.take_back([each for each in marks if each is not None])
    return statistics.median(rounds[1:])  # the first makes the events


def _bare_event_ns(driver: ctypes.CDLL) -> float:
    """Of the driver's `cuEventRecord` alone: what a call through ctypes takes, less one that does next to nothing."""
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    stream: Any = torch._C
    arguments = ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream._cuda_getCurrentRawStream(0))
    version = (ctypes.byref(ctypes.c_int()),)
    calls = (driver.cuEventRecord, arguments), (driver.cuDriverGetVersion, version)
    took: tuple[list[float], list[float]] = [], []
    for _ in range(_ROUNDS):
        for (function, given), times in zip(calls, took, strict=True):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            for _ in range(_MARKS):
                function(*given)
            times.append((time.perf_counter_ns() - began) / _MARKS)
    record, nothing = map(statistics.median, took)
    return record - nothing


def _against_torch(found: Found, clock: DeviceClock) -> None:
    """The time between two marks, on torch's default stream and on another one, is that of torch's own events; and a
    stream that is being captured gets none."""
    matrix = torch.randn(4096, 4096, device="cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            outer = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            outer[0].record()
            first = clock.mark()
            for _ in range(20):
                matrix @ matrix
            last = clock.mark()
            outer[1].record()
        torch.cuda.synchronize()
        with clock.reading():
            ours = clock.microseconds(first, last) / 1e3
        theirs = outer[0].elapsed_time(outer[1])
        found.within(False, "two marks (ms) are as far apart as torch's events", ours, theirs, 0.02)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matrix + 1
        captured = clock.mark()
    found.expect("a mark while a CUDA graph is captured", captured, None)


@contextlib.contextmanager
def _gpu(work: Path, cpu: bool) -> Iterator[ctypes.CDLL]:
    """The driver of the GPU, or of a fake one."""
    if not cpu:
        torch.cuda.init()
        yield ctypes.CDLL("libcuda.so.1")
        return
    import pytest

    from tests.recorders.fake_gpu import FakeGpu, compiled

    with pytest.MonkeyPatch.context() as patches:
        gpu = FakeGpu(compiled(work))
        gpu.install(patches)
        patches.setattr(torch.cuda, "synchronize", lambda: None)
        patches.setattr(torch.cuda, "current_stream", lambda: None)
        yield gpu.driver
