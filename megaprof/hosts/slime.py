"""slime: its roles, its training steps, and its own profiling options.

Shortest way in, no edit: ``--custom-megatron-init-path megaprof.hosts.slime.init`` (`init`) and ``MEGAPROF_DIR``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megaprof.autoload.arming import arm
from megaprof.autoload.contract import Facts, Hook, local

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

_MODEL = "slime.backends.megatron_utils.model"

#: Defaults of slime's parser for options that mean the same as ours: they tell a default from what the user typed.
DEFAULTS = {
    "profile_target": ["train_overall"],
    "profile_ranks": [0],
    "profile_step_start": 10,
    "profile_step_end": 12,
}
#: The variables of slime's pull request 1879, and our options of the same meaning.
VARIABLES = {
    "SLIME_PROFILE_ALL_RANKS": "all_ranks",
    "SLIME_PROFILE_RECORD_SHAPES": "record_shapes",
    "SLIME_PROFILE_WITH_FLOPS": "with_flops",
    "SLIME_PROFILE_WITH_STACK": "with_stack",
    "SLIME_PROFILE_MEMORY": "profile_memory",
}


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns ``env`` with slime's own variables translated into ours. If both are set, ours count. Raises ValueError
    for a value that is neither true nor false."""
    from megaprof.config.options import variable
    from megaprof.config.values import boolean

    switches = {
        option: boolean(their_name, env[their_name]) for their_name, option in VARIABLES.items() if their_name in env
    }
    if variable("select") in env:
        switches.pop("all_ranks", None)
    return {variable(option): "1" for option, is_on in switches.items() if is_on} | dict(env)


def config_of(args: argparse.Namespace) -> ProfileConfig:
    """Returns the ProfileConfig of slime's arguments with the patch, and of the environment with slime's own
    variables."""
    from megaprof.config.arguments import config_from_args

    return config_from_args(args, environment(os.environ))


def init(args: argparse.Namespace) -> None:
    """Arms a training rank: slime calls it on each of them before the model is built.

    slime's ``--profile-target``, ``--profile-ranks``, ``--profile-step-start`` and ``--profile-step-end`` mean what
    they mean in slime, with windows of one step each, and so do the variables in VARIABLES. Everything else comes from
    the ``MEGAPROF_*`` environment. Without ``MEGAPROF_DIR`` in it, nothing is profiled. Raises ValueError for settings
    that cannot be honoured.
    """
    if "MEGAPROF_DIR" not in os.environ:
        return
    options = {name: getattr(args, name, default) for name, default in DEFAULTS.items()}
    settings = argparse.Namespace(
        **options, profile_dir=os.environ["MEGAPROF_DIR"], megaprof_host_defaults=DEFAULTS, profile=False
    )
    settings.use_pytorch_profiler = getattr(args, "use_pytorch_profiler", False)
    config = config_of(settings)
    if config.enabled:
        arm(config)


def _train(arguments: Mapping[str, Any]) -> Facts:
    """Reads ``train(rollout_id, model, ..., num_microbatches, ...)``: a step for each entry of ``num_microbatches``."""
    return Facts(role=_role(arguments), iteration=partial(_step, arguments), host_step=arguments["rollout_id"])


def _forward_only(arguments: Mapping[str, Any]) -> Facts:
    """Reads ``forward_only``, whose ``store_prefix`` says whose weights are loaded: ``ref_``, ``teacher_``; empty for
    the model's own role."""
    rollout = local("rollout_id")
    return Facts(
        role=arguments.get("store_prefix", "").rstrip("_") or _role(arguments),
        iteration=None if rollout is None else partial(_step, {**arguments, "rollout_id": rollout}),
        host_step=rollout,
    )


def _step(arguments: Mapping[str, Any]) -> Any:
    """Returns the number that slime logs as ``train/step``, of the training step or of the log-probs for it. Both
    functions count a rollout's steps in a variable of their own, ``step_id``."""
    step = local("step_id")
    return None if step is None else arguments["rollout_id"] * len(arguments["num_microbatches"]) + step


def _role(arguments: Mapping[str, Any]) -> str:
    return str(getattr(arguments["model"][0], "role", "actor"))


_ACTOR = "slime.backends.megatron_utils.actor"
_METRICS = "slime.observability.train_metric_utils"

HOOKS = (
    Hook(_MODEL, "train", _train, ends="step"),
    Hook(_MODEL, "forward_only", _forward_only),
    # For functions that were imported by name before megaprof was armed.
    Hook(_ACTOR, "train", _train, ends="step"),
    Hook(_ACTOR, "forward_only", _forward_only),
    Hook(_ACTOR, "MegatronTrainRayActor.update_weights", part="weight_sync"),
    Hook(_ACTOR, "MegatronTrainRayActor.save_model", part="saving"),
    Hook(_ACTOR, "MegatronTrainRayActor._get_rollout_data", part="data"),
    *(Hook(_ACTOR, f"MegatronTrainRayActor.{name}", part="offload") for name in ("sleep", "wake_up")),
    # Weights of the roles that share a model, which wait in the host's memory.
    *(
        Hook("slime.utils.tensor_backper", f"_TensorBackuperNormal.{name}", part="offload")
        for name in ("backup", "copy", "restore")
    ),
    *(Hook(_METRICS, name, part="logging") for name in ("log_rollout_data", "log_perf_data")),
)
