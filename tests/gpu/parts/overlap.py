"""Gradient reduction that overlaps with compute, in a group of one: names of process groups on NCCL's kernels."""

from __future__ import annotations

import json
from pathlib import Path

from megaprof.analysis.trace.traces import find_traces
from megaprof.formats.inputs import unpacked
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, machine, steps_from, train, workload


def run(work: Path, cpu: bool) -> Found:
    with machine(cpu, work) as device:
        gpt = build(workload(cpu, overlap_grad_reduce=True), device)
        train(gpt, WARM)
        with hooked(gpt, config(work / "traces", cpu, **steps_from(gpt, 1))):
            train(gpt, 1)
    (path,) = find_traces(work / "traces")
    events = json.loads(b"".join(unpacked(path)))["traceEvents"]
    kernels = [each for each in events if each.get("cat") == "kernel" and "nccl" in each["name"].lower()]
    named = sorted({str(each["args"].get("Process Group Description")) for each in kernels})
    found = Found({"nccl_kernels": len(kernels), "groups_on_kernels": named})
    found.expect("captured", bool(events), True)
    found.on_a_gpu(cpu, "kernels of NCCL name their group", named, "no kernel without", "None" not in named)
    return found
