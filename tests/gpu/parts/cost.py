"""What each kind of recording adds to a step, in alternating blocks, and how long the end of a window blocks."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megaprof.analysis.trace.calls import calls_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.capture.session import Session
from megaprof.formats.ranges import FORWARD
from megaprof.formats.steps import codes
from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.testing.gpt import BuiltGPT, build
from tests.gpu.found import Found
from tests.gpu.job import WARM, activities, config, hooked, machine, steps_from, train, workload
from tests.gpu.stand_ins import Cudart, faked

_BLOCKS, _STEPS = 6, 5
"""How often each kind of recording takes its turn, and for how many steps."""


def run(work: Path, cpu: bool) -> Found:
    modes: dict[str, dict[str, Any] | None] = {
        "off": None,
        "armed": {"steps": "1000000"},
        "ranges": {"tool": ("nsys",)},
        "cuda_only": {} if cpu else {"activities": ("cuda",)},
        "full": {"record_shapes": True, "with_stack": True},
        "timeline": {"tool": ("timeline",)},
    }
    took: dict[str, list[float]] = {name: [] for name in modes}
    blocked: list[float] = []
    end = Session.end

    def timed_end(self: Session, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        end(self, *args, **kwargs)
        blocked.append((time.perf_counter() - began) * 1e3)

    usual: dict[str, list[float]] = {}
    steps = 2 if cpu else _STEPS
    with machine(cpu, work) as device, faked(cpu, {"cuda.is_initialized": lambda: True, "cuda.cudart": Cudart()}):
        gpt = build(workload(cpu), device)
        train(gpt, WARM)
        for block in range(1 if cpu else _BLOCKS):
            for name, options in modes.items():
                directory = work / f"{name}{block}"
                wanted = None if options is None else config(directory, cpu, **{**steps_from(gpt, steps), **options})
                hooks = hooked(gpt, wanted) if wanted else None
                blocked.clear()
                with patch.object(Session, "end", timed_end), hooks or contextlib.nullcontext():
                    for _ in range(steps):
                        torch.cuda.synchronize()
                        began = time.perf_counter()
                        gpt.train_step()
                        torch.cuda.synchronize()
                        took[name].append((time.perf_counter() - began) * 1e3)
                usual.setdefault(name, []).extend(blocked)
        theirs = _theirs(gpt, work / "theirs", cpu)
        both = config(work / "both", cpu, tool=("torch", "timeline"), **steps_from(gpt, 3))
        with hooked(gpt, both):
            train(gpt, 3)
    found = Found({f"{name}_ms": statistics.median(each) for name, each in took.items()})
    ours = statistics.median(usual["full"])
    found.on_a_gpu(
        cpu, "the end of a window (ms) is sooner than torch's", ours, f"less than {theirs:.4g}", ours < theirs
    )
    found.within(cpu, "armed (ms) is as off", found.figures["armed_ms"], found.figures["off_ms"], 0.01)
    timeline, kineto = _by_timeline(work / "both"), _by_kineto(work / "both")
    found.within(cpu, "the timeline's forwards (ms) are Kineto's", timeline, kineto, 0.02)
    return found


def _theirs(gpt: BuiltGPT, directory: Path, cpu: bool) -> float:
    """Milliseconds that the end of torch's own profiler blocks."""
    handler = torch.profiler.tensorboard_trace_handler(str(directory), use_gzip=True)
    given: dict[str, Any] = {"activities": activities(cpu), "record_shapes": True, "with_stack": True}
    with torch.profiler.profile(**given, on_trace_ready=handler):
        gpt.train_step()
        began = time.perf_counter()
    return (time.perf_counter() - began) * 1e3


def _by_kineto(directory: Path) -> float:
    """Milliseconds between the ends of the forwards of a step, the median of the captured steps."""
    calls = [call for path in find_traces(directory) for call in calls_of(read_trace(path))]
    return statistics.median(
        sum(each.end - each.start for each in call.phases if each.kind == FORWARD) / 1e6 for call in calls
    )


def _by_timeline(directory: Path) -> float:
    """The same of the timeline, of the same steps."""
    (path,) = directory.glob(f"*{SUFFIX}")
    timeline, found = read_timeline(path), []
    for position in range(len(timeline.steps)):
        events = timeline.events(position)
        if events is not None:
            forwards = events.code & codes.KIND_MASK == codes.FORWARD
            found.append(float((events.end - events.start)[forwards].sum()) / 1e3)
    return statistics.median(found)
