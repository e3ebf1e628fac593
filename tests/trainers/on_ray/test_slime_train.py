"""slime's trainer, whole, on two stages: ``python train.py --debug-train-only`` with its Ray, actor and reference.

Needs ``SLIME_CHECKOUT`` and ``MEGATRON_LM_CHECKOUT`` (slime uses Megatron-LM's arguments and model). Its own option for
training without an inference engine takes rollouts from files. Replaced: the GPUs (`tests.trainers.cpu_process`; Ray
is told that it has two), Transformer Engine (tests/stand_ins), which computes attention over packed sequences one by
one. Nothing is in the place of the packages in EDGES where they are missing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.driving import checkout
from tests.trainers import tiny
from tests.trainers.running import check, check_iterations, environment, ray_environment, train

pytestmark = pytest.mark.hosts

EDGES = "sglang,sglang_router,torch_memory_saver,deep_ep,flash_attn,ring_flash_attn,wandb,pylatexenc"
ROLLOUTS, STEPS, SAMPLES = 4, 2, 8  # steps and samples of a rollout
ARGUMENTS = f"""
--train-backend megatron --actor-num-nodes 1 --actor-num-gpus-per-node 2 --num-gpus-per-node 2 --debug-train-only
--swiglu --num-layers {tiny.LAYERS} --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16
--group-query-attention --num-query-groups 2 --use-rotary-position-embeddings --rotary-base 10000 --qk-layernorm
--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --vocab-size 384 --make-vocab-size-divisible-by 1
--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 7
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-gradient-accumulation-fusion --attention-dropout 0 --hidden-dropout 0 --attention-backend unfused
--micro-batch-size 1 --global-batch-size {SAMPLES // STEPS} --rollout-batch-size {SAMPLES // 4} --n-samples-per-prompt 4
--num-rollout {ROLLOUTS} --num-steps-per-rollout {STEPS} --rollout-max-response-len 64 --disable-rollout-global-dataset
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --eps-clip 0.2
--optimizer adam --lr 1e-4 --lr-decay-style constant
"""
PROFILE = """
--custom-megatron-init-path megaprof.hosts.slime.init --profile-target train_actor train_log_probs
--profile-step-start 2 --profile-step-end 3
"""


def prepared(tmp_path: Path) -> tuple[list[str], Path, Path, Path]:
    """slime's command; both checkouts, and a directory with rollouts."""
    slime, megatron_lm = (Path(checkout(f"{name}_CHECKOUT")) for name in ("SLIME", "MEGATRON_LM"))
    model, rollouts = tiny.model(tmp_path / "model"), tmp_path / "rollouts"
    rollouts.mkdir()
    make = [
        sys.executable,
        str(Path(__file__).parent / "slime_rollouts.py"),
        str(rollouts),
        str(ROLLOUTS),
        str(SAMPLES),
    ]
    subprocess.run(make, env=environment(tmp_path / "made", EDGES, slime, megatron_lm), check=True, timeout=200)
    command = [
        sys.executable,
        str(slime / "train.py"),
        "--load-debug-rollout-data",
        f"{rollouts}/rollout_{{rollout_id}}.pt",
    ]
    for option in ("--hf-checkpoint", "--ref-load", "--load"):
        command += [option, str(model)]
    return [*command, *ARGUMENTS.split()], slime, megatron_lm, rollouts


def test_its_rollouts_are_seen_by_who_was_there_before_its_actors(tmp_path: Path) -> None:
    command, *checkouts, _ = prepared(tmp_path)
    work, traces = tmp_path / "profiled", tmp_path / "traces"
    run = [sys.executable, "-m", "megaprof", "run", "--profile-tool", "timeline", "--profile-dir", str(traces)]
    with ray_environment(work, EDGES, *checkouts) as env:
        train([*run, "--profile-target", "train_actor", "train_log_probs", "--", *command], env, work, seconds=1200)
    parts = "rollout", "weight_sync", "data", "train_log_probs", "reference", "optimizer", "offload", "logging"
    check_iterations(traces, {"actor": parts})


def test_by_its_own_options(tmp_path: Path) -> None:
    command, *checkouts, rollouts = prepared(tmp_path)
    plain, profiled, traces = tmp_path / "plain", tmp_path / "profiled", tmp_path / "traces"
    wanted = {"MEGAPROF_DIR": str(traces), "MEGAPROF_SELECT": "per-stage", "MEGAPROF_ACTIVITIES": "cpu"}
    wanted["MEGAPROF_TOOL"] = "torch,timeline"
    for work, own, options in ((plain, {}, ""), (profiled, wanted, PROFILE)):
        with ray_environment(work, EDGES, *checkouts, **own) as env:
            train([*command, *options.split()], env, work, seconds=1200)
    samples = [each for path in rollouts.iterdir() for each in torch.load(path)["samples"]]
    padded = [(length := len(each["tokens"]), 128 - length) for each in samples]  # the rest is a sequence of its own
    passes = ("train_actor", "actor"), ("train_log_probs", "actor"), ("train_log_probs", "ref")
    kinds = [f"{target}.{role}.step000002" for target, role in passes]
    check(plain, profiled, traces, "slime", ROLLOUTS * STEPS, kinds, dict.fromkeys(passes, 4), padded)
    check_iterations(traces, {"actor": ("train_log_probs", "reference", "optimizer", "offload", "logging")})
