"""Module ranges on Transformer Engine's layers: Megatron-Core's own wrappers, unmodified, in a real 1F1B on the CPU.

Transformer Engine is the stand-in of tests/stand_ins, plain torch. Everything above it is Megatron-Core's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaprof.formats.ranges import module_backward, module_range
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.built import layer_numbers
from tests.hooks.test_modules import compare, parents, spans

STAND_INS = str(Path(__file__).parents[1] / "stand_ins")
SMALL: dict[str, Any] = {"pp": 2, "hidden": 32, "seq_length": 16, "layers": 4, "heads": 2, "microbatches": 3}
WORKLOAD = GPTWorkload(**SMALL, num_experts=4)


def train(workload: GPTWorkload, directory: str) -> dict[str, Any]:
    init_distributed()
    with cpu_megatron():
        from megatron.core.models.gpt import gpt_layer_specs

        def of_transformer_engine(num_experts: int | None, moe_grouped_gemm: bool) -> Any:
            return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts, bool(num_experts))

        gpt_layer_specs.get_gpt_layer_local_spec = of_transformer_engine
        gpt = build(workload)
        kinds = {type(module).__name__ for chunk in gpt.chunks for module in chunk.modules()}
        return {"layers": layer_numbers(gpt), "kinds": kinds, **compare(gpt, directory, "module")}


@pytest.mark.slow
def test_layers_of_transformer_engine_have_the_ranges_of_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    for number, rank in enumerate(run_ranks(train, 2, WORKLOAD, str(tmp_path), timeout=300)):
        assert rank["ranged"] == rank["plain"]
        assert rank["changed"] == []
        assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= rank["kinds"]
        assert "TEGroupedMLP" in rank["kinds"]
        found = [name for name, _ in parents(spans(tmp_path, number))]
        for layer in rank["layers"][0]:
            for part in ("layer", "attention", "mlp", "router", "experts"):
                assert found.count(str(module_range(part, layer))) == WORKLOAD.microbatches, part
                assert found.count(module_backward(str(module_range(part, layer)))) == WORKLOAD.microbatches, part
