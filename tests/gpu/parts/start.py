"""Windows of two ranks: what starting the profiler takes on each, and the report's step is the usual one all the same.

The first window of a process is the one in which CUPTI attaches.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, Stopwatch, config, hooked, train, workload
from tests.gpu.ranks import joined, together

_BEFORE, _WINDOWS = 2, 3


def one_stage(directory: str, cpu: bool) -> float:
    """Milliseconds of a usual step on this stage, by events."""
    with joined(cpu) as device:
        gpt, watch = build(workload(cpu, pp=2, layers=8), device), Stopwatch()
        train(gpt, WARM)
        train(gpt, 5, watch)
        usual = statistics.median(watch.take())
        first = gpt.step + _BEFORE
        with hooked(gpt, config(Path(directory), cpu, steps=f"{first}:{first + _WINDOWS}")):
            train(gpt, _BEFORE + _WINDOWS)
        return usual


def run(work: Path, cpu: bool) -> Found:
    usual = max(together(one_stage, 2, str(work / "traces"), cpu, cpu=cpu))
    traces = sorted((read_trace(path) for path in find_traces(work / "traces")), key=lambda each: each.metadata.steps)
    found = Found()
    starts: dict[int, list[float]] = {}
    for trace in traces:
        how = trace.metadata.profiler
        if how is not None and how.start_ns is not None:
            starts.setdefault(trace.metadata.coords.rank, []).append(how.start_ns / 1e6)
    for rank, times in sorted(starts.items()):
        found.figures[f"rank_{rank}_start_ms"] = times
    found.expect("windows that say what starting took", sum(map(len, starts.values())), 2 * _WINDOWS)
    prepared = [how.prepared for trace in traces if (how := trace.metadata.profiler)]
    # On a busy CPU the gap between two calls may be longer than a call, and then nothing is prepared.
    found.on_a_gpu(cpu, "the first windows were prepared in the call before", prepared[:2], [True, True])
    (target,) = analyze(work / "traces").targets
    step = target.measured.step_time_ms
    found.within(cpu, "the report's step (ms) is the usual one", step.mean if step else None, usual, 0.1)
    found.within(cpu, "the imbalance of an even pipeline", target.measured.imbalance, 1.0, 0.1)
    return found
