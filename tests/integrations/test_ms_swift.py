"""ms-swift's own Megatron trainers, from its released wheel, on real megatron-core: its options, steps and roles.

Real: ``MegatronTrainer.train`` down to ``train_step`` and ``evaluate``, with its batches, loss and callbacks;
``MegatronDPOTrainer.train_step`` with forward step and loss; ``MegatronGRPOTrainer._maybe_compute_logps`` and what it
calls; the parser of ms-swift's arguments. Replaced: mcore_bridge and its models (they need Transformer Engine), the
optimizer, datasets, checkpoints, and GRPO's rollouts and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
FIRST = 5
LAST = FIRST + 1
ROLES = ("actor", "ref", "teacher")


def arguments(*options: str) -> Any:
    """Parsed as ms-swift parses them, and what it derives from model and ranks as far as it is needed here.

    To be called before ms-swift's trainers are imported, as ms-swift does.
    """
    from swift.megatron.arguments import MegatronSftArguments
    from transformers import HfArgumentParser

    args = HfArgumentParser([MegatronSftArguments]).parse_args(options)
    given = {
        "train_iters": LAST + 1,
        "eval_iters": 1,
        "eval_steps": 1,
        "seq_length": WORKLOAD.seq_length,
        "global_batch_size": WORKLOAD.microbatches,
        "num_microbatches": WORKLOAD.microbatches,
        "pipeline_model_parallel_size": WORKLOAD.pp,
        "padding_free": False,
        "task_type": "causal_lm",
        "is_multimodal": False,
    }
    vars(args).update(given)
    return args


def batches(rows: int = 1) -> Iterator[dict[str, Any]]:
    import torch

    length = WORKLOAD.seq_length
    while True:
        tokens = torch.randint(0, WORKLOAD.vocab, (rows, length))
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        positions = torch.arange(length)[None]
        yield {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions, "attention_mask": mask}


def trainer(base: Any, gpt: Any, args: Any) -> Any:
    from swift.megatron.callbacks import megatron_callbacks_map
    from swift.megatron.callbacks.default_flow import DefaultFlowCallback
    from swift.megatron.trainers.utils import TrainerState

    class Trainer(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.args, self.config = args, gpt.config
            self.wrapped_models = gpt.chunks
            self.unwrapped_models = [chunk.module for chunk in gpt.chunks]
            self.optimizer = SimpleNamespace(
                scale_loss=lambda loss: loss,
                zero_grad=gpt.optimizer.zero_grad,
                step=lambda: (gpt.optimizer.step(), (True, 1.0, 0))[1],
                param_groups=gpt.optimizer.param_groups,
            )
            self.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)
            self.state = TrainerState(iteration=FIRST)  # as after a resume
            self.enable_routing_replay, self.eval_metrics = False, None
            self.callbacks = [
                DefaultFlowCallback(self),
                *(megatron_callbacks_map[name](self) for name in args.callbacks),
            ]

        def _prepare_data_iterator(self, train_dataset: Any, val_dataset: Any = None) -> Any:
            return batches(), batches()

        def save_checkpoint(self) -> None: ...

        def _determine_best_metric(self, metrics: Any) -> None: ...

    return Trainer


def train(host: str, *options: str) -> None:
    init_distributed()
    prepare(host, "mcore_bridge")
    args = arguments(*options)
    from swift.megatron.trainers.trainer import MegatronTrainer

    with cpu_megatron():
        trainer(MegatronTrainer, build(WORKLOAD), args)().train(None, None)


def train_grpo(host: str) -> None:
    init_distributed()
    prepare(host, "mcore_bridge")
    args = arguments()
    import torch
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    with cpu_megatron():
        gpt = build(WORKLOAD)

        class Trainer(trainer(MegatronGRPOTrainer, gpt, args)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.args.tuner_type, self.args.ref_adapters = "full", []
                self.beta, self.temperature, self.template = 0.1, 1.0, SimpleNamespace(padding_free=False)
                self.ref_models = self.teacher_models = self.unwrapped_models
                self._has_teacher_explicit, self._is_dynamic_self_distillation = True, False
                self.use_teacher_api = self._teacher_use_disable_adapter = self.offload_teacher_model = False

            def _replace_data_iterator(self, data_iterator: Any) -> Any:
                mask = torch.ones(1, WORKLOAD.seq_length)
                batch = next(batches()) | {"grpo_batch": SimpleNamespace(seq_lengths=None, completion_mask=mask)}
                self._maybe_compute_logps(batch)
                return gpt.data_iterator(0)

            def forward_step(self, data_iterator: Any, model: Any) -> Any:
                return gpt.forward_step(data_iterator, model)

        made = Trainer()
        for _ in range(2):
            made.train_step(None)
            made.state.iteration += 1


def train_dpo(host: str) -> None:
    init_distributed()
    prepare(host, "mcore_bridge")
    args = arguments()
    from swift.megatron.trainers.dpo_trainer import DummyDPOTrainer, MegatronDPOTrainer

    from megaprof.testing.gpt import _build_chunk

    with cpu_megatron():
        gpt = build(WORKLOAD)
        given = {"rlhf_type": "dpo", "beta": 0.1, "loss_type": ["sigmoid"], "label_smoothing": 0.0, "rpo_alpha": None}
        vars(args).update(given, f_divergence_type="reverse_kl", reference_free=False, tuner_type="full")

        class Trainer(trainer(MegatronDPOTrainer, gpt, args)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.ref_models = [_build_chunk(WORKLOAD, gpt.config, 0).module]
                self.dummy_dpo_trainer = DummyDPOTrainer(args)
                for model in self.unwrapped_models:  # mcore_bridge's have this
                    model.get_input_tensor = lambda decoder=model.decoder: decoder.input_tensor

            def _all_reduce_metric(self, metric: Any) -> Any:
                return metric  # gloo has no average

        made = Trainer()
        for _ in range(2):
            made.train_step(batches(2))
            made.state.iteration += 1


def test_options_of_its_own_and_an_evaluation(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    host = wheel("ms-swift")
    apply("ms-swift", host)
    env = host_environment(host, None)
    skip_without_packages()
    options = [
        *("--callbacks", "profiler"),
        *("--profiler_save_path", str(tmp_path)),
        *("--profiler_ranks", "0", "1"),
        *("--profiler_contents", "cpu", "shapes"),
        *("--profiler_steps", f"train_actor={LAST};train_log_probs=0;evaluate=1"),
        *("--profiler_target", "train_actor", "train_log_probs", "evaluate"),
    ]
    run_ranks(train, WORKLOAD.world_size, str(host), *options, timeout=240, env=env)

    found = traces(tmp_path)
    assert sorted(found) == [
        f"{name}.pp{pp}" for name in ("evaluate.step000001", f"train_actor.step{LAST:06d}") for pp in (0, 1)
    ]
    for name, trace in found.items():
        assert labels(trace).count("forward") == WORKLOAD.microbatches
        assert labels(trace).count("backward") == (WORKLOAD.microbatches if name.startswith("train_actor") else 0)
        assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])


@pytest.mark.parametrize("discrete", [False, True])
def test_roles_of_log_probs(discrete: bool, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    config = ProfileConfig(
        target=("train_actor",) if discrete else ("train_overall",),
        dir=str(tmp_path),
        select="per-stage",
        steps=str(LAST if discrete else FIRST),
        discrete=discrete,
        activities=("cpu",),
    )
    host = wheel("ms-swift")
    env = host_environment(host, config)
    skip_without_packages()
    run_ranks(train_grpo, WORKLOAD.world_size, str(host), timeout=240, env=env)

    found = traces(tmp_path)
    stages = [f"pp{pp}" for pp in range(WORKLOAD.pp)]
    if discrete:
        files = [f"{work}.step{LAST:06d}" for work in (*(f"annotated.{role}" for role in ROLES), "train_actor")]
    else:
        files = [f"train_overall.step{FIRST:06d}"]
    assert sorted(found) == [f"{name}.{stage}" for name in files for stage in stages]
    passes = {role: f"role/{role}/compute_per_token_logps" for role in ROLES}
    for name, trace in found.items():
        written = labels(trace)
        for role, computed in passes.items():
            assert written.count(computed) == (not discrete or name.startswith(f"annotated.{role}."))


def test_the_reference_of_dpo_is_a_range_of_its_role(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    config = ProfileConfig(
        target=("train_actor",), dir=str(tmp_path), select="per-stage", steps=str(LAST), activities=("cpu",)
    )
    host = wheel("ms-swift")
    env = host_environment(host, config)
    skip_without_packages()
    run_ranks(train_dpo, WORKLOAD.world_size, str(host), timeout=240, env=env)

    found = traces(tmp_path)
    assert sorted(found) == [f"train_actor.step{LAST:06d}.pp{pp}" for pp in range(WORKLOAD.pp)]
    for trace in found.values():
        written = labels(trace)
        for range_, count in {"forward": 1, "role/ref/null_ref_context": 1, "backward": 1}.items():
            assert written.count(range_) == count * WORKLOAD.microbatches
