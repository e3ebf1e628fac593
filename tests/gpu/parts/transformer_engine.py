"""Transformer Engine's real layers, in bf16 and in FP8: the ranges that local layers have, and kernels in every pass.

A rehearsal has bf16 on the stand-in of tests/stand_ins.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats.ranges import module_backward, module_range
from tests.built import layer_numbers
from tests.gpu.found import Found
from tests.gpu.job import build_with, config, hooked, machine, small, steps_from, train

_STAND_INS = str(Path(__file__).parents[2] / "stand_ins")
_KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "FP8, delayed scaling": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "FP8, scaling by tensor": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
}


def run(work: Path, cpu: bool) -> Found:
    if cpu:
        sys.path.insert(0, _STAND_INS)
    if importlib.util.find_spec("transformer_engine") is None:
        return Found(skipped="transformer-engine is not installed")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    def spec(num_experts: int | None, moe_grouped_gemm: bool) -> Any:
        return get_gpt_layer_with_transformer_engine_spec(num_experts, moe_grouped_gemm)

    found = Found()
    with machine(cpu, work) as device:
        for number, (name, options) in enumerate(list(_KINDS.items())[: 1 if cpu else None]):
            gpt = build_with(small(cpu), device, spec, **options)
            train(gpt, 2)
            with hooked(gpt, config(work / str(number), cpu, ranges="module", **steps_from(gpt, 1))):
                train(gpt, 1)
            (trace,) = map(read_trace, find_traces(work / str(number)))
            classes = {type(module).__name__ for module in gpt.chunks[0].modules()}
            found.expect(f"{name}: layers are Transformer Engine's", "TELayerNormColumnParallelLinear" in classes, True)
            names = [str(each.name) for each in trace.ranges]
            every = gpt.workload.microbatches
            wrong = [
                one
                for layer in layer_numbers(gpt)[0]
                for part in ("layer", "attention", "mlp")
                for one in (str(module_range(part, layer)), module_backward(str(module_range(part, layer))))
                if names.count(one) != every
            ]
            found.expect(f"{name}: modules without a range for every microbatch", wrong, [])
            (call,) = steps_of(trace)
            idle = int((call.passes.compute == 0).sum()) if call.has_kernels else None
            found.on_a_gpu(cpu, f"{name}: passes without a kernel", idle, 0)
    return found
