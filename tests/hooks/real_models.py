"""Models of Megatron-Core other than the plain GPT, as this megatron-core builds them, and a training step of each.

Transformer Engine and mamba_ssm are the stand-ins of tests/stand_ins, plain torch; everything above is Megatron-Core's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.testing import cpu_megatron, init_distributed

LENGTH, VOCAB, LAYERS, MICROBATCHES = 16, 64, 4, 2
#: Layers of a hybrid model's stages, as its pattern says them.
HYBRID = "M-M*", "M-"
VISION_LAYERS, IMAGE, PATCH = 3, 28, 14
#: Where LLaVA's tokens have an image.
IMAGE_TOKEN, IMAGE_AT = -200, 3

Forward = Callable[[torch.Tensor], Any]


def train(build: Callable[[], tuple[Any, Forward]], sizes: dict[str, int], directory: str) -> None:
    """A rank: the model that ``build`` makes is trained for two steps, of which the second is captured."""
    init_distributed()
    with cpu_megatron():
        from megatron.core import parallel_state
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(**sizes)
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        model, forward = build()
        model.model_type = ModelType.encoder_or_decoder

        def step(data: Any, _: Any) -> Any:
            return forward(next(data)), lambda loss: (loss.float().mean(), {})

        config = ProfileConfig(
            ("train_actor",), directory, steps="1", select="all", activities=("cpu",), ranges="module"
        )
        with install_hooks([model], config):
            for _ in range(2):
                get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=repeat(torch.randint(0, VOCAB, (1, LENGTH))),
                    model=[model],
                    num_microbatches=MICROBATCHES,
                    seq_length=getattr(model, "_language_max_sequence_length", LENGTH),
                    micro_batch_size=1,
                    forward_only=False,
                )


def _config(layers: int = LAYERS, **more: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{"num_layers": layers, "hidden_size": 32, "num_attention_heads": 2, "use_cpu_initialization": True},
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **more,
    )


def _ends() -> dict[str, bool]:
    from megatron.core import parallel_state

    return {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }


def _mask(length: int = LENGTH) -> torch.Tensor:
    return torch.ones(1, 1, length, length).triu(1).bool()


def multi_token_prediction() -> tuple[Any, Forward]:
    layer_specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = _config(mtp_num_layers=1)
    block = layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    ahead = layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    model = GPTModel(config, block, VOCAB, LENGTH, mtp_block_spec=ahead)
    mask, ones = _mask(), torch.ones(1, LENGTH)
    return model, lambda tokens: model(tokens, torch.arange(LENGTH)[None], mask, labels=tokens, loss_mask=ones)


def encoder_and_decoder() -> tuple[Any, Forward]:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    config, mask = _config(), _mask()
    specs = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    model = T5Model(config, config, *specs, VOCAB, LENGTH, add_encoder=True, add_decoder=True)
    every = torch.zeros_like(mask)
    return model, lambda tokens: model(tokens, tokens, every, mask, every, lm_labels=tokens)


def context_parallel() -> tuple[Any, Forward]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = GPTModel(_config(), get_gpt_layer_with_transformer_engine_spec(), VOCAB, LENGTH)
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    parts = torch.arange(LENGTH)[None].chunk(2 * ranks, 1)
    own = torch.cat([parts[rank], parts[2 * ranks - 1 - rank]], 1)
    return model, lambda tokens: model(tokens[:, own[0]], own, None, labels=tokens[:, own[0]])


def hybrid() -> tuple[Any, Forward]:
    pytest.importorskip("einops")
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    mamba = {f"mamba_{name}": size for name, size in (("num_heads", 4), ("head_dim", 16), ("state_dim", 8))}
    config = _config(sum(map(len, HYBRID)), mamba_num_groups=2, **mamba)
    model = HybridModel(config, hybrid_stack_spec, VOCAB, LENGTH, hybrid_layer_pattern="|".join(HYBRID), **_ends())
    return model, lambda tokens: model(tokens, torch.arange(LENGTH)[None], None, labels=tokens)


def vision_and_language() -> tuple[Any, Forward]:
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.multimodal.llava_spec import decoder_model_with_local_default_spec
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    language, vision, projection = _config(), _config(VISION_LAYERS), _config(1, ffn_hidden_size=32)
    for each in (vision, projection):
        each.pipeline_model_parallel_size = 1
    vision.vision_model_type = "clip"
    model = LLaVAModel(
        *(language, decoder_model_with_local_default_spec(), VOCAB, 2 * LENGTH),
        *(vision, get_vit_layer_with_local_spec(), True),
        *(projection, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
        **_ends(),
        add_encoder=_ends()["pre_process"],
        img_h=IMAGE,
        img_w=IMAGE,
        patch_dim=PATCH,
    )

    def forward(tokens: torch.Tensor) -> Any:
        seen = tokens.clone()
        seen[0, IMAGE_AT] = IMAGE_TOKEN
        image, positions = torch.rand(1, 3, IMAGE, IMAGE), torch.arange(LENGTH)[None]
        output = model(image, seen, positions, None, labels=tokens, loss_mask=torch.ones(1, LENGTH))
        return output[0] if isinstance(output, tuple) else output

    return model, forward


def megatron_fsdp() -> tuple[Any, Forward]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,  # an operation that NCCL alone has
        **{"use_megatron_fsdp": True} if "use_megatron_fsdp" in known else {},
    )
    config, mask = _config(), _mask()
    model = FullyShardedDataParallel(config, reduction, GPTModel(config, get_gpt_layer_local_spec(), VOCAB, LENGTH))
    return model, lambda tokens: model(tokens, torch.arange(LENGTH)[None], mask, labels=tokens)
