"""Who comes last, by NCCL's own times: that every collective has one, what timing costs, and which rank is named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprof.analysis.report.report import analyze
from megaprof.formats.timeline import COLLECTIVES, SUFFIX, read_timeline
from megaprof.recorders import flight
from megaprof.testing.faults import layers
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, train, workload
from tests.gpu.ranks import joined, together

_COUNT, _STEPS, _LATE_MS = 500, 16, 20.0
#: Of every rank: timed or not, and with room for all steps.
_ENV = {flight.SIZE: "20000"}


def called(cpu: bool) -> tuple[float, list[float | None]]:
    """Microseconds of the host for one all-reduce, and the milliseconds that torch says of each."""
    with joined(cpu) as device:
        values = torch.ones(1 << 16, device=device)
        for _ in range(WARM):
            dist.all_reduce(values)
        began = time.perf_counter()
        for _ in range(_COUNT):
            dist.all_reduce(values)
        host = time.perf_counter() - began
        limit = time.monotonic() + 30
        while not all(entry.ended for entry in flight.entries()) and time.monotonic() < limit:
            time.sleep(0.1)  # torch's watchdog looks now and then
        return 1e6 * host / _COUNT, [entry.duration_ms for entry in flight.entries()[-_COUNT:]]


def one_rank(directory: str, cpu: bool, late: int | None) -> None:
    """A job of two tensor-parallel ranks, one of which may wait in its first layer."""

    def wait(*_: Any) -> None:
        if cpu:
            time.sleep(_LATE_MS / 1e3)
        else:
            torch.cuda._sleep(int(_LATE_MS * 1.5e6))  # in cycles

    with joined(cpu) as device:
        gpt = build(workload(cpu, tp=2), device)
        if dist.get_rank() == late:
            layers(gpt.chunks)[0].self_attention.register_forward_pre_hook(wait)
        train(gpt, WARM)
        with hooked(gpt, config(Path(directory), cpu, tool=("timeline",), collectives=True)):
            train(gpt, _STEPS)


def run(work: Path, cpu: bool) -> Found:
    found = Found()
    for timed in (True,) if cpu else (False, True):
        (each,) = together(called, 1, cpu, cpu=cpu, env={**_ENV, flight.TIMING: str(int(timed))})
        name = "timed" if timed else "untimed"
        found.figures[f"all_reduce_{name}_us"] = each[0]
        found.expect(f"{name}: collectives in the recorder", len(each[1]), _COUNT)
        known = sum(ms is not None for ms in each[1])
        found.on_a_gpu(cpu, f"{name}: collectives of which torch says how long they ran", known, _COUNT * timed)
    for late in (1,) if cpu else (None, 1):
        own = work / f"late-{late}"
        together(one_rank, 2, str(own), cpu, late, cpu=cpu, env={**_ENV, flight.TIMING: "1"})
        timelines = [read_timeline(path) for path in own.rglob(f"*{SUFFIX}")]
        steps = [len(timeline.facts(COLLECTIVES)) for timeline in timelines]
        found.expect(f"late {late}: steps of each rank with its collectives", steps, [_STEPS, _STEPS])
        (target,) = analyze(own).targets
        slow = [rank for cause in target.causes if cause.kind == "slow_rank" for rank in cause.ranks]
        found.on_a_gpu(cpu, f"late {late}: ranks that are named", slow, [] if late is None else [late])
        exposed = target.stages[0].exposed_ms["tp"]
        ms = None if exposed is None else exposed.mean
        found.on_a_gpu(cpu, f"late {late}: exposed tensor parallelism (ms)", ms, "a number", ms is not None)
    return found
