"""Models of Megatron-Core other than the plain GPT: what the report says of them against what was built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.analysis.synthetic import kinds
from tests.hooks import real_models as models
from tests.hooks.test_te_layers import STAND_INS

pytestmark = pytest.mark.slow

DENSE = ("dense",) * models.LAYERS
LETTERS = {"M": "MambaLayer", "-": "mlp", "*": "attention"}


@pytest.mark.parametrize(
    ("model", "needs", "sizes", "stages", "ranges"),
    [
        pytest.param(
            models.multi_token_prediction,
            "megatron.core.transformer.multi_token_prediction",
            {},
            [DENSE],
            {"layer": models.LAYERS + 1, "mtp_layer": 1},
            id="mtp",
        ),
        # An encoder's layers are counted, and have no ranges.
        pytest.param(
            models.encoder_and_decoder,
            "megatron.core.models.T5",
            {},
            [("encoder",) * models.LAYERS + DENSE],
            {"layer": models.LAYERS, "cross_attention": models.LAYERS},
            id="t5",
        ),
        pytest.param(
            models.context_parallel,
            "megatron.core",
            {"context_parallel_size": 2},
            [DENSE],
            {"layer": models.LAYERS, "attention": models.LAYERS},
            id="cp",
        ),
        pytest.param(
            models.hybrid,
            "megatron.core.models.hybrid.hybrid_model",
            {"pipeline_model_parallel_size": 2},
            [tuple(LETTERS[letter] for letter in stage) for stage in models.HYBRID],
            {"layer": 4, "mixer": 2, "attention": 1, "mlp": 1},
            id="hybrid",
        ),
        pytest.param(
            models.vision_and_language,
            "megatron.core.models.multimodal.llava_model",
            {"pipeline_model_parallel_size": 2},
            [DENSE[:2], DENSE[2:]],
            {"layer": 2, "vision_model": 1, "vision_projection": 1, "embedding": 1},
            id="llava",
        ),
        pytest.param(
            models.megatron_fsdp,
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
            {},
            [DENSE],
            {"layer": models.LAYERS},
            id="fsdp",
        ),
    ],
)
def test_the_report_says_what_was_built(
    model: Callable[[], Any],
    needs: str,
    sizes: dict[str, int],
    stages: list[tuple[str, ...]],
    ranges: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ranges``: how many a pass has on the first stage."""
    try:
        import_module(needs)
    except ImportError as missing:
        pytest.skip(f"this megatron-core has it not, or needs what is not installed: {missing}")
    monkeypatch.syspath_prepend(STAND_INS)
    many = 2 if sizes or model is models.megatron_fsdp else 1
    run_ranks(models.train, many, model, sizes, str(tmp_path), timeout=300)

    (target,) = analyze(tmp_path).targets
    assert (target.microbatches, target.sizes.pp, target.sizes.cp) == (
        models.MICROBATCHES,
        len(stages),
        sizes.get("context_parallel_size", 1),
    )
    assert [stage.pp for stage in target.stages] == list(range(len(stages)))
    traces = [read_trace(path) for path in find_traces(tmp_path)]
    assert {trace.metadata.coords.rank for trace in traces} == set(range(many))
    for trace in traces:
        stage, (chunk,) = trace.metadata.coords.pp, trace.metadata.chunks
        first, last = stage == 0, stage == len(stages) - 1
        assert (chunk.embedding, chunk.kinds, chunk.loss) == (first, stages[stage], last)
        assert chunk.mtp == (model is models.multi_token_prediction)
        found = Counter(each.name.label for each in trace.ranges)
        assert (found["forward"], found["backward"]) == (models.MICROBATCHES, models.MICROBATCHES)
        for label, times in ranges.items() if first else ():
            assert found[label] == models.MICROBATCHES * times, label
            if label != "vision_model" or found[f"{label}_backward"]:
                assert found[f"{label}_backward"] == models.MICROBATCHES * times, label


#: Microbatches of each replica's steps.
COUNTS = (2, 3, 1), (2, 3, 4)
DYNAMIC = GPTWorkload(pp=2, dp=2, layers=4, hidden=32, seq_length=16, heads=2, microbatches=4)


def train_dynamically(directory: str) -> None:
    from megatron.core import parallel_state

    from megaprof import ProfileConfig, install_hooks

    init_distributed()
    with cpu_megatron():
        gpt = build(DYNAMIC)
        config = ProfileConfig(("train_actor",), directory, steps="0:3", select="all", activities=("cpu",))
        with install_hooks(gpt.chunks, config):
            for step, count in enumerate(COUNTS[parallel_state.get_data_parallel_rank()]):
                gpt._run(None, step, forward_only=False, num_microbatches=count)


def test_microbatches_that_change_by_step_and_replica(tmp_path: Path) -> None:
    run_ranks(train_dynamically, DYNAMIC.world_size, str(tmp_path), timeout=300)
    for trace in map(read_trace, find_traces(tmp_path)):
        count = COUNTS[trace.metadata.coords.dp][trace.metadata.steps[0]]
        passes = Counter(each.name.label for each in trace.ranges)
        assert (trace.metadata.microbatches, passes["forward"], passes["backward"]) == (count, count, count)
    (target,) = analyze(tmp_path).targets
    assert [stage.pp for stage in target.stages] == [0, 1]
    # Steps with other numbers are left out, and on a busy machine those that were pulled apart between the ranks.
    assert all(target.microbatches in {of_replica[step] for of_replica in COUNTS} for step in target.steps)
    assert "not_comparable" not in kinds(target.warnings)
