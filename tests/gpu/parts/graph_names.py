"""Kernels of a replayed full-iteration graph bear the ranges that they were captured in, by torch's annotations."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats.inputs import unpacked
from tests.gpu.found import Found
from tests.gpu.job import machine, small
from tests.gpu.parts.whole_graph import train_replayed

_MODULE = "torch.cuda._graph_annotations"


def run(work: Path, cpu: bool) -> Found:
    missing = "tests/hooks/test_graph_names.py rehearses it, with a stand-in for CUDA's graphs" if cpu else _missing()
    if missing is not None:
        return Found(skipped=missing)
    with machine(cpu, work) as device:
        train_replayed(work / "traces", cpu, device, ranges="module")
    found = Found()
    every = range(small(cpu).microbatches)
    passes = {f"megaprof/{kind} mb={number} chunk=0" for kind in ("forward", "backward") for number in every}
    for path in sorted(find_traces(work / "traces"))[-2:]:  # the replayed steps
        stacks = list(_stacks(json.loads(b"".join(unpacked(path)))))
        step = path.name.split(".")[1]
        found.expect(f"{step}: kernels of the graph", len(stacks), "some", bool(stacks))
        share = sum(map(bool, stacks)) / max(len(stacks), 1)
        found.expect(f"{step}: share of them with a name", share, "at least 0.99", share >= 0.99)
        names = {name for stack in stacks for name in stack}
        found.expect(f"{step}: passes without a kernel", sorted(passes - names), [])
        layers = sum(name.startswith("megaprof/layer ") for name in names)
        passes_of_calls = [len(call.passes.kind) for call in steps_of(read_trace(path))]
        found.expect(f"{step}: passes in the report", passes_of_calls, [len(passes)])
        found.expect(f"{step}: layers among the names", layers, small(cpu).layers)
    return found


def _missing() -> str | None:
    if importlib.util.find_spec(_MODULE) is None:
        return f"torch {torch.__version__} has no {_MODULE} (2.13 has)"
    if import_module(_MODULE)._is_tools_id_unavailable():
        return "the driver, or cuda-bindings, does not number the nodes of graphs (CUDA 13.1 does)"
    return None


def _stacks(trace: Mapping[str, Any]) -> Iterator[list[str]]:
    """Of every kernel that a graph launched, the ranges that it was captured in (docs/trace-metadata.md)."""
    known = trace.get("megaprof_graphs", {"runs": [], "stacks": []})
    for event in trace["traceEvents"]:
        node = event.get("args", {}).get("graph node id") if event.get("cat") == "kernel" else None
        if node:
            yield next((known["stacks"][stack] for first, last, stack in known["runs"] if first <= node <= last), [])
