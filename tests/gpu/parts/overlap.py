"""Gradient reduction of two replicas that overlaps with compute: names of process groups on NCCL's kernels."""

from __future__ import annotations

import json
from pathlib import Path

from megaprof.analysis.trace.traces import find_traces
from megaprof.formats.inputs import unpacked
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, small, steps_from, train
from tests.gpu.ranks import joined, together


def one_rank(directory: str, cpu: bool) -> None:
    """One replica."""
    with joined(cpu) as device:
        gpt = build(small(cpu, dp=2, overlap_grad_reduce=True), device)
        train(gpt, WARM)
        with hooked(gpt, config(Path(directory), cpu, **steps_from(gpt, 1))):
            train(gpt, 1)


def run(work: Path, cpu: bool) -> Found:
    together(one_rank, 2, str(work / "traces"), cpu, cpu=cpu)
    traces = [json.loads(b"".join(unpacked(path)))["traceEvents"] for path in find_traces(work / "traces")]
    kernels = [
        each for trace in traces for each in trace if each.get("cat") == "kernel" and "nccl" in each["name"].lower()
    ]
    named = sorted({str(each["args"].get("Process Group Description")) for each in kernels})
    found = Found({"nccl_kernels": len(kernels), "groups_on_kernels": named})
    found.expect("captured", len(traces), 2)
    found.on_a_gpu(cpu, "kernels of NCCL", len(kernels), "some", bool(kernels))
    found.on_a_gpu(cpu, "kernels of NCCL name their group", named, "no kernel without", "None" not in named)
    return found
