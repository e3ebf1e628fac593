"""Any rank of a larger job on the one GPU, with real kernels and a process group that exchanges nothing.

What is checked needs no peers: where the rank stands, what its files and ranges are called, which passes it has, and
which kernels belong to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import Trace, find_traces, read_trace
from megaprof.formats.names import parse_artifact_name
from megaprof.formats.ranges import BACKWARD, COMBINED, FORWARD
from megaprof.testing.gpt import BuiltGPT, build
from tests.analysis.rows import Row, rows
from tests.built import layer_numbers
from tests.gpu.fake_world import rank_of
from tests.gpu.found import Found
from tests.gpu.job import config, device_of, hooked, shorten, small, steps_from, train


@dataclass(frozen=True)
class _Job:
    """One rank of one job."""

    rank: int
    options: dict[str, Any]
    coords: str
    """Where Megatron's order of axes (tp, cp, ep, dp, pp) puts the rank."""
    kind: str = "dense"
    """Of its layers."""
    cp: int = 1
    modules: tuple[str, ...] = ("layer", "attention", "mlp")
    ends: tuple[str, ...] = ()
    """Of the model: ``embedding``, ``output_layer``."""


_JOBS = {
    "TP=2 PP=2 DP=2, last rank": _Job(7, {"tp": 2, "pp": 2, "dp": 2}, "tp1 cp0 ep0 dp1 pp1", ends=("output_layer",)),
    "PP=4 VPP=2, third stage": _Job(2, {"pp": 4, "vpp": 2, "layers": 8}, "tp0 cp0 ep0 dp0 pp2"),
    "PP=2 EP=2 of experts, second rank": _Job(
        1,
        {"pp": 2, "ep": 2},
        "tp0 cp0 ep1 dp1 pp0",
        kind="moe",
        modules=("layer", "attention", "router", "token_dispatch", "experts", "token_combine"),
        ends=("embedding",),
    ),
    "PP=2 CP=2 DP=2, rank 6": _Job(6, {"pp": 2, "dp": 4}, "tp0 cp0 ep0 dp1 pp1", cp=2, ends=("output_layer",)),
    "PP=2 VPP=2 EP=2, combined 1F1B": _Job(
        1,
        {"pp": 2, "vpp": 2, "ep": 2, "options": {"overlap_moe_expert_parallel_comm": True}},
        "tp0 cp0 ep1 dp1 pp0",
        kind="moe",
        modules=("attention", "router", "token_dispatch", "experts", "token_combine"),
        ends=("embedding",),
    ),
}


def run(work: Path, cpu: bool) -> Found:
    found = Found()
    with device_of(cpu) as device:
        for number, (name, job) in enumerate(_JOBS.items()):
            directory = work / str(number)
            asked = small(cpu, **{"layers": 4, **job.options})
            with rank_of(job.rank, asked.world_size, context_parallel_size=job.cp):
                gpt = build(asked, device)
                if job.cp > 1:
                    shorten(gpt, job.cp)
                train(gpt, 1)
                with hooked(gpt, config(directory, cpu, ranges="module", **steps_from(gpt, 1))):
                    train(gpt, 1)
                layers = layer_numbers(gpt)
            (path,) = find_traces(directory)
            _compare(found, cpu, name, job, gpt, layers, read_trace(path))
    return found


def _compare(
    found: Found, cpu: bool, name: str, job: _Job, gpt: BuiltGPT, layers: list[list[int]], trace: Trace
) -> None:
    (call,) = steps_of(trace)
    labels = {each.name.label for each in trace.ranges}
    named = parse_artifact_name(trace.path.name)
    (outer,) = (each.name.fields for each in trace.ranges if each.name.label == "train_actor")
    places = {
        "metadata": vars(call.metadata.coords),
        "file's name": vars(named.coords) if named else {},
        "range": outer,
    }
    for where, coords in places.items():
        spelled = " ".join(f"{axis}{coords.get(axis)}" for axis in ("tp", "cp", "ep", "dp", "pp"))
        found.expect(f"{name}: coordinates in the {where}", spelled, job.coords)
    found.expect(f"{name}: layers", [list(each.layer_numbers or ()) for each in call.metadata.chunks], layers)
    kinds = sorted({kind for each in call.metadata.chunks for kind in each.kinds})
    found.expect(f"{name}: kinds of layers", kinds, [job.kind])
    modules = {*job.modules, *job.ends}
    found.expect(f"{name}: modules", sorted(labels & modules), sorted(modules))
    passes = Counter(each for row in rows(call) for each in _passes(row))
    expected = Counter(product((FORWARD, BACKWARD), range(len(layers)), range(gpt.workload.microbatches)))
    wrong = sorted(map(str, ((passes - expected) | (expected - passes)).elements()))
    found.expect(f"{name}: passes that are missing, or there too often", wrong, [])
    idle = int((call.passes.compute == 0).sum()) if call.has_kernels else None
    found.on_a_gpu(cpu, f"{name}: passes without a kernel", idle, 0)


def _passes(row: Row) -> Iterator[tuple[str, int | None, int | None]]:
    """A combined pass is a forward and a backward, either of which may be missing."""
    if row.kind != COMBINED:
        yield row.kind, row.chunk, row.microbatch
        return
    if row.microbatch is not None:
        yield FORWARD, row.chunk, row.microbatch
    if row.backward is not None:
        yield BACKWARD, *row.backward
