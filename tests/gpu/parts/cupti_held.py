"""Another tool holds CUPTI, which takes one subscriber in a process: a window must say that its kernels are missing.

The other tool is this part itself, which subscribes before Kineto does.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, machine, small, steps_from, train

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class _Said(logging.Handler):
    """What megaprof logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(work: Path, cpu: bool) -> Found:
    if cpu:
        return Found(skipped="tests/analysis/diagnosis/test_unseen.py rehearses it, with synthetic traces")
    library = loaded("libcupti.so")
    if library is None:
        return Found(skipped="torch brings no CUPTI of its own that could be held before Kineto holds it")
    held = _Held(library)
    said = _Said()
    logging.getLogger("megaprof").addHandler(said)
    with machine(cpu, work) as device:
        gpt = build(small(cpu), device)
        train(gpt, WARM)
        with hooked(gpt, config(work / "traces", cpu, **steps_from(gpt, 2))):
            train(gpt, 2)
    traces = [read_trace(path) for path in find_traces(work / "traces")]
    kernels = [(trace.gpu is not None) for trace in traces]
    unseen = [call.unseen is not None for trace in traces for call in steps_of(trace)]
    found = Found({"cuptiSubscribe": held.status, "windows_with_kernels": sum(kernels)})
    found.expect("CUPTI is held", held.status, 0)
    found.expect("windows", len(traces), 2)
    found.expect("a window says that kernels are missing where they are", unseen, [not each for each in kernels])
    if not all(kernels):
        about = [line for line in said.lines if "kernel" in line]
        found.expect("the log says so when the window closes", about, "a line about kernels", bool(about))
        (target,) = analyze(work / "traces").targets
        found.expect("the report knows a bubble", target.stages[0].bubble_ms is not None, False)
        found.expect("the report names causes", len(target.causes), 0)
    return found


class _Held:
    """A subscription, until the process ends."""

    def __init__(self, library: str) -> None:
        self._callback = _CALLBACK(lambda *_: None)
        self._subscriber = ctypes.c_void_p()
        cupti: Any = ctypes.CDLL(library)
        self.status = int(cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None))


def loaded(library: str) -> str | None:
    """The path of the shared library of this name that is loaded in this process, whatever its version."""
    paths = {line.rpartition(" ")[2] for line in Path("/proc/self/maps").read_text().splitlines()}
    return next((path for path in sorted(paths) if path.rpartition("/")[2].startswith(library)), None)
