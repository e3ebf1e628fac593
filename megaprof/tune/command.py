"""The words of a training command, rewritten: with another layout, or without saving checkpoints or tracking the run.

Options are spelled ``--name value`` (Megatron-LM, ms-swift) or ``name=value`` (Hydra: Megatron-Bridge, verl, SkyRL).
`what_if.layouts.options_of` spells a layout as the host does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megaprof.analysis.what_if.layouts import options_of
from megaprof.cli import UsageError
from megaprof.config.options import variable

#: Megatron-LM's options that place layers. A layout replaces all of them.
PLACING = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--num-virtual-stages-per-pipeline-rank",
)
#: The older form of the last of these options; no layout is written with it.
_OLDER = "--num-layers-per-virtual-pipeline-stage"
#: The words that turn saving off, by the option that makes a host save; none if it is enough to remove the option.
_SAVING: dict[str, tuple[str, ...]] = {
    "--save": (),  # Megatron-LM, megatron/training/checkpointing.py: without it nothing is saved
    # Megatron-Bridge, CheckpointConfig; its recipes write for TensorBoard by default.
    "checkpoint.save": ("checkpoint.save=null", "logger.tensorboard_dir=null"),
    # verl. Its SFT trainers still save after their last step, so that save goes into the trial's own directory.
    "trainer.save_freq": (
        "trainer.save_freq=-1",
        f"trainer.default_local_dir=${{oc.env:{variable('dir')}}}/checkpoints",
        "trainer.default_hdfs_dir=null",
    ),
    "trainer.ckpt_interval": ("trainer.ckpt_interval=-1", "trainer.hf_save_interval=-1"),  # SkyRL
}
#: An option that every Megatron-LM command has. A command with this option and without ``--save`` saves nothing.
_MEGATRON_LM = "--num-layers"
#: Megatron-LM's options that write a run for TensorBoard and W&B. The W&B option needs the directory of ``--save``.
_TRACKING = ("--tensorboard-dir", "--wandb-project")


def without_saving(command: Sequence[str], instead: Sequence[str] | None = None) -> list[str]:
    """Returns the words of ``command``, changed so that it saves no checkpoint and Megatron-LM tracks no run. They are
    followed by ``instead``, the user's own words that turn saving off.

    Raises UsageError if neither the command nor ``instead`` says how to turn saving off.
    """
    words, turned_off = list(command), instead is not None
    for option, off_words in _SAVING.items():
        if _has(words, option):
            words, turned_off = [*_without(words, {_name(word) for word in (option, *off_words)}), *off_words], True
    script = next((word for word in words if word.endswith(".sh")), None)
    if not turned_off and (script or not _has(words, _MEGATRON_LM)):
        why = f"{script} may have others" if script else f"it is no command of Megatron-LM, with {_MEGATRON_LM}"
        raise UsageError(
            f"nothing in the command says whether it saves checkpoints: it has none of {', '.join(_SAVING)}, and {why}."
            " Give the words that turn saving off with --saving-off WORDS, or --saving-off '' if it saves none"
        )
    return _without(words, set(map(_name, _TRACKING))) + list(instead or ())


def with_layout(
    command: Sequence[str], flags: Sequence[str], framework: str | None, role: str | None, stages: int
) -> list[str]:
    """Returns the words of ``command`` with another layout.

    ``flags`` are Megatron-LM's options for a pipeline of ``stages``. They replace the options that place layers now,
    and every option that both have. They are spelled for ``framework`` and ``role``, as traces name them.
    """
    layout_words = list(options_of(framework, role, flags, stages) or flags)
    placing_names = {_name(word) for word in (*PLACING, _OLDER, *filter(_names_an_option, layout_words))}
    for flag in PLACING:
        spelled = options_of(framework, role, (flag, "t"), 1)  # the value does not matter: only the name is used
        placing_names |= {_name(spelled[0])} if spelled else set()
    return _without(command, placing_names) + layout_words


def _has(words: Iterable[str], option: str) -> bool:
    return any(_name(word) == _name(option) for word in words if _names_an_option(word))


def _without(words: Sequence[str], names: set[str]) -> list[str]:
    """Returns the words without the options of these names and their values."""
    kept_words: list[str] = []
    dropped_option = None
    for word in words:
        if word.startswith("--") or (dropped_option is None and _names_an_option(word)):
            dropped_option = _name(word) if _name(word) in names else None
            if dropped_option is None:
                kept_words.append(word)
            elif "=" in word:
                dropped_option = None  # its value is in the same word
        else:  # a value of the option, or a word by itself
            is_flag = dropped_option is not None and dropped_option.startswith("--account")
            if dropped_option is None or (is_flag and word.lower() not in ("true", "false")):
                kept_words.append(word)
            dropped_option = None
    return kept_words


def _names_an_option(word: str) -> bool:
    return word.startswith("--") or ("=" in word and not word.startswith("-"))


def _name(word: str) -> str:
    """Returns an option's name as hosts compare names: ``--num-layers`` for ``--num_layers=3``, ``a.b-c`` for
    ``++a.b_c=3``."""
    return word.partition("=")[0].lstrip("+").replace("_", "-")
