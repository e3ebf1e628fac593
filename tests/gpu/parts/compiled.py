"""A module compiled by ``torch.compile``: captured, and said in the metadata.

It is small, because a whole layer takes minutes to compile.
"""

from __future__ import annotations

import os
from pathlib import Path

from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing import faults
from megaprof.testing.gpt import build
from tests.built import digests
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, machine, small, steps_from, train


def run(work: Path, cpu: bool) -> Found:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # sooner than it takes to begin as many processes as cores
    with machine(cpu, work) as device:
        gpt = build(small(cpu, layers=1), device)
        (layer,) = faults.layers(gpt.chunks)
        layer.mlp.compile()
        train(gpt, WARM)
        _, before = digests(gpt)
        with hooked(gpt, config(work / "traces", cpu, ranges="module", **steps_from(gpt, 1))):
            train(gpt, 1)
    metadata = [read_trace(path).metadata for path in find_traces(work / "traces")]
    said = sorted({each.reason for one in metadata for each in one.ranges.without})
    found = Found()
    found.expect("windows", len(metadata), 1)
    found.on_a_gpu(cpu, "what has no ranges is said", said, "compiled", any("compile" in each for each in said))
    found.expect("it trained", digests(gpt)[1] != before, True)
    return found
