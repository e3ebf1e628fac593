"""One rank on NCCL in bf16: the report against CUDA events, the kernel summary against torch's ``key_averages()``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from megaprof.analysis.report.report import analyze
from megaprof.testing.gpt import build
from tests.artifacts.summaries import summarise
from tests.gpu.found import Found
from tests.gpu.job import WARM, Stopwatch, activities, config, hooked, machine, train, workload

_AROUND, _WINDOWS = 3, 3
"""Steps before and after the windows, with the hooks in place, and windows."""


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, {})


def compare(work: Path, cpu: bool, options: dict[str, Any]) -> Found:
    """The report on windows of a job with these options of its workload."""
    with machine(cpu, work) as device:
        gpt, watch = build(workload(cpu, **options), device), Stopwatch()
        train(gpt, WARM, watch)
        watch.take()
        train(gpt, 8, watch)
        plain = statistics.median(watch.take())
        first = gpt.step + _AROUND
        with hooked(gpt, config(work / "traces", cpu, kernels=True, steps=f"{first}:{first + _WINDOWS}")) as handle:
            train(gpt, _AROUND + _WINDOWS, watch)
            in_windows = statistics.median(watch.take()[_AROUND:])
            summary = handle.kernel_summary(60.0)
            train(gpt, _AROUND)
        with torch.profiler.profile(activities=activities(cpu)) as profiler:
            train(gpt, 1)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(work / "own.json"))
    averages = _kernels_ms(profiler)
    with (work / "own.json").open() as file:
        ours = sum(each["self_us"] for each in summarise(file)["devices"] if not cpu) / 1e3
    (target,) = analyze(work / "traces").targets
    stage, step = target.measured.stages[0], target.measured.step_time_ms
    found = Found(
        {
            "step_ms_by_events": plain,
            "step_ms_in_windows_by_events": in_windows,
            "step_ms_in_the_report": step.mean if step else None,
            "compute_ms": stage.compute_ms.mean if stage.compute_ms else None,
            "host_bound_ms": stage.host_bound_ms.mean if stage.host_bound_ms else None,
        }
    )
    found.within(cpu, "the report's step (ms) is that of the events", step.mean if step else None, plain, 0.1)
    found.within(cpu, "kernels (ms) add up as in key_averages()", ours, averages, 0.001)
    found.expect("a kernel summary comes with the window", bool(summary and summary["kernels"]), True)
    found.on_a_gpu(cpu, "the report knows what ran on the GPU", stage.host_bound_ms is not None, True)
    return found


def _kernels_ms(profiler: torch.profiler.profile) -> float:
    """Rows of operators hold the time of the kernels that they launched, which have rows of their own."""
    rows = [row for row in profiler.key_averages() if str(row.device_type) == "DeviceType.CUDA"]
    return sum(float(row.self_device_time_total) for row in rows if not getattr(row, "is_user_annotation", False)) / 1e3
