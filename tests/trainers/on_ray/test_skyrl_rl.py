"""SkyRL's RL trainer, whole, on two stages: ``python -m skyrl.train.entrypoints.main_base``, GRPO with a reference.

Replaced: what test_skyrl_sft replaces, and the inference engine, by SkyRL's ``trainer.override_entrypoint``
(skyrl_entry); the weights are exported to it all the same (skyrl_names).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers import tiny
from tests.trainers.on_ray.skyrl import EDGES, VARIABLES, packages
from tests.trainers.running import RL_PROFILE, check, check_iterations, ray_environment, train

pytestmark = pytest.mark.hosts

STEPS, PROMPTS, ANSWERS, MINI_BATCH = 4, 4, 2, 2  # a step, a prompt, and prompts of a mini-batch
MODELS = """
megatron_config.pipeline_model_parallel_size=2
megatron_config.transformer_config_kwargs.num_layers_in_first_pipeline_stage=7
"""
ARGUMENTS = f"""
trainer.override_entrypoint=tests.trainers.on_ray.skyrl_entry trainer.strategy=megatron environment.env_class=gsm8k
trainer.algorithm.advantage_estimator=grpo trainer.algorithm.use_kl_loss=true trainer.placement.colocate_all=true
trainer.placement.policy_num_nodes=1 trainer.placement.ref_num_nodes=1 trainer.placement.policy_num_gpus_per_node=2
trainer.placement.ref_num_gpus_per_node=2 generator.inference_engine.num_engines=2
generator.inference_engine.tensor_parallel_size=1 generator.inference_engine.backend=vllm generator.batched=true
generator.n_samples_per_prompt={ANSWERS} generator.sampling_params.max_generate_length=32
trainer.train_batch_size={PROMPTS} trainer.policy_mini_batch_size={MINI_BATCH} trainer.max_prompt_length=128
trainer.micro_forward_batch_size_per_gpu=1 trainer.micro_train_batch_size_per_gpu=1 trainer.epochs=1
trainer.max_training_steps={STEPS} trainer.eval_before_train=false trainer.eval_interval=-1 trainer.ckpt_interval=-1
trainer.hf_save_interval=-1 trainer.resume_mode=none trainer.logger=console
"""


def test_without_an_edit(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    model, data = tiny.model(tmp_path / "model"), tiny.questions(tmp_path / "rl.parquet", STEPS * PROMPTS)
    plain, profiled, traces = tmp_path / "plain", tmp_path / "profiled", tmp_path / "traces"
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", f"trainer.policy.model.path={model}"]
    command += [f"data.train_data=['{data}']", f"data.val_data=['{data}']", *ARGUMENTS.split()]
    command += [f"trainer.{role}.{option}" for role in ("policy", "ref") for option in MODELS.split()]
    run = [sys.executable, "-m", "megaprof", "run", *RL_PROFILE, "--profile-dir", str(traces)]
    run += ["--profile-steps", "2", "--"]
    for work, before in ((plain, []), (profiled, run)):
        with ray_environment(work, EDGES, *packages(wheel), **VARIABLES) as env:
            own = [f"trainer.{name}_path={work / name}" for name in ("ckpt", "export")]
            train([*before, *command, *own], env, work, seconds=1500)
    kinds = [f"{each}.step000002" for each in ("train_actor.actor", "train_log_probs.actor", "train_log_probs.ref")]
    microbatches = {("train_actor", "actor"): MINI_BATCH * ANSWERS}
    check(plain, profiled, traces, "skyrl", STEPS * PROMPTS // MINI_BATCH, kinds, microbatches)
    roles = {
        "actor": ("rollout", "train_log_probs", "optimizer", "offload", "weight_sync"),
        "ref": ("waiting", "offload"),
    }
    check_iterations(traces, roles)
