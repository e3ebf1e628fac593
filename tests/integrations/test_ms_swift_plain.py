"""ms-swift without Megatron, patched: the command of its pull request 9449, on two data-parallel ranks.

Real: ms-swift's training arguments and its registry of callbacks, from the released wheel, and the training loop of
transformers' ``Trainer``, which ms-swift's trainers inherit. Replaced: the model and the data set, by small ones.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprof.cli import main
from megaprof.testing import RanksFailed, run_ranks
from tests.integrations.driving import host_environment, labels
from tests.integrations.patching import apply

pytestmark = pytest.mark.hosts

ACCUMULATED = 2


def train(host: str, *options: str) -> list[float]:
    sys.path.append(host)
    import torch
    from swift.callbacks import callbacks_map
    from swift.trainers.arguments import TrainingArguments
    from transformers import HfArgumentParser, Trainer

    given = ["--use_cpu", "true", "--ddp_backend", "gloo", "--report_to", "none", "--save_strategy", "no"]
    given += ["--gradient_checkpointing", "false", *options]
    (args,) = HfArgumentParser([TrainingArguments]).parse_args_into_dataclasses(given)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": (self.layer(x) - labels).square().mean()}

    torch.manual_seed(0)
    rows = [{"x": torch.ones(4), "labels": torch.zeros(1)}] * 64
    trainer = Trainer(model=Model(), args=args, train_dataset=rows)
    for name in args.callbacks:  # as SwiftMixin does
        trainer.add_callback(callbacks_map[name](args, trainer))
    before = trainer.compute_loss
    trainer.train()
    assert trainer.compute_loss == before
    return [parameter.sum().item() for parameter in trainer.model.parameters()]


def options(directory: Path, *more: str) -> list[str]:
    steps = [
        "--max_steps",
        "3",
        "--gradient_accumulation_steps",
        str(ACCUMULATED),
        "--per_device_train_batch_size",
        "1",
    ]
    profile = [
        *("--enable_profiler", "true", "--profiler_save_path", str(directory / "traces"), "--profiler_ranks", "0", "1"),
        *("--profiler_contents", "cpu", "--profiler_steps", "1"),
    ]
    return ["--output_dir", str(directory / "out"), *steps, *profile, *more]


def test_the_command_of_the_pull_request(
    wheel: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = wheel("ms-swift")
    apply("ms-swift", host)
    env = host_environment(host, None)
    profiled = run_ranks(train, 2, str(host), *options(tmp_path), timeout=300, env=env)
    plain = run_ranks(train, 2, str(host), *options(tmp_path), "--enable_profiler", "false", timeout=300, env=env)
    assert profiled == plain

    files = sorted((tmp_path / "traces").glob("*.pt.trace.json.gz"))
    assert [path.name.partition(".pt.")[0] for path in files] == [
        f"train_actor.step000001.pp0-tp0-cp0-ep0-dp{rank}.rank0000{rank}" for rank in (0, 1)
    ]
    with gzip.open(files[1]) as file:
        trace = json.load(file)
    assert (labels(trace).count("forward"), labels(trace).count("backward")) == (ACCUMULATED, ACCUMULATED)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "traces"), "--json", "-"]) == 0
    (training,) = json.loads(capsys.readouterr().out)["targets"]
    assert 1 not in training["steps"]  # lengths are of steps without a profiler
    assert training["profiled_step_time_ms"]["count"] == 1
    assert training["stages"][0]["forward_ms"]["mean"] > 0


def test_a_target_that_such_a_trainer_does_not_have(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    host = wheel("ms-swift")
    apply("ms-swift", host)
    with pytest.raises(RanksFailed, match="--profiler_target: evaluate is not valid for a trainer without Megatron"):
        run_ranks(
            *(
                train,
                1,
                str(host),
                *options(tmp_path, "--profiler_target", "evaluate", "--profiler_steps", "evaluate=0"),
            ),
            timeout=300,
            env=host_environment(host, None),
        )
