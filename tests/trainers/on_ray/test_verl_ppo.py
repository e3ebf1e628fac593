"""verl's RL trainer, whole, on two stages: ``python -m verl.trainer.main_ppo``, GRPO with a reference, four steps.

Replaced: the GPUs (`tests.trainers.cpu_process`; Ray is told that it has two), Transformer Engine (tests/stand_ins),
which computes attention over packed sequences one by one, and the inference engine, by verl's own registries
(verl_registries, verl_engine); the weights are exported to it all the same. verl's custom sampler (verl_order) takes
the answers in one order, whichever came first. Nothing is in the place of the packages in EDGES where they are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers import tiny
from tests.trainers.running import RL_PROFILE, check, check_iterations, ray_environment, train

pytestmark = pytest.mark.hosts

EDGES = (
    "apex,modelopt,vllm,sglang,nvidia_resiliency_ext,megatron.energon,mamba_ssm,causal_conv1d,fla,flashinfer,"
    "diffusers,timm,open_clip,mlflow,comet_ml,cupy,wandb,torchvision,qwen_vl_utils,mathruler,pylatexenc"
)
STEPS, PROMPTS, ANSWERS, MINI_BATCH = 4, 4, 2, 2  # a step, a prompt, and prompts of a mini-batch
MEGATRON = """
megatron.pipeline_model_parallel_size=2 megatron.tensor_model_parallel_size=1 megatron.sequence_parallel=False
megatron.override_transformer_config.attention_backend=unfused
megatron.override_transformer_config.num_layers_in_first_pipeline_stage=7
megatron.override_transformer_config.gradient_accumulation_fusion=False
megatron.override_transformer_config.apply_rope_fusion=False
megatron.override_transformer_config.masked_softmax_fusion=False
megatron.override_transformer_config.bias_dropout_fusion=False
megatron.override_transformer_config.cross_entropy_loss_fusion=False
"""
ARGUMENTS = f"""
model_engine=megatron algorithm.adv_estimator=grpo reward.num_workers=1
data.train_batch_size={PROMPTS} data.max_prompt_length=128 data.max_response_length=32 data.dataloader_num_workers=0
data.shuffle=False actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.name=stand_in
actor_rollout_ref.rollout.n={ANSWERS} actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.agent.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.v1.sampler.custom_sampler.name=InOrder trainer.v1.sampler.custom_sampler.path=pkg://tests.trainers.on_ray.verl_order
trainer.logger=["console"] trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=-1
trainer.val_before_train=False trainer.total_training_steps={STEPS} trainer.total_epochs=1 trainer.resume_mode=disable
"""


def test_without_an_edit(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    packages = wheel("verl"), wheel("megatron-bridge")
    model, data = tiny.model(tmp_path / "model"), tiny.questions(tmp_path / "rl.parquet", STEPS * PROMPTS)
    plain, profiled, traces = tmp_path / "plain", tmp_path / "profiled", tmp_path / "traces"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"actor_rollout_ref.model.path={model}"]
    command += [f"data.train_files={data}", f"data.val_files={data}", *ARGUMENTS.split()]
    command += [f"++actor_rollout_ref.{role}.{option}" for role in ("actor", "ref") for option in MEGATRON.split()]
    run = [sys.executable, "-m", "megaprof", "run", *RL_PROFILE, "--profile-dir", str(traces)]
    run += ["--profile-steps", "2", "--"]
    for work, before in ((plain, []), (profiled, run)):
        engine = {"VERL_USE_EXTERNAL_MODULES": "tests.trainers.on_ray.verl_registries"}
        with ray_environment(work, EDGES, *packages, **engine) as env:
            checkpoints = f"trainer.default_local_dir={work / 'checkpoints'}"
            train([*before, *command, checkpoints], env, work, seconds=1500)
    microbatches = {
        ("train_actor", "actor"): MINI_BATCH * ANSWERS,
        ("train_log_probs", "actor"): PROMPTS * ANSWERS,
        ("train_log_probs", "ref"): PROMPTS * ANSWERS,
    }
    kinds = [f"{target}.{role}.step000002" for target, role in microbatches]
    check(plain, profiled, traces, "verl", STEPS * PROMPTS // MINI_BATCH, kinds, microbatches)
    check_iterations(traces, {"actor": ("rollout", "train_log_probs", "reference", "optimizer", "weight_sync")})
