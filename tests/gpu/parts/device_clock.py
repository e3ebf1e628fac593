"""A pipeline of two stages over NCCL on one GPU, recorded by the timeline on the device's clock, against CUDA events.

The events stand around the same two functions of Megatron's, below megaprof's hooks.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megaprof.analysis.report.report import analyze
from megaprof.formats import codes
from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.testing.gpt import build
from tests.formats.step_records import events_of
from tests.gpu.found import Found
from tests.gpu.job import WARM, Stopwatch, config, hooked, steps_from, train, workload
from tests.gpu.ranks import joined, together

_STEPS = 8
_PASSES = {"forward_step": "forward", "backward_step": "backward"}


def one_stage(directory: str, cpu: bool) -> dict[str, float]:
    """Milliseconds of a usual step, and of its forwards and backwards, on this stage, by events."""
    with joined(cpu) as device:
        gpt, watch = build(workload(cpu, pp=2, layers=8, layout=(6, 2)), device), Stopwatch()
        with _watched() as passes:
            train(gpt, WARM)
            passes.clear()
            with hooked(gpt, config(Path(directory), cpu, tool=("timeline",), **steps_from(gpt, _STEPS))):
                train(gpt, _STEPS, watch)
                steps = watch.take()  # waits for the GPU: a step that it has not finished at the end has no times
        count = gpt.workload.microbatches
        found = {"step": statistics.median(steps)}
        for name, pairs in passes.items():
            times = [float(begin.elapsed_time(end)) for begin, end in pairs]
            found[name] = statistics.median(sum(times[n : n + count]) for n in range(0, len(times), count))
        return found


@contextlib.contextmanager
def _watched() -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """Pairs of events around every forward and backward, in their order."""
    from megatron.core.pipeline_parallel import schedules

    pairs: dict[str, list[tuple[Any, Any]]] = {}

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watch(*args: Any, **kwargs: Any) -> Any:
            cuda: Any = torch.cuda
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            result = original(*args, **kwargs)
            end.record()
            pairs.setdefault(name, []).append((begin, end))
            return result

        return watch

    with contextlib.ExitStack() as stack:
        for function, name in _PASSES.items():
            stack.enter_context(patch.object(schedules, function, watched(name, getattr(schedules, function))))
        yield pairs


def run(work: Path, cpu: bool) -> Found:
    by_events = together(one_stage, 2, str(work / "timelines"), cpu, cpu=cpu)
    found = Found()
    for stage, path in enumerate(sorted((work / "timelines").glob(f"*{SUFFIX}"))):
        timeline = read_timeline(path)
        found.expect(f"stage {stage}: steps", len(timeline.steps), _STEPS)
        clocks = {(each.timeline or {}).get("clock") for each in timeline.metadata}
        found.on_a_gpu(cpu, f"stage {stage}: its clock", sorted(map(str, clocks)), ["device"])
        for column, name in {"duration": "step", "forward": "forward", "backward": "backward"}.items():
            ours = statistics.median(timeline.steps[column]) / 1e3
            found.within(cpu, f"stage {stage}: {name} (ms) is that of the events", ours, by_events[stage][name], 0.02)
        found.figures[f"stage_{stage}_exchanges_ms"] = statistics.median(timeline.steps["p2p"]) / 1e3
        events = events_of(timeline, len(timeline.steps) - 1)
        kinds = [] if events is None else (events.code & codes.KIND_MASK).tolist()
        passes = [kinds.count(kind) for kind in (codes.FORWARD, codes.BACKWARD)]
        found.expect(f"stage {stage}: forwards and backwards of a step", passes, [workload(cpu).microbatches] * 2)
        found.expect(f"stage {stage}: exchanges are events", kinds.count(codes.P2P) > 0, True)
    (target,) = analyze(work / "timelines").targets
    found.on_a_gpu(cpu, "the slow stage is the one with six layers", target.slowest_stage, 0)
    return found
