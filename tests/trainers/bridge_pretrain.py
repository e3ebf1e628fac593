"""What a user of Megatron-Bridge writes: a configuration by hand, changed by the command line in Hydra's words, and
``pretrain(config, forward_step)``. ``--arm``: it arms megaprof itself."""

import sys

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

MODEL = GPTModelProvider(
    num_layers=8,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=128,
    seq_length=128,
    vocab_size=255,
    make_vocab_size_divisible_by=1,
    pipeline_model_parallel_size=2,
    pipeline_dtype=torch.float32,
    params_dtype=torch.float32,
    transformer_layer_spec=local_layer_spec,
    transformer_impl="local",
    attention_backend=None,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    bias_dropout_fusion=False,
    bias_activation_fusion=False,
    apply_rope_fusion=False,
    persist_layer_norm=False,
    cross_entropy_loss_fusion=False,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
CONFIG = ConfigContainer(
    model=MODEL,
    train=TrainingConfig(train_iters=6, global_batch_size=8, micro_batch_size=1),
    validation=ValidationConfig(eval_interval=3, eval_iters=1),
    optimizer=OptimizerConfig(
        optimizer="adam", lr=3e-4, min_lr=3e-5, clip_grad=1.0, use_distributed_optimizer=False, bf16=False
    ),
    scheduler=SchedulerConfig(
        lr_decay_style="cosine",
        lr_warmup_iters=1,
        lr_warmup_init=0.0,
        start_weight_decay=0.033,
        end_weight_decay=0.033,
        weight_decay_incr_style="constant",
    ),
    ddp=DistributedDataParallelConfig(
        check_for_nan_in_grad=True, grad_reduce_in_fp32=True, use_distributed_optimizer=False
    ),
    dataset=GPTDatasetConfig(
        random_seed=1234,
        seq_length=128,
        blend=None,
        blend_per_split=None,
        split="9999,8,2",
        dataloader_type="single",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        num_workers=0,
        persistent_workers=False,
    ),
    logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
    tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=255),
    checkpoint=CheckpointConfig(save=None, save_interval=None, ckpt_format="torch_dist"),
    rng=RNGConfig(seed=1234),
    dist=DistributedInitConfig(distributed_backend="gloo"),
)

if __name__ == "__main__":
    words = sys.argv[1:]
    if "--arm" in words:
        from megaprof.autoload.arming import arm

        words.remove("--arm")
        arm()
    pretrain(process_config_with_overrides(CONFIG, cli_overrides=words), forward_step)
