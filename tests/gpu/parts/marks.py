"""What one mark of the device's clock costs the training thread, on a GPU that waits and on one that works."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaprof.recorders.timeline.device import device_clock
from tests.gpu.found import Found
from tests.gpu.job import device_of

_MARKS = 200
"""At once: many fewer than the GPU queues before a launch waits."""
_ROUNDS = 50
_OF_A_STEP = 256
"""A step of 32 microbatches on a stage of a pipeline: a begin and an end of 64 passes and as many exchanges."""
_STEP_NS = 100e6


def run(work: Path, cpu: bool) -> Found:
    with device_of(cpu) as device:
        clock = None if cpu else _clock()
        mark = time.monotonic_ns if clock is None else clock.mark
        take_back = (lambda marks: None) if clock is None else clock.take_back
        busy = torch.randn(64 if cpu else 4096, 64 if cpu else 4096, device=device)
        idle = _ns(mark, take_back, lambda: None)
        working = _ns(mark, take_back, lambda: busy @ busy)
        event: Any = torch.cuda.Event(enable_timing=True)
        theirs = _ns(event.record, lambda marks: None, lambda: None)
    found = Found({"ns_per_mark": idle, "ns_per_mark_while_the_gpu_works": working, "ns_per_record_of_torch": theirs})
    found.on_a_gpu(cpu, "a mark (ns) costs no more than torch's own event.record()", idle, theirs, idle <= theirs)
    share = _OF_A_STEP * working / _STEP_NS
    what = f"{_OF_A_STEP} marks cost of a step of 100 ms (share)"
    found.on_a_gpu(cpu, what, share, "at most 0.002", share <= 0.002)
    return found


def _clock() -> Any:
    torch.cuda.init()
    clock = device_clock()
    if clock is None:
        raise RuntimeError("device_clock() answers that no GPU is in use")
    return clock


def _ns(mark: Callable[[], Any], take_back: Callable[[list[Any]], None], launch: Callable[[], Any]) -> float:
    """The fastest round: others held something up in the slower ones. The first makes the events."""
    fastest = float("inf")
    for _ in range(_ROUNDS):
        launch()
        began = time.perf_counter_ns()
        marks = [mark() for _ in range(_MARKS)]
        fastest = min(fastest, (time.perf_counter_ns() - began) / _MARKS)
        torch.cuda.synchronize()
        take_back(marks)
    return fastest
