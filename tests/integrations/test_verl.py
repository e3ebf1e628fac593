"""verl's own workers, Megatron engines and SFT trainer, from its released wheel, on real megatron-core: roles in the
traces, and what verl's own settings become.

Real: the methods of ``RayPPOTrainer`` that hand batches to the workers; ``ActorRolloutRefWorker``'s three methods,
``TrainingWorker.infer_batch``, ``train_mini_batch`` and ``train_batch``, ``SFTTrainer.fit``; below them the engines for
a language model and for a value model with its head, in verl's padded layout (``use_remove_padding=False``); the losses
of the critic and of SFT. Replaced: how the workers are built (Ray, Hugging Face weights, the optimizer) and the way of
batches to them and back, the policy's loss, the attention mask (verl's is made for Transformer Engine), data sets and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.built import VARIABLE
from tests.integrations.driving import host_environment, labels, prepare, skip_without_packages, traces
from tests.integrations.patching import apply

pytestmark = pytest.mark.hosts

WORKLOAD = GPTWorkload(
    pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=32, heads=2, seq_length=16, options=VARIABLE
)
RESPONSE = 8
#: Tokens of the examples of SFT.
LENGTHS = (16, 10, 14, 12)
MINI_BATCHES = 2
EDGES = ("cachetools", "megatron.bridge", "torchdata", "verl.utils.dataset.multiturn_sft_dataset")


class Off(SimpleNamespace):
    """A configuration of verl's: what is not given is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) or default


def engine(base: Any, chunks: list[Any], config: Any, options: dict[str, Any]) -> Any:
    """One of verl's engines around a model that is built already. ``options`` of megaprof's count with the patch."""
    import torch
    from verl.workers.engine.megatron import transformer_impl

    transformer_impl.log_gpu_memory_usage = lambda *args, **kwargs: None

    def causal(module: Any, positional: Any, named: dict[str, Any]) -> Any:
        length = named["attention_mask"].shape[1]
        return positional, named | {"attention_mask": torch.ones(1, 1, length, length).triu(1).bool()}

    for chunk in chunks:
        chunk.register_forward_pre_hook(causal, with_kwargs=True)
    weights = torch.optim.AdamW([parameter for chunk in chunks for parameter in chunk.parameters()])

    def step() -> tuple[bool, float, int]:
        for parameter in weights.param_groups[0]["params"]:
            parameter.grad = getattr(parameter, "main_grad", parameter.grad)
        weights.step()
        return True, 1.0, 0

    class Engine(base):  # type: ignore[misc]
        is_param_offload_enabled = is_optimizer_offload_enabled = enable_routing_replay = False
        _is_offload_param = _qat_enabled = False
        mode, tf_config = None, config

        def __init__(self) -> None:
            self.engine_config = Off(
                context_parallel_size=1,
                micro_batch_size_per_gpu=1,
                infer_micro_batch_size_per_gpu=1,
                override_transformer_config={},
                megaprof=options,
                forward_only=True,
            )
            self.model_config = Off(
                mtp=Off(), hf_config=SimpleNamespace(architectures=["GPTModel"]), tokenizer=Off(pad_token_id=0)
            )
            self.initialize()  # verl's own, which builds no optimizer for forward_only
            self.engine_config.forward_only = False
            self.lr_scheduler = SimpleNamespace(step=lambda increment: None)
            self.optimizer = SimpleNamespace(zero_grad=weights.zero_grad, step=step, param_groups=weights.param_groups)

        def _build_tf_config(self) -> None: ...

        def _build_megatron_module(self) -> list[Any]:
            return chunks

        def to(self, *args: Any, **kwargs: Any) -> None: ...

    return Engine()


def training_worker(made: Any, model_type: str, profiler: Any = None) -> Any:
    from verl.utils.profiler import DistProfiler
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    worker = TrainingWorker.__new__(TrainingWorker)
    worker.engine, worker.engine_config, worker.model_config = made, made.engine_config, made.model_config
    worker.config = TrainingWorkerConfig(model_type=model_type, profiler_config=profiler)
    worker.device_name = "cpu"
    worker.flops_counter = None
    worker.profiler = DistProfiler(rank=0, config=None)
    return worker


def actor_and_reference(gpt: Any, options: dict[str, Any]) -> Any:
    """In one process, as verl colocates them."""
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
    from verl.workers.engine_workers import ActorRolloutRefWorker

    made = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    language = engine(MegatronEngineWithLMHead, gpt.chunks, gpt.config, options)
    made.actor, made.ref = (training_worker(language, "language_model") for _ in range(2))
    made.actor.loss_fn = lambda model_output, data, dp_group: (model_output["log_probs"].values().mean(), {})
    made.enable_routing_replay = False
    made.profiler = DistProfiler(rank=0, config=None)
    return made


def critic(gpt: Any, options: dict[str, Any], profiler: Any) -> Any:
    """A model of its own, with the head that verl puts on a value model."""
    from megatron.core.utils import unwrap_model
    from verl.models.mcore.bridge import make_value_model
    from verl.workers.config import CriticConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithValueHead
    from verl.workers.utils.losses import value_loss

    from megaprof.testing.gpt import _build_chunk

    chunks = [_build_chunk(WORKLOAD, gpt.config, 0)]
    make_value_model(WORKLOAD.hidden, sequence_parallel=False)(unwrap_model(chunks))
    made = training_worker(engine(MegatronEngineWithValueHead, chunks, gpt.config, options), "value_model", profiler)
    made.loss_fn = partial(value_loss, config=CriticConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=1))
    return made


def composed(host: str, name: str, *overrides: str) -> Any:
    """verl's configuration as its trainer has it, and hands parts of it to its workers."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(f"{host}/verl/trainer/config", version_base=None):
        config = compose(name, overrides=list(overrides))
    OmegaConf.resolve(config)
    return config


def prepare_verl(host: str) -> None:
    """megatron-bridge is missing: verl makes the value model's head itself then, as it does with an older one."""
    import sys

    prepare(host, *EDGES)
    sys.modules["megatron.bridge.training.utils.train_utils"] = None  # type: ignore[assignment]


def batch(**given: Any) -> Any:
    """What PPO's trainer hands its workers, unpadded (the padding it takes out with flash_attn's functions)."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    count, length = WORKLOAD.microbatches, WORKLOAD.seq_length
    tokens = torch.randint(1, WORKLOAD.vocab, (count, length))
    response = torch.ones(count, RESPONSE, dtype=torch.long)
    data = TensorDict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested(torch.arange(length).expand(count, -1)),
            "prompts": tokens[:, :-RESPONSE],
            "responses": tokens[:, -RESPONSE:],
            "attention_mask": torch.ones_like(tokens),
            "response_mask": response,
            "loss_mask": response,
            "values": response.float(),
            "returns": response.float(),
            "temperature": torch.ones(count),
        },
        [count],
    )
    tu.assign_non_tensor(data, global_token_num=[length] * count, **given)
    return data


def nested(rows: Any) -> Any:
    import torch

    return torch.nested.as_nested_tensor([row.clone() for row in rows], layout=torch.jagged)


def train(host: str, options: dict[str, Any], *overrides: str) -> None:
    """A trainer's steps 4 and 5: with megaprof's ``options`` for the patch, or with ``overrides`` of verl's."""
    init_distributed()
    prepare_verl(host)
    with cpu_megatron():
        gpt = build(WORKLOAD)
        policy, steps, profiler = actor_and_reference(gpt, options), [], None
        if overrides:
            from verl.utils.config import omega_conf_to_dataclass

            config = composed(host, "ppo_megatron_trainer", *overrides)
            policy.config, steps = config.actor_rollout_ref, config.global_profiler.steps
            profiler = omega_conf_to_dataclass(config.critic.profiler)
        values = critic(gpt, options, profiler)
        trainer = ppo_trainer(host, policy, values)
        for trainer.global_steps in (4, 5):
            if trainer.global_steps in steps:
                policy.start_profile(role="train", profile_step=trainer.global_steps)
                values.start_profile(profile_step=trainer.global_steps)
            for method in ("compute_old_log_prob", "compute_ref_log_prob", "compute_values", "update_critic"):
                getattr(trainer, f"_{method}")(padded())
            trainer._update_actor(padded())
            if trainer.global_steps in steps:
                policy.stop_profile()
                values.stop_profile()


def padded() -> Any:
    """The batch of a step, as PPO's trainer has it."""
    import torch
    from verl import DataProto

    return DataProto.from_single_dict({"responses": torch.ones(WORKLOAD.microbatches, RESPONSE)})


def ppo_trainer(host: str, policy: Any, values: Any) -> Any:
    """verl's trainer over workers of this process: they get batches of their own with what is said of the trainer's."""
    import torch
    from verl.trainer.ppo import ray_trainer
    from verl.utils import tensordict_utils as tu

    columns = {name: torch.ones(WORKLOAD.microbatches, RESPONSE) for name in ("entropy", "log_probs", "values")}

    def group(**methods: Any) -> Any:
        def called(method: Any) -> Any:
            def call(data: Any) -> Any:
                said = {name: tu.get(data, name) for name, v in data.items() if not isinstance(v, torch.Tensor)}
                method(batch(**said))
                output = tu.get_tensordict(dict(columns), {"metrics": {"mfu": 0.0}})
                return SimpleNamespace(get=lambda: output) if method.__self__ is values else output

            return call

        return SimpleNamespace(**{name: called(method) for name, method in methods.items()})

    ray_trainer.left_right_2_no_padding = lambda data: data
    ray_trainer.no_padding_2_padding = lambda column, data: column
    trainer = ray_trainer.RayPPOTrainer.__new__(ray_trainer.RayPPOTrainer)
    sizes = (
        f"{of}.ppo_mini_batch_size={WORKLOAD.microbatches // MINI_BATCHES}"
        for of in ("actor_rollout_ref.actor", "critic")
    )
    trainer.config = composed(host, "ppo_megatron_trainer", "actor_rollout_ref.rollout.n=1", *sizes)
    trainer.ref_in_actor, trainer.distillation_config = False, None
    trainer.actor_rollout_wg = group(compute_log_prob=policy.compute_log_prob, update_actor=policy.update_actor)
    trainer.ref_policy_wg = group(compute_ref_log_prob=policy.compute_ref_log_prob)
    trainer.critic_wg = group(infer_batch=values.infer_batch, train_mini_batch=values.train_mini_batch)
    return trainer


def fit(host: str, *overrides: str) -> None:
    """verl's SFT trainer, steps 4 to 6 of a run that was resumed, with a validation after each."""
    init_distributed()
    prepare_verl(host)
    import torch
    from verl.trainer import sft_trainer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
    from verl.workers.utils.losses import sft_loss

    own = ("model.path=none", "data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1", "trainer.device=cpu")
    schedule = ("trainer.total_epochs=1", "trainer.test_freq=1", "trainer.logger=console")
    with cpu_megatron():
        gpt = build(WORKLOAD)
        sft_trainer.log_gpu_memory_usage = lambda *args, **kwargs: None
        trainer = sft_trainer.SFTTrainer.__new__(sft_trainer.SFTTrainer)
        trainer.config = composed(host, "sft_trainer_engine", *own, *schedule, *overrides)
        trainer.profiler_config = omega_conf_to_dataclass(trainer.config.profiler)
        trainer.start_profile_step, trainer.end_profile_step = trainer.config.trainer.profile_interval
        language = engine(MegatronEngineWithLMHead, gpt.chunks, gpt.config, {})
        trainer.engine, trainer.model_config = language, language.model_config
        trainer.training_client = training_worker(language, "language_model", trainer.profiler_config)
        trainer.training_client.set_loss_fn(partial(sft_loss, config=None))

        def examples() -> Any:
            tokens = [torch.randint(1, WORKLOAD.vocab, (length,)) for length in LENGTHS]
            rows = [{"input_ids": row, "position_ids": torch.arange(len(row)), "loss_mask": row > 0} for row in tokens]
            return SFTTensorCollator(DatasetPadMode.NO_PADDING)(rows)

        trainer.train_dataloader, trainer.val_dataloader = [examples() for _ in range(3)], [examples()]
        trainer.train_sampler = SimpleNamespace(set_epoch=lambda epoch: None)
        trainer.ckpt_handler = SimpleNamespace(save_checkpoint=lambda step: None)
        trainer.device_name, trainer.rank = "cpu", torch.distributed.get_rank()
        trainer.global_batch_size = WORKLOAD.microbatches
        trainer.steps_per_epoch, trainer.resume_global_step, trainer.total_training_steps = 100, 3, 6
        trainer.save_freq, trainer.test_freq = -1, 1
        trainer.fit()


@pytest.mark.parametrize("patched", [False, True])
def test_roles_of_colocated_workers(patched: bool, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    step = 1 if patched else 5  # the patch has no part in the trainer's process, so that steps are counted
    options: dict[str, Any] = {
        "target": ["train_actor", "train_log_probs"],
        "dir": str(tmp_path),
        "select": "per-stage",
        "steps": str(step),
        "activities": ["cpu"],
    }
    host = wheel("verl")
    if patched:
        apply("verl", host)
    env = host_environment(host, None if patched else ProfileConfig(**options))
    skip_without_packages()
    run_ranks(train, WORKLOAD.world_size, str(host), options, timeout=240, env=env)

    found = traces(tmp_path)
    kinds = ("train_actor.actor", "train_actor.critic", *(f"train_log_probs.{r}" for r in ("actor", "critic", "ref")))
    assert sorted(found) == [f"{kind}.step{step:06d}.pp{pp}" for kind in kinds for pp in (0, 1)]
    for name, trace in found.items():
        update = WORKLOAD.microbatches // MINI_BATCHES if name.startswith("train_actor") else 0
        assert labels(trace).count("forward") == update or WORKLOAD.microbatches
        assert labels(trace).count("backward") == update


@pytest.mark.parametrize("discrete", [False, True])
def test_verls_own_settings(discrete: bool, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    host = wheel("verl")
    env = host_environment(host, None) | {"VERL_USE_EXTERNAL_MODULES": "megaprof.hosts.plugin"}
    skip_without_packages()
    actor, ref = (f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref"))
    overrides = [
        "global_profiler.tool=megaprof",
        "global_profiler.steps=[1,5]",
        f"global_profiler.save_path={tmp_path}",
        *(f"{actor}.enable=True", f"{actor}.all_ranks=True"),
        *(f"{ref}.enable=True", f"{ref}.ranks=[1]"),
        *("critic.profiler.enable=True", "critic.profiler.ranks=[0]"),
        *(f"{path}.tool_config.torch.contents=[cpu]" for path in (actor, ref, "critic.profiler")),
        *(f"{path}.tool_config.torch.discrete={discrete}" for path in (actor, ref, "critic.profiler")),
    ]
    run_ranks(train, WORKLOAD.world_size, str(host), {}, *overrides, timeout=240, env=env)

    if not discrete:
        assert sorted(traces(tmp_path)) == [f"train_overall.step000005.pp{pp}" for pp in (0, 1)]
        return
    assert sorted(traces(tmp_path)) == sorted(
        [
            *(f"annotated.actor.step000005.pp{pp}" for pp in (0, 1)),
            "annotated.ref.step000005.pp1",
            "annotated.critic.step000005.pp0",
            *(f"train_actor.actor.step000005.pp{pp}" for pp in (0, 1)),
            "train_actor.critic.step000005.pp0",
        ]
    )


@pytest.mark.parametrize("settings", ["megaprof", "verl"])
def test_sft(settings: str, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    host = wheel("verl")
    config, overrides = None, []
    if settings == "megaprof":
        config = ProfileConfig(
            target=("train_actor", "train_log_probs", "evaluate"),
            dir=str(tmp_path),
            select="per-stage",
            steps="train_actor=5;train_log_probs=0;evaluate=1",
            activities=("cpu",),
        )
    else:
        overrides = [
            *("profiler.tool=megaprof", "profiler.enable=True", "profiler.all_ranks=True"),
            *(f"profiler.save_path={tmp_path}", "profiler.tool_config.torch.contents=[cpu]"),
            "trainer.profile_interval=[5,5]",
        ]
    env = host_environment(host, config) | {"VERL_USE_EXTERNAL_MODULES": "megaprof.hosts.plugin"}
    skip_without_packages()
    run_ranks(fit, WORKLOAD.world_size, str(host), *overrides, timeout=240, env=env)

    found = traces(tmp_path)
    if settings == "verl":  # one file for all of a step, the validation behind it as well
        assert sorted(found) == [f"train_overall.step000005.pp{pp}" for pp in (0, 1)]
        assert all(labels(trace).count("backward") == WORKLOAD.microbatches for trace in found.values())
        return
    kinds = ["evaluate.step000001", "train_actor.step000005"]
    assert sorted(found) == [f"{kind}.pp{pp}" for kind in kinds for pp in (0, 1)]
    for name, trace in found.items():
        assert trace["megaprof"]["lengths"] == [[length] for length in LENGTHS]
        assert labels(trace).count("forward") == WORKLOAD.microbatches
        assert labels(trace).count("backward") == (WORKLOAD.microbatches if name.startswith("train_actor") else 0)
