"""CUDA's memory history of a window in which an allocation fails."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import torch

from megaprof.testing import faults
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, machine, small, steps_from, train
from tests.gpu.stand_ins import faked


def run(work: Path, cpu: bool) -> Found:
    answers: dict[str, Any] = {
        "cuda.is_initialized": lambda: True,
        "cuda.memory._record_memory_history": lambda *_, **__: None,
        "cuda.memory._snapshot": lambda: {"segments": [], "device_traces": [[]]},
        "_C._cuda_isHistoryEnabled": lambda: False,
    }

    def run_out() -> None:
        if not cpu:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(1 << 42, dtype=torch.uint8, device="cuda")

    with machine(cpu, work) as device, faked(cpu, answers):
        gpt = build(small(cpu), device)
        train(gpt, WARM)
        faults.before_forward(gpt.chunks[0], run_out)
        with hooked(gpt, config(work / "files", cpu, tool=("memory",), **steps_from(gpt, 1))):
            train(gpt, 1)
    files = sorted((work / "files").glob("*.memory.pickle"))
    found = Found({path.name.partition("rank00000.")[2]: path.stat().st_size for path in files})
    found.expect("snapshots of the window", len(files), 1)
    actions = {event["action"] for path in files for events in _snapshot(path)["device_traces"] for event in events}
    found.on_a_gpu(cpu, "the snapshot has the allocation that failed", "oom" in actions, True)
    return found


def _snapshot(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return dict(pickle.load(file))
