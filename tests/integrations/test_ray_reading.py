"""A report that a running Ray cluster reads: the same answers as one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.cli import main
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.integrations.driving import PATIENT_RAY

ROOT = Path(__file__).parents[2]

#: A cluster of two processors, and the command as a process of its own that finds it. Afterwards no processor is free.
CLUSTER = """
import json, os, subprocess, sys
import ray
from tests.integrations.driving import start_ray

directory, temporary = sys.argv[1:]
start_ray(num_cpus=2, _temp_dir=temporary)
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address

def report(*more):
    command = [sys.executable, "-m", "megaprof", "report", os.path.basename(directory), *more]
    run = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(directory))
    return [run.returncode, run.stdout, run.stderr]

@ray.remote(num_cpus=2)
class Busy:
    def ready(self):
        return True

found = [report("--json", "-", "--workers", "ray")]
busy = Busy.remote()
ray.get(busy.ready.remote())
found.append(report("--workers", "ray"))
print(json.dumps(found))
"""


@pytest.mark.hosts
def test_a_ray_cluster_reads_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'megaprof[hosts]'")
    job = tmp_path / "job"
    write(Scenario("parallel", layers=(6, 4, 3, 3)), job)
    (job / "broken.pt.trace.json").write_text("[")
    write_timelines(job, WorldLayout(ParallelSizes(pp=4)), steps=6, microbatches=2)
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **PATIENT_RAY}
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:  # Ray's sockets need short names
        command = [sys.executable, str(script), str(job), short]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    there, refused = json.loads(run.stdout.splitlines()[-1])
    assert there[0] == 0, there
    assert json.loads(there[1]) == analyze(job).to_json()
    assert refused[:2] == [1, ""]
    assert refused[2] == "megaprof report: --workers ray: no processor of the Ray cluster is free\n"


def test_without_a_cluster_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Scenario("alone", layers=(2, 2), microbatches=2), tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["report", str(tmp_path), "--workers", "ray"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("megaprof report: --workers ray: the package ray cannot be imported")
    assert said.count("\n") == 1
    for wrong in ("0", "-1", "many", "raysomething"):
        assert main(["report", str(tmp_path), f"--workers={wrong}"]) == 2
        assert f"--workers {wrong} must be" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--workers", "1"]) == 0
