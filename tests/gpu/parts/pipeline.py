"""Two stages over NCCL on one GPU: the slow stage is the one built slow, and advice is run and compared."""

from __future__ import annotations

import statistics
from pathlib import Path

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, Stopwatch, config, hooked, steps_from, train, workload
from tests.gpu.ranks import joined, together

_STEPS = 4


def one_stage(directory: str, cpu: bool, layout: tuple[int, ...], vpp: int | None) -> list[float]:
    """One rank's part; its schedule's times while it was captured."""
    with joined(cpu) as device:
        gpt, watch = build(workload(cpu, pp=2, vpp=vpp, layers=8, layout=layout), device), Stopwatch()
        train(gpt, WARM, watch)
        watch.take()
        with hooked(gpt, config(Path(directory), cpu, **steps_from(gpt, _STEPS))):
            train(gpt, _STEPS, watch)
        return watch.take()


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, (6, 2), (4, 4), None)


def compare(work: Path, cpu: bool, built: tuple[int, ...], even: tuple[int, ...], vpp: int | None) -> Found:
    """The report of a pipeline that was ``built`` uneven, and the ``even`` one that it should predict."""
    together(one_stage, 2, str(work / "built"), cpu, built, vpp, cpu=cpu)
    again = together(one_stage, 2, str(work / "even"), cpu, even, vpp, cpu=cpu)
    (target,) = analyze(work / "built").targets
    measured = max(map(statistics.median, again))
    other = next((each for each in target.what_if.candidates if each.layers == (4, 4)), None)
    traces = [read_trace(path) for path in find_traces(work / "built")]
    passes = [phase for trace in traces for phase in trace.ranges if phase.name.label in ("forward", "backward")]
    step, error = target.measured.step_time_ms, target.what_if.replay_error
    found = Found(
        {
            "imbalance": target.measured.imbalance,
            "step_ms": step.mean if step else None,
            "replay_error": error.mean if error else None,
            "from_to_ms": other.reach_ms if other else None,
        }
    )
    found.on_a_gpu(cpu, "the slow stage is the one with six layers", target.slowest_stage, 0)
    expected = 2 * (vpp or 1) * len(traces) * workload(cpu).microbatches
    found.expect("every microbatch has its passes", len(passes), expected)
    found.on_a_gpu(
        cpu,
        "the prediction (ms) of 4+4 layers holds the re-run",
        other.step_ms if other else None,
        f"{measured:.4g} give or take its uncertainty",
        other is not None and other.reach_ms[0] <= measured <= other.reach_ms[1],
    )
    found.on_a_gpu(cpu, "every trace has kernels", sum(trace.gpu is not None for trace in traces), len(traces))
    return found
