"""Hooks in a host that nobody edited: armed by the environment, installed when the host asks for its schedule."""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.autoload import arming, megatron_lm, registry
from megaprof.autoload.arming import PATH, environment
from megaprof.capture import profiler
from megaprof.capture.process import process
from megaprof.runtime.armed import armed
from tests import programs

ROOT = Path(__file__).parents[2]
#: What a program that never sees Megatron-Core says at its end.
UNMET = re.compile(r"megaprof: no hooks were installed in this process\b.*\n")


def python(code: str, env: dict[str, str], *options: str, cwd: Path | None = None) -> Any:
    return subprocess.run(
        [sys.executable, *options, "-c", code], env=env, capture_output=True, text=True, timeout=120, cwd=cwd
    )


@pytest.fixture
def env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_off_leaves_no_trace_in_the_environment(env: dict[str, str]) -> None:
    assert environment(ProfileConfig(), env) == env
    armed = environment(ProfileConfig(target=("train_actor",), dir="traces"), env)
    assert environment(ProfileConfig(), armed) == env


def test_a_configuration_survives_the_environment_with_an_absolute_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ProfileConfig(
        target=("train_actor", "evaluate"), dir="a b/traces", steps="train_actor=3:5;evaluate=0", with_stack=True
    )
    read = ProfileConfig.from_env(environment(config, {**env, "MEGAPROF_WARMUP": "7"}))
    assert read == ProfileConfig(**{**vars(config), "dir": str(tmp_path / "a b/traces")})


def test_python_looks_the_same_but_for_the_finder(env: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; print(sys.path, [type(f).__name__ for f in sys.meta_path], 'torch' in sys.modules, "
        "'sitecustomize' in sys.modules)"
    )
    plain = python(code, env, cwd=tmp_path).stdout
    armed = python(code, environment(ProfileConfig(target=("train_actor",), dir="t"), env), cwd=tmp_path)
    assert UNMET.fullmatch(armed.stderr)
    assert armed.stdout.replace("'_Finder', ", "").rpartition(" ")[0] == plain.rpartition(" ")[0]
    assert "'_Finder'" in armed.stdout


def test_a_sitecustomize_of_the_environment_runs_as_well(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('mine', __name__, __file__)\nsys.mine = True\n")
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code = "import sys, sitecustomize; print(sys.mine, sitecustomize.__file__, sys.meta_path[0])"
    run = python(code, environment(ProfileConfig(target=("train_actor",), dir="t"), env))
    mine = str(tmp_path / "sitecustomize.py")
    assert run.stdout.splitlines()[0] == f"mine sitecustomize {mine}"
    assert f"True {mine} <megaprof.autoload.arming._Finder" in run.stdout
    assert UNMET.fullmatch(run.stderr)


def test_an_interpreter_without_megaprof_still_finds_it(env: dict[str, str], tmp_path: Path) -> None:
    env["PYTHONPATH"] = PATH
    env |= {"MEGAPROF_TARGET": "train_actor", "MEGAPROF_DIR": str(tmp_path)}
    run = python("import sys; print(sys.meta_path[0], [p for p in sys.path if 'megaprof' in p])", env, cwd=tmp_path)
    assert run.stdout.startswith("<megaprof.autoload.arming._Finder")
    assert UNMET.fullmatch(run.stderr)


def test_a_process_that_never_sees_megatron_core_loads_next_to_nothing(env: dict[str, str]) -> None:
    """An idle worker of Ray's: the set-up hook runs in every one of them, and there are many."""
    code = (
        "import sys, megaprof.autoload.arming as a; a.arm(); import json, email.message, xml; "
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('megaprof', 'torch', 'numpy')))"
    )
    run = python(code, env | {"MEGAPROF_TARGET": "train_actor", "MEGAPROF_DIR": "/nowhere"})
    assert run.stderr == ""
    autoload = [f"megaprof.autoload{name}" for name in ("", ".arming")]
    assert ast.literal_eval(run.stdout) == [
        "megaprof",
        *autoload,
        "megaprof.runtime",
        "megaprof.runtime.armed",
        "megaprof.runtime.isolation",
        "megaprof.version",
    ]


def test_a_loader_that_cannot_be_watched_still_loads(monkeypatch: Any, caplog: Any) -> None:
    class Fixed(importlib.abc.Loader):
        def exec_module(self, module: Any) -> None:
            module.loaded = True

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    finder = SimpleNamespace(find_spec=lambda name, *_: ModuleSpec(name, Fixed()))
    monkeypatch.setattr(sys, "meta_path", [finder])
    spec = arming._Finder().find_spec(arming._SCHEDULES, None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.loaded
    assert f"{arming._SCHEDULES} cannot be hooked" in caplog.text


def test_every_host_is_watched() -> None:
    assert {module.partition(".")[0] for module in registry.MODULES} == arming._PACKAGES


ONE_RANK = """
import sys
from pathlib import Path
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func  # as every host does, before anything exists
from megatron.core.pipeline_parallel import schedules
assert schedules.__loader__ is schedules.__spec__.loader
assert type(schedules.__loader__).__name__ == "SourceFileLoader", schedules.__loader__
from megaprof.testing import GPTWorkload, build, cpu_megatron

untouched = schedules.forward_backward_no_pipelining
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
with cpu_megatron():
    gpt = build(GPTWorkload(layers=2, microbatches=2, hidden=32, seq_length=16, heads=2))
    assert schedules.forward_backward_no_pipelining is untouched
    forward_backward = get_forward_backward_func()
    print("hooked")
    for _ in range(2):
        gpt.train_step(forward_backward)
"""


@pytest.mark.slow
def test_a_world_that_the_configuration_does_not_fit_stops_before_the_first_step(
    env: dict[str, str], tmp_path: Path
) -> None:
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path / "out"), select="7")
    run = subprocess.run(
        [sys.executable, "-c", ONE_RANK, str(tmp_path)],
        env=environment(config, env),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "ValueError: MEGAPROF_SELECT: rank 7" in run.stderr
    assert "hooked" not in run.stdout


#: Megatron-Bridge 0.6.2 keeps a schedule that it imported by name: of several modules it calls only that, and with
#: ``dist_train`` it has asked for another one before.
KEEPS_A_SCHEDULE = """
import sys
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining, get_forward_backward_func
import megaprof
from megaprof.testing import GPTWorkload, build, cpu_megatron

def train(way, config=None):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    with cpu_megatron():
        gpt = build(GPTWorkload(layers=2, microbatches=2, hidden=32, seq_length=16, heads=2))
        if way == "asks for another":
            get_forward_backward_func(pp_size=2, vp_size=None)
        if way == "two lines":
            megaprof.install_hooks(gpt.chunks, config)
        for _ in range(2):
            gpt.train_step(forward_backward_no_pipelining)
    dist.destroy_process_group()
"""


def captured(directory: Path) -> list[str]:
    return sorted(path.name.partition(".pp0")[0] for path in directory.glob("*.pt.trace.json.gz"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["never asks", "asks for another", "two lines"])
def test_a_schedule_that_was_imported_by_its_name_is_captured(way: str, env: dict[str, str], tmp_path: Path) -> None:
    config = ProfileConfig(target=("train_actor",), dir=str(tmp_path / "out"), steps="0:2", activities=("cpu",))
    (tmp_path / "bridge.py").write_text(KEEPS_A_SCHEDULE)
    code = f"import bridge; bridge.train({way!r})"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment(config, {**env, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert captured(tmp_path / "out") == ["train_actor.step000000", "train_actor.step000001"]
    assert "megaprof ends: 2 windows captured" in run.stderr
    assert "nothing was captured" not in run.stderr
    assert run.stderr.count("megaprof ends") == 1, "hooks of the host's own are the only ones"


@pytest.mark.slow
def test_hooks_of_the_programs_own_count_and_other_options_are_said_to_be_lost(
    env: dict[str, str], tmp_path: Path
) -> None:
    asked = ProfileConfig(target=("train_log_probs",), dir=str(tmp_path / "asked"), activities=("cpu",))
    (tmp_path / "bridge.py").write_text(KEEPS_A_SCHEDULE)
    code = "import bridge, sys, megaprof\n"
    code += "own = megaprof.ProfileConfig(('train_actor',), sys.argv[1] + '/out', steps='0', activities=('cpu',))\n"
    code += "bridge.train('two lines', own)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment(asked, {**env, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert captured(tmp_path / "out") == ["train_actor.step000000"]
    assert run.stderr.count("hooks that the program installed itself have other options, which count") == 1


@pytest.mark.parametrize("way", ["armed late", "two lines"])
def test_nor_is_one_missed_that_was_imported_before_megaprof(way: str, tmp_path: Path) -> None:
    (tmp_path / "bridge.py").write_text(KEEPS_A_SCHEDULE)
    code = f"""
import sys
sys.path.insert(0, sys.argv[1])
import bridge
from megaprof import ProfileConfig
from megaprof.autoload.arming import arm
config = ProfileConfig(("train_actor",), sys.argv[2], steps="0", activities=("cpu",))
{"arm(config)" if way == "armed late" else ""}
bridge.train({way!r}, config)
"""
    run = programs.run(code, tmp_path, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert captured(tmp_path / "out") == ["train_actor.step000000"], run.stderr


@pytest.mark.usefixtures("one_rank")
def test_the_hosts_own_profiler_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_lm, "arguments", lambda: argparse.Namespace(profile=True, use_pytorch_profiler=True))
    monkeypatch.setattr(armed, "config", ProfileConfig(target=("train_actor",), dir=str(tmp_path)))
    with pytest.raises(ValueError, match="--profile and --profile-target are both set"):
        arming.install()


@pytest.mark.parametrize("several", [False, True])
def test_the_first_call_brings_the_hooks_where_it_has_the_process_groups(
    several: bool, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of several modules, and of Megatron-Bridge's decentralised groups: Megatron's global ones do not exist."""
    from megatron.core.pipeline_parallel import schedules

    collections = pytest.importorskip("megatron.core.process_groups_config")
    if "pg_collection" not in inspect.signature(schedules.forward_backward_no_pipelining).parameters:
        pytest.skip("schedules of this megatron-core take no process groups")
    own = collections.ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "dp", "ep", "expt_tp", "dp_cp"])
    for each in ("embd", "pos_embd", "tp_dp_cp"):
        setattr(own, each, own.tp)
    given = own if not several else SimpleNamespace(module_pgs={"images": own, "language": own}, **vars(own))
    monkeypatch.setattr("megaprof.parallel.megatron.has_groups", lambda: False)
    monkeypatch.setattr("megaprof.capture.this_rank.has_groups", lambda: False)
    config = ProfileConfig(("train_actor",), str(tmp_path), steps="0", activities=("cpu",))
    monkeypatch.setattr(armed, "config", config)
    monkeypatch.setattr(armed, "schedules", SimpleNamespace())
    monkeypatch.setattr(armed, "awaits_schedule", True)
    kept = arming._called(schedules.forward_backward_no_pipelining)
    arming._asked(lambda: kept)()
    assert armed.awaits_schedule, "it is too early"
    try:
        assert one_rank.train_step(partial(kept, pg_collection=given))
        sessions = process.sessions.copy()
    finally:
        for session in process.sessions.copy():
            profiler.leave(session)
    if several:
        assert not sessions
        assert "several modules with process groups of their own (this rank runs images, language)" in caplog.text
    else:
        assert len(sessions) == 1
        files = [path.name.partition(".rank")[0] for path in tmp_path.glob("*.pt.trace.json.gz")]
        assert files == ["train_actor.step000000.pp0-tp0-cp0-ep0-dp0"]
