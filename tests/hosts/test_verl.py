"""verl's own workers and Megatron engine, from its released wheel, on real megatron-core: roles in the traces, and what
verl's own settings become.

Real: ``ActorRolloutRefWorker``'s three methods, ``TrainingWorker.infer_batch`` and ``train_batch``, the engine's
``forward_backward_batch``. Replaced: how the workers are built (Ray, Hugging Face weights) and the engine's
``forward_step``, whose packed sequences only CUDA kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driving import host_environment, labels, prepare, skip_unless_importable, traces

from megaprof import ProfileConfig
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

WORKLOAD = GPTWorkload(
    pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=32, heads=2, seq_length=16, seq_lengths=(16,) * 4
)


def worker(gpt: Any) -> Any:
    """An actor and its reference in one process, as verl colocates them."""
    import torch
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    class Engine(MegatronEngineWithLMHead):
        def __init__(self) -> None:
            self.module, self.tf_config, self.optimizer = gpt.chunks, gpt.config, gpt.optimizer
            self.engine_config = SimpleNamespace(
                context_parallel_size=1,
                dynamic_context_parallel=False,
                pad_bshd_to_minibatch_max=False,
                use_dynamic_bsz=False,
                max_token_len_per_gpu=None,
                infer_max_token_len_per_gpu=None,
                micro_batch_size_per_gpu=1,
                infer_micro_batch_size_per_gpu=1,
                use_fused_kernels=False,
                forward_only=False,
                param_offload=False,
                optimizer_offload=False,
                grad_offload=False,
            )
            self.model_config = SimpleNamespace(mtp=SimpleNamespace(enable=False), get=lambda name, default: default)
            self.mode = None

        is_param_offload_enabled = is_optimizer_offload_enabled = False

        def to(self, *args: Any, **kwargs: Any) -> None: ...

        def optimizer_step(self) -> float:
            self.optimizer.step()
            return 1.0

        def forward_step(
            self, batch_iter: Any, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
        ) -> Any:
            batch = next(batch_iter)
            tokens = torch.stack(list(batch["input_ids"].unbind()))
            positions = torch.arange(tokens.shape[1])[None]
            mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
            output = model(tokens, positions, mask)

            def finish(logits: Any) -> Any:
                log_probs = torch.nested.as_nested_tensor(list(-logits.logsumexp(-1)), layout=torch.jagged)
                return postprocess_micro_batch_func({"log_probs": log_probs}, data=batch)

            return output, finish

    def training_worker() -> Any:
        made = TrainingWorker.__new__(TrainingWorker)
        made.engine = Engine()
        made.engine_config, made.model_config = made.engine.engine_config, made.engine.model_config
        made.config = SimpleNamespace(model_type="language_model")
        made.loss_fn = lambda model_output, data, dp_group: (model_output["log_probs"].values().mean(), {})
        made.device_name = "cpu"
        made.flops_counter = None
        made.profiler = DistProfiler(rank=0, config=None)
        return made

    made = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    made.actor, made.ref = training_worker(), training_worker()
    made.actor.train_mini_batch = made.actor.train_batch
    made.enable_routing_replay = False
    made.profiler = DistProfiler(rank=0, config=None)
    return made


def composed(host: str, *overrides: str) -> Any:
    """verl's configuration as its PPO trainer has it, and hands parts of it to its workers."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(f"{host}/verl/trainer/config", version_base=None):
        config = compose("ppo_megatron_trainer", overrides=list(overrides))
    OmegaConf.resolve(config)
    return config


def train(host: str, *overrides: str) -> None:
    """A trainer's steps 4 and 5; with ``overrides`` as in a run with those settings."""
    init_distributed()
    prepare(host)
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    def batch() -> Any:
        tokens = torch.randint(0, WORKLOAD.vocab, (4, 16))
        nested = torch.nested.as_nested_tensor(list(tokens), layout=torch.jagged)
        data = TensorDict({"input_ids": nested, "loss_mask": torch.ones(4, 16), "temperature": torch.ones(4)}, [4])
        tu.assign_non_tensor(data, global_token_num=[16] * 4, compute_loss=False)
        return data

    with cpu_megatron():
        made = worker(build(WORKLOAD))
        steps = []
        if overrides:
            config = composed(host, *overrides)
            made.config, steps = config.actor_rollout_ref, config.global_profiler.steps
        for step in (4, 5):
            if step in steps:
                made.start_profile(role="train", profile_step=step)
            made.compute_ref_log_prob(batch())
            made.compute_log_prob(batch())
            made.update_actor(batch())
            made.update_actor(batch())
            if step in steps:
                made.stop_profile()


def test_roles_of_a_colocated_worker(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    config = ProfileConfig(
        target=("train_actor", "train_log_probs"), dir=str(tmp_path), select="per-stage", steps="1", activities=("cpu",)
    )
    host = wheel("verl")
    env = host_environment(host, config)
    skip_unless_importable("verl.workers.engine_workers", env)
    run_ranks(train, WORKLOAD.world_size, str(host), timeout=240, env=env)

    found = traces(tmp_path)
    assert sorted(found) == [
        f"{kind}.step000001.pp{pp}"
        for kind in ("train_actor.actor", "train_log_probs.actor", "train_log_probs.ref")
        for pp in (0, 1)
    ]
    for name, trace in found.items():
        assert labels(trace).count("forward") == 4
        assert labels(trace).count("backward") == (4 if name.startswith("train_actor") else 0)


@pytest.mark.parametrize("discrete", [False, True])
def test_verls_own_settings(discrete: bool, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    host = wheel("verl")
    env = host_environment(host, None) | {"VERL_USE_EXTERNAL_MODULES": "megaprof.autoload.plugin"}
    skip_unless_importable("verl.workers.engine_workers", env)
    actor, ref = (f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref"))
    overrides = [
        "global_profiler.tool=megaprof",
        "global_profiler.steps=[1,5]",
        f"global_profiler.save_path={tmp_path}",
        *(f"{actor}.enable=True", f"{actor}.all_ranks=True"),
        *(f"{ref}.enable=True", f"{ref}.ranks=[1]"),
        *(f"{path}.tool_config.torch.contents=[cpu]" for path in (actor, ref)),
        *(f"{path}.tool_config.torch.discrete={discrete}" for path in (actor, ref)),
    ]
    run_ranks(train, WORKLOAD.world_size, str(host), *overrides, timeout=240, env=env)

    log_probs = "annotated" if discrete else "train_log_probs"
    assert sorted(traces(tmp_path)) == sorted(
        [
            *(f"{log_probs}.actor.step000005.pp{pp}" for pp in (0, 1)),
            f"{log_probs}.ref.step000005.pp1",
            *(f"train_actor.actor.step000005.pp{pp}" for pp in (0, 1)),
        ]
    )
