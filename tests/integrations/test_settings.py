"""Settings that people have in slime, verl and SkyRL already mean here what they mean there."""

from __future__ import annotations

import ast
import asyncio
import copy
import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.autoload import arming, registry
from megaprof.autoload.contract import Facts
from megaprof.hosts import skyrl, slime, verl
from megaprof.parallel.selectors import NOBODY
from megaprof.runtime.armed import armed
from megaprof.runtime.patching import Patches
from tests.integrations.driving import host_environment, skip_without_packages

ACTOR, REF, CRITIC = "actor_rollout_ref.actor.profiler", "actor_rollout_ref.ref.profiler", "critic.profiler"


def verl_tree(settings: dict[str, Any]) -> dict[str, Any]:
    """verl's tree with its own defaults, and ``settings`` by dotted name."""
    torch: dict[str, Any] = {"contents": [], "discrete": False, "schedule": {"active": 0, "skip_first": 0, "repeat": 0}}
    role: dict[str, Any] = {
        "tool": "megaprof",
        "enable": False,
        "all_ranks": False,
        "ranks": [],
        "save_path": "/data/traces",
        "finish_hook_cmd": None,
        "finish_hook_all_ranks": False,
        "finish_hook_ranks": [],
        "tool_config": {"torch": torch, "nsys": {"discrete": True}},
    }
    tree: dict[str, Any] = {"global_profiler": {"tool": "megaprof", "steps": [1, 2, 5]}}
    for path in (ACTOR, REF, CRITIC):
        assign(tree, path, copy.deepcopy(role))
    for path, value in settings.items():
        assign(tree, path, value)
    return tree


def assign(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value


def test_verl_steps_ranks_and_save_path() -> None:
    settings = {
        f"{ACTOR}.enable": True,
        f"{ACTOR}.ranks": [0, 8],
        f"{CRITIC}.enable": True,
        f"{CRITIC}.all_ranks": True,
    }
    config = verl.config_from(verl_tree(settings))
    assert config == ProfileConfig(
        target=("train_overall",),
        dir="/data/traces",
        steps="1,2,5",
        role_select="actor=0,8;ref=none;critic=all",
    )


def test_verl_without_ranks_captures_rank_0_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = verl_tree({f"{ACTOR}.enable": True})
    assert str(verl.config_from(tree).selector("actor")) == "0"
    assert verl.config_from(tree).selector("ref") == NOBODY
    monkeypatch.setenv("MEGAPROF_SELECT", "per-stage")
    assert str(verl.config_from(tree).selector("actor")) == "per-stage"


@pytest.mark.parametrize(
    ("tool", "recorder", "discrete"),
    [
        ("megaprof", "torch", False),
        ("torch", "torch", False),
        ("nsys", "nsys", True),
        ("torch_memory", "memory", False),
    ],
)
def test_verl_tools_and_their_own_settings(tool: str, recorder: str, discrete: bool) -> None:
    config = verl.config_from(verl_tree({f"{ACTOR}.enable": True, f"{ACTOR}.tool": tool}))
    assert (config.tool, config.discrete) == ((recorder,), discrete)
    assert config.target == (("train_actor", "train_log_probs") if discrete else ("train_overall",))


@pytest.mark.parametrize("tool", ["nsys", "timeline", "torch,memory"])
def test_verl_leaves_the_tool_to_megaprofs_own_variable(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAPROF_TOOL", tool)
    config = verl.config_from(verl_tree({f"{ACTOR}.enable": True}))
    assert ",".join(config.tool) == tool
    assert (config.target == ("train_overall",)) is (tool != "timeline")  # a timeline has no file of a step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{ACTOR}.tool": "torch"}, r"global_profiler\.tool: 'torch' and MEGAPROF_TOOL=nsys contradict"),
        (
            {f"{ACTOR}.tool_config.torch.contents": ["cpu"]},
            r"torch\.contents: \['cpu'\] has no effect .* nsys; valid: \[\]",
        ),
    ],
)
def test_verl_settings_that_contradict_megaprofs_tool(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAPROF_TOOL", "nsys")
    with pytest.raises(ValueError, match=message):
        verl.config_from(verl_tree({f"{ACTOR}.enable": True} | settings))


def test_verl_ranks_null_are_no_ranks() -> None:
    config = verl.config_from(verl_tree({f"{ACTOR}.enable": True, f"{REF}.enable": True, f"{REF}.ranks": None}))
    assert config.selector("ref") == NOBODY
    assert str(config.selector("actor")) == "0"


def test_verl_reward_model_and_rollout_have_ranks_of_their_own() -> None:
    """As in verl up to 0.6, where both are Megatron workers."""
    rollout, reward = "actor_rollout_ref.rollout.profiler", "reward_model.profiler"
    role = {"enable": True, "tool": "nsys", "save_path": "/data/traces", "all_ranks": False}
    settings: dict[str, Any] = {reward: role | {"ranks": [2]}, rollout: role | {"ranks": [1]}}
    assert verl.config_from(verl_tree(settings)).role_select == "actor=none;ref=none;critic=none;reward=2"
    settings[reward]["tool_config"] = {"nsys": {"discrete": True}}
    assert verl.config_from(verl_tree(settings)).role_select == "actor=none;ref=none;critic=none;reward=2;rollout=1"


def test_a_relative_save_path_is_made_absolute_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {f"{ACTOR}.enable": True, f"{ACTOR}.save_path": "outputs/profile"}
    own = {"target": ["train_actor"]}
    monkeypatch.chdir(tmp_path)
    assert verl.config_from(verl_tree(settings)).dir == str(tmp_path / "outputs/profile")
    assert skyrl.config_of(policy(own, save_path="traces")).dir == str(tmp_path / "traces")
    worker = SimpleNamespace(WORKER_MODE=1, global_worker=SimpleNamespace(mode=1))
    monkeypatch.setitem(sys.modules, "ray._private.worker", worker)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"global_profiler\.save_path: 'outputs/profile' is not valid in a worker"):
        verl.config_from(verl_tree(settings))
    with pytest.raises(ValueError, match=r"torch_profiler_config\.save_path: 'traces'"):
        skyrl.config_of(policy(own, save_path="traces"))
    with pytest.raises(ValueError, match=r"--profile-dir: 'mine'"):
        skyrl.config_of(policy(own | {"dir": "mine"}))
    with pytest.raises(ValueError, match=r"MEGAPROF_DIR: 'mine'"):
        ProfileConfig.from_env({"MEGAPROF_TARGET": "train_actor", "MEGAPROF_DIR": "mine"})
    assert skyrl.config_of(policy(own | {"dir": "memory://traces"})).dir == "memory://traces"


@pytest.mark.parametrize(
    ("contents", "activities", "on"),
    [
        ([], ("cpu", "cuda"), ()),
        (["cuda", "stack"], ("cpu", "cuda"), ("with_stack",)),
        (["shapes", "memory"], ("cpu",), ("record_shapes", "profile_memory")),
    ],
)
def test_verl_contents(contents: list[str], activities: tuple[str, ...], on: tuple[str, ...]) -> None:
    config = verl.config_from(verl_tree({f"{ACTOR}.enable": True, f"{ACTOR}.tool_config.torch.contents": contents}))
    assert config.activities == activities
    assert [name for name in ("record_shapes", "profile_memory", "with_stack") if getattr(config, name)] == list(on)


def test_verl_finish_command_finds_the_directory_by_verls_name() -> None:
    command = verl.config_from(verl_tree({f"{ACTOR}.enable": True, f"{ACTOR}.finish_hook_cmd": "ls $X"}))
    printed = subprocess.run(
        str(command.on_finish).replace("ls $X", 'echo "$VERL_PROFILE_SAVE_PATH $VERL_PROFILE_RANK"'),
        shell=True,
        env={"PROFILED_DIR": "/data/traces", "RANK": "3"},
        capture_output=True,
        text=True,
    )
    assert printed.stdout == "/data/traces 3\n"


@pytest.mark.parametrize(
    "settings",
    [{}, {f"{ACTOR}.enable": True, "global_profiler.steps": None}, {f"{ACTOR}.enable": True, f"{ACTOR}.tool": None}],
)
def test_verl_off(settings: dict[str, Any]) -> None:
    assert verl.config_from(verl_tree(settings)) == ProfileConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{ACTOR}.tool": "npu"}, r"global_profiler\.tool: 'npu' .* valid: megaprof, torch, nsys, torch_memory"),
        ({"global_profiler.steps": [1, -2]}, r"global_profiler\.steps: -2 in \[1, -2\]"),
        ({"global_profiler.steps": "1"}, r"global_profiler\.steps: '1' .* valid: a list"),
        ({"global_profiler.profile_continuous_steps": True}, r"profile_continuous_steps: True .* valid: False"),
        ({f"{ACTOR}.ranks": [True]}, r"actor\.profiler\.ranks: True in \[True\]"),
        ({f"{ACTOR}.ranks": [0], f"{ACTOR}.all_ranks": True}, r"actor\.profiler\.all_ranks: True and .*ranks: \[0\]"),
        ({f"{ACTOR}.tool_config.torch.contents": ["gpu"]}, r"torch\.contents: unknown 'gpu'; valid: cpu, cuda"),
        ({f"{ACTOR}.tool_config.torch.schedule.active": 2}, r"schedule\.active: 2 .* valid: 0, 1"),
        ({f"{ACTOR}.tool_config.torch.schedule.wait": 1}, r"schedule\.wait: 1 .* valid: 0"),
        ({f"{ACTOR}.tool_config.torch.schedule.repeat": 2}, r"schedule\.repeat: 2 .* valid: 0, 1"),
        ({f"{ACTOR}.finish_hook_cmd": "ls", f"{ACTOR}.finish_hook_ranks": [0]}, r"finish_hook_ranks: \[0\] .* unset"),
        ({f"{REF}.enable": True, f"{REF}.save_path": "/b"}, r"ref\.profiler\.save_path: '/b' .* '/data/traces'"),
        ({f"{ACTOR}.save_path": None}, r"global_profiler\.save_path is not set"),
        ({f"{ACTOR}.save_path": "nope://b"}, r"global_profiler\.save_path: 'nope://b'"),
    ],
)
def test_verl_refuses_what_it_cannot_honour(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verl.config_from(verl_tree({f"{ACTOR}.enable": True} | settings))


@pytest.mark.parametrize("settings", [{}, {f"{ACTOR}.enable": True, "global_profiler.steps": None}])
def test_verl_that_names_megaprof_and_captures_nothing_is_told_so(settings: dict[str, Any], caplog: Any) -> None:
    config = verl._config_of_job(verl_tree(settings))
    assert config is not None
    assert not config.enabled
    assert "captures nothing" in caplog.text
    assert verl._config_of_job(verl_tree({"global_profiler.tool": None, **settings})) is None


def test_verls_guide_to_nsight_systems() -> None:
    """Its settings, of before there was a tool to name: [] and null are no ranks."""
    tree: dict[str, Any] = {
        "trainer": {"profile_steps": [1, 2, 5]},
        "global_profiler": {"save_path": "/data/traces"},
        "actor_rollout_ref": {
            "actor": {"profile_discrete": True, "profile_ranks": [0, 1]},
            "rollout": {"profile_discrete": True, "profile_ranks": None},
            "ref": {"profile_discrete": False, "profile_ranks": []},
        },
        "critic": {"profile_discrete": True, "profile_ranks_all": True},
    }
    config = verl.config_from(tree)
    assert (config.tool, config.steps, config.discrete) == (("nsys",), "1,2,5", True)
    assert config.role_select == "actor=0,1;ref=none;critic=all;rollout=none"
    tree["trainer"]["profile_steps"] = None
    assert not verl.config_from(tree).enabled
    tree["trainer"]["profile_steps"] = [1]
    for path, value, message in (
        ("critic.profile_ranks", [3], r"critic\.profile_ranks_all: True and profile_ranks: \[3\]"),
        ("critic.profile_ranks", [-1], r"critic\.profile_ranks: -1"),
        ("critic.profile_discrete", False, "profile_discrete|discrete: False"),
        ("critic.profiler.enable", True, r"critic\.profile_\*"),
        ("global_profiler.steps", [2], r"trainer\.profile_steps: \[1\] and global_profiler\.steps: \[2\]"),
        ("trainer.profile_steps", "2", r"trainer\.profile_steps: '2'"),
    ):
        wrong = copy.deepcopy(tree)
        assign(wrong, path, value)
        with pytest.raises(ValueError, match=message):
            verl.config_from(wrong)


def test_verls_range_of_steps() -> None:
    """``step_start`` and ``step_end`` are the steps to capture, unless something else says them: then they are
    mini-batches of these, of which the first is captured."""
    torch = f"{ACTOR}.tool_config.torch"
    ours = {f"{ACTOR}.enable": True, f"{torch}.step_start": 1, f"{torch}.step_end": 3}
    assert verl.config_from(verl_tree({**ours, "global_profiler.steps": None})).steps == "1:3"
    assert not verl.config_from(verl_tree({**ours, "global_profiler.steps": []})).enabled
    assert not verl.config_from(
        verl_tree({**ours, f"{torch}.step_end": None, "global_profiler.steps": None})
    ).enabled, "as in verl, where it is the default"
    first = {**ours, f"{torch}.step_start": 0, f"{torch}.step_end": 1}
    assert verl.config_from(verl_tree(first)).steps == "1,2,5"
    for start, end, message in (
        (1, 3, r"torch\.step_start: 1 .* mini-batches .* valid: 0"),
        (0, 3, r"torch\.step_end: 3 .* mini-batches .* valid: 1"),
        (5, 3, r"torch\.step_start: 5 must be less than .*torch\.step_end: 3"),
        (3, 3, r"torch\.step_start: 3 must be less than .*torch\.step_end: 3"),
        (-1, 3, r"torch\.step_start: -1"),
    ):
        with pytest.raises(ValueError, match=message):
            verl.config_from(verl_tree({**ours, f"{torch}.step_start": start, f"{torch}.step_end": end}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{ACTOR}.rank", [0, 8]),
        ("global_profiler.step", [1]),
        ("trainer.profile_stepz", [1]),
        ("critic.profile_rank", [1]),
        (f"{ACTOR}.tool_config.torhc", {}),
        (f"{ACTOR}.tool_config.torch.content", ["cuda"]),
        (f"{ACTOR}.tool_config.torch.schedule.repeats", 3),
        (f"{ACTOR}.tool_config.torch.profile_token_start", 4),
        (f"{ACTOR}.tool_config.torch.profile_token_end", 9),
        ("global_profiler.global_tool_config.megaprof", {}),
        ("", None),
    ],
)
def test_no_setting_of_verl_is_lost_in_silence(path: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    verl.config_from(verl_tree({f"{ACTOR}.enable": True} | ({path: value} if path else {})))
    said = [record.getMessage() for record in caplog.records]
    if value in (None, {}) and path != f"{ACTOR}.tool_config.torhc":
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"megaprof: {path}:")


def test_of_many_ranks_one_names_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "3")
    verl.config_from(verl_tree({f"{ACTOR}.enable": True, f"{ACTOR}.rank": [3]}))
    assert not caplog.records


@pytest.mark.parametrize(("name", "usual", "other"), [("stack_depth", 32, 8), ("context", "all", "alloc")])
def test_settings_of_verls_memory_tool(name: str, usual: Any, other: Any, caplog: pytest.LogCaptureFixture) -> None:
    ours = {f"{ACTOR}.enable": True, f"{ACTOR}.tool": "torch_memory", "global_profiler.tool": "torch_memory"}
    for value in (usual, other):
        verl.config_from(verl_tree({**ours, f"global_profiler.global_tool_config.torch_memory.{name}": value}))
    assert [record.getMessage() for record in caplog.records] == [
        f"megaprof: global_profiler.global_tool_config.torch_memory.{name}: {other!r} has no effect with megaprof"
    ]


def test_verls_controller_says_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="megaprof")
    facts("RayPPOTrainer.fit", SimpleNamespace(config={}))
    assert f"process {os.getpid()} on {socket.gethostname()}" in caplog.text


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(armed, "config", None)
    monkeypatch.setattr(verl._Announced, "step", None)
    monkeypatch.setattr(armed, "install", lambda: False)


def facts(function: str, worker: Any, **arguments: Any) -> Any:
    (hook,) = [hook for hook in verl.HOOKS if f".{hook.function}".endswith(f".{function}")]
    return hook.read({"self": worker, **arguments})


def critic(**profiler: Any) -> Any:
    own = {"tool": "megaprof", "enable": True, "ranks": [0], "save_path": "/data/traces", **profiler}
    return SimpleNamespace(config=SimpleNamespace(model_type="value_model", profiler_config=SimpleNamespace(**own)))


@pytest.mark.usefixtures("unsettled")
def test_verl_profiles_when_its_trainer_says_so() -> None:
    worker = critic()
    assert facts("train_batch", worker).iteration == verl.NO_STEP
    config = armed.config
    assert (config.role_select, str(config.selector("critic"))) == ("critic=0", "0")
    facts("start_profile", worker, kwargs={"profile_step": 5})
    assert facts("train_batch", worker) == Facts(role="critic", iteration=5)
    plan = config.plan("train_actor")
    assert plan.captures(5, 0)
    facts("stop_profile", worker)
    assert not plan.captures(facts("train_batch", worker).iteration, 0)


@pytest.mark.usefixtures("unsettled")
def test_steps_that_verls_trainer_does_not_know_are_those_that_came_with_the_batches() -> None:
    settings = {f"{CRITIC}.enable": True, "global_profiler.steps": None}
    steps = {f"{CRITIC}.tool_config.torch.step_start": 1, f"{CRITIC}.tool_config.torch.step_end": 3}
    tree = verl_tree({**settings, **steps})
    worker = SimpleNamespace(config=SimpleNamespace(model_type="value_model", _get_root=lambda: tree))
    assert facts("train_batch", worker, data=SimpleNamespace(meta_info={"megaprof_step": 2})).iteration == 2
    config = armed.config
    assert config.plan("train_overall").captures(2, 0)


@pytest.mark.usefixtures("unsettled")
def test_verls_trainers_that_override_fit_wait_for_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(armed, "finish_job", lambda: waited.append(armed.config))
    experimental = "verl.experimental"

    class OneStepOffRayTrainer:
        async def fit(self) -> str:
            assert not waited
            return "trained"

    class MessageQueueClient:
        async def clear_queue(self) -> None: ...

    modules = {
        "separation.utils": {"create_role_worker_mapping": lambda config: "mapping"},
        "separation.ray_trainer": {"SeparateRayPPOTrainer": type("Trainer", (), {"fit": lambda self: "trained"})},
        "one_step_off_policy.ray_trainer": {"OneStepOffRayTrainer": OneStepOffRayTrainer},
        "fully_async_policy.message_queue": {"MessageQueueClient": MessageQueueClient},
    }
    for name, content in modules.items():
        module = ModuleType(f"{experimental}.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patches = Patches()
    registry.adapt(patches)
    loaded = {name: sys.modules[f"{experimental}.{name}"] for name in modules}
    tree = verl_tree({f"{ACTOR}.enable": True})
    assert loaded["separation.utils"].create_role_worker_mapping(tree) == "mapping"
    assert asyncio.run(OneStepOffRayTrainer().fit()) == "trained"
    assert loaded["separation.ray_trainer"].SeparateRayPPOTrainer().fit() == "trained"
    asyncio.run(MessageQueueClient().clear_queue())
    patches.restore()
    assert waited == [verl.config_from(tree)] * 3


@pytest.mark.hosts
def test_every_trainer_of_verl_ends_its_job(wheel: Callable[[str], Path]) -> None:
    """Of the released verl, each class with a ``fit`` of its own, except actors of Ray and the SFT trainer under
    torchrun, whose ranks end by themselves."""
    root = wheel("verl")
    found = set()
    for path in (root / "verl").rglob("*trainer*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            methods = {getattr(method, "name", None) for method in getattr(node, "body", [])}
            if isinstance(node, ast.ClassDef) and not node.decorator_list and "fit" in methods:
                found.add((module, f"{node.name}.fit"))
    ends = {(hook.module, hook.function) for hook in verl.HOOKS if hook.ends == "job"}
    assert found - ends == {("verl.trainer.sft_trainer", "SFTTrainer.fit")}


@pytest.mark.usefixtures("unsettled")
def test_verl_settings_of_another_tool_are_left_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts("train_batch", critic(tool="torch")).iteration is None
    monkeypatch.setenv("MEGAPROF_TARGET", "train_actor")
    assert facts("train_batch", critic()).iteration is None
    assert armed.config is None


@pytest.mark.usefixtures("unsettled")
def test_verl_mistakes_are_raised_where_the_schedule_is_asked_for() -> None:
    facts("train_batch", critic(ranks=[-1]))
    with pytest.raises(ValueError, match=r"critic\.profiler\.ranks: -1"):
        arming._config()


@pytest.mark.hosts
def test_verls_own_dataclasses(wheel: Callable[[str], Path]) -> None:
    host = wheel("verl")
    env = host_environment(host, None)
    skip_without_packages()
    code = """
from tests.integrations import driving
driving.prepare(None)
from verl.utils.profiler.config import ProfilerConfig, TorchProfilerToolConfig, NsightToolConfig
from megaprof.hosts.verl import config_from
torch = TorchProfilerToolConfig(contents=["cpu", "shapes"], discrete=True)
profiler = ProfilerConfig(tool="torch", enable=True, ranks=[0, 3], save_path="/t", tool_config={"torch": torch})
tree = {"global_profiler": {"steps": [2]}, "actor_rollout_ref": {"actor": {"profiler": profiler}}}
config = config_from(tree)
print([config.role_select, config.dir, config.steps, config.activities, config.record_shapes, config.discrete])
print(config_from({"global_profiler": {"steps": [2]}, "critic": {"profiler": ProfilerConfig(enable=True)}}).enabled)
"""
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-2:] == ["['actor=0,3', '/t', '2', ('cpu',), True, True]", "False"]


@dataclass
class SkyRLProfiler:
    """The fields and defaults of SkyRL 0.4.0's TorchProfilerConfig; the test below has the real one."""

    enable: bool = False
    ranks: list[int] = field(default_factory=lambda: [0])
    save_path: str | None = None
    skip_first: int = 10
    wait: int = 0
    warmup: int = 1
    active: int = 1
    repeat: int = 1
    activities: list[str] = field(default_factory=lambda: ["cpu", "cuda"])
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    with_modules: bool = False
    use_gzip: bool = False
    export_type: str = "chrome_trace"


def policy(own: dict[str, Any], **settings: Any) -> Any:
    return SimpleNamespace(
        megatron_config=SimpleNamespace(megaprof=own), torch_profiler_config=SkyRLProfiler(**settings)
    )


def test_skyrl_fields_that_were_changed_keep_their_meaning() -> None:
    target = {"target": ["train_actor"]}
    config = skyrl.config_of(
        policy(target, save_path="/t", ranks=[0, 8], active=3, activities=["CPU"], with_flops=True)
    )
    assert config == ProfileConfig(
        target=("train_actor",),
        dir="/t",
        select="0,8",
        schedule="10:0:1:3:1",
        activities=("cpu",),
        with_flops=True,
    )
    assert skyrl.config_of(policy({**target, "dir": "/t"})) == ProfileConfig(target=("train_actor",), dir="/t")
    stacks = skyrl.config_of(policy(target, save_path="/t", export_type="stacks"))
    assert (stacks.export, stacks.with_stack) == (("stacks",), True)
    assert skyrl.config_of(policy(target, save_path="/t", with_modules=True)).ranges == "module"


def test_skyrl_megaprofs_own_options_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"target": ["train_actor"], "dir": "/mine", "steps": "4", "all_ranks": True}
    config = skyrl.config_of(policy(own, save_path="/t", ranks=[1], skip_first=2))
    assert config == ProfileConfig(target=("train_actor",), dir="/mine", steps="4", select="all")
    monkeypatch.setenv("MEGAPROF_TARGET", "train_actor")
    monkeypatch.setenv("MEGAPROF_SELECT", "per-stage")
    assert skyrl.config_of(policy({}, save_path="/t", ranks=[1])).select == "per-stage"


def test_skyrl_without_a_target_is_skyrls_own_profilers() -> None:
    assert not skyrl.config_of(policy({}, enable=True, save_path="/t")).enabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable": True}, r"torch_profiler_config\.enable: True .* valid: False"),
        ({"ranks": [-1]}, "'-1'"),
        ({"ranks": []}, r"torch_profiler_config\.ranks: ''"),
        ({"ranks": None}, r"torch_profiler_config\.ranks: ''"),
        ({"ranks": True}, r"torch_profiler_config\.ranks: 'True'"),
        ({"warmup": -1}, r"torch_profiler_config\.warmup: -1 .* at least 0"),
        ({"active": None}, r"torch_profiler_config\.active: None"),
        ({"activities": ["gpu"]}, r"torch_profiler_config\.activities: unknown value 'gpu'; valid: .*cpu, cuda"),
        ({"export_type": "html"}, r"torch_profiler_config\.export_type: .*'html'; valid: .*stacks"),
        ({"export_type": "stacks", "with_stack": False}, "--profile-with-stack"),
    ],
)
def test_skyrl_refuses_what_it_cannot_honour(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skyrl.config_of(policy({"target": ["train_actor"], "dir": "/t"}, **settings))


@pytest.mark.hosts
def test_skyrls_own_dataclass(wheel: Callable[[str], Path]) -> None:
    host = wheel("skyrl")
    env = host_environment(host, None)
    skip_without_packages()
    code = """
from tests.integrations import driving
driving.prepare(None, "skyrl_gym")
import dataclasses, json
from skyrl.train.config.config import TorchProfilerConfig
from types import SimpleNamespace
from megaprof.hosts.skyrl import config_of
own = SimpleNamespace(megaprof={"target": ["train_actor"]})
settings = TorchProfilerConfig(save_path="/t", ranks=[0, 4], skip_first=2)
config = config_of(SimpleNamespace(megatron_config=own, torch_profiler_config=settings))
print(json.dumps(dataclasses.asdict(TorchProfilerConfig())))
print([config.dir, config.select, config.schedule, config.with_stack])
"""
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    defaults, config = run.stdout.splitlines()[-2:]
    assert json.loads(defaults) == vars(SkyRLProfiler())
    assert config == "['/t', '0,4', '2:0:1:1:1', False]"


def test_slime_variables() -> None:
    ours = {"MEGAPROF_RECORD_SHAPES": "1", "MEGAPROF_MEMORY": "1", "MEGAPROF_ALL_RANKS": "1"}
    theirs = {"SLIME_PROFILE_RECORD_SHAPES": "True", "SLIME_PROFILE_MEMORY": "yes", "SLIME_PROFILE_ALL_RANKS": "1"}
    found = slime.environment({**theirs, "SLIME_PROFILE_WITH_STACK": "0", "HOME": "/root"})
    assert {name: value for name, value in found.items() if name.startswith("MEGAPROF_")} == ours
    assert found["HOME"] == "/root"
    assert slime.environment({**theirs, "MEGAPROF_RECORD_SHAPES": "0"})["MEGAPROF_RECORD_SHAPES"] == "0"
    assert "MEGAPROF_ALL_RANKS" not in slime.environment({**theirs, "MEGAPROF_SELECT": "per-stage"})
    with pytest.raises(ValueError, match="SLIME_PROFILE_WITH_FLOPS: 'maybe'"):
        slime.environment({"SLIME_PROFILE_WITH_FLOPS": "maybe"})


def test_slime_variables_reach_its_own_profiling_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    armed: list[ProfileConfig] = []
    monkeypatch.setattr("megaprof.hosts.slime.arm", armed.append)
    monkeypatch.setenv("MEGAPROF_DIR", str(tmp_path))
    monkeypatch.setenv("SLIME_PROFILE_ALL_RANKS", "1")
    monkeypatch.setenv("SLIME_PROFILE_WITH_STACK", "true")
    slime.init(Namespace(**slime.DEFAULTS | {"profile_target": ["train_actor"]}))
    assert armed == [
        ProfileConfig(target=("train_actor",), dir=str(tmp_path), steps="10:12", select="all", with_stack=True)
    ]
