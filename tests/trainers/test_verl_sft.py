"""verl's SFT trainer, whole, on two stages: ``torchrun -m verl.trainer.sft_trainer``, model by Megatron-Bridge.

Replaced: the GPU (`tests.trainers.cpu_process`), Transformer Engine (tests/stand_ins), which computes attention over
packed sequences one by one. Nothing is in the place of the packages in EDGES where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.trainers import tiny
from tests.trainers.running import PROFILE, check, check_tuning, environment, torchrun, train

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(version("megatron-core") < "0.19", reason="Megatron-Bridge 0.6.2 needs megatron-core 0.19"),
]

EDGES = (
    "apex,modelopt,vllm,sglang,nvidia_resiliency_ext,megatron.energon,mamba_ssm,causal_conv1d,fla,flashinfer,"
    "diffusers,timm,open_clip,mlflow,comet_ml,cupy,wandb,torchvision,qwen_vl_utils,mathruler,pylatexenc"
)
PLACING = "+engine.override_transformer_config.num_layers_in_first_pipeline_stage=7"
ENGINE = """
engine.override_transformer_config.attention_backend=unfused
+engine.override_transformer_config.gradient_accumulation_fusion=False
+engine.override_transformer_config.apply_rope_fusion=False
+engine.override_transformer_config.masked_softmax_fusion=False
+engine.override_transformer_config.bias_dropout_fusion=False
+engine.override_transformer_config.cross_entropy_loss_fusion=False
engine=megatron optim=megatron engine.pipeline_model_parallel_size=2 engine.tensor_model_parallel_size=1
engine.sequence_parallel=False engine.use_remove_padding=True model.use_remove_padding=True
"""
ARGUMENTS = """
data.train_batch_size=8 data.max_length=128 data.pad_mode=no_padding data.truncation=error data.use_dynamic_bsz=False
data.micro_batch_size_per_gpu=1 data.messages_key=messages data.num_workers=0 data.ignore_input_ids_mismatch=True
trainer.logger=["console"] trainer.resume_mode=disable optim.lr=1e-4 optim.lr_warmup_steps=1
"""


def command(directory: Path, *arguments: str, before: Sequence[str] = ()) -> list[str]:
    """For a model and data that it writes."""
    model, data = tiny.model(directory / "model"), tiny.parquet(directory / "sft.parquet")
    own = [f"model.path={model}", f"data.train_files={data}", f"data.val_files={data}", PLACING]
    words = [*own, *ENGINE.split(), *ARGUMENTS.split(), *arguments]
    return torchrun(*before, "-m", "verl.trainer.sft_trainer", *words)


def test_without_an_edit(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    packages = wheel("verl"), wheel("megatron-bridge")
    plain, profiled, traces = tmp_path / "plain", tmp_path / "profiled", tmp_path / "traces"
    steps = ["trainer.test_freq=3", "trainer.save_freq=-1", "trainer.total_training_steps=4", "trainer.total_epochs=1"]
    run = ["-m", "megaprof", "run", *PROFILE, "--profile-dir", str(traces)]
    run += ["--profile-steps", "train_actor=3;evaluate=0", "--"]
    for work, before in ((plain, []), (profiled, run)):
        arguments = [*steps, f"trainer.default_local_dir={work / 'out'}"]
        train(command(tmp_path, *arguments, before=before), environment(work, EDGES, *packages), work)
    kinds = ("evaluate.step000000", "train_actor.step000003")
    lengths = [(length,) for length in tiny.lengths()]
    check(plain, profiled, traces, "verl", 4, kinds, {("train_actor", None): 8}, lengths)


def test_tuned(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    packages = wheel("verl"), wheel("megatron-bridge")
    arguments = ["trainer.save_freq=2", "trainer.total_training_steps=100", "trainer.total_epochs=20"]
    tuned = command(tmp_path, *arguments, f"trainer.default_local_dir={tmp_path / 'saved'}")
    check_tuning(tuned, [PLACING], environment(tmp_path, EDGES, *packages), tmp_path)
    assert not (tmp_path / "saved").exists()
