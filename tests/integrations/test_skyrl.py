"""SkyRL's own Megatron workers and model wrapper, from its released wheel, on real megatron-core: roles in the traces.

Real: ``MegatronPolicyWorkerBase.forward``, ``forward_backward`` and ``optim_step``, ``MegatronRefWorkerBase.forward``,
and ``MegatronModelWrapper`` below them, on SkyRL's configuration and batches; ``RayPPOTrainer._execute_forward_pass``
above them. Replaced: how the workers are built (Ray, Hugging Face weights, the optimizer), Megatron-Bridge and what
SkyRL patches in it, the inference engine.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.built import VARIABLE
from tests.integrations.driving import (
    PATIENT_RAY,
    host_environment,
    labels,
    prepare,
    skip_without_packages,
    start_ray,
    traces,
)
from tests.integrations.patching import apply

pytestmark = pytest.mark.hosts

WORKLOAD = GPTWorkload(
    pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=32, heads=2, seq_length=16, options=VARIABLE
)
RESPONSE = 8
#: Tokens of the sequences of a batch, behind padding.
LENGTHS = (16, 10, 14, 12)
FIRST = 3
WORKERS = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker"
EDGES = (
    "aiohttp",
    "megatron.bridge",
    "pybase64",
    "skyrl_gym",
    "torchdata",
    "vllm_router",
    "skyrl.backends.skyrl_train.patches.megatron.patch_shared_expert_lora_tp",
)
OVERRIDES = (
    "trainer.strategy=megatron",
    "trainer.remove_microbatch_padding=false",
    "trainer.micro_train_batch_size_per_gpu=1",
    "trainer.micro_forward_batch_size_per_gpu=1",
)


def configuration(*overrides: str) -> Any:
    from skyrl.train.config import SkyRLTrainConfig

    return SkyRLTrainConfig.from_cli_overrides([*OVERRIDES, *overrides]).trainer


def equip(worker: Any, gpt: Any) -> None:
    """What a worker's ``init_model`` leaves in it."""
    from megatron.core.distributed import finalize_model_grads
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper

    megatron_model_wrapper.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
    worker.optimizer = SimpleNamespace(
        scale_loss=lambda loss: loss,
        step=lambda: (gpt.optimizer.step(), (True, 1.0, 0))[1],
        zero_grad=gpt.optimizer.zero_grad,
        param_groups=gpt.optimizer.param_groups,
    )
    worker.actor_module = gpt.chunks
    loss = PolicyLossRegistry.get(worker.cfg.algorithm.policy_loss_type)
    worker.model = megatron_model_wrapper.MegatronModelWrapper(worker.cfg, gpt.chunks, worker.optimizer, loss)
    worker.strategy = MegatronStrategy.__new__(MegatronStrategy)
    worker.scheduler = SimpleNamespace(step=lambda increment: None)
    worker.enable_router_replay = worker.enable_sample_support_replay = worker.empty_cuda_cache = False


def batch(**metadata: Any) -> Any:
    import torch
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    count, length = WORKLOAD.microbatches, WORKLOAD.seq_length
    floats = ("action_log_probs", "base_action_log_probs", "advantages", "loss_mask", "rollout_logprobs")
    data = TrainingInputBatch(
        {
            "sequences": torch.randint(0, WORKLOAD.vocab, (count, length)),
            "attention_mask": (torch.arange(length) >= length - torch.tensor(LENGTHS)[:, None]).long(),
            "response_mask": torch.ones(count, RESPONSE, dtype=torch.long),
            **{name: torch.ones(count, RESPONSE) for name in floats},
        }
    )
    data.metadata = {"response_length": RESPONSE, **metadata}
    return data


def train(host: str, *overrides: str) -> None:
    """A reference and a policy worker in one process: they share a model, as nothing here depends on its weights.

    ``overrides`` of SkyRL's command line are the policy worker's.
    """
    init_distributed()
    prepare(host, *EDGES)
    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker

    ref = megatron_worker.MegatronRefWorkerBase.__new__(megatron_worker.MegatronRefWorkerBase)
    policy = megatron_worker.MegatronPolicyWorkerBase.__new__(megatron_worker.MegatronPolicyWorkerBase)
    ref.cfg, policy.cfg = configuration(), configuration(*overrides)
    trainer = log_prob_trainer(ref, policy)
    with cpu_megatron():
        gpt = build(WORKLOAD)
        equip(ref, gpt)
        equip(policy, gpt)
        for step in (FIRST, FIRST + 1):
            trainer.global_step = step
            trainer._execute_forward_pass("ref", batch(), "logprobs", None)
            trainer._execute_forward_pass("policy", batch(), "logprobs", [(0, 2), (2, 4)])
            for _ in range(2):  # mini-batches
                policy.forward_backward(batch(global_step=step))
                policy.optim_step()
            policy.forward(batch(), loss_fn="cross_entropy")


def log_prob_trainer(ref: Any, policy: Any) -> Any:
    """SkyRL's trainer, whose dispatch calls the workers of this process. Policy log-probs come in mini-batches."""
    from skyrl.train.trainer import RayPPOTrainer

    workers = {"ref": ref, "policy": policy}

    def forward(model: str, data: Any) -> Any:
        workers[model].forward(data)
        return SimpleNamespace(loss_fn_outputs=[{"logprobs": [0.0]}])

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.cfg = SimpleNamespace(trainer=SimpleNamespace(recompute_old_logprobs_per_minibatch=True))
    trainer.dispatch = SimpleNamespace(
        forward=forward,
        forward_from_staged=forward,
        stage_data=lambda model, data, boundaries: [data] * len(boundaries),
    )
    return trainer


def replace_edges() -> None:
    """Ray's set-up hook."""
    prepare(None, *EDGES)


def init_model(worker: Any) -> None:
    """Builds the model when the worker is told to load it to the GPU: in the thread that Ray runs its methods in."""
    import torch

    def load(*_: Any, **__: Any) -> None:
        torch.distributed.init_process_group("gloo")
        worker.on_cpu = cpu_megatron()
        worker.on_cpu.__enter__()  # for the rest of its life
        equip(worker, build(WORKLOAD))

    worker.strategy = SimpleNamespace(backload_to_gpu=load)


def drive(ports: tuple[int, int], directory: str) -> None:
    """SkyRL's own actors in one job of a local Ray: two policy workers are a pipeline, and two reference workers."""
    replace_edges()
    import ray
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import PolicyWorker, RefWorker

    hook = {"worker_process_setup_hook": "test_skyrl.replace_edges"}
    start_ray(num_cpus=1, runtime_env=hook, _temp_dir=directory)

    def group(worker: Any, port: int) -> Any:
        place = {"world_size": WORKLOAD.pp, "local_rank": 0, "master_addr": "127.0.0.1", "master_port": port}
        options = {"cfg": configuration(), "sequence_parallel_size": 1, **place}
        actors = [worker.options(num_cpus=0, num_gpus=0).remote(rank=rank, **options) for rank in range(WORKLOAD.pp)]

        def call(method: str, *args: Any) -> None:
            ray.get([getattr(actor, method).remote(*args) for actor in actors])

        call("__ray_call__", init_model)
        call("backload_to_gpu")
        return call

    policy, ref = group(PolicyWorker, ports[0]), group(RefWorker, ports[1])
    for step in (FIRST, FIRST + 1):
        ref("forward", batch())
        policy("forward", batch())
        policy("forward_backward", batch(global_step=step))
        policy("optim_step")
    ray.shutdown()


@pytest.mark.parametrize("patched", [False, True])
def test_roles_of_the_workers(patched: bool, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "target": ["train_actor", "train_log_probs", "evaluate"],
        "dir": str(tmp_path),
        "select": "per-stage",
        "steps": f"train_actor={FIRST + 1};train_log_probs={FIRST + 1};evaluate=1",
        "activities": ["cpu"],
    }
    host = wheel("skyrl")
    overrides = []
    if patched:
        apply("skyrl", host)
        overrides = [f"trainer.policy.megatron_config.megaprof={json.dumps(options)}"]
    env = host_environment(host, None if patched else ProfileConfig(**options))
    skip_without_packages()
    run_ranks(train, WORKLOAD.world_size, str(host), *overrides, timeout=240, env=env)

    found = traces(tmp_path)
    assert sorted(found) == [
        f"{kind}.pp{pp}"
        for kind in (
            "evaluate.actor.step000001",
            f"train_actor.actor.step{FIRST + 1:06d}",
            f"train_log_probs.actor.step{FIRST + 1:06d}",
            f"train_log_probs.ref.step{FIRST + 1:06d}",
        )
        for pp in (0, 1)
    ]
    for name, trace in found.items():
        # The second stage is given an input that it does not read, padding and all.
        assert trace["megaprof"]["lengths"] == [[length if name.endswith("pp0") else 16] for length in LENGTHS]
        assert labels(trace).count("forward") == WORKLOAD.microbatches
        assert labels(trace).count("backward") == (WORKLOAD.microbatches if name.startswith("train_actor") else 0)


def test_roles_in_one_job_of_rays(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    config = ProfileConfig(
        target=("train_actor", "train_log_probs"),
        dir=str(tmp_path),
        select="per-stage",
        steps=f"train_actor={FIRST + 1};train_log_probs=1",
        activities=("cpu",),
    )
    env = host_environment(wheel("skyrl"), config) | PATIENT_RAY
    skip_without_packages()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:  # Ray's sockets need short names
        code = f"import test_skyrl; test_skyrl.drive({ports}, {short!r})"
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert sorted(traces(tmp_path)) == [
        f"{kind}.pp{pp}"
        for kind in (
            f"train_actor.actor.step{FIRST + 1:06d}",
            "train_log_probs.actor.step000001",
            "train_log_probs.ref.step000001",
        )
        for pp in (0, 1)
    ]
