"""ms-swift's Megatron trainers: their iteration, and the role whose log-probs they compute.

ms-swift computes log-probs without Megatron's schedule, so such a pass is annotated work and never a
``train_log_probs`` step. Evaluation is known by the name of its function, ``evaluate``.

Shortest way in, no edit: ``--external_plugins`` with the file of ``megaprof.autoload.plugin``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from megaprof.capture import roles
from megaprof.integrations.contract import Facts, Hook, Host

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

_BASE, _TRAINER = "swift.megatron.trainers.base", "BaseMegatronTrainer"
_RLHF, _GRPO = "swift.megatron.trainers.rlhf_mixin", "swift.megatron.trainers.grpo_trainer"


#: What ``--profiler_contents`` names, in the terms of ProfileConfig.
_CONTENTS = {"stack": "with_stack", "memory": "profile_memory", "shapes": "record_shapes", "flops": "with_flops"}


def config_of(args: Any) -> ProfileConfig:
    """Returns the ProfileConfig of ms-swift's arguments with the patch: ``--enable_profiler``, ``--profiler_tool``,
    ``--profiler_target``, ``--profiler_save_path``, ``--profiler_ranks``, ``--profiler_contents`` and
    ``--profiler_steps``.

    ``--profiler_ranks`` and ``--profiler_steps`` are lists of numbers, or what --profile-select and --profile-steps
    take; steps are the trainer's own iterations, the first being 0. ``--callbacks profiler`` means the same as
    ``--enable_profiler``. Without either, and without the patch, the ``MEGAPROF_*`` environment decides. Raises
    ValueError for settings that cannot be honoured.
    """
    from megaprof.config.options import ACTIVITIES, ProfileConfig, variable

    enabled = getattr(args, "enable_profiler", None)
    if not enabled and (enabled is None or "profiler" not in args.callbacks):
        return ProfileConfig.from_env()
    contents = [word.lower() for word in args.profiler_contents]
    for word in contents:
        if word not in (*ACTIVITIES, *_CONTENTS):
            raise ValueError(f"--profiler_contents: unknown {word!r}; valid: {', '.join((*ACTIVITIES, *_CONTENTS))}")
    if not args.profiler_save_path and variable("dir") not in os.environ:
        raise ValueError("--profiler_save_path: not set; valid: the directory that receives the traces")
    options: dict[str, Any] = {_CONTENTS[word]: True for word in contents if word in _CONTENTS}
    optional = {
        "target": args.profiler_target,
        "tool": args.profiler_tool,
        "activities": [word for word in contents if word in ACTIVITIES] if "torch" in args.profiler_tool else None,
        "dir": args.profiler_save_path,
        "select": ",".join(args.profiler_ranks),
        "steps": ",".join(args.profiler_steps),
    }
    return ProfileConfig.from_values(options | {name: value for name, value in optional.items() if value})


HOST = Host(
    name="ms-swift",
    package="swift",
    hooks=(
        Hook(_BASE, f"{_TRAINER}.train_step", lambda arguments: Facts(iteration=arguments["self"].state.iteration)),
        Hook(_BASE, f"{_TRAINER}.evaluate", lambda arguments: Facts(host_step=arguments["self"].state.iteration)),
        Hook(_RLHF, "MegatronRLHFTrainer.null_ref_context", lambda _: Facts(role="ref"), context=True),
        Hook(
            _RLHF,
            "MegatronRLHFTrainer.compute_per_token_logps",
            lambda _: Facts(role=roles.current().role or "actor"),
        ),
        Hook(_GRPO, "MegatronGRPOTrainer._compute_teacher_logps", lambda _: Facts(role="teacher")),
    ),
)
