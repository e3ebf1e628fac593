"""Adapters: what a host's functions know is known to the schedule calls inside them."""

from __future__ import annotations

import ast
import asyncio
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.autoload import HOSTS, contract, megatron_bridge, megatron_lm, registry
from megaprof.autoload.contract import Facts, Hook
from megaprof.capture import profiler, roles
from megaprof.capture.agenda import Agenda
from megaprof.capture.roles import evaluating
from megaprof.formats.facts import PARTS
from megaprof.hosts import ms_swift, skyrl, slime, verl
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.recorders.loop import Parts
from megaprof.runtime.armed import armed
from megaprof.runtime.patching import Patches
from tests.integrations.wheels import WHEELS


def seen() -> tuple[str | None, int | None, bool]:
    """What a schedule call at this place would be counted as."""
    return roles.current().role, registry.iteration(), evaluating()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("acme.training")
    code = """
from contextlib import contextmanager
def train(model, step, *, fail=False):
    'docstring'
    if fail:
        raise KeyError(step)
    return seen()
class Trainer:
    name = "mine"
    def evaluate(self):
        return seen()
    @contextmanager
    def reference(self):
        yield seen()
    async def fit(self, fail=False):
        if fail:
            raise KeyError("fit")
        return seen()
"""
    vars(module)["seen"] = seen
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "acme.training", module)
    return module


HOOKS = (
    Hook("acme.training", "train", lambda known: Facts(role="actor", iteration=known["step"]), ends="step"),
    Hook("acme.training", "Trainer.evaluate", lambda known: Facts(role=known["self"].name, evaluation=True)),
    Hook("acme.training", "Trainer.reference", lambda known: Facts(role="ref"), context=True),
    Hook("acme.training", "Trainer.fit", lambda known: Facts(host_step=1), ends="job"),
    Hook("acme.training", "gone", lambda known: Facts(role="never")),
    Hook("acme.elsewhere", "train", lambda known: Facts(role="never")),
)


@pytest.fixture
def adapted(host: Any) -> Iterator[Any]:
    before = host.train, vars(host.Trainer)["evaluate"]
    patches = Patches()
    contract.apply(HOOKS, patches)
    contract.apply(HOOKS, patches)  # a second time changes nothing
    yield host
    patches.restore()
    assert (host.train, vars(host.Trainer)["evaluate"]) == before


def test_a_function_tells_role_and_iteration_for_its_own_duration(adapted: Any) -> None:
    assert adapted.train("model", step=7) == ("actor", 7, False)
    assert adapted.train("model", 8) == ("actor", 8, False)
    assert seen() == (None, None, False)
    assert (adapted.train.__name__, adapted.train.__doc__) == ("train", "docstring")


def test_the_hosts_exception_passes_and_nothing_stays(adapted: Any) -> None:
    with pytest.raises(KeyError, match="7"):
        adapted.train("model", 7, fail=True)
    assert seen() == (None, None, False)


def test_a_method_and_an_evaluation(adapted: Any) -> None:
    assert adapted.Trainer().evaluate() == ("mine", None, True)


def test_facts_hold_inside_a_context_manager(adapted: Any) -> None:
    with adapted.Trainer().reference() as inside:
        assert inside == ("ref", None, False)
        assert seen() == ("ref", None, False)
        assert adapted.train("model", 3) == ("actor", 3, False)
    assert seen() == (None, None, False)


def test_all_calls_of_a_hosts_step_know_its_number() -> None:
    config = ProfileConfig(target=("train_overall",), steps="none", dir="traces")
    coords = WorldLayout(ParallelSizes()).coords(0)
    agenda = Agenda(config, coords)

    def begun(target: str) -> int | None:
        host_step, *own = agenda.begins(target, None, *registry.numbers(target))[0]
        return host_step.number if own else None

    assert begun("evaluate") is None
    with contract.inside(Facts(iteration=12), "mini-batch"):
        assert begun("evaluate") == 12  # without one of its own, a call belongs to the step of its number
        assert begun("train_actor") is None
        with contract.inside(Facts(host_step=3, evaluation=True), "evaluate"):
            assert (begun("evaluate"), registry.iteration()) == (3, 12)
    with contract.inside(Facts(host_step=4), "log_probs"):
        assert (begun("train_log_probs"), registry.iteration()) == (4, None)
        assert begun("train_log_probs") is None


def test_the_end_of_a_hosts_step_is_told_and_what_fails_there_is_ours(
    adapted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def fail() -> None:
        told.append(1)
        raise OSError("disk full")

    monkeypatch.setattr(contract, "process", SimpleNamespace(sessions=[1], parts=Parts()))
    monkeypatch.setattr(profiler, "step_ended", fail)
    assert adapted.train("model", 8) == ("actor", 8, False)
    assert told == [1]
    assert "disk full" in caplog.text
    with pytest.raises(KeyError):
        adapted.train("model", 9, fail=True)
    assert told == [1, 1]


def test_a_coroutine_is_over_when_it_was_awaited(adapted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(armed, "finish_job", lambda: told.append(1))
    fitting = adapted.Trainer().fit()
    assert told == []
    assert asyncio.run(fitting) == (None, None, False)
    assert told == [1]
    with pytest.raises(KeyError, match="fit"):
        asyncio.run(adapted.Trainer().fit(fail=True))
    assert told == [1, 1]


def test_what_cannot_be_read_is_left_unsaid(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patches = Patches()
    contract.apply((Hook("acme.training", "train", lambda known: known["missing"]),), patches)
    assert host.train("model", 1) == (None, None, False)
    assert host.train("model", 2) == (None, None, False)
    assert caplog.text.count("cannot read") == 1
    with pytest.raises(TypeError, match="step"):
        host.train("model")
    patches.restore()


def facts(module: Any, function: str, **arguments: Any) -> Facts:
    hooks: dict[str, Hook] = {hook.function: hook for hook in module.HOOKS}
    return hooks[function].read(arguments)


def numbers(facts: Facts, steps: int) -> list[int | None]:
    """What the schedule calls inside are numbered, called as slime does: from a loop over ``step_id``."""
    found = []
    with contract.inside(facts, "train"):
        for step_id in range(steps):
            assert step_id >= 0
            found.append(contract.iteration())
    return found


def test_the_host_is_the_one_that_is_built_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, _ in HOSTS.values():
        monkeypatch.delitem(sys.modules, package, raising=False)
    assert registry.framework() is None
    found = []
    for package in ("megatron.training", "megatron.bridge", "verl"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        found.append(registry.framework())
    assert found == ["megatron-lm", "megatron-bridge", "verl"]


def test_a_timeline_has_a_number_for_each_part_of_a_hosts_loop() -> None:
    assert {hook.part for hook in registry.HOOKS} - {None} <= set(PARTS)


def test_slime_numbers_training_steps_and_log_probs_as_it_logs_them() -> None:
    model, steps = [SimpleNamespace(role="critic")], [4, 4, 4]
    training = facts(slime, "train", model=model, num_microbatches=steps, rollout_id=5)
    assert (training.role, training.host_step) == ("critic", 5)
    assert numbers(training, 3) == [15, 16, 17]

    def train_critic(rollout_id: int) -> Facts:
        return facts(slime, "forward_only", model=model, num_microbatches=steps)

    log_probs = train_critic(6)
    assert (log_probs.role, log_probs.host_step) == ("critic", 6)
    assert numbers(log_probs, 3) == [18, 19, 20]
    alone = facts(slime, "forward_only", model=model, num_microbatches=steps)
    assert (alone.iteration, alone.host_step) == (None, None)


def test_slime_tells_whose_weights_are_loaded() -> None:
    actor = [SimpleNamespace(role="actor")]
    for prefix, role in (("ref_", "ref"), ("teacher_", "teacher"), ("", "actor")):
        assert facts(slime, "forward_only", model=actor, store_prefix=prefix).role == role
    assert facts(slime, "forward_only", model=[SimpleNamespace(role="critic")]).role == "critic"


def test_verl_workers() -> None:
    critic = SimpleNamespace(config=SimpleNamespace(model_type="value_model"))
    language = SimpleNamespace(config=SimpleNamespace(model_type="language_model"))
    assert facts(verl, "ActorRolloutRefWorker.compute_ref_log_prob", self=None).role == "ref"
    assert facts(verl, "ActorRolloutRefWorker.update_actor", self=None).role == "actor"
    assert facts(verl, "TrainingWorker.train_batch", self=critic).role == "critic"
    assert facts(verl, "TrainingWorker.infer_batch", self=language) == Facts()


def test_verl_workers_up_to_0_6() -> None:
    """A rollout and a reward model are work of their own there, under whichever tool."""
    worker = SimpleNamespace(config=None)
    for function, role in (
        ("ActorRolloutRefWorker.generate_sequences", "rollout"),
        ("CriticWorker.update_critic", "critic"),
        ("RewardModelWorker.compute_rm_score", "reward"),
    ):
        assert facts(verl, function, self=worker) == Facts(role=role)


def test_verls_trainers_give_their_step_to_the_batches() -> None:
    trainer, worker = SimpleNamespace(global_steps=7), SimpleNamespace(config=None)
    for name, batch in (
        ("RayPPOTrainer", SimpleNamespace(meta_info={"temperature": 1.0})),
        ("PPOTrainer", SimpleNamespace(extra_info={})),
    ):
        assert facts(verl, "ActorRolloutRefWorker.compute_log_prob", self=worker, data=batch).iteration is None
        assert facts(verl, f"{name}._compute_old_log_prob", self=trainer, batch=batch) == Facts()
        told = facts(verl, "ActorRolloutRefWorker.compute_log_prob", self=worker, data=batch)
        assert told == Facts(role="actor", iteration=7)


def test_verls_reference_with_lora_is_the_actors_worker() -> None:
    """Its trainer says so in the batch: in a tensordict what is no tensor is wrapped."""
    worker = SimpleNamespace(config=None)
    for carried, role in (({}, "actor"), ({"no_lora_adapter": True}, "ref"), ({"no_lora_adapter": False}, "actor")):
        wrapped = {name: SimpleNamespace(data=value) for name, value in carried.items()}
        for batch in (carried, wrapped, SimpleNamespace(meta_info=carried), SimpleNamespace(extra_info=carried)):
            assert facts(verl, "ActorRolloutRefWorker.compute_log_prob", self=worker, data=batch).role == role


def test_verl_sft_infers_only_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    language = SimpleNamespace(config=SimpleNamespace(model_type="language_model"))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="verl.trainer.sft_trainer"))
    assert facts(verl, "TrainingWorker.infer_batch", self=language).evaluation


def test_verl_sft_steps_are_its_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    language = SimpleNamespace(config=SimpleNamespace(model_type="language_model"))

    def fit(global_step: int) -> Facts:
        return facts(verl, "TrainingWorker.train_batch", self=language)

    assert fit(7).iteration is None  # somebody else's function of that name
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="verl.trainer.sft_trainer"))
    assert fit(7) == Facts(iteration=7)
    assert facts(verl, "TrainingWorker.train_batch", self=language) == Facts()


def test_skyrl_workers() -> None:
    class Worker:
        model = object()

        def run(
            self, data: Any, function: str = "forward_backward_mini_batch", model: Any = None, **given: Any
        ) -> Facts:
            return facts(skyrl, f"MegatronModelWrapper.{function}", **{"self": model or self.model, **given})

    class MegatronRefWorkerBase(Worker): ...

    data = SimpleNamespace(metadata={"global_step": 12})
    assert Worker().run(data) == Facts(role="actor", iteration=12)
    assert Worker().run(SimpleNamespace()) == Facts(role="actor")
    assert Worker().run(data, forward_only=True) == Facts(role="actor", iteration=12, evaluation=True)
    assert Worker().run(data, "forward") == Facts(role="actor", iteration=12)
    assert Worker().run(SimpleNamespace(metadata={"response_length": 8}), "forward") == Facts(role="actor")
    assert MegatronRefWorkerBase().run(data, "forward") == Facts(role="ref", iteration=12)
    assert Worker().run(data, model=object()) == Facts()


def test_skyrls_trainer_gives_its_step_to_the_batches_of_log_probs() -> None:
    trainer, batch = SimpleNamespace(global_step=12), SimpleNamespace(metadata={"response_length": 8})
    facts(skyrl, "RayPPOTrainer._execute_forward_pass", self=trainer, data_fwd_pass=batch)
    facts(skyrl, "SFTTrainer.train_step", self=None, batch=batch, step=13)
    assert batch.metadata == {"response_length": 8, "global_step": 12}


def test_ms_swift_and_bridge_iterations() -> None:
    trainer = SimpleNamespace(state=SimpleNamespace(iteration=3))
    assert facts(ms_swift, "BaseMegatronTrainer.train_step", self=trainer).iteration == 3
    state = SimpleNamespace(train_state=SimpleNamespace(step=4))
    assert facts(megatron_bridge, "train_step", global_state=state).iteration == 4
    assert facts(ms_swift, "MegatronRLHFTrainer.compute_per_token_logps").role == "actor"
    with roles.role("ref"):
        assert facts(ms_swift, "MegatronRLHFTrainer.compute_per_token_logps").role == "ref"


def test_megatron_lm_rl_computes_its_own_log_probs_first() -> None:
    for _ in range(2):
        assert facts(megatron_lm, "prepare_data_for_update") == Facts()
        assert facts(megatron_lm, "compute_logprobs_batch").role == "actor"
        assert facts(megatron_lm, "compute_logprobs_batch").role == "ref"


@pytest.mark.hosts
@pytest.mark.parametrize("host", WHEELS)
def test_the_parts_of_a_released_hosts_loop_are_where_they_are_looked_for(
    host: str, wheel: Callable[[str], Path]
) -> None:
    root = wheel(host)
    hooks = import_module(f"megaprof.{HOSTS[host][1]}").HOOKS
    found, missing = set(), []
    for hook in hooks:
        path = root / (hook.module.replace(".", "/") + ".py")
        if hook.part is None or not path.exists():  # up to verl 0.6
            continue
        body: list[ast.stmt] = ast.parse(path.read_text()).body
        *classes, name = hook.function.split(".")
        for each in classes:
            body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each), [])
        defined = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        imported = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        found.add(hook.part)
        missing += [] if name in defined | imported else [f"{hook.module}.{hook.function}"]
    assert not missing
    of_rl = {"weight_sync"} if host != "megatron-bridge" else set()
    assert found >= {"saving", *of_rl}


def swift_options(directory: Any, **given: Any) -> Any:
    """ms-swift's arguments with the patch, as its parser leaves them."""
    options = {
        "callbacks": [],
        "enable_profiler": True,
        "profiler_tool": ["torch"],
        "profiler_target": ["train_actor"],
        "profiler_save_path": str(directory),
        "profiler_ranks": ["0", "1"],
        "profiler_contents": ["cpu", "cuda", "stack"],
        "profiler_steps": ["1"],
    }
    return SimpleNamespace(**options | given)


def test_ms_swifts_own_command_means_what_it_says(tmp_path: Any) -> None:
    config = ms_swift.config_of(swift_options(tmp_path))
    assert (config.select, config.steps, config.activities, config.with_stack) == ("0,1", "1", ("cpu", "cuda"), True)
    assert config.profile_memory is False
    config = ms_swift.config_of(
        swift_options(tmp_path, profiler_ranks=["per-stage"], profiler_steps=["2:4"], profiler_contents=["CPU"])
    )
    assert (config.select, config.steps, config.activities) == ("per-stage", "2:4", ("cpu",))
    several = ms_swift.config_of(swift_options(tmp_path, profiler_steps=["1", "2", "5"], profiler_ranks=[]))
    assert (several.steps, several.select) == ("1,2,5", None)
    memory = ms_swift.config_of(swift_options(tmp_path, profiler_tool=["memory"], profiler_contents=["cpu", "cuda"]))
    assert memory.tool == ("memory",)


def test_ms_swifts_profiler_is_off_unless_it_is_named(tmp_path: Any) -> None:
    off = swift_options(tmp_path, enable_profiler=False)
    assert not ms_swift.config_of(off).enabled
    off.callbacks = ["profiler"]
    assert ms_swift.config_of(off).select == "0,1"
    assert not ms_swift.config_of(SimpleNamespace(callbacks=["profiler"])).enabled  # not patched: the environment


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profiler_contents": ["gpu"]}, "--profiler_contents: unknown 'gpu'"),
        ({"profiler_tool": ["perf"]}, "--profiler_tool: unknown value 'perf'"),
        ({"profiler_tool": ["memory"]}, "--profiler_contents has no effect with --profiler_tool memory: add torch"),
        ({"profiler_save_path": None}, "--profiler_save_path: not set"),
        ({"profiler_ranks": ["0", "-1"]}, "--profiler_ranks: '-1'"),
        ({"profiler_steps": ["a"]}, "--profiler_steps: 'a'"),
    ],
)
def test_ms_swift_refuses_what_it_cannot_honour(given: dict[str, Any], message: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ms_swift.config_of(swift_options(tmp_path, **given))


def test_slime_init_honours_slimes_own_options(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[Any] = []
    monkeypatch.setattr("megaprof.hosts.slime.arm", armed.append)
    typed = Namespace(**slime.DEFAULTS, use_pytorch_profiler=False)
    slime.init(typed)
    assert armed == []
    monkeypatch.setenv("MEGAPROF_DIR", str(tmp_path))
    slime.init(typed)
    typed.profile_target, typed.profile_step_start, typed.profile_step_end = ["train_log_probs"], 3, 5
    slime.init(typed)
    assert [(config.target, config.steps) for config in armed] == [
        (("train_overall",), "10:12"),
        (("train_log_probs",), "3:5"),
    ]
    typed.use_pytorch_profiler = True
    with pytest.raises(ValueError, match="--use-pytorch-profiler"):
        slime.init(typed)
