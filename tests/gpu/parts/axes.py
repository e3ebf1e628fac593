"""Two ranks of tensor parallelism over NCCL: whose communication its kernels are, with and without CPU operators.

NCCL takes one rank per GPU, so this part needs two.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from megaprof.analysis.trace.calls import calls_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing.gpt import build
from megaprof.testing.launcher import init_distributed, run_ranks
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, device_of, hooked, steps_from, train, workload


def one_rank(directory: str, cpu: bool) -> None:
    """Windows with both kinds of activities, and with CUDA alone."""
    with device_of(cpu) as device:
        if cpu:
            init_distributed()
        else:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
        gpt = build(workload(cpu, tp=2), device)
        train(gpt, WARM)
        for name, options in {"both": {}, "cuda": {} if cpu else {"activities": ("cuda",)}}.items():
            with hooked(gpt, config(Path(directory) / name, cpu, **options, **steps_from(gpt, 2))):
                train(gpt, 2)


def run(work: Path, cpu: bool) -> Found:
    if not cpu and torch.cuda.device_count() < 2:
        return Found(skipped="there is one GPU, and NCCL takes one rank per GPU")
    run_ranks(one_rank, 2, str(work), cpu, timeout=300)
    found = Found()
    exposed = {}
    for name in ("both", "cuda"):
        calls = [call for path in find_traces(work / name) for call in calls_of(read_trace(path))]
        found.expect(f"{name}: windows", len(calls), 4)
        exposed[name] = [None if (ns := call.exposed_ns["tp"]) is None else ns / 1e6 for call in calls]
        found.figures[f"{name}_exposed_tp_ms"] = exposed[name]
    seen = all(exposed["both"])
    found.on_a_gpu(cpu, "with CPU operators, exposed tensor parallelism (ms)", exposed["both"], "above zero", seen)
    never_zero = all(each is None or each > 0 for each in exposed["cuda"])
    found.on_a_gpu(cpu, "without them it is null, or above zero", exposed["cuda"], "no zero", never_zero)
    return found
