"""The end of verl's job in a real local Ray, whose ``shutdown`` kills the workers: nothing that they capture is lost.

Real: Ray, its actor, verl's ``DistProfilerExtension`` in it with verl's own settings, ``RayPPOTrainer.fit`` around the
end of the job (on a trainer that has nothing but its settings, so that it fails at once), megatron-core's schedule.
Replaced: verl's worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.driving import PATIENT_RAY, host_environment, skip_without_packages

EDGES = ("cachetools", "megatron.bridge", "torchdata")

DRIVER = f"""
import json, os, sys
import driving
driving.prepare(None, *{EDGES!r})
import ray
from types import SimpleNamespace
from verl.utils.profiler.profile import DistProfiler, DistProfilerExtension

@ray.remote(num_cpus=0)
class Worker(DistProfilerExtension):
    def __init__(self, store, settings):
        super().__init__(DistProfiler(rank=0, config=None))
        self.config = SimpleNamespace(profiler_config=settings)
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)

    def write_slowly(self):
        import time
        from megaprof.artifacts import writer
        publish = writer.publish
        writer.publish = lambda *files: (time.sleep(2), publish(*files))[1]

    def train(self):
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megaprof.testing import GPTWorkload, build, cpu_megatron
        with cpu_megatron():
            gpt = build(GPTWorkload(layers=1, microbatches=2, hidden=32, seq_length=16, heads=2))
            gpt.train_step(get_forward_backward_func())

store, settings, temporary = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
driving.start_ray(num_cpus=1, runtime_env={{"worker_process_setup_hook": "test_ray_end.set_up"}}, _temp_dir=temporary)
worker = Worker.remote(store, settings)
end = lambda: sorted(name for name in os.listdir(settings["save_path"]) if name.startswith("train_actor"))
for step in (1, 2):
    ray.get(worker.start_profile.remote(profile_step=step))
    ray.get(worker.train.remote())
    ray.get(worker.write_slowly.remote())
    ray.get(worker.stop_profile.remote(run_command=step == 2))
    print("after", step, json.dumps([len(end()), os.path.exists(settings["save_path"] + "/uploaded")]))
# A step that nobody says is over: the controller alone waits for its files.
ray.get(worker.start_profile.remote(profile_step=3))
ray.get(worker.train.remote())
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
trainer = RayPPOTrainer.__new__(RayPPOTrainer)
trainer.config = {{"global_profiler": {{"tool": "megaprof", "steps": [1, 2, 3]}}, "critic": {{"profiler": settings}}}}
try:
    trainer.fit()
except AttributeError:
    print("fit", len(end()))
ray.shutdown()
"""


def set_up() -> None:
    """Ray's set-up hook, in the workers."""
    import driving

    driving.prepare(None, *EDGES)


@pytest.mark.hosts
def test_the_finish_command_runs_and_the_last_files_are_waited_for(
    wheel: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'megaprof[hosts]'")
    env = host_environment(wheel("verl"), None) | PATIENT_RAY
    env["VERL_USE_EXTERNAL_MODULES"] = "megaprof.hosts.plugin"
    skip_without_packages()
    out = tmp_path / "out"
    out.mkdir()
    settings = {
        "tool": "megaprof",
        "enable": True,
        "save_path": str(out),
        "finish_hook_cmd": 'echo "$VERL_PROFILE_RANK" $PROFILED_FILES >> "$VERL_PROFILE_SAVE_PATH/uploaded"',
        "tool_config": {"torch": {"contents": ["cpu"], "discrete": True}},
    }
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:  # Ray's sockets need short names
        command = [sys.executable, str(driver), str(tmp_path / "store"), json.dumps(settings), short]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    said = [line for line in run.stdout.splitlines() if line.startswith(("after", "fit"))]
    assert said == ["after 1 [1, true]", "after 2 [2, true]", "fit 3"]
    # Counted: none of verl's functions that know the step is around this worker's.
    names = [f"train_actor.step{step:06d}.pp0-tp0-cp0-ep0-dp0.rank00000.pt.trace.json.gz" for step in (0, 1, 2)]
    assert sorted(path.name for path in out.iterdir()) == [*names, "uploaded"]
    uploaded = (out / "uploaded").read_text().splitlines()
    assert [line.split()[-1] for line in uploaded[:2]] == [str(out / name) for name in names[:2]]
