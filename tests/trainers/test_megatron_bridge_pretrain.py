"""Megatron-Bridge's ``pretrain()``, whole, under torchrun on two stages: without an edit, and armed by its script.

Replaced: the GPU (`tests.trainers.cpu_process`), and the layers are Megatron-Core's local ones. Nothing is in the
place of the packages in EDGES where they are missing. The configuration is written by hand, since Bridge's recipes
import every model. No checkpoint is saved: the last save hangs on a CPU, with and without megaprof.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.trainers.running import check, check_rehearsal, check_tuning, environment, torchrun, train

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(version("megatron-core") < "0.19", reason="Megatron-Bridge 0.6.2 needs megatron-core 0.19"),
]

EDGES = "modelopt,nvidia_resiliency_ext,megatron.energon,nvdlfw_inspect,mamba_ssm,causal_conv1d,fla,wandb"
SCRIPT = str(Path(__file__).parent / "bridge_pretrain.py")
PLACING = "model.num_layers_in_first_pipeline_stage=7"
WANTED = {
    "target": ("train_actor", "evaluate"),
    "select": "per-stage",
    "activities": "cpu",
    "steps": "train_actor=4;evaluate=0",
}


def test_without_an_edit_and_armed_by_its_script(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    packages = [wheel("megatron-bridge")]
    run = ["-m", "megaprof", "run", "--"]
    ways = {"plain": ([], []), "run": (run, []), "arm": ([], ["--arm"])}
    for name, (before, after) in ways.items():
        work = tmp_path / name
        options = (
            {
                f"MEGAPROF_{option.upper()}": " ".join([value] if isinstance(value, str) else value)
                for option, value in {**WANTED, "dir": str(work / "traces")}.items()
            }
            if name != "plain"
            else {}
        )
        train(torchrun(*before, SCRIPT, PLACING, *after), environment(work, EDGES, *packages, **options), work)
        if name != "plain":
            kinds = ("evaluate.step000000", "train_actor.step000004")
            microbatches = {("train_actor", None): 8}
            check(tmp_path / "plain", work, work / "traces", "megatron-bridge", 6, kinds, microbatches)


def test_tuned(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    command = torchrun(SCRIPT, PLACING, "train.train_iters=100", "checkpoint.save=saved", "checkpoint.save_interval=2")
    check_tuning(command, [PLACING], environment(tmp_path, EDGES, wheel("megatron-bridge")), tmp_path)
    assert not (tmp_path / "saved").exists()


def test_rehearsed(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, PLACING, "train.train_iters=100", "train.global_batch_size=7"]
    check_rehearsal(command, environment(tmp_path, EDGES, wheel("megatron-bridge")), tmp_path, "megatron-bridge")
