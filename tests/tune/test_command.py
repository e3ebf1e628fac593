"""Words of a command: another layout in them, nothing that saves."""

import pytest

from megaprof.cli import UsageError
from megaprof.tune.command import with_layout, without_saving

VERL = [
    "trainer.save_freq=-1",
    "trainer.default_local_dir=${oc.env:MEGAPROF_DIR}/checkpoints",
    "trainer.default_hdfs_dir=null",
]
SKYRL = ["trainer.ckpt_interval=-1", "trainer.hf_save_interval=-1"]
LM = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--num-layers", "8"]


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ([*LM, "--save", "ckpt", "--bf16"], [*LM, "--bf16"]),
        ([*LM, "--wandb-project", "p", "--wandb-exp-name", "n", "--bf16"], [*LM, "--wandb-exp-name", "n", "--bf16"]),
        ([*LM, "--save=ckpt", "--tensorboard-dir=tb"], LM),
        ([*LM, "--save", "runs/lr=1e-4", "--bf16"], [*LM, "--bf16"]),
        ([*LM, "--save=ckpt", "--load", "ckpt"], [*LM, "--load", "ckpt"]),
        (LM, LM),
        (["main.py", "trainer.default_local_dir=/c", "++trainer.save_freq=5", "x=1"], ["main.py", "x=1", *VERL]),
        (["main.py", "trainer.hf_save_interval=9", "trainer.ckpt_interval=5"], ["main.py", *SKYRL]),
        (
            ["run.py", "checkpoint.save=/c", "train.train_iters=5"],
            ["run.py", "train.train_iters=5", "checkpoint.save=null", "logger.tensorboard_dir=null"],
        ),
    ],
)
def test_nothing_is_saved_and_no_run_is_written(command: list[str], kept: list[str]) -> None:
    assert without_saving(command) == kept


def test_a_command_that_may_save_is_refused() -> None:
    of_a_script = ["srun", "scripts/train.sh", "--num-layers", "8"]  # which may have options of its own
    for command in (
        ["bash", "train.sh"],
        of_a_script,
        ["megatron", "sft", "--output_dir", "out", "--save_steps", "50"],
    ):
        with pytest.raises(UsageError, match="--saving-off"):
            without_saving(command)
    assert without_saving(["bash", "train.sh"], ()) == ["bash", "train.sh"]
    assert without_saving(["bash", "train.sh"], ("save=no",)) == ["bash", "train.sh", "save=no"]


DEEP = ("--pipeline-model-parallel-size",)
FIRST_5 = ("--decoder-first-pipeline-num-layers", "5")
PIECES = ("--pipeline-model-parallel-layout", "Et*5|t*3L")


@pytest.mark.parametrize(
    ("words", "flags", "framework", "after"),
    [
        (["--decoder-first-pipeline-num-layers", "6", "--bf16"], FIRST_5, "megatron-lm", ["--bf16", *FIRST_5]),
        (["--decoder-first-pipeline-num-layers=6", "x.py"], FIRST_5, None, ["x.py", *FIRST_5]),
        (["--account-for-loss-in-pipeline-split", "x.py"], FIRST_5, None, ["x.py", *FIRST_5]),
        (["--num-layers-per-virtual-pipeline-stage", "2", "--bf16"], PIECES, None, ["--bf16", *PIECES]),
        (
            ["run.py", "model.num_layers_in_first_pipeline_stage=6"],
            FIRST_5,
            "megatron-bridge",
            ["run.py", "model.num_layers_in_first_pipeline_stage=5"],
        ),
        (
            ["sft", "--decoder_first_pipeline_num_layers", "6", "--account_for_loss_in_pipeline_split", "true"],
            FIRST_5,
            "ms-swift",
            ["sft", "--decoder_first_pipeline_num_layers", "5"],
        ),
        ([*DEEP, "4", "--bf16"], (*DEEP, "2", *FIRST_5), "megatron-lm", ["--bf16", *DEEP, "2", *FIRST_5]),
        (
            ["run.py", "model.pipeline_model_parallel_size=4"],
            (*DEEP, "2"),
            "megatron-bridge",
            ["run.py", "model.pipeline_model_parallel_size=2"],
        ),
    ],
)
def test_a_layout_takes_the_place_of_another(
    words: list[str], flags: tuple[str, ...], framework: str | None, after: list[str]
) -> None:
    assert with_layout(words, flags, framework, None, 2) == after


def test_a_final_command_saves_what_the_given_one_saves() -> None:
    assert with_layout([*LM, "--save", "ckpt"], FIRST_5, None, None, 2) == [*LM, "--save", "ckpt", *FIRST_5]
