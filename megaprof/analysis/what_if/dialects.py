"""A layout in the words of the host that trained: its options instead of Megatron-LM's flags.

As of verl 0.9.1, SkyRL 0.4.0, ms-swift 4.6.0 and Megatron-Bridge 0.6.2. Megatron-LM and slime, which has Megatron-LM's
parser, take the flags themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["options_of"]

#: Megatron-LM's flags as fields of Megatron-Core's configuration, which Megatron-Bridge's models have, too.
_FIELDS = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--account-for-embedding-in-pipeline-split": "account_for_embedding_in_pipeline_split",
    "--account-for-loss-in-pipeline-split": "account_for_loss_in_pipeline_split",
    "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
    "--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
}
_CHUNKS = "virtual_pipeline_model_parallel_size"
#: Where verl's engine of each role has its options: the reference takes the actor's. Without a role it is an SFT run.
_VERL = {None: "engine", "critic": "critic.megatron"}
_SKYRL = {"ref": "trainer.ref.megatron_config"}


def options_of(framework: str | None, role: str | None, flags: Sequence[str]) -> tuple[str, ...] | None:
    """``flags`` of Megatron-LM's, as ``framework`` takes them for the models of ``role``; None where it takes the
    flags themselves, is not known, or has no option for one of them."""
    given = list(_pairs(flags))
    if framework is None or not given:
        return None
    fields = [(_FIELDS[flag], value) for flag, value in given]
    if framework == "ms-swift":
        named = (
            (name if name == _CHUNKS else flag[2:].replace("-", "_"), value)
            for (flag, _), (name, value) in zip(given, fields, strict=True)
        )
        return tuple(
            word for name, value in named for word in (f"--{name}", value.lower() if value == "True" else value)
        )
    if framework == "megatron-bridge":
        return tuple(f"model.{name}={_quoted(value)}" for name, value in fields)
    if framework == "verl":
        engine = _VERL.get(role, "actor_rollout_ref.actor.megatron")
        return tuple(
            f"{engine}.{name}={value}"
            if name == _CHUNKS
            else f"++{engine}.override_transformer_config.{name}={_quoted(value)}"
            for name, value in fields
        )
    if framework == "skyrl" and all(name != _CHUNKS for name, _ in fields):
        place = _SKYRL.get(role or "", "trainer.policy.megatron_config")
        return tuple(f"{place}.transformer_config_kwargs.{name}={_quoted(value)}" for name, value in fields)
    return None


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, ``True`` for one that takes none."""
    for place, word in enumerate(flags):
        if word.startswith("--"):
            following = flags[place + 1 : place + 2]
            yield word, following[0] if following and not following[0].startswith("--") else "True"


def _quoted(value: str) -> str:
    """Hydra's grammar reads ``|``, ``*`` and parentheses; in quotes a text is a text."""
    return value if value.isalnum() else f'"{value}"'
