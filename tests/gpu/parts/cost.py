"""What each kind of recording adds to a step: the timeline and armed hooks by steps that alternate, before CUPTI was
ever attached and after, and what records windows in blocks; how long the end of a window blocks; and the report on the
windows against CUDA events around plain steps, with the kernel summary against torch's ``key_averages()``."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.summary import kernel_summary, read_events
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.capture import profiler
from megaprof.capture.session import Session
from megaprof.formats import codes
from megaprof.formats.ranges import FORWARD
from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.testing.gpt import BuiltGPT, build
from tests.analysis.rows import rows
from tests.formats.step_records import events_of
from tests.gpu.found import Found, difference
from tests.gpu.job import WARM, Stopwatch, activities, config, hooked, machine, steps_from, train, workload
from tests.gpu.stand_ins import Cudart, faked

_TURNS_S = 10.0
"""Seconds of steps that alternate, before windows; after them, half as much."""
_WINDOWS, _BEFORE, _BEHIND = 3, 3, 7
"""Steps of each kind of window, and steps with the hooks in place before and behind those that the report is about: a
capture keeps a timeline of them, of five behind it that it does not disturb."""
_ANY = ("1000000", "schedule")
"""Steps of armed hooks, which never come, and of the timeline, which has all."""


class _Job:
    """A model, and the milliseconds of its steps: whole, by the host, and from the schedule's begin to its end, by
    events."""

    def __init__(self, gpt: BuiltGPT, work: Path, cpu: bool) -> None:
        self.gpt, self.work, self.cpu = gpt, work, cpu
        self.watch = None if cpu else Stopwatch()
        self.number = 0

    def steps(self, count: int, options: dict[str, Any] | None) -> tuple[list[float], list[float]]:
        """Times of ``count`` steps with these options, or without hooks; one more comes before them, unless they are
        windows."""
        self.number += 1
        given = steps_from(self.gpt, count) | (options or {})
        hooks = None if options is None else hooked(self.gpt, config(self.work / str(self.number), self.cpu, **given))
        quiet = given["steps"] in _ANY or options is None
        with hooks or contextlib.nullcontext():
            whole, by_events = self.timed(count + quiet)
        return whole[quiet:], by_events[quiet:]

    def timed(self, count: int) -> tuple[list[float], list[float]]:
        """Times of ``count`` steps as things are."""
        whole = []
        for _ in range(count):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.gpt.train_step(self.watch)
            torch.cuda.synchronize()
            whole.append((time.perf_counter() - began) * 1e3)
        return whole, self.watch.take() if self.watch else whole

    def turns(self, seconds: float) -> dict[str, list[float]]:
        """Steps without hooks, with armed ones, and with the timeline, in turn."""
        modes: dict[str, dict[str, Any] | None] = {
            "off": None,
            "armed": {"steps": _ANY[0]},
            "off_again": None,
            "timeline": {"tool": ("timeline",), "steps": _ANY[1]},
        }
        found: dict[str, list[float]] = {name: [] for name in modes}
        ends = time.monotonic() + seconds
        while not found["timeline"] or (time.monotonic() < ends and not self.cpu):
            for name, options in modes.items():
                found[name] += self.steps(1, options)[0]
        return found


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, {})


def compare(work: Path, cpu: bool, options: dict[str, Any]) -> Found:
    """The cost of recording a job with these options of its workload."""
    windows: dict[str, dict[str, Any]] = {
        "ranges": {"tool": ("nsys",)},
        "cuda_only": {} if cpu else {"activities": ("cuda",)},
        "full": {"record_shapes": True, "with_stack": True},
    }
    with machine(cpu, work) as device, faked(cpu, {"cuda.is_initialized": lambda: True, "cuda.cudart": Cudart()}):
        job = _Job(build(workload(cpu, **options), device), work, cpu)
        train(job.gpt, WARM)
        plain = job.timed(5)[1]
        before = job.turns(_TURNS_S)
        first = job.gpt.step + _BEFORE
        wanted = config(work / "traces", cpu, kernels=True, steps=f"{first}:{first + _WINDOWS}")
        with hooked(job.gpt, wanted):
            whole, by_events = job.timed(_BEFORE + _WINDOWS)
            took = {"default": (whole[_BEFORE:], by_events[_BEFORE:])}
            summary = profiler.kernel_summary(timeout=60.0)
            job.timed(_BEHIND)
        with _ends() as ends:
            took |= {name: job.steps(_WINDOWS, given) for name, given in windows.items()}
        after = job.turns(_TURNS_S / 2)
        theirs = _theirs(found := Found(), job.gpt, work / "theirs", cpu)
        both = config(work / "both", cpu, tool=("torch", "timeline"), **steps_from(job.gpt, 3))
        with hooked(job.gpt, both):
            train(job.gpt, 3)
    found.expect("a kernel summary comes with the window", bool(summary and summary["kernels"]), True)
    _reported(found, cpu, work / "traces", plain)
    found.figures |= {"off_ms": statistics.median(before["off"]), "turns": len(before["off"])}
    off = found.figures["off_ms"]
    for name, (whole, by_events) in took.items():
        found.figures[f"{name}_ms"] = statistics.median(whole)
        found.figures[f"{name}_by_events_ms"] = statistics.median(by_events)
    for name in ("armed", "timeline", "off_again"):
        costs = {when: difference(turns[name], turns["off"]) for when, turns in (("before", before), ("after", after))}
        found.figures |= {f"{name}_costs_{when}_windows_ms": cost for when, cost in costs.items()}
        found.nothing(cpu, f"{name} (ms) costs nothing before any window", costs["before"], off, 0.005)
    count = min(len(before["off"]), len(after["off"]))
    found.figures["after_windows_ms"] = difference(after["off"][:count], before["off"][-count:])
    found.nothing(cpu, "steps after the windows (ms) are as before", found.figures["after_windows_ms"], off, 0.01)
    ours = statistics.median(ends[-_WINDOWS:])
    found.on_a_gpu(
        cpu, "the end of a window (ms) is sooner than torch's", ours, f"less than {theirs:.4g}", ours < theirs
    )
    timeline, kineto = _by_timeline(work / "both"), _by_kineto(work / "both")
    found.within(cpu, "the timeline's forwards (ms) are Kineto's", timeline, kineto, 0.02)
    return found


@contextlib.contextmanager
def _ends() -> Iterator[list[float]]:
    """Milliseconds that the end of each window blocks."""
    blocked: list[float] = []
    end = Session.end

    def timed_end(self: Session, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        end(self, *args, **kwargs)
        blocked.append((time.perf_counter() - began) * 1e3)

    with patch.object(Session, "end", timed_end):
        yield blocked


def _reported(found: Found, cpu: bool, directory: Path, plain: list[float]) -> None:
    (target,) = analyze(directory).targets
    stage, step = target.stages[0], target.step_time_ms
    found.figures["plain_by_events_ms"] = statistics.median(plain)
    found.figures["compute_ms"] = stage.compute_ms.mean if stage.compute_ms else None
    found.figures["host_bound_ms"] = stage.host_bound_ms.mean if stage.host_bound_ms else None
    expected = found.figures["plain_by_events_ms"]
    found.within(cpu, "the report's step (ms) is that of plain steps", step.mean if step else None, expected, 0.05)
    found.on_a_gpu(cpu, "the report knows what ran on the GPU", stage.host_bound_ms is not None, True)


def _theirs(found: Found, gpt: BuiltGPT, directory: Path, cpu: bool) -> float:
    """Milliseconds that the end of torch's own profiler blocks. Its kernels are looked at, too."""
    handler = torch.profiler.tensorboard_trace_handler(str(directory), use_gzip=True)
    given: dict[str, Any] = {"activities": activities(cpu), "record_shapes": True, "with_stack": True}
    with torch.profiler.profile(**given, on_trace_ready=handler) as profiler:
        gpt.train_step()
        torch.cuda.synchronize()
        began = time.perf_counter()
    took = (time.perf_counter() - began) * 1e3
    # Rows of operators hold the time of the kernels that they launched, which have rows of their own.
    rows = [row for row in profiler.key_averages() if str(row.device_type) == "DeviceType.CUDA"]
    kernels = [row for row in rows if not getattr(row, "is_user_annotation", False)]
    averages = sum(float(row.self_device_time_total) for row in kernels) / 1e3
    (path,) = directory.iterdir()
    summary = kernel_summary(read_events(path, python=False), {})
    ours = sum(each["self_us"] for each in summary["devices"] if not cpu) / 1e3
    found.within(cpu, "kernels (ms) add up as in key_averages()", ours, averages, 0.001)
    return took


def _by_kineto(directory: Path) -> float:
    """Milliseconds between the ends of the forwards of a step, the median of the captured steps."""
    calls = [call for path in find_traces(directory) for call in steps_of(read_trace(path))]
    return statistics.median(
        sum(each.end - each.start for each in rows(call) if each.kind == FORWARD) / 1e6 for call in calls
    )


def _by_timeline(directory: Path) -> float:
    """The same of the timeline, of the same steps."""
    (path,) = directory.glob(f"*{SUFFIX}")
    timeline, found = read_timeline(path), []
    for position in range(len(timeline.steps)):
        events = events_of(timeline, position)
        if events is not None:
            forwards = events.code & codes.KIND_MASK == codes.FORWARD
            found.append(float((events.end - events.start)[forwards].sum()) / 1e3)
    return statistics.median(found)
