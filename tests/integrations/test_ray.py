"""A real local Ray whose actors run megatron-core ranks: every worker process profiles itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.autoload.arming import environment
from megaprof.autoload.ray import HOOK, runtime_env
from megaprof.cli import main
from tests.cli.running import as_a_user
from tests.integrations.driving import PATIENT_RAY

ROOT = Path(__file__).parents[2]

#: A trainer as the Ray hosts have them: the driver makes actors, each is one rank, and together they are one pipeline.
#: It installs nothing; ``megaprof.testing`` is its model and what stands in for GPUs.
DRIVER = """
import json, sys
import ray
from tests.integrations.driving import start_ray

@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, rank, store):
        self.armed = [type(finder).__module__ for finder in sys.meta_path if "megaprof" in type(finder).__module__]
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)

    def train(self):
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megaprof.testing import GPTWorkload, build, cpu_megatron
        with cpu_megatron():
            gpt = build(GPTWorkload(pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=32, seq_length=16, heads=2))
            for _ in range(2):
                gpt.train_step(get_forward_backward_func())
            gpt.log_probs_pass(get_forward_backward_func())
        return self.armed

    async def parts(self):  # which makes the actor one whose methods run in an event loop
        from megaprof.capture.process import process
        return [part for part, _, _ in reversed(process.parts.since(0))]

    def write_slowly(self):
        import time
        from megaprof.artifacts import writer
        publish = writer.publish
        writer.publish = lambda *files: (time.sleep(2), publish(*files))

store, given = sys.argv[1], json.loads(sys.argv[2])
env = {}
if given:
    from megaprof import ProfileConfig
    from megaprof.autoload.ray import runtime_env
    env = runtime_env(ProfileConfig.from_env(given), {"env_vars": {"MINE": "1"}})
start_ray(num_cpus=2, runtime_env=env, log_to_driver=True, _temp_dir=sys.argv[3])
ranks = [Rank.remote(i, store) for i in range(2)]
ray.get([rank.write_slowly.remote() for rank in ranks])
armed = ray.get([rank.train.remote() for rank in ranks], timeout=300)
print(json.dumps([armed, ray.get([rank.parts.remote() for rank in ranks])]))
# The driver is done, and Ray ends its workers while they are still writing.
ray.shutdown() if given else sys.exit()
"""


def config(directory: Path) -> ProfileConfig:
    return ProfileConfig(
        target=("train_actor", "train_log_probs"),
        dir=str(directory),
        select="per-stage",
        steps="train_actor=1;train_log_probs=0",
    )


def drive(tmp_path: Path, env: dict[str, str], given: dict[str, Any], short: Path) -> Any:
    """What armed each actor before its own code imported anything of megaprof's, and the parts of its loop."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable, str(driver), str(tmp_path / "store"), json.dumps(given), str(short)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.hosts
@pytest.mark.parametrize("way", ["runtime_env", "inherited"])
def test_two_actors_are_one_pipeline(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'megaprof[hosts]'")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "6", **PATIENT_RAY}
    out = tmp_path / "out"
    if way == "runtime_env":
        given = config(out).to_env()
    else:
        given, env = {}, environment(config(out), env)
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:  # Ray's sockets need short names
        armed, parts = drive(tmp_path, env, given, Path(short))
    assert armed == [["megaprof.autoload.arming"]] * 2
    step = ["train_actor", "optimizer"]
    assert parts == [["waiting", "waiting", *step, *step, "train_log_probs", "waiting"]] * 2
    found = sorted(path.name.split(".pt.")[0] for path in out.glob("*.pt.*"))
    assert found == [
        f"{target}.pp{pp}-tp0-cp0-ep0-dp0.rank0000{pp}"
        for target in ("train_actor.step000001", "train_log_probs.step000000")
        for pp in (0, 1)
    ]
    capsys.readouterr()
    assert main(["report", str(out), "--json", "-"]) == 0
    training, log_probs = json.loads(capsys.readouterr().out)["targets"]
    assert (training["target"], log_probs["target"]) == ("train_actor", "train_log_probs")
    stages = training["stages"]
    assert [stage["pp"] for stage in stages] == [0, 1]
    assert [stage["ranks"] for stage in stages] == [[0], [1]]
    assert [chunk["holds"]["layers"] for stage in stages for chunk in stage["chunks"]] == [3, 1]
    assert all(stage["forward_ms"]["mean"] > 0 and stage["backward_ms"]["mean"] > 0 for stage in stages)
    assert all(stage["backward_ms"] is None for stage in log_probs["stages"])


def test_a_runtime_env_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = {"env_vars": {"MINE": "1"}, "pip": ["x"]}
    merged = runtime_env(ProfileConfig(target=("train_actor",), dir="traces"), base)
    assert merged["pip"] == ["x"]
    assert merged["env_vars"] == {
        "MINE": "1",
        "MEGAPROF_TARGET": "train_actor",
        "MEGAPROF_DIR": str(tmp_path / "traces"),
    }
    assert base == {"env_vars": {"MINE": "1"}, "pip": ["x"]}
    assert runtime_env(ProfileConfig(), base) == base


def test_a_set_up_hook_of_the_hosts_own_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.setup"):
        runtime_env(config(tmp_path), {HOOK: "mine.setup"})


def test_the_command_prints_what_ray_job_submit_takes(tmp_path: Path) -> None:
    arguments = ["--profile-target", "train_actor", "--profile-dir", "traces", "--ray-runtime-env"]
    run = subprocess.run(
        [sys.executable, "-m", "megaprof", "run", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == runtime_env(ProfileConfig(target=("train_actor",), dir=str(tmp_path / "traces")))


@pytest.mark.hosts
def test_a_driver_is_not_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'megaprof[hosts]'")
    program = tmp_path / "train.py"
    program.write_text("import ray\nray.init()\n")
    ended = as_a_user("rehearse", "--world", "2", "--out", tmp_path / "out", "--saving-off", "", "--", program)
    assert ended.returncode == 1
    assert "a driver of Ray" in ended.stderr.splitlines()[-1]
