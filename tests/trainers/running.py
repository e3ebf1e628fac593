"""A host's whole trainer in processes of its own on the CPU, with megaprof and without, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "stand_ins"
ON_CPU = Path(__file__).parent / "on_cpu"
SECONDS = 500
#: What is captured of a trainer, but for where and in which steps.
PROFILE = (
    "--profile-target",
    "train_actor",
    "evaluate",
    "--profile-select",
    "per-stage",
    "--profile-activities",
    "cpu",
)


def environment(work: Path, edges: str, *paths: Path, **variables: str) -> dict[str, str]:
    """For a trainer whose packages are in ``paths``, with nothing in the place of ``edges``; see on_cpu."""
    (work / "digests").mkdir(parents=True, exist_ok=True)
    path = [ON_CPU, STAND_INS, ROOT, *paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MEGAPROF_")},
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRAINERS_EDGES": edges,
        "TRAINERS_DIGESTS": str(work / "digests"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "MODELSCOPE_CACHE": str(work / "modelscope"),
        "KINETO_LOG_LEVEL": "6",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **variables,
    }


def torchrun(*arguments: str) -> list[str]:
    """The command of two ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *arguments]


def train(command: list[str], env: Mapping[str, str], work: Path) -> str:
    """Run it in ``work``; what it printed. It must end well."""
    run = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, timeout=SECONDS)
    said = run.stdout + run.stderr
    (work / "output.txt").write_text(said)
    assert run.returncode == 0, said[-20000:]
    return said


def digests(work: Path) -> dict[str, list[str]]:
    """By rank: its parameters after each step of the optimizer."""
    return {path.name: path.read_text().split() for path in sorted((work / "digests").iterdir())}


def captured(directory: Path) -> list[str]:
    """Traces by target, role, step and stage, as in their names."""
    return sorted(path.name.partition("-tp")[0] for path in directory.glob("*.pt.trace.json.gz"))


def report(directory: Path) -> dict[tuple[str, str | None], dict[str, Any]]:
    """What ``megaprof report`` says, by target and role."""
    command = [sys.executable, "-m", "megaprof", "report", str(directory), "--json", "-"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return {(each["target"], each["role"]): each for each in json.loads(run.stdout)["targets"]}


def layers(target: Mapping[str, Any]) -> list[int]:
    """Decoder layers of each stage."""
    return [sum(chunk["layers"] for chunk in stage["chunks"]) for stage in target["stages"]]


def finds_the_first_stage_slow(target: Mapping[str, Any]) -> bool:
    """Whether the report has the stage that was built slow as the slowest. On a machine whose cores the ranks share it
    may take that for chance, and say so; it may not name another one."""
    quickest = [
        sum(stage["per_microbatch"][f"{kind}_ms"]["min"] for kind in ("forward", "backward"))
        for stage in target["stages"]
    ]
    return quickest[0] > 1.5 * quickest[1] and target["imbalance"] > 1 and target["slowest_stage"] in (0, None)
