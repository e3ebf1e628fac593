"""CUDA graphs of single layers: captured, and what has no ranges is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.install import install_hooks
from megaprof.testing import gpt as building
from megaprof.testing.workload import GPTWorkload
from tests.gpu.found import Found
from tests.gpu.job import config, machine, train, workload


def run(work: Path, cpu: bool) -> Found:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if cpu:
        return Found(skipped="tests/hooks/test_layer_graphs.py rehearses it, with replaced CUDA calls")
    configure = building._config

    def configured(asked: GPTWorkload) -> Any:
        made = configure(asked)
        made.cuda_graph_impl = "local"
        return made

    with machine(cpu, work) as device:
        with patch.object(building, "_config", configured):
            get_cuda_rng_tracker(use_cudagraphable_rng=True)
            gpt = building.build(workload(cpu), device)
        with install_hooks(gpt.chunks, config(work / "traces", cpu, skip_first=0, repeat=0, ranges="module")):
            train(gpt, 5)
    metadata = [read_trace(path).metadata for path in find_traces(work / "traces")]
    said = sorted({each.reason for one in metadata for each in one.ranges.without})
    found = Found()
    found.expect("every step is captured", len(metadata), 5)
    found.expect("what has no ranges is said", said, "a CUDA graph", any("CUDA graph" in each for each in said))
    return found
