"""ms-swift's command ``megatron sft``, whole, on two stages: torchrun, model, data, optimizer and checkpoint its own.

Replaced: the GPU (`tests.trainers.cpu_process`), Transformer Engine (tests/stand_ins); nothing is in the place of
flash_attn, apex and modelopt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers import tiny
from tests.trainers.running import PROFILE, check, environment, train

pytestmark = pytest.mark.hosts

ARGUMENTS = """
--model_type qwen3 --template qwen3 --split_dataset_ratio 0.25 --use_hf true
--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers 7 --micro_batch_size 1 --global_batch_size 8
--max_length 128 --packing false --padding_free false --train_iters 6 --eval_iters 1 --eval_steps 3 --save_steps 1000
--logging_steps 1 --lr 1e-4 --lr_warmup_iters 1 --optimizer adam --torch_dtype bfloat16 --attention_backend unfused
--no_save_optim true --no_save_rng true --dataloader_num_workers 0 --dataset_num_proc 1
--cross_entropy_loss_fusion false --apply_rope_fusion false --masked_softmax_fusion false
--bias_dropout_fusion false --gradient_accumulation_fusion false
"""
MEGATRON = "from swift.cli._megatron.main import cli_main; cli_main()"  # what the console script ``megatron`` runs


def test_without_an_edit(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    packages = wheel("ms-swift"), wheel("mcore-bridge")
    model, data = tiny.model(tmp_path / "model"), tiny.jsonl(tmp_path / "sft.jsonl")
    plain, profiled, traces = tmp_path / "plain", tmp_path / "profiled", tmp_path / "traces"
    command = [sys.executable, "-c", MEGATRON, "sft", "--model", str(model), "--dataset", str(data), *ARGUMENTS.split()]
    run = [sys.executable, "-m", "megaprof", "run", *PROFILE, "--profile-dir", str(traces)]
    run += ["--profile-steps", "train_actor=4;evaluate=0", "--"]
    for work, before in ((plain, []), (profiled, run)):
        env = environment(work, "flash_attn,apex,modelopt", *packages, NPROC_PER_NODE="2", MASTER_PORT="29633")
        train([*before, *command, "--output_dir", str(work / "out")], env, work)
    kinds = ("evaluate.step000000", "train_actor.step000004")
    thoughts = len("<think>\n\n</think>\n\n")  # its template has none to write
    lengths = [(length + thoughts,) for length in tiny.lengths()]
    check(plain, profiled, traces, "ms-swift", 6, kinds, {("train_actor", None): 8}, lengths)
