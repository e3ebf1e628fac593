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
from tests.trainers.running import PROFILE, check, check_rehearsal, check_tuning, environment, train

pytestmark = pytest.mark.hosts

PLACING = ["--decoder_first_pipeline_num_layers", "7"]
ARGUMENTS = """
--model_type qwen3 --template qwen3 --split_dataset_ratio 0.25 --use_hf true
--pipeline_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 8
--max_length 128 --packing false --padding_free false --eval_iters 1
--logging_steps 1 --lr 1e-4 --lr_warmup_iters 1 --optimizer adam --torch_dtype bfloat16 --attention_backend unfused
--no_save_optim true --no_save_rng true --dataloader_num_workers 0 --dataset_num_proc 1
--cross_entropy_loss_fusion false --apply_rope_fusion false --masked_softmax_fusion false
--bias_dropout_fusion false --gradient_accumulation_fusion false
"""
MEGATRON = "from swift.cli._megatron.main import cli_main; cli_main()"  # what the console script ``megatron`` runs


def command(directory: Path, *arguments: str) -> list[str]:
    """For a model and data that it writes."""
    model, data = tiny.model(directory / "model"), tiny.jsonl(directory / "sft.jsonl")
    own = ["--model", str(model), "--dataset", str(data), *PLACING, *ARGUMENTS.split()]
    return [sys.executable, "-c", MEGATRON, "sft", *own, *arguments]


def trainer(work: Path, *packages: Path) -> dict[str, str]:
    """Its environment."""
    return environment(work, "flash_attn,apex,modelopt", *packages, NPROC_PER_NODE="2", MASTER_PORT="29633")


def test_without_an_edit(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    packages = wheel("ms-swift"), wheel("mcore-bridge")
    plain, profiled, traces = tmp_path / "plain", tmp_path / "profiled", tmp_path / "traces"
    steps = ["--train_iters", "6", "--eval_steps", "3", "--save_steps", "1000"]
    run = [sys.executable, "-m", "megaprof", "run", *PROFILE, "--profile-dir", str(traces)]
    run += ["--profile-steps", "train_actor=4;evaluate=0", "--"]
    for work, before in ((plain, []), (profiled, run)):
        own = command(tmp_path, *steps, "--output_dir", str(work / "out"))
        train([*before, *own], trainer(work, *packages), work)
    kinds = ("evaluate.step000000", "train_actor.step000004")
    thoughts = len("<think>\n\n</think>\n\n")  # its template has none to write
    lengths = [(length + thoughts,) for length in tiny.lengths()]
    check(plain, profiled, traces, "ms-swift", 6, kinds, {("train_actor", None): 8}, lengths)


def test_tuned(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    packages = wheel("ms-swift"), wheel("mcore-bridge")
    steps = ["--train_iters", "100", "--eval_steps", "1000", "--save_steps", "2"]
    tuned = command(tmp_path, *steps, "--output_dir", str(tmp_path / "out"))
    off = ("--saving-off", "--save_strategy steps --save_steps 0")
    check_tuning(tuned, PLACING, trainer(tmp_path, *packages), tmp_path, *off)
    assert not list(tmp_path.glob("out/*/checkpoint*"))


def test_rehearsed(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    """What one rank runs; its stages tell each other the shape of each microbatch."""
    packages = wheel("ms-swift"), wheel("mcore-bridge")
    steps = ["--train_iters", "100", "--eval_steps", "1000", "--save_steps", "1000", "--global_batch_size", "7"]
    _, _, _, _, *words = command(tmp_path, *steps, "--output_dir", str(tmp_path / "out"))
    rank = [sys.executable, "-m", "swift.cli._megatron.sft", *words]
    check_rehearsal(rank, trainer(tmp_path, *packages), tmp_path, "ms-swift")
