"""Megatron-LM's own pretrain_gpt.py, from a checkout, on the CPU: with ``megaprof run``, with the patch, with neither.

What is profiled has the same parameters after each step of the optimizer, bit by bit.

Needs ``MEGATRON_LM_CHECKOUT``: a checkout of a version that has a patch, copied and left as it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import driving
from tests.integrations.driving import ROOT
from tests.integrations.patching import apply
from tests.trainers.digests import read_digests

pytestmark = pytest.mark.hosts

#: pretrain_gpt.py imports them itself.
NEEDS = ("transformers", "sentencepiece", "tiktoken", "einops", "six")
ARGUMENTS = """
--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --lr-decay-style constant --clip-grad 0 --mock-data
--tokenizer-type NullTokenizer --vocab-size 256 --transformer-impl local --distributed-backend gloo
--use-cpu-initialization --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --log-interval 1
--eval-interval 3 --eval-iters 1 --position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0
--attention-backend unfused --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6 --ckpt-format torch
"""
PROFILE = "--profile-target train_actor train_log_probs evaluate --profile-select per-stage --profile-activities cpu"


Digests = dict[str, list[str]]


def copied(into: Path) -> Path:
    """The checkout's part that the trainer needs."""
    given = driving.checkout("MEGATRON_LM_CHECKOUT")
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"pretrain_gpt.py imports {', '.join(missing)}, not installed here: pip install 'megaprof[hosts]'")
    copy = into / "Megatron-LM"
    copy.mkdir()
    for name in ("megatron", "pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        source = Path(given) / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    return copy


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """What two ranks train in eight steps without megaprof."""
    digests = pretrain(copied(tmp_path_factory.mktemp("plain")), arguments=("--train-iters", "8"))
    assert [len(set(each)) for each in digests.values()] == [8, 8]
    return digests


def steps_of(digests: Digests, first: int, last: int) -> Digests:
    """``first`` inclusive, ``last`` exclusive, from 0."""
    return {rank: each[first:last] for rank, each in digests.items()}


def pretrain(checkout: Path, *before: str, arguments: tuple[str, ...], ranks: int = 2) -> Digests:
    """torchrun; ``before`` stands where the script would. What each rank trained."""
    digests = Path(tempfile.mkdtemp(prefix="digests", dir=checkout.parent))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    ran([*launcher, *before, *script(checkout), *arguments], digests)
    return read_digests(digests)


def script(checkout: Path) -> list[str]:
    on_cpu = Path(__file__).parent / "megatron_lm_on_cpu.py"
    return [str(on_cpu), str(checkout), "pretrain_gpt.py", *ARGUMENTS.split()]


def ran(command: list[str], digests: Path) -> str:
    """What it printed."""
    env = {
        **os.environ,
        "TRAINERS_DIGESTS": str(digests),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "KINETO_LOG_LEVEL": "6",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    return run.stdout


def megaprof(*arguments: str) -> str:
    command = [sys.executable, "-m", "megaprof", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=200).stdout


def names(directory: Path) -> list[str]:
    return sorted(path.name.partition("-tp")[0] for path in directory.glob("*.pt.trace.json.gz"))


def stages(*kinds: str) -> list[str]:
    return [f"{kind}.pp{stage}" for kind in kinds for stage in (0, 1)]


def trained(directory: Path) -> dict[str, Any]:
    """What the report says about the training step."""
    report = json.loads(megaprof("report", str(directory), "--json", "-"))
    return next(target for target in report["targets"] if target["target"] == "train_actor")


def layers(reported: dict[str, Any]) -> list[int]:
    """By stage and chunk."""
    return [chunk["holds"]["layers"] for stage in reported["stages"] for chunk in stage["chunks"]]


def test_rehearsed_without_an_edit(checkout: Path, tmp_path: Path) -> None:
    """Each of its stages alone."""
    words = [sys.executable, *script(checkout), "--train-iters", "100"]
    rehearse = [sys.executable, "-m", "megaprof", "rehearse", "--world", "2", "--steps", "3", "--json"]
    made = json.loads(ran([*rehearse, "--out", str(tmp_path / "out"), "--", *words], tmp_path))
    assert made["step_ms"]["value"] > 0
    assert made["what_if"]["layout"] == "Et*6|t*2L"
    assert made["what_if"]["costs"]["from_ranges"]
    report = json.loads(megaprof("report", str(tmp_path / "out" / "predicted"), "--json", "-"))
    assert layers(report["targets"][0]) == [6, 2]


def test_run_without_an_edit_and_resume(checkout: Path, plain: Digests, tmp_path: Path) -> None:
    out, resumed, saved = tmp_path / "out", tmp_path / "resumed", str(tmp_path / "saved")
    steps = "train_actor={};train_log_probs=0;evaluate=0"
    run = ["-m", "megaprof", "run", *PROFILE.split()]
    trained_first = pretrain(
        checkout,
        *run, "--profile-dir", str(out), "--profile-steps", steps.format(4), "--",
        arguments=("--train-iters", "6", "--save", saved, "--save-interval", "6"),
    )  # fmt: skip
    assert names(out) == stages("evaluate.step000000", "train_actor.step000004")
    assert trained_first == steps_of(plain, 0, 6)
    # Which stage is slow is not asked where the ranks share cores.
    assert layers(trained(out)) == [6, 2]

    trained_then = pretrain(
        checkout,
        *run, "--profile-dir", str(resumed), "--profile-steps", steps.format(7), "--",
        arguments=("--train-iters", "8", "--load", saved, "--override-opt_param-scheduler"),
    )  # fmt: skip
    assert names(resumed) == stages("evaluate.step000000", "train_actor.step000007")
    assert trained_then == steps_of(plain, 6, 8)


def test_tensor_parallel_stages(checkout: Path, tmp_path: Path) -> None:
    """TP=2 PP=2 without an edit: one rank of each stage. Four ranks on a few busy cores say nothing about time."""
    out = tmp_path / "out"
    two = "--tensor-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "2", "--train-iters", "4"
    plain = pretrain(checkout, arguments=two, ranks=4)
    assert [len(set(each)) for each in plain.values()] == [4] * 4
    steps = "train_actor=3;train_log_probs=0;evaluate=0"
    profiled = pretrain(
        checkout,
        *("-m", "megaprof", "run", *PROFILE.split(), "--profile-dir", str(out), "--profile-steps", steps, "--"),
        arguments=two,
        ranks=4,
    )
    assert profiled == plain
    assert names(out) == stages("evaluate.step000000", "train_actor.step000003")
    assert sorted(path.name.rpartition("rank")[2][:5] for path in out.glob("*.pt.*")) == [
        "00000",
        "00000",
        "00002",
        "00002",
    ]
    reported = trained(out)
    assert (reported["sizes"]["tp"], reported["sizes"]["pp"]) == (2, 2)
    assert layers(reported) == [2, 6]


def test_with_the_patch(checkout: Path, plain: Digests, tmp_path: Path) -> None:
    out = tmp_path / "out"
    apply("megatron-lm", checkout)
    profiled = pretrain(
        checkout,
        arguments=(
            *PROFILE.split(),
            *("--profile-dir", str(out), "--profile-step-start", "3", "--profile-step-end", "5", "--train-iters", "5"),
        ),
    )
    assert names(out) == stages("train_actor.step000003", "train_actor.step000004")
    assert profiled == steps_of(plain, 0, 5)
