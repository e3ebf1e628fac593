"""Two stages over NCCL on one GPU: the slow stage is the one built slow, advice is run and compared, and what starting
the profiler takes on each rank."""

from __future__ import annotations

import statistics
from pathlib import Path

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, Stopwatch, config, hooked, train, workload
from tests.gpu.ranks import joined, together

_BEFORE, _WINDOWS, _BEHIND = 3, 4, 7


def one_stage(directory: str, cpu: bool, layouts: tuple[tuple[int, ...], ...], vpp: int | None) -> list[list[float]]:
    """One rank's part; plain steps and captured ones of each layout, by events."""
    found = []
    with joined(cpu) as device:
        watch = Stopwatch()
        for layout in layouts:
            gpt = build(workload(cpu, pp=2, vpp=vpp, layers=8, layout=layout), device)
            train(gpt, WARM, watch)
            watch.take()
            train(gpt, _WINDOWS, watch)
            found.append(watch.take())
            first = gpt.step + _BEFORE
            wanted = config(Path(directory) / str(layout), cpu, steps=f"{first}:{first + _WINDOWS}")
            with hooked(gpt, wanted):
                train(gpt, _BEFORE + _WINDOWS + _BEHIND, watch)
            found.append(watch.take()[_BEFORE : _BEFORE + _WINDOWS])
    return found


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, (6, 2), (4, 4), None)


def compare(work: Path, cpu: bool, built: tuple[int, ...], even: tuple[int, ...], vpp: int | None) -> Found:
    """The report of a pipeline that was ``built`` uneven, and the ``even`` one that it should predict."""
    ranks = together(one_stage, 2, str(work), cpu, (built, even), vpp, cpu=cpu)
    # A step takes as long as on the rank on which it takes longest.
    plain, captured, plain_even, captured_even = (
        max(map(statistics.median, each)) for each in zip(*ranks, strict=True)
    )
    (target,) = analyze(work / str(built)).targets
    (target_even,) = analyze(work / str(even)).targets
    step, error = target.step_time_ms, target.what_if.replay_error
    found = Found(
        {
            "plain_ms": plain,
            "in_windows_ms": captured,
            "even_plain_ms": plain_even,
            "even_in_windows_ms": captured_even,
            "imbalance": target.imbalance,
            "replay_error": error.mean if error else None,
        }
    )
    found.within(cpu, "the report's step (ms) is that of plain steps", step.mean if step else None, plain, 0.05)
    found.on_a_gpu(cpu, "the slow stage is the one with six layers", target.slowest_stage, 0)
    found.within(cpu, "the imbalance of the even pipeline", target_even.imbalance, 1.0, 0.1)
    other = next((each for each in target.what_if.candidates if each.layers == (4, 4)), None)
    found.on_a_gpu(
        cpu,
        "the prediction (ms) of 4+4 layers holds the re-run",
        (other.step_ms.low, other.step_ms.high) if other else None,
        f"holds {plain_even:.4g}",
        other is not None and other.step_ms.holds(plain_even),
    )
    _of_the_files(found, cpu, work / str(built), 2 * (vpp or 1) * workload(cpu).microbatches)
    return found


def _of_the_files(found: Found, cpu: bool, directory: Path, passes: int) -> None:
    traces = sorted((read_trace(path) for path in find_traces(directory)), key=lambda each: each.metadata.steps)
    found.expect("windows", len(traces), 2 * _WINDOWS)
    seen = [each for trace in traces for each in trace.ranges if each.name.label in ("forward", "backward")]
    found.expect("every microbatch has its passes", len(seen), passes * len(traces))
    found.on_a_gpu(cpu, "every trace has kernels", sum(trace.gpu is not None for trace in traces), len(traces))
    how = [(trace.metadata.coords.rank, trace.metadata.profiler) for trace in traces]
    for rank in (0, 1):
        starts = [each.start_ns / 1e6 for which, each in how if which == rank and each and each.start_ns is not None]
        found.figures[f"rank_{rank}_start_ms"] = starts
        found.expect(f"rank {rank}: windows that say what starting took", len(starts), _WINDOWS)
    # On a busy CPU the gap between two calls may be longer than a call, and then nothing is prepared.
    prepared = [each.prepared for _, each in how[:2] if each]
    found.on_a_gpu(cpu, "the first windows were prepared in the call before", prepared, [True, True])
