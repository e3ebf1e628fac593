"""SkyRL's SFT trainer, whole, on two stages: ``python -m skyrl.train.main_sft`` with its Ray, its workers and its data.

Replaced: the GPUs (`tests.trainers.cpu_process`; Ray is told that it has two), Transformer Engine (tests/stand_ins),
which computes attention over packed sequences one by one, and two functions for experts that Megatron-Bridge 0.6.2 does
not have yet (skyrl_names). Nothing is in the place of the packages in EDGES (skyrl.py) where they are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers import tiny
from tests.trainers.on_ray.skyrl import EDGES, VARIABLES, packages
from tests.trainers.running import PROFILE, check, ray_environment, train

pytestmark = pytest.mark.hosts

ARGUMENTS = """
strategy=megatron placement.num_nodes=1 placement.num_gpus_per_node=2
megatron_config.pipeline_model_parallel_size=2 megatron_config.tensor_model_parallel_size=1
megatron_config.transformer_config_kwargs.num_layers_in_first_pipeline_stage=7
train_dataset_splits=[train] eval_dataset_splits=['train[:4]'] eval_dataset_names=[few] eval_interval=2
messages_key=messages max_length=128 num_steps=4 batch_size=8 micro_train_batch_size_per_gpu=1 num_workers=0
disable_cache=true logger=console enable_ray_gpu_monitor=false
"""


def test_without_an_edit(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    model, data = tiny.model(tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    tiny.parquet(data / "train.parquet")
    plain, profiled, traces = tmp_path / "plain", tmp_path / "profiled", tmp_path / "traces"
    command = [sys.executable, "-m", "skyrl.train.main_sft", f"model.path={model}"]
    command += [f"train_datasets=[{data}]", f"eval_datasets=[{data}]", *ARGUMENTS.split()]
    run = [sys.executable, "-m", "megaprof", "run", *PROFILE, "--profile-dir", str(traces)]
    run += ["--profile-steps", "train_actor=3;evaluate=0", "--"]
    for work, before in ((plain, []), (profiled, run)):
        with ray_environment(work, EDGES, *packages(wheel), **VARIABLES) as env:
            train([*before, *command], env, work, seconds=900)
    kinds = ("evaluate.actor.step000000", "train_actor.actor.step000003")
    check(plain, profiled, traces, "skyrl", 4, kinds, {("train_actor", "actor"): 8})
