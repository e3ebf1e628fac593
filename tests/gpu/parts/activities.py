"""What is known of a step, and what is null, by what Kineto records: both kinds, CUDA alone, the CPU alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, machine, steps_from, train, workload

_MODES = {"cpu and cuda": ("cpu", "cuda"), "cuda": ("cuda",), "cpu": ("cpu",)}
_STEPS = 3


def run(work: Path, cpu: bool) -> Found:
    found = Found()
    with machine(cpu, work) as device:
        gpt = build(workload(cpu), device)
        train(gpt, WARM)
        for name, asked in _MODES.items():
            if not cpu or asked == ("cpu",):
                wanted = config(work / name, cpu, activities=asked, kernels="cuda" in asked, **steps_from(gpt, _STEPS))
                with hooked(gpt, wanted):
                    train(gpt, _STEPS)
                _look(found, cpu, name, work / name)
    compute = [found.figures.get(f"{name}_compute_ms") for name in ("cuda", "cpu and cuda")]
    found.within(cpu, "compute (ms) with CUDA alone is that with both", *compute, 0.03)
    return found


def _look(found: Found, cpu: bool, name: str, directory: Path) -> None:
    traces = [read_trace(path) for path in find_traces(directory)]
    passes = sum(each.name.label in ("forward", "backward") for trace in traces for each in trace.ranges)
    expected = 2 * workload(cpu).microbatches * _STEPS
    found.expect(f"{name}: ranges of passes", passes, expected)
    devices = sorted({str(trace.metadata.device) for trace in traces})
    found.expect(f"{name}: the model's device in the metadata", devices, ["cpu" if cpu else "cuda"])
    recorded = {trace.metadata.profiler.recorded for trace in traces if trace.metadata.profiler}
    found.expect(f"{name}: recorded activities in the metadata", sorted(map(list, recorded)), [list(_MODES[name])])
    calls = [call for trace in traces for call in steps_of(trace)]
    (target,) = analyze(directory).targets
    stage = target.stages[0]
    known: dict[str, Any] = {
        "compute": stage.compute_ms is not None,
        "bubble": stage.bubble_ms is not None,
        "causes": bool(target.causes),
    }
    if stage.compute_ms is not None:
        found.figures[f"{name}_compute_ms"] = stage.compute_ms.mean
    if "cuda" in _MODES[name]:
        idle = sum(int((call.passes.compute == 0).sum()) for call in calls)
        found.expect(f"{name}: passes without a kernel", idle, 0)
        found.expect(f"{name}: compute is known", known["compute"], True)
    else:
        unseen = sorted({"None" if call.unseen is None else call.unseen.kind for call in calls})
        why = "why the windows say nothing"
        found.on_a_gpu(cpu, f"{name}: {why}", unseen, "no kernels were asked for", "None" not in unseen)
        found.on_a_gpu(cpu, f"{name}: what the report makes of it", known, dict.fromkeys(known, False))
