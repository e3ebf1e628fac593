"""Models of Megatron-Core other than the plain GPT, as they are: what a trace says of them against what was built.

Not here, because a CPU cannot run them: context parallelism (Megatron has it in Transformer Engine's attention alone)
and Mamba (its kernels are CUDA's).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.trace.traces import find_traces, read_trace

pytestmark = pytest.mark.slow

LENGTH, VOCAB, LAYERS, MICROBATCHES = 16, 64, 2, 2


def _config(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 2}
    return TransformerConfig(**sizes, use_cpu_initialization=True, **more)


def multi_token_prediction() -> tuple[Any, Callable[[Any, Any], Any]]:
    layer_specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    from megatron.core.models.gpt.gpt_model import GPTModel

    if not hasattr(layer_specs, "get_gpt_mtp_block_spec"):
        pytest.skip("megatron-core before 0.13")
    config = _config(mtp_num_layers=1)
    block = layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    ahead = layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    model = GPTModel(config, block, VOCAB, LENGTH, mtp_block_spec=ahead)

    def forward(tokens: Any, mask: Any) -> Any:
        return model(tokens, torch.arange(LENGTH)[None], mask, labels=tokens, loss_mask=torch.ones(1, LENGTH))

    return model, forward


def encoder_and_decoder() -> tuple[Any, Callable[[Any, Any], Any]]:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    config = _config()
    specs = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    model = T5Model(config, config, *specs, VOCAB, LENGTH, add_encoder=True, add_decoder=True)

    def forward(tokens: Any, mask: Any) -> Any:
        every = torch.zeros_like(mask)
        return model(tokens, tokens, every, mask, every, lm_labels=tokens)

    return model, forward


@pytest.mark.parametrize(
    ("build", "kinds", "mtp", "layer_ranges"),
    [
        (multi_token_prediction, ("dense", "dense"), 1, 3),
        # An encoder's layers are counted, and have no ranges.
        (encoder_and_decoder, ("encoder", "encoder", "dense", "dense"), 0, 2),
    ],
)
def test_a_trace_says_what_was_built(
    build: Callable[[], Any], kinds: tuple[str, ...], mtp: int, layer_ranges: int, one_rank: Any, tmp_path: Path
) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    model, forward = build()
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

    def step(data: Any, _: Any) -> Any:
        return forward(next(data), mask), lambda loss: (loss.float().mean(), {})

    config = ProfileConfig(("train_actor",), str(tmp_path), steps="0", activities=("cpu",), ranges="module")
    with install_hooks([model], config):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(torch.randint(0, VOCAB, (MICROBATCHES, 1, LENGTH))),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
    trace = read_trace(next(iter(find_traces(tmp_path))))
    (chunk,) = trace.metadata.chunks
    assert (chunk.embedding, chunk.kinds, chunk.mtp, chunk.loss) == (True, kinds, mtp, True)
    found = Counter(each.name.label for each in trace.ranges)
    assert (found["forward"], found["backward"]) == (MICROBATCHES, MICROBATCHES)
    assert found["layer"] == MICROBATCHES * layer_ranges
