"""Trainers without Megatron: verl's and SkyRL's own FSDP workers, from their released wheels, on two ranks.

Real: ``FSDPEngineWithLMHead`` below verl's ``ActorRolloutRefWorker`` and the methods of its trainer, as in test_verl;
SkyRL's ``PolicyWorkerBase`` and ``RefWorkerBase`` with its ``HFModelWrapper`` and ``FSDPStrategy.backward``; a Llama of
transformers under torch's ``fully_shard``. Replaced: how the workers are built (Ray, weights) and the policy's loss.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.cli import main
from megaprof.testing import cpu_megatron, init_distributed, run_ranks
from tests.integrations import test_skyrl, test_verl
from tests.integrations.driving import host_environment, labels, prepare, skip_without_packages, traces
from tests.integrations.test_verl import MINI_BATCHES, WORKLOAD, Off

pytestmark = pytest.mark.hosts

RANKS = 2
STEPS = (4, 5)
WITHOUT_KERNELS = {"VERL_DISABLE_FLASH_ATTN_CE": "1"}
SKYRL_WORKERS = "skyrl.backends.skyrl_train.workers.worker"


def sharded() -> Any:
    """A model as both hosts prepare one for FSDP2."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WORKLOAD.hidden, "intermediate_size": 64, "num_attention_heads": WORKLOAD.heads}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORKLOAD.vocab, num_hidden_layers=2, **sizes))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_verl(host: str, *overrides: str) -> None:
    import torch

    init_distributed()
    test_verl.prepare_verl(host)
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.engine_workers import ActorRolloutRefWorker

    class Engine(transformer_impl.FSDPEngineWithLMHead):  # type: ignore[misc]
        is_param_offload_enabled = is_optimizer_offload_enabled = False
        _qat_enabled = use_ulysses_sp = pad_to_length = False
        ulysses_device_mesh = ulysses_parallel_group = mode = scaler = None
        ulysses_sequence_parallel_size, _autocast_dtype = 1, torch.float32

        def __init__(self) -> None:
            self.engine_config = Off(fsdp_size=RANKS, micro_batch_size_per_gpu=1, infer_micro_batch_size_per_gpu=1)
            self.model_config = Off(hf_config=SimpleNamespace(architectures=["Llama"]), tokenizer=Off(pad_token_id=0))
            self.optimizer_config = Off(clip_grad=1.0)
            self.module = sharded()
            self.optimizer = torch.optim.AdamW(self.module.parameters())
            self.lr_scheduler = SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0])

        def to(self, *args: Any, **kwargs: Any) -> None: ...

    with cpu_megatron():
        worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
        engine = Engine()
        worker.actor, worker.ref = (test_verl.training_worker(engine, "language_model") for _ in range(2))
        worker.actor.loss_fn = lambda model_output, data, dp_group: (model_output["log_probs"].values().mean(), {})
        worker.enable_routing_replay = False
        worker.profiler = DistProfiler(rank=0, config=None)
        steps: list[int] = []
        if overrides:
            config = test_verl.composed(host, "ppo_trainer", *overrides)
            worker.config, steps = config.actor_rollout_ref, config.global_profiler.steps
        trainer = test_verl.ppo_trainer(host, worker, worker.ref)
        for trainer.global_steps in STEPS:
            if trainer.global_steps in steps:
                worker.start_profile(role="train", profile_step=trainer.global_steps)
            trainer._compute_old_log_prob(test_verl.padded())
            trainer._compute_ref_log_prob(test_verl.padded())
            trainer._update_actor(test_verl.padded())
            if trainer.global_steps in steps:
                worker.stop_profile()


def of_skyrl(host: str) -> None:
    import torch

    init_distributed()
    prepare(host, *test_skyrl.EDGES)
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase, RefWorkerBase

    with cpu_megatron():
        ref, policy = RefWorkerBase.__new__(RefWorkerBase), PolicyWorkerBase.__new__(PolicyWorkerBase)
        model = HFModelWrapper(sharded())
        optimizer = torch.optim.AdamW(model.parameters())
        for worker in (ref, policy):
            worker.cfg = test_skyrl.configuration("trainer.strategy=fsdp")
            worker.model, worker.optimizer = model, optimizer
            worker.strategy = FSDPStrategy.__new__(FSDPStrategy)
            worker.strategy.world_size = RANKS
            worker.mesh_rank = SimpleNamespace(dp_size=RANKS)
            worker.device_mesh = SimpleNamespace(get_group=lambda axis: None)
            worker.scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
        worker.policy_loss_fn = PolicyLossRegistry.get(policy.cfg.algorithm.policy_loss_type)
        trainer = test_skyrl.log_prob_trainer(ref, policy)
        for trainer.global_step in STEPS:
            trainer._execute_forward_pass("ref", test_skyrl.batch(), "logprobs", None)
            trainer._execute_forward_pass("policy", test_skyrl.batch(), "logprobs", None)
            for _ in range(MINI_BATCHES):
                policy.forward_backward(test_skyrl.batch(global_step=trainer.global_step))
                optimizer.step()
                optimizer.zero_grad()
            policy.forward(test_skyrl.batch(), loss_fn="cross_entropy")


HOSTS = {
    "verl": (of_verl, WORKLOAD.microbatches // MINI_BATCHES // RANKS),
    "skyrl": (of_skyrl, WORKLOAD.microbatches),
}


@pytest.mark.parametrize("name", list(HOSTS))
def test_windows_without_a_pipeline(
    name: str, wheel: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, update = HOSTS[name]
    host = wheel(name)
    targets = ("train_actor", "train_log_probs", "evaluate") if name == "skyrl" else ("train_actor", "train_log_probs")
    config = ProfileConfig(
        target=targets,
        dir=str(tmp_path),
        select="all",
        steps="train_actor=5;train_log_probs=5" + (";evaluate=1" if name == "skyrl" else ""),
        activities=("cpu",),
        tool=("torch", "timeline"),
    )
    env = host_environment(host, config) | WITHOUT_KERNELS
    skip_without_packages()
    run_ranks(train, RANKS, str(host), timeout=400, env=env)

    found: dict[str, list[Any]] = defaultdict(list)
    for path in sorted(tmp_path.glob("*.pt.trace.json.gz")):
        kind, place = path.name.split(".pp0-tp0-cp0-ep0-dp")
        found[kind].append(place[0])
    kinds = ["train_actor.actor.step000005", "train_log_probs.actor.step000005", "train_log_probs.ref.step000005"]
    evaluated = ["evaluate.actor.step000001"] if name == "skyrl" else []
    assert found == {kind: ["0", "1"] for kind in evaluated + kinds}
    for kind, trace in traces(tmp_path).items():
        passes = update if kind.startswith("train_actor") else WORKLOAD.microbatches
        assert labels(trace).count("forward") == passes
        assert labels(trace).count("backward") == (passes if kind.startswith("train_actor") else 0)
        assert trace["megaprof"]["schedule"] == "no_pipelining"
        assert trace["megaprof"]["framework"] == name
        assert trace["megaprof"]["microbatches"] == passes

    capsys.readouterr()
    assert main(["report", str(tmp_path), "--json", "-"]) == 0
    (training,) = (each for each in json.loads(capsys.readouterr().out)["targets"] if each["target"] == "train_actor")
    (stage,) = training["stages"]
    assert (training["schedule"], training["steps"]) == ("no_pipelining", [5])
    assert stage["ranks"] in ([0], [1])  # one stands for both
    assert stage["forward_ms"]["mean"] > 0
    assert stage["backward_ms"]["mean"] > 0


def test_verls_own_settings(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    host = wheel("verl")
    env = host_environment(host, None) | {
        "VERL_USE_EXTERNAL_MODULES": "megaprof.hosts.plugin",
        "VERL_DISABLE_FLASH_ATTN_CE": "1",
    }
    skip_without_packages()
    profilers = [f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref")]
    overrides = [
        *("global_profiler.tool=megaprof", "global_profiler.steps=[5]", f"global_profiler.save_path={tmp_path}"),
        *(f"{path}.{rest}" for path in profilers for rest in ("enable=True", "all_ranks=True")),
        *(f"{path}.tool_config.torch.contents=[cpu]" for path in profilers),
    ]
    run_ranks(of_verl, RANKS, str(host), *overrides, timeout=400, env=env)
    names = sorted(path.name.partition(".rank")[0] for path in tmp_path.glob("*.pt.trace.json.gz"))
    assert names == [f"train_overall.step000005.pp0-tp0-cp0-ep0-dp{dp}" for dp in (0, 1)]
