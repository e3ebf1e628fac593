"""CUDA graphs of single layers: captured, and what has no ranges is said."""

from __future__ import annotations

from pathlib import Path

from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.autoload.install import install_hooks
from tests.gpu.found import Found
from tests.gpu.job import build_with, config, machine, small, train


def run(work: Path, cpu: bool) -> Found:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if cpu:
        return Found(skipped="tests/hooks/test_layer_graphs.py rehearses it, with replaced CUDA calls")
    with machine(cpu, work) as device:
        get_cuda_rng_tracker(use_cudagraphable_rng=True)
        gpt = build_with(small(cpu), device, cuda_graph_impl="local")
        with install_hooks(gpt.chunks, config(work / "traces", cpu, schedule="0:0:0:1:0", ranges="module")):
            train(gpt, 5)
    metadata = [read_trace(path).metadata for path in find_traces(work / "traces")]
    said = sorted({each.reason for one in metadata for each in one.ranges.without})
    found = Found()
    found.expect("every step is captured", len(metadata), 5)
    found.expect("what has no ranges is said", said, "a CUDA graph", any("CUDA graph" in each for each in said))
    return found
