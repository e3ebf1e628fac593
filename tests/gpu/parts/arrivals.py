"""NCCL's own times of collectives: that every one has one, and what timing costs the host."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from megaprof.recorders import flight
from tests.gpu.found import Found
from tests.gpu.job import WARM
from tests.gpu.ranks import joined, together

_COUNT = 500


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
        limit = time.monotonic() + (0 if cpu else 30)
        # Only its watchdog times them, and it looks now and then. One that has ended may still be without a time.
        while not all(entry.retired for entry in flight.entries()) and time.monotonic() < limit:
            time.sleep(0.1)
        return 1e6 * host / _COUNT, [entry.duration_ms for entry in flight.entries()[-_COUNT:]]


def run(work: Path, cpu: bool) -> Found:
    found = Found()
    for timed in (True,) if cpu else (False, True):
        env = {flight.SIZE: "20000", flight.TIMING: str(int(timed))}
        (each,) = together(called, 1, cpu, cpu=cpu, env=env)
        name = "timed" if timed else "untimed"
        found.figures[f"all_reduce_{name}_us"] = each[0]
        found.expect(f"{name}: collectives in the recorder", len(each[1]), _COUNT)
        known = sum(ms is not None for ms in each[1])
        found.on_a_gpu(cpu, f"{name}: collectives of which torch says how long they ran", known, _COUNT * timed)
    return found
