"""CUDA's memory history of a window, and the snapshot when an allocation fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaprof.testing import faults
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, machine, small, steps_from, train
from tests.gpu.stand_ins import faked


def run(work: Path, cpu: bool) -> Found:
    observers: list[Callable[[int, int, int, int], None]] = []
    answers: dict[str, Any] = {
        "cuda.is_initialized": lambda: True,
        "cuda.memory._record_memory_history": lambda *_, **__: None,
        "cuda.memory._snapshot": lambda: {"segments": [], "device_traces": [[]]},
        "_C._cuda_attach_out_of_memory_observer": observers.append,
        "_C._cuda_isHistoryEnabled": lambda: False,
    }

    def run_out() -> None:
        if cpu:
            observers[0](0, 1 << 40, 0, 0)
        else:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(1 << 42, dtype=torch.uint8, device="cuda")

    with machine(cpu, work) as device, faked(cpu, answers):
        gpt = build(small(cpu), device)
        train(gpt, WARM)
        faults.before_forward(gpt.chunks[0], run_out)
        with hooked(gpt, config(work / "files", cpu, tool=("memory",), **steps_from(gpt, 1))):
            train(gpt, 1)
    sizes = {path.name.partition("rank00000.")[2]: path.stat().st_size for path in (work / "files").glob("*.pickle")}
    found = Found(dict(sizes))
    found.expect("a snapshot of the window", sorted(sizes), "memory.pickle", "memory.pickle" in sizes)
    found.expect("a snapshot on out of memory", sorted(sizes), "oom.memory.pickle", "oom.memory.pickle" in sizes)
    return found
